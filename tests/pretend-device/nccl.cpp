// Stands in for libnccl.so: calls move real data between real processes, over sockets, when their stream gets to them.
//
// As with NCCL, a send waits until its receive has been queued, calls of a communicator run one after the other, and those of a group
// run at once. A sum is in the order of ranks and, but for f64 and integers, in f32, which is what Shardwise does over MPI. NCCL
// itself promises neither.
#include "driver.h"

#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <poll.h>
#include <random>
#include <string>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern "C" {
using ncclResult_t = int;
struct ncclUniqueId {
  char internal[128];
};
struct Communicator;
using ncclComm_t = Communicator *;
}

namespace {

constexpr ncclResult_t ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclRemoteError = 6;
constexpr int ncclSum = 0, ncclMax = 2, ncclAvg = 4;
constexpr int ncclUint8 = 1, ncclInt64 = 4, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9;

size_t bytes_of(int type) {
  switch (type) {
  case ncclUint8: return 1;
  case ncclFloat16:
  case ncclBfloat16: return 2;
  case ncclFloat32: return 4;
  default: return 8;
  }
}

// ---- reductions -----------------------------------------------------------------------------------------------------

float widen_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

uint16_t narrow_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value))
    return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename Element, typename Wide, typename Widen, typename Narrow>
void reduce(const std::vector<const void *> &inputs, void *output, size_t count, int op, Widen widen, Narrow narrow) {
  for (size_t i = 0; i < count; i++) {
    Wide result = widen(static_cast<const Element *>(inputs[0])[i]);
    for (size_t rank = 1; rank < inputs.size(); rank++) {
      Wide next = widen(static_cast<const Element *>(inputs[rank])[i]);
      bool keeps = result != result || result > next;
      result = op != ncclMax ? result + next : keeps ? result : next;
    }
    if (op == ncclAvg)
      result /= Wide(inputs.size());
    static_cast<Element *>(output)[i] = narrow(result);
  }
}

void reduce(int type, int op, const std::vector<const void *> &inputs, void *output, size_t count) {
  auto same = [](auto value) { return value; };
  switch (type) {
  case ncclFloat64: return reduce<double, double>(inputs, output, count, op, same, same);
  case ncclFloat32: return reduce<float, float>(inputs, output, count, op, same, same);
  case ncclInt64: return reduce<int64_t, int64_t>(inputs, output, count, op, same, same);
  case ncclBfloat16: return reduce<uint16_t, float>(inputs, output, count, op, widen_bf16, narrow_bf16);
  case ncclFloat16:
    return reduce<_Float16, float>(
        inputs, output, count, op, [](_Float16 value) { return float(value); }, [](float value) { return _Float16(value); });
  default: std::fprintf(stderr, "libnccl.so (pretend): a reduction of type %d\n", type), std::abort();
  }
}

// ---- transfers ------------------------------------------------------------------------------------------------------

struct Transfer {
  int peer;
  char *data;
  size_t bytes;
};

// What a rank does in a call: it sends, receives and, when all of that is done, computes.
struct Work {
  std::vector<Transfer> sends, receives;
  std::function<void()> finish = [] {};
};

constexpr auto CONNECT_TIMEOUT = std::chrono::seconds(60);

// The address of a rank's socket: a name that no file has.
sockaddr_un address(const ncclUniqueId &id, int rank, socklen_t &length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  char name[sizeof address.sun_path];
  int written = std::snprintf(name, sizeof name, "%.64s-%d", id.internal, rank);
  std::memcpy(address.sun_path + 1, name, written);
  length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + written);
  return address;
}

} // namespace

// Two connections to every other rank: one for data, and one on which a receiver says that it is ready.
struct Communicator {
  int size, rank;
  std::vector<int> data, ready;
  std::atomic<bool> is_aborted{false};
  std::atomic<ncclResult_t> failure{ncclSuccess};

  ~Communicator() {
    for (const auto &sockets : {data, ready})
      for (int socket : sockets)
        if (socket >= 0)
          close(socket);
  }

  bool connect(const ncclUniqueId &id) {
    data.assign(size, -1);
    ready.assign(size, -1);
    socklen_t length;
    sockaddr_un own = address(id, rank, length);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, reinterpret_cast<sockaddr *>(&own), length) != 0 || listen(listener, 4 * size) != 0)
      return false;
    bool connects = true;
    for (int peer = 0; peer < rank && connects; peer++)
      for (int channel = 0; channel < 2 && connects; channel++)
        connects = connect_to(id, peer, channel);
    for (int i = 0; i < 2 * (size - 1 - rank) && connects; i++)
      connects = accept_from(listener);
    close(listener);
    return connects;
  }

  // Makes all transfers at once. Returns false if the communicator fails or is aborted.
  bool exchange(std::vector<Transfer> sends, std::vector<Transfer> receives) {
    struct Lane {
      std::deque<Transfer> sends, receives;
      bool may_send = false;
    };
    std::vector<Lane> lanes(size);
    for (const Transfer &send : sends)
      lanes[send.peer].sends.push_back(send);
    for (const Transfer &receive : receives)
      lanes[receive.peer].receives.push_back(receive);
    for (int peer = 0; peer < size; peer++)
      for (size_t i = 0; i < lanes[peer].receives.size(); i++)
        if (write(ready[peer], "r", 1) != 1)
          return false;
    for (;;) {
      std::vector<pollfd> polled;
      std::vector<int> peers;
      auto poll_for = [&](int peer, int socket, short events) {
        polled.push_back({socket, events, 0});
        peers.push_back(peer);
      };
      for (int peer = 0; peer < size; peer++) {
        Lane &lane = lanes[peer];
        while (!lane.receives.empty() && lane.receives.front().bytes == 0)
          lane.receives.pop_front();
        while (lane.may_send && lane.sends.front().bytes == 0) {
          lane.sends.pop_front();
          lane.may_send = false;
        }
        if (!lane.receives.empty())
          poll_for(peer, data[peer], POLLIN);
        if (!lane.sends.empty())
          poll_for(peer, lane.may_send ? data[peer] : ready[peer], lane.may_send ? POLLOUT : POLLIN);
      }
      if (polled.empty())
        return true;
      if (is_aborted)
        return false;
      poll(polled.data(), polled.size(), 20);
      for (size_t i = 0; i < polled.size(); i++) {
        Lane &lane = lanes[peers[i]];
        if (polled[i].revents == 0)
          continue;
        bool moves = true;
        if (polled[i].fd == ready[peers[i]]) {
          char token;
          moves = recv(polled[i].fd, &token, 1, MSG_DONTWAIT) == 1;
          lane.may_send = moves;
        } else if (polled[i].events == POLLIN) {
          moves = move(lane.receives.front(), recv(polled[i].fd, lane.receives.front().data, lane.receives.front().bytes, MSG_DONTWAIT));
        } else {
          moves = move(lane.sends.front(),
                       send(polled[i].fd, lane.sends.front().data, lane.sends.front().bytes, MSG_DONTWAIT | MSG_NOSIGNAL));
        }
        if (!moves)
          return false;
      }
    }
  }

private:
  static bool move(Transfer &transfer, ssize_t moved) {
    if (moved < 0)
      return errno == EAGAIN || errno == EINTR;
    transfer.data += moved;
    transfer.bytes -= moved;
    return moved > 0;
  }

  struct Hello {
    int rank, channel;
  };

  bool connect_to(const ncclUniqueId &id, int peer, int channel) {
    socklen_t length;
    sockaddr_un theirs = address(id, peer, length);
    auto began = std::chrono::steady_clock::now();
    int connection = socket(AF_UNIX, SOCK_STREAM, 0);
    while (::connect(connection, reinterpret_cast<sockaddr *>(&theirs), length) != 0) {
      if (std::chrono::steady_clock::now() - began > CONNECT_TIMEOUT)
        return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    (channel == 0 ? data : ready)[peer] = connection;
    Hello hello{rank, channel};
    return write(connection, &hello, sizeof hello) == sizeof hello;
  }

  bool accept_from(int listener) {
    pollfd polled{listener, POLLIN, 0};
    if (poll(&polled, 1, int(std::chrono::milliseconds(CONNECT_TIMEOUT).count())) != 1)
      return false;
    int connection = accept(listener, nullptr, nullptr);
    Hello hello{};
    if (connection < 0 || recv(connection, &hello, sizeof hello, MSG_WAITALL) != sizeof hello)
      return false;
    (hello.channel == 0 ? data : ready)[hello.rank] = connection;
    return true;
  }
};

namespace {

struct Queued {
  Communicator *communicator;
  CUstream stream;
  Work work;
};

thread_local int depth = 0;
thread_local std::vector<Queued> group;

void run(void *data) {
  std::unique_ptr<Queued> queued(static_cast<Queued *>(data));
  auto &[communicator, stream, work] = *queued;
  // Nothing runs after a failure: results would be wrong.
  if (communicator->is_aborted || communicator->failure != ncclSuccess)
    return;
  if (communicator->exchange(std::move(work.sends), std::move(work.receives)))
    work.finish();
  else if (!communicator->is_aborted)
    communicator->failure = ncclRemoteError;
}

// Queues the calls of a group as one.
ncclResult_t flush() {
  std::vector<Queued> calls = std::move(group);
  group.clear();
  while (!calls.empty()) {
    auto *merged = new Queued{calls[0].communicator, calls[0].stream, {}};
    std::vector<std::function<void()>> finishes;
    std::vector<Queued> others;
    for (Queued &call : calls) {
      if (call.communicator != merged->communicator) {
        others.push_back(std::move(call));
        continue;
      }
      auto append = [](std::vector<Transfer> &to, const std::vector<Transfer> &from) { to.insert(to.end(), from.begin(), from.end()); };
      append(merged->work.sends, call.work.sends);
      append(merged->work.receives, call.work.receives);
      finishes.push_back(std::move(call.work.finish));
    }
    merged->work.finish = [finishes = std::move(finishes)] {
      for (const auto &finish : finishes)
        finish();
    };
    cuLaunchHostFunc(merged->stream, &run, merged);
    calls = std::move(others);
  }
  return ncclSuccess;
}

ncclResult_t queue(Communicator *communicator, CUstream stream, Work work) {
  group.push_back({communicator, stream, std::move(work)});
  return depth == 0 ? flush() : ncclSuccess;
}

char *kernel(const void *data) { return static_cast<char *>(pretend_kernel_address(data)); }

template <typename Each> void for_peers(Communicator *communicator, Each each) {
  for (int peer = 0; peer < communicator->size; peer++)
    if (peer != communicator->rank)
      each(peer);
}

// Receives everybody's contribution, and reduces them in the order of ranks.
void receive_and_reduce(Communicator *communicator, Work &work, char *own, char *output, size_t count, int type, int op) {
  size_t bytes = count * bytes_of(type);
  auto received = std::make_shared<std::vector<char>>(bytes * communicator->size);
  for_peers(communicator, [&](int peer) { work.receives.push_back({peer, received->data() + peer * bytes, bytes}); });
  work.finish = [=] {
    std::vector<const void *> inputs;
    for (int rank = 0; rank < communicator->size; rank++)
      inputs.push_back(rank == communicator->rank ? own : received->data() + rank * bytes);
    reduce(type, op, inputs, output, count);
  };
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version) {
  *version = 22907;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    return ncclSystemError;
  std::memset(id->internal, 0, sizeof id->internal);
  int written = std::snprintf(id->internal, sizeof id->internal, "shardwise-nccl-");
  for (unsigned char byte : random)
    written += std::snprintf(id->internal + written, sizeof id->internal - written, "%02x", byte);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
  CUcontext context = nullptr;
  cuCtxGetCurrent(&context);
  if (context == nullptr || rank < 0 || rank >= size)
    return ncclInvalidArgument;
  auto communicator = std::make_unique<Communicator>();
  communicator->size = size;
  communicator->rank = rank;
  if (!communicator->connect(id))
    return ncclSystemError;
  *out = communicator.release();
  return ncclSuccess;
}

// The caller has waited for all calls, as NCCL demands.
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  delete communicator;
  return ncclSuccess;
}

// Calls that are under way end, without a result. The memory is not freed, because they may still look at it.
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  communicator->is_aborted = true;
  for (const auto &sockets : {communicator->data, communicator->ready})
    for (int socket : sockets)
      if (socket >= 0)
        shutdown(socket, SHUT_RDWR);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) {
  *error = communicator->failure;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) { return result == ncclRemoteError ? "remote process exited" : "error"; }

ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return --depth == 0 ? flush() : ncclSuccess; }

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, int type, ncclComm_t communicator, CUstream stream) {
  size_t bytes = count * bytes_of(type);
  char *from = kernel(send), *to = kernel(receive), *own = to + communicator->rank * bytes;
  Work work;
  for_peers(communicator, [&](int peer) {
    work.sends.push_back({peer, from, bytes});
    work.receives.push_back({peer, to + peer * bytes, bytes});
  });
  work.finish = [=] { std::memmove(own, from, bytes); };
  return queue(communicator, stream, std::move(work));
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, ncclComm_t communicator,
                               CUstream stream) {
  size_t bytes = count * bytes_of(type);
  char *from = kernel(send);
  Work work;
  for_peers(communicator, [&](int peer) { work.sends.push_back({peer, from + peer * bytes, bytes}); });
  receive_and_reduce(communicator, work, from + communicator->rank * bytes, kernel(receive), count, type, op);
  return queue(communicator, stream, std::move(work));
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, ncclComm_t communicator, CUstream stream) {
  char *from = kernel(send);
  Work work;
  for_peers(communicator, [&](int peer) { work.sends.push_back({peer, from, count * bytes_of(type)}); });
  receive_and_reduce(communicator, work, from, kernel(receive), count, type, op);
  return queue(communicator, stream, std::move(work));
}

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t communicator,
                        CUstream stream) {
  char *from = kernel(send);
  Work work;
  if (communicator->rank == root)
    receive_and_reduce(communicator, work, from, kernel(receive), count, type, op);
  else
    work.sends.push_back({root, from, count * bytes_of(type)});
  return queue(communicator, stream, std::move(work));
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm_t communicator, CUstream stream) {
  size_t bytes = count * bytes_of(type);
  char *from = kernel(send), *to = kernel(receive);
  Work work;
  if (communicator->rank == root) {
    for_peers(communicator, [&](int peer) { work.sends.push_back({peer, from, bytes}); });
    work.finish = [=] { std::memmove(to, from, bytes); };
  } else {
    work.receives.push_back({root, to, bytes});
  }
  return queue(communicator, stream, std::move(work));
}

// A message to oneself waits for its other half, which is in the same group.
thread_local std::deque<std::pair<char *, size_t>> to_self;

ncclResult_t ncclSend(const void *data, size_t count, int type, int peer, ncclComm_t communicator, CUstream stream) {
  size_t bytes = count * bytes_of(type);
  if (peer == communicator->rank) {
    to_self.push_back({kernel(data), bytes});
    return ncclSuccess;
  }
  return queue(communicator, stream, {{{peer, kernel(data), bytes}}, {}});
}

ncclResult_t ncclRecv(void *data, size_t count, int type, int peer, ncclComm_t communicator, CUstream stream) {
  size_t bytes = count * bytes_of(type);
  char *to = kernel(data);
  if (peer == communicator->rank) {
    if (to_self.empty() || to_self.front().second != bytes)
      return ncclInvalidArgument;
    char *from = to_self.front().first;
    to_self.pop_front();
    Work work;
    work.finish = [=] { std::memcpy(to, from, bytes); };
    return queue(communicator, stream, std::move(work));
  }
  return queue(communicator, stream, {{}, {{peer, to, bytes}}});
}
}
