// Stands in for libcuda.so.1: streams are threads, and events are real.
//
// Device memory has two addresses. Programs get the one where nothing can be read or written: host code that follows it gets a
// segmentation fault. Kernels, which are functions that a stream calls, use the other one.
#include "driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace {

std::atomic<uint64_t> seed{0};
std::atomic<bool> has_shapes_only{false};

// A step of a sequence of pseudorandom numbers (splitmix64).
uint64_t next(uint64_t &state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// A point in the work of a stream.
class Point {
public:
  void pass() {
    std::lock_guard<std::mutex> guard(mutex);
    has_passed = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> guard(mutex);
    changed.wait(guard, [this] { return has_passed; });
  }
  bool query() {
    std::lock_guard<std::mutex> guard(mutex);
    return has_passed;
  }

private:
  std::mutex mutex;
  std::condition_variable changed;
  bool has_passed = false;
};

} // namespace

struct Context {};

struct Event {
  std::mutex mutex;
  // Where it was last recorded.
  std::shared_ptr<Point> point;

  std::shared_ptr<Point> get() {
    std::lock_guard<std::mutex> guard(mutex);
    return point;
  }
};

// A queue of calls, and a thread that makes them one after the other.
struct Stream {
  Stream() {
    static std::atomic<uint64_t> count{0};
    number = ++count;
    std::thread([this] { run(); }).detach();
  }

  void push(std::function<void()> call) {
    std::lock_guard<std::mutex> guard(mutex);
    calls.push_back(std::move(call));
    changed.notify_all();
  }

  // Ends the thread once all calls have been made.
  void close() { push(nullptr); }

  void record(const std::shared_ptr<Point> &point) {
    push([point] { point->pass(); });
  }

  void synchronize() {
    auto point = std::make_shared<Point>();
    record(point);
    point->wait();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> guard(mutex);
    return calls.empty() && !is_busy;
  }

private:
  void run() {
    uint64_t made = 0;
    for (;;) {
      std::function<void()> call;
      {
        std::unique_lock<std::mutex> guard(mutex);
        is_busy = false;
        changed.wait(guard, [this] { return !calls.empty(); });
        call = std::move(calls.front());
        calls.pop_front();
        is_busy = true;
      }
      if (!call) {
        delete this;
        return;
      }
      pause(made++);
      call();
    }
  }

  // One call in eight starts up to 0.3 ms late, and one in a hundred up to 3 ms.
  void pause(uint64_t made) const {
    uint64_t state = seed.load();
    if (state == 0)
      return;
    state ^= number * 0x2545f4914f6cdd1d + made;
    uint64_t random = next(state);
    uint64_t longest_us = random % 100 == 0 ? 3000 : random % 8 == 0 ? 300 : 0;
    if (longest_us > 0)
      std::this_thread::sleep_for(std::chrono::microseconds(next(state) % longest_us));
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> calls;
  bool is_busy = false;
  uint64_t number;
};

namespace {

// Memory in the order of streams, as `cuMemAllocAsync` and PyTorch's caching allocator have it: a freed block is used again at once,
// by the next allocation on the same stream, because that stream's calls come after those that used it. A call on another stream
// that still uses the block finds something else in it.
class Arena {
public:
  Arena() : device(reserve(PROT_NONE)), kernel(reserve(PROT_READ | PROT_WRITE)) {}

  void *allocate(size_t bytes, Stream *stream) {
    std::lock_guard<std::mutex> guard(mutex);
    auto &free_blocks = free_by_stream[stream];
    auto found = free_blocks.lower_bound(bytes);
    if (found != free_blocks.end() && found->first <= bytes + bytes / WASTE) {
      size_t reused_bytes = found->first;
      void *reused = found->second.back();
      found->second.pop_back();
      if (found->second.empty())
        free_blocks.erase(found);
      used_blocks[reused] = {reused_bytes, stream};
      used_bytes += reused_bytes;
      return reused;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes > ARENA_BYTES - end || bytes > limit() - std::min(limit(), used_bytes))
      return nullptr;
    void *fresh = device + end;
    end += bytes;
    used_blocks[fresh] = {bytes, stream};
    used_bytes += bytes;
    poison(fresh, bytes, stream);
    return fresh;
  }

  bool release(void *data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = used_blocks.find(data);
    if (found == used_blocks.end())
      return false;
    auto [bytes, stream] = found->second;
    used_blocks.erase(found);
    used_bytes -= bytes;
    poison(data, bytes, stream);
    free_by_stream[stream][bytes].push_back(data);
    return true;
  }

  void *for_kernel(const void *data) const {
    const char *address = static_cast<const char *>(data);
    bool is_here = address >= device && address < device + ARENA_BYTES;
    return const_cast<char *>(is_here ? kernel + (address - device) : address);
  }

  size_t used() {
    std::lock_guard<std::mutex> guard(mutex);
    return used_bytes;
  }

  // What the device says it has, or as many MiB as a test wants.
  static size_t limit() {
    static const size_t bytes = [] {
      const char *mib = std::getenv("SHARDWISE_PRETEND_MEMORY_MIB");
      return mib ? size_t(std::strtoull(mib, nullptr, 10)) << 20 : ARENA_BYTES;
    }();
    return bytes;
  }

private:
  // Address space: as much as a model of any size can want.
  static constexpr size_t ARENA_BYTES = size_t(512) << 30;
  static constexpr size_t ALIGNMENT = 512;
  // A reused block may be larger than the request by an eighth.
  static constexpr size_t WASTE = 8;
  // A NaN in every floating-point type, and an index that is out of bounds.
  static constexpr int POISON = 0xFF;

  struct Used {
    size_t bytes;
    Stream *stream;
  };

  // Address space only: pages become resident when they are first written.
  static char *reserve(int protection) {
    void *data = mmap(nullptr, ARENA_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
      std::fprintf(stderr, "the pretend device cannot reserve its address space\n");
      std::abort();
    }
    return static_cast<char *>(data);
  }

  void poison(void *data, size_t bytes, Stream *stream) {
    if (!has_shapes_only)
      stream->push([address = for_kernel(data), bytes] { std::memset(address, POISON, bytes); });
  }

  char *const device, *const kernel;
  std::mutex mutex;
  size_t end = 0, used_bytes = 0;
  std::map<Stream *, std::map<size_t, std::vector<void *>>> free_by_stream;
  std::unordered_map<void *, Used> used_blocks;
};

Arena &arena() {
  // Never destroyed: tensors may outlive everything.
  static Arena *arena = new Arena;
  return *arena;
}

int device_count() {
  const char *count = std::getenv("SHARDWISE_PRETEND_DEVICES");
  return count ? std::atoi(count) : 1;
}

Context context;
thread_local Context *current = nullptr;

} // namespace

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) {
  *count = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count())
    return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

// Every process has its own device, unless a test wants them to have the same.
CUresult cuDeviceGetUuid_v2(char uuid[16], CUdevice device) {
  const char *shared = std::getenv("SHARDWISE_PRETEND_SHARED_DEVICE");
  uint64_t halves[2] = {uint64_t(device), shared ? 0 : uint64_t(getpid())};
  std::memcpy(uuid, halves, sizeof halves);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice) {
  *out = &context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
  *out = current;
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned) {
  if (current == nullptr)
    return CUDA_ERROR_INVALID_CONTEXT;
  *stream = new Stream;
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  stream->close();
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  if (current == nullptr)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (auto point = event->get())
    stream->push([point] { point->wait(); });
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  stream->synchronize();
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) { return stream->is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  stream->push([function, data] { function(data); });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned) {
  if (current == nullptr)
    return CUDA_ERROR_INVALID_CONTEXT;
  *event = new Event;
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  auto point = std::make_shared<Point>();
  {
    std::lock_guard<std::mutex> guard(event->mutex);
    event->point = point;
  }
  stream->record(point);
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  auto point = event->get();
  return point && !point->query() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent event) {
  if (auto point = event->get())
    point->wait();
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream) {
  void *data = arena().allocate(bytes, stream);
  *out = reinterpret_cast<CUdeviceptr>(data);
  return data ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// The block belongs to the stream that it was allocated on.
CUresult cuMemFreeAsync(CUdeviceptr data, CUstream) {
  return arena().release(reinterpret_cast<void *>(data)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  auto address = [](CUdeviceptr data) { return arena().for_kernel(reinterpret_cast<void *>(data)); };
  stream->push([to = address(to), from = address(from), bytes] { std::memcpy(to, from, bytes); });
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
  *total = Arena::limit();
  *free = *total - std::min(*total, arena().used());
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  switch (error) {
  case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; break;
  case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
  case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
  case CUDA_ERROR_INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
  case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
  case CUDA_ERROR_NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
  default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

void *pretend_kernel_address(const void *data) { return arena().for_kernel(data); }
void pretend_set_seed(uint64_t value) { seed = value; }
void pretend_set_shapes_only() { has_shapes_only = true; }
bool pretend_has_shapes_only() { return has_shapes_only; }
