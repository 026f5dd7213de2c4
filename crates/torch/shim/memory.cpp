// A caching allocator for CPU tensors.
//
// libtorch's own allocator is malloc, which returns large blocks to the system at once; the system clears every page before
// it hands it out again, and a training step allocates the same blocks over and over. Here a freed large block is cached for
// the next request of about its size, as long as used and cached blocks together do not exceed the peak of used blocks. So
// caching costs no memory: resident memory stays at the peak that was needed anyway, apart from malloc's heap. Large blocks
// are mapped, in huge pages if the system grants them: fresh memory then costs a page fault per 2 MiB, not per 4 KiB.
#include "shim.h"

#include <algorithm>
#include <cstring>
#include <malloc.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace {

// Smaller blocks go to malloc, which keeps them in its heap.
constexpr size_t LARGE_BYTES = 256 << 10;
// A cached block may be larger than the request by an eighth.
constexpr size_t WASTE = 8;
constexpr size_t HUGE_PAGE_BYTES = 2 << 20;
// Scratch memory of libraries below libtorch, which call malloc directly, stays in the heap. These are malloc's maxima.
constexpr size_t HEAP_BLOCK_BYTES = 32 << 20;
constexpr size_t HEAP_TRIM_BYTES = 256 << 20;

size_t in_pages(size_t bytes) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

// Returns null if the system has no more memory.
void *map_plainly(size_t bytes) {
  void *mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

void *map(size_t bytes) {
  size_t wanted = in_pages(bytes), room = HUGE_PAGE_BYTES;
  void *mapped = wanted < HUGE_PAGE_BYTES ? nullptr : map_plainly(wanted + room);
  if (mapped == nullptr)
    return map_plainly(wanted);
  // Huge pages start at multiples of their size; the rest before and after is unmapped.
  auto begin = reinterpret_cast<uintptr_t>(mapped);
  auto aligned = (begin + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
  if (aligned > begin)
    munmap(mapped, aligned - begin);
  if (size_t after = begin + room - aligned; after > 0)
    munmap(reinterpret_cast<void *>(aligned + wanted), after);
  // Only advice: small pages work too.
  madvise(reinterpret_cast<void *>(aligned), wanted, MADV_HUGEPAGE);
  return reinterpret_cast<void *>(aligned);
}

void unmap(void *data, size_t bytes) { munmap(data, in_pages(bytes)); }

class BlockCache {
public:
  void *allocate(size_t bytes) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      auto found = free_blocks.lower_bound(bytes);
      if (found != free_blocks.end() && found->first <= bytes + bytes / WASTE) {
        void *data = found->second.data;
        use(data, found->first);
        free_bytes -= found->first;
        free_blocks.erase(found);
        return data;
      }
      give_back(bytes);
    }
    return allocate_fresh(bytes);
  }

  // Zeros in fresh pages that are not resident yet.
  void *allocate_zeros(size_t bytes) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      give_back(bytes);
    }
    return allocate_fresh(bytes);
  }

  size_t bytes_in_use() {
    std::lock_guard<std::mutex> guard(mutex);
    return used_bytes;
  }

  size_t take_peak() {
    std::lock_guard<std::mutex> guard(mutex);
    return std::exchange(used_bytes_peak_lately, used_bytes);
  }

  // Returns whether the block belongs to this cache.
  bool release(void *data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = used_blocks.find(data);
    if (found == used_blocks.end())
      return false;
    used_bytes -= found->second;
    free_bytes += found->second;
    free_blocks.emplace(found->second, Free{data, ++time});
    used_blocks.erase(found);
    return true;
  }

private:
  struct Free {
    void *data;
    uint64_t since;
  };

  void use(void *data, size_t bytes) {
    used_blocks[data] = bytes;
    used_bytes += bytes;
    used_bytes_peak = std::max(used_bytes_peak, used_bytes);
    used_bytes_peak_lately = std::max(used_bytes_peak_lately, used_bytes);
  }

  void *allocate_fresh(size_t bytes) {
    void *data = fresh(bytes);
    std::lock_guard<std::mutex> guard(mutex);
    use(data, bytes);
    return data;
  }

  // From the system. If it has no more memory, the cache is emptied first.
  void *fresh(size_t bytes) {
    if (void *data = map(bytes))
      return data;
    {
      std::lock_guard<std::mutex> guard(mutex);
      give_back_beyond(0);
    }
    malloc_trim(0);
    void *data = map(bytes);
    // The memory in use is reported here: much of it will be freed before the error reaches its reader.
    TORCH_CHECK(data != nullptr, "the system has no memory left for ", bytes, " bytes; ", sw_malloc_bytes(), " are in use");
    return data;
  }

  // Makes room below the peak for a request.
  void give_back(size_t bytes) {
    size_t room = std::max(used_bytes_peak, used_bytes + bytes);
    give_back_beyond(room - used_bytes - bytes);
  }

  // Starting with the block that has been free for the longest.
  void give_back_beyond(size_t cached_bytes_max) {
    while (!free_blocks.empty() && free_bytes > cached_bytes_max) {
      auto oldest = std::min_element(free_blocks.begin(), free_blocks.end(), [](const auto &a, const auto &b) {
        return a.second.since < b.second.since;
      });
      free_bytes -= oldest->first;
      unmap(oldest->second.data, oldest->first);
      free_blocks.erase(oldest);
    }
  }

  std::mutex mutex;
  std::multimap<size_t, Free> free_blocks;
  std::unordered_map<void *, size_t> used_blocks;
  size_t used_bytes = 0, used_bytes_peak = 0, used_bytes_peak_lately = 0, free_bytes = 0;
  uint64_t time = 0;
};

BlockCache &cache() {
  // Never destroyed: tensors may outlive everything.
  static BlockCache *cache = new BlockCache;
  return *cache;
}

void release(void *data) {
  if (data != nullptr && !cache().release(data))
    c10::free_cpu(data);
}

struct CachingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void *data = bytes == 0 ? nullptr : bytes < LARGE_BYTES ? c10::alloc_cpu(bytes) : cache().allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *destination, const void *source, size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

bool is_caching() { return dynamic_cast<CachingAllocator *>(c10::GetCPUAllocator()) != nullptr; }

} // namespace

c10::DataPtr sw_cpu_zeros(size_t bytes) {
  if (bytes >= LARGE_BYTES && is_caching()) {
    void *data = cache().allocate_zeros(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DataPtr data = c10::GetCPUAllocator()->allocate(bytes);
  if (bytes > 0)
    std::memset(data.get(), 0, bytes);
  return data;
}

#pragma weak mallinfo2

extern "C" {

size_t sw_malloc_bytes() {
  // glibc has it from 2.33 on. The older function counts modulo 4 GiB.
  if (mallinfo2 != nullptr) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd + cache().bytes_in_use();
  }
  struct mallinfo info = mallinfo();
  return static_cast<uint32_t>(info.uordblks) + static_cast<uint32_t>(info.hblkhd) + cache().bytes_in_use();
}

size_t sw_memory_take_peak() { return cache().take_peak(); }

void sw_memory_keep() {
  static CachingAllocator *allocator = new CachingAllocator;
  c10::SetCPUAllocator(allocator, /*priority=*/100);
  mallopt(M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES);
  mallopt(M_TRIM_THRESHOLD, HEAP_TRIM_BYTES);
}
}
