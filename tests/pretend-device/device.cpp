// A device inside libtorch that computes on the CPU. See src/lib.rs for what it is for.
//
// Its tensors are PrivateUse1 tensors: the autograd engine knows that back end. tch has no name for it, but passes
// `Device::Mps` as MPS, and reports a device that it does not know as `Device::Mps`. So a request for memory on MPS gets
// PrivateUse1 memory, and to tch both are one device.
//
// Most operators have no kernel here. The fallback runs the CPU's on the same memory, so results have the CPU's bits. It runs on a
// stream, after the call has returned, if the shape of the result can be told without running it.
#include "device.h"
#include "driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/to_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

extern "C" {
struct Counts {
  uint64_t launches;
  uint64_t host_to_device;
  uint64_t device_to_host;
  uint64_t synchronizations;
  uint64_t allocations;
};
void sw_pretend_counts(Counts *out);
void sw_pretend_set_seed(uint64_t seed);
void sw_pretend_set_shapes_only();
}

pretend::AtomicCounts pretend::counts;

namespace {

using namespace pretend;
using c10::DeviceIndex, c10::DeviceType, c10::IntArrayRef, c10::StreamId, c10::SymIntArrayRef;

const c10::Device DEVICE(DeviceType::PrivateUse1, 0);

// ---- streams ----------------------------------------------------------------------------------------------------

void check(CUresult result) {
  const char *name = "an error";
  cuGetErrorName(result, &name);
  TORCH_CHECK(result == CUDA_SUCCESS, "the pretend driver reports ", name);
}

// libtorch's streams, by their number. The first is the default stream.
class Streams {
public:
  Streams() { create(); }

  StreamId create() {
    std::lock_guard<std::mutex> guard(mutex);
    CUcontext context;
    check(cuInit(0));
    check(cuDevicePrimaryCtxRetain(&context, 0));
    check(cuCtxSetCurrent(context));
    CUstream stream;
    check(cuStreamCreate(&stream, 0));
    streams.push_back(stream);
    return streams.size() - 1;
  }

  // Streams of a pool take turns, as libtorch's streams of CUDA do.
  StreamId from_pool() {
    constexpr size_t POOL = 32;
    std::lock_guard<std::mutex> guard(pool_mutex);
    size_t turn = turns++;
    if (turn >= POOL)
      return pool.at(turn % POOL);
    StreamId id = create();
    pool.push_back(id);
    return id;
  }

  CUstream get(StreamId id) {
    std::lock_guard<std::mutex> guard(mutex);
    return streams.at(id);
  }

  std::vector<CUstream> all() {
    std::lock_guard<std::mutex> guard(mutex);
    return streams;
  }

private:
  std::mutex mutex, pool_mutex;
  std::vector<CUstream> streams;
  std::vector<StreamId> pool;
  size_t turns = 0;
};

Streams &streams() {
  // Never destroyed: tensors may outlive everything.
  static Streams *streams = new Streams;
  return *streams;
}

thread_local StreamId current_stream = 0;

CUstream stream() { return streams().get(current_stream); }

// Waits for the current stream, without counting it: a GPU would not have to.
void drain() { check(cuStreamSynchronize(stream())); }

void synchronize() {
  counts.synchronizations++;
  drain();
}

// The program ends: its queued kernels are not run, because libtorch is about to be taken apart.
std::atomic<bool> is_ending{false};

void end() {
  is_ending = true;
  auto is_idle = [](CUstream stream) { return cuStreamQuery(stream) == CUDA_SUCCESS; };
  // A stream may wait for another process that has gone.
  for (int i = 0; i < 3000; i++) {
    std::vector<CUstream> all = streams().all();
    if (std::all_of(all.begin(), all.end(), is_idle))
      return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Called by a stream when a kernel has run. The first call of an operator may make variables of libtorch that live until the program
// ends, and they are destroyed in reverse order: so `end` is registered once more, to be called before that.
void end_before_variables_of(const std::string &kernel) {
  static std::mutex mutex;
  static std::set<std::string> known;
  std::lock_guard<std::mutex> guard(mutex);
  if (known.insert(kernel).second)
    std::atexit(end);
}

// Called by a stream. An error ends the program, as one in a kernel leaves a GPU unusable.
void run_kernel(void *data) {
  static thread_local bool is_new = true;
  if (std::exchange(is_new, false))
    at::init_num_threads();
  std::unique_ptr<Kernel> kernel(static_cast<Kernel *>(data));
  if (is_ending)
    return;
  try {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView guard;
    (*kernel)();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "a kernel on the pretend device failed: %s\n", error.what());
    std::abort();
  }
}

} // namespace

void pretend::launch(Kernel kernel) {
  if (!pretend_has_shapes_only())
    check(cuLaunchHostFunc(stream(), &run_kernel, new Kernel(std::move(kernel))));
}

namespace {

// ---- memory -----------------------------------------------------------------------------------------------------

void *for_kernel(const void *data) { return pretend_kernel_address(data); }

class Allocator final : public c10::DeviceAllocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0)
      return {nullptr, nullptr, &release, DEVICE};
    counts.allocations++;
    CUdeviceptr data;
    TORCH_CHECK_WITH(OutOfMemoryError, cuMemAllocAsync(&data, bytes, stream()) == CUDA_SUCCESS,
                     "the pretend device has no memory left for ", bytes, " bytes");
    void *address = reinterpret_cast<void *>(data);
    std::lock_guard<std::mutex> guard(mutex);
    blocks[address] = {bytes, current_stream, {}};
    allocated += bytes;
    peak = std::max(peak, allocated);
    return {address, address, &release, DEVICE};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void *to, const void *from, size_t count) const override {
    launch([=] { std::memcpy(for_kernel(to), for_kernel(from), count); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second.stream != stream.id())
      found->second.users.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    std::lock_guard<std::mutex> guard(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto &bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = allocated;
    bytes.peak = peak;
    stats.allocation[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].allocated = counts.allocations;
    // It keeps no free memory.
    stats.reserved_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current = allocated;
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex) override {}

  void resetPeakStats(DeviceIndex) override {
    std::lock_guard<std::mutex> guard(mutex);
    peak = allocated;
  }

  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    size_t free, total;
    check(cuMemGetInfo_v2(&free, &total));
    return {free, total};
  }

private:
  struct Block {
    size_t bytes;
    StreamId stream;
    // The other streams that have been recorded as using it.
    std::set<StreamId> users;
  };

  static void release(void *data);
  void free(void *data);

  std::mutex mutex;
  std::unordered_map<void *, Block> blocks;
  size_t allocated = 0, peak = 0;
};

Allocator &allocator() {
  static Allocator *allocator = new Allocator;
  return *allocator;
}

void Allocator::release(void *data) {
  if (data != nullptr)
    allocator().free(data);
}

void Allocator::free(void *data) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find(data);
  TORCH_INTERNAL_ASSERT(found != blocks.end());
  CUstream own = streams().get(found->second.stream);
  for (StreamId user : found->second.users) {
    CUevent event;
    check(cuEventCreate(&event, 0));
    check(cuEventRecord(event, streams().get(user)));
    check(cuStreamWaitEvent(own, event, 0));
    check(cuEventDestroy_v2(event));
  }
  allocated -= found->second.bytes;
  blocks.erase(found);
  check(cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(data), own));
}

// ---- what libtorch asks of a back end -----------------------------------------------------------------------------

// Memory of the host from which a copy reads when its turn has come, not when it is queued.
class PinnedAllocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(size_t bytes) override {
    void *data = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> guard(mutex);
    blocks[data] = bytes;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t count) const override { std::memcpy(to, from, count); }

  bool contains(const void *data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto after = blocks.upper_bound(const_cast<void *>(data));
    if (after == blocks.begin())
      return false;
    auto [start, bytes] = *std::prev(after);
    return data < static_cast<char *>(start) + std::max<size_t>(bytes, 1);
  }

private:
  static void release(void *data);

  std::mutex mutex;
  std::map<void *, size_t> blocks;
};

PinnedAllocator &pinned_allocator() {
  static PinnedAllocator *allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::release(void *data) {
  PinnedAllocator &allocator = pinned_allocator();
  std::lock_guard<std::mutex> guard(allocator.mutex);
  allocator.blocks.erase(data);
  std::free(data);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  c10::Allocator *getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void *data) const override { return pinned_allocator().contains(data); }
};

template <DeviceType TYPE> struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(TYPE, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device device) const override { return named(device, current_stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return named(device, streams().from_pool()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return named(device, streams().create()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return named(stream.device(), std::exchange(current_stream, stream.id()));
  }
  void *getStreamNativeHandle(const c10::Stream stream) const override { return streams().get(stream.id()); }
  bool queryStream(const c10::Stream &stream) const override { return cuStreamQuery(streams().get(stream.id())) == CUDA_SUCCESS; }
  void synchronizeStream(const c10::Stream &stream) const override {
    counts.synchronizations++;
    check(cuStreamSynchronize(streams().get(stream.id())));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    counts.synchronizations++;
    for (CUstream stream : streams().all())
      check(cuStreamSynchronize(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
    allocator().recordStream(data, stream);
  }

  void record(void **event, const c10::Stream &stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr)
      check(cuEventCreate(reinterpret_cast<CUevent *>(event), 0));
    check(cuEventRecord(static_cast<CUevent>(*event), streams().get(stream.id())));
  }
  void block(void *event, const c10::Stream &stream) const override {
    if (event != nullptr)
      check(cuStreamWaitEvent(streams().get(stream.id()), static_cast<CUevent>(event), 0));
  }
  bool queryEvent(void *event) const override { return event == nullptr || cuEventQuery(static_cast<CUevent>(event)) == CUDA_SUCCESS; }
  void synchronizeEvent(void *event) const override {
    counts.synchronizations++;
    check(cuEventSynchronize(static_cast<CUevent>(event)));
  }
  void destroyEvent(void *event, const DeviceIndex) const noexcept override {
    if (event != nullptr)
      cuEventDestroy_v2(static_cast<CUevent>(event));
  }

private:
  static c10::Stream named(c10::Device device, StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard<DeviceType::PrivateUse1>);
C10_REGISTER_GUARD_IMPL(MPS, Guard<DeviceType::MPS>);

Hooks hooks;
const bool is_registered = [] {
  c10::register_privateuse1_backend("pretend");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(DeviceType::PrivateUse1, &allocator());
  c10::SetAllocator(DeviceType::MPS, &allocator());
  return true;
}();

// ---- operators without arithmetic ---------------------------------------------------------------------------------

using Kind = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<at::Device>;
using MemoryFormat = std::optional<at::MemoryFormat>;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(SymIntArrayRef size, Kind kind, Layout, Place, std::optional<bool>, MemoryFormat format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(), KEYS, kind.value_or(at::kFloat), format);
}

at::Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, Kind kind, Layout, Place, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(), KEYS,
                                           kind.value_or(at::kFloat));
}

} // namespace

at::Tensor pretend::on_host(const at::Tensor &tensor) {
  void *data = for_kernel(tensor.storage().mutable_data());
  int64_t len = tensor.storage().nbytes() / tensor.element_size();
  return at::from_blob(data, {len}, tensor.options().device(at::kCPU))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

namespace {

// libtorch waits for the CUDA device in a copy to or from pageable memory, unless it is `non_blocking`.
at::Tensor &copy_(at::Tensor &to, const at::Tensor &from, bool non_blocking) {
  bool is_local = !to.is_cpu() && !from.is_cpu();
  if (is_local)
    counts.launches++;
  else
    (to.is_cpu() ? counts.device_to_host : counts.host_to_device)++;
  // CUDA has read pageable memory when the call returns. libtorch keeps pinned memory until it is read.
  bool is_read_later = !non_blocking || (from.is_cpu() && pinned_allocator().contains(from.const_data_ptr()));
  at::Tensor source = !from.is_cpu() ? on_host(from) : is_read_later ? from.detach() : from.detach().clone();
  at::Tensor target = to.is_cpu() ? to.detach() : on_host(to);
  if (to.is_cpu() && pretend_has_shapes_only())
    target.copy_(source);
  else
    launch([source, target]() mutable { target.copy_(source); });
  if (!is_local && !non_blocking)
    synchronize();
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor &tensor) {
  counts.device_to_host++;
  synchronize();
  return on_host(tensor).item();
}

// Otherwise a tensor that is on the device would be copied to it.
c10::Device own_name(c10::Device device) { return device.type() == DeviceType::MPS ? DEVICE : device; }

at::Tensor to_dtype_layout(const at::Tensor &self, Kind kind, Layout layout, Place place, std::optional<bool> pin,
                           bool non_blocking, bool copy, MemoryFormat format) {
  if (place)
    place = own_name(*place);
  return at::native::to(self, kind, layout, place, pin, non_blocking, copy, format);
}

at::Tensor to_device_dtype(const at::Tensor &self, c10::Device device, at::ScalarType kind, bool non_blocking, bool copy,
                           MemoryFormat format) {
  return at::native::to(self, own_name(device), kind, non_blocking, copy, format);
}

// ---- the fallback -------------------------------------------------------------------------------------------------

// A tensor on the device, and the one that the CPU's kernel gets for it.
struct Argument {
  at::Tensor device, host;
};

bool is_on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// An output without elements is resized by the kernel, which can only resize memory of the CPU's allocator.
at::Tensor argument(const at::Tensor &tensor) {
  return tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : on_host(tensor);
}

at::Tensor empty_like_on_device(const at::Tensor &tensor) {
  return at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &allocator(), KEYS, tensor.scalar_type());
}

// Of a result that is there.
at::Tensor to_device(const at::Tensor &host) {
  at::Tensor result = empty_like_on_device(host);
  launch([to = on_host(result), host]() mutable { to.copy_(host); });
  return result;
}

void take_resized(const Argument &argument) {
  if (argument.device.sizes() == argument.host.sizes())
    return;
  at::Tensor resized = to_device(argument.host);
  c10::TensorImpl *impl = argument.device.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(resized.storage());
  impl->set_sizes_and_strides(resized.sizes(), resized.strides());
}

// Replaces the tensors among the last `count` values of a stack.
template <typename Replace> void replace_tensors(torch::jit::Stack &stack, size_t count, c10::Device device, Replace replace) {
  for (size_t at = stack.size() - count; at < stack.size(); at++) {
    c10::IValue &value = stack[at];
    if (value.isTensor()) {
      value = replace(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor &tensor : value.toTensorVector())
        list.push_back(replace(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(replace(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = device;
    }
  }
}

// The operators whose results have shapes that only the CPU's kernel can tell.
class WithoutMeta {
public:
  bool contains(const c10::OperatorName &name) {
    std::lock_guard<std::mutex> guard(mutex);
    return names.count(c10::toString(name)) > 0;
  }
  void insert(const c10::OperatorName &name) {
    std::lock_guard<std::mutex> guard(mutex);
    names.insert(c10::toString(name));
  }

private:
  std::mutex mutex;
  std::set<std::string> names;
};

WithoutMeta without_meta;

// libtorch's AdamW computes the last few elements of a tensor without vectors, and rounds them differently. Shardwise's kernel for CPUs
// rounds all as the vectors do, so here all elements are in vectors.
void adamw_in_whole_vectors(const c10::OperatorHandle &op, torch::jit::Stack &stack) {
  constexpr int64_t VECTOR = 64;
  std::vector<std::pair<at::Tensor, at::Tensor>> padded;
  // Parameters, gradients and both moments.
  for (size_t at = 0; at < 4; at++) {
    c10::List<at::Tensor> list;
    for (const at::Tensor &tensor : stack[at].toTensorVector()) {
      const int64_t missing = (VECTOR - tensor.numel() % VECTOR) % VECTOR;
      padded.emplace_back(tensor, at::constant_pad_nd(tensor.reshape(-1), {0, missing}));
      list.push_back(padded.back().second);
    }
    stack[at] = list;
  }
  op.callBoxed(&stack);
  for (const auto &[tensor, whole] : padded)
    tensor.copy_(whole.narrow(0, 0, tensor.numel()).view_as(tensor));
}

void call_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack &stack) {
  if (op.operator_name().name == "aten::_fused_adamw_")
    adamw_in_whole_vectors(op, stack);
  else
    op.callBoxed(&stack);
}

class Call {
public:
  Call(const c10::OperatorHandle &op, torch::jit::Stack *stack) : op(op), stack(stack), inputs(op.schema().arguments().size()) {}

  // Runs on the stream, after this has returned, if the results' shapes are known.
  void run(bool waits) {
    std::optional<torch::jit::Stack> results;
    if (!waits && !has_empty())
      results = infer();
    torch::jit::Stack host(stack->end() - inputs, stack->end());
    replace_tensors(host, inputs, at::kCPU, [this](const at::Tensor &tensor) { return enter(tensor); });
    if (results) {
      queue(std::move(host), std::move(*results));
      return;
    }
    drain();
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      call_on_cpu(op, host);
    }
    for (const Argument &argument : arguments)
      take_resized(argument);
    replace_tensors(host, host.size(), DEVICE, [this](const at::Tensor &tensor) { return leave(tensor); });
    finish(std::move(host));
  }

private:
  // Replaces the arguments on the stack by the results.
  void finish(torch::jit::Stack results) {
    torch::jit::drop(*stack, inputs);
    for (c10::IValue &result : results)
      stack->push_back(std::move(result));
  }

  void queue(torch::jit::Stack host, torch::jit::Stack results) {
    std::vector<at::Tensor> targets;
    replace_tensors(results, results.size(), DEVICE, [&](const at::Tensor &result) {
      targets.push_back(is_on_device(result) ? at::Tensor() : result);
      if (!result.defined() || is_on_device(result))
        return result;
      at::Tensor device = empty_like_on_device(result);
      targets.back() = on_host(device);
      return device;
    });
    std::string kernel = c10::toString(op.operator_name());
    if (!arguments.empty())
      kernel += c10::toString(arguments[0].host.scalar_type());
    launch([op = op, host, targets, kernel]() mutable {
      call_on_cpu(op, host);
      end_before_variables_of(kernel);
      size_t next = 0;
      replace_tensors(host, host.size(), at::kCPU, [&](const at::Tensor &result) {
        at::Tensor &target = targets.at(next++);
        if (target.defined()) {
          TORCH_CHECK(target.sizes() == result.sizes() && target.scalar_type() == result.scalar_type(), op.operator_name(),
                      " returned a shape that its meta kernel had not announced");
          target.copy_(result);
        }
        return result;
      });
    });
    finish(std::move(results));
  }

  bool has_empty() const {
    bool found = false;
    torch::jit::Stack arguments(stack->end() - inputs, stack->end());
    replace_tensors(arguments, inputs, DEVICE, [&](const at::Tensor &tensor) {
      found |= is_on_device(tensor) && tensor.numel() == 0;
      return tensor;
    });
    return found;
  }

  // The results: arguments that the operator changes, and meta tensors with the shapes of new tensors. Nothing if that is not known.
  std::optional<torch::jit::Stack> infer() const {
    const auto &returns = op.schema().returns();
    torch::jit::Stack results;
    for (const c10::Argument &value : returns)
      if (value.alias_info())
        if (const c10::IValue *changed = argument_that_is(value))
          results.push_back(*changed);
    if (results.size() == returns.size())
      return results;
    if (!results.empty() || without_meta.contains(op.operator_name()))
      return std::nullopt;
    results.assign(stack->end() - inputs, stack->end());
    replace_tensors(results, inputs, at::kMeta, [](const at::Tensor &tensor) {
      return is_on_device(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)) : tensor;
    });
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(&results);
    } catch (const std::exception &) {
      // There is no meta kernel, or the arguments are wrong. The CPU's kernel tells.
      without_meta.insert(op.operator_name());
      return std::nullopt;
    }
    bool has_only_tensors = std::all_of(results.begin(), results.end(), [](const c10::IValue &value) {
      return value.isTensor() || value.isTensorList();
    });
    return has_only_tensors ? std::optional(results) : std::nullopt;
  }

  // The argument that a return value is.
  const c10::IValue *argument_that_is(const c10::Argument &value) const {
    const auto &declared = op.schema().arguments();
    for (size_t at = 0; at < inputs; at++) {
      const c10::IValue &argument = (*stack)[stack->size() - inputs + at];
      if (declared[at].alias_info() && *declared[at].alias_info() == *value.alias_info() && argument.isTensor())
        return &argument;
    }
    return nullptr;
  }

  at::Tensor enter(const at::Tensor &tensor) {
    if (!is_on_device(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0, op.operator_name(), " on the pretend device got a tensor of shape ",
                  tensor.sizes(), " on ", tensor.device());
      bool may_change = tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return may_change ? tensor.detach().clone() : tensor;
    }
    for (const Argument &argument : arguments)
      if (argument.device.is_same(tensor))
        return argument.host;
    arguments.push_back({tensor, argument(tensor)});
    return arguments.back().host;
  }

  at::Tensor leave(const at::Tensor &tensor) {
    if (!tensor.defined())
      return tensor;
    for (const Argument &argument : arguments) {
      if (argument.host.is_same(tensor))
        return argument.device;
      TORCH_CHECK(!argument.host.is_alias_of(tensor) || tensor.numel() == 0, op.operator_name(),
                  " returns a view, for which the pretend device has no kernel");
    }
    return to_device(tensor);
  }

  const c10::OperatorHandle &op;
  torch::jit::Stack *stack;
  size_t inputs;
  std::vector<Argument> arguments;
};

// Operators whose result is a value on the host, or has a shape that depends on the elements: the host waits for them.
bool waits(const c10::OperatorHandle &op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output))
    return true;
  const auto &returns = op.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument &value) {
    return value.type()->kind() == c10::TypeKind::NumberType || value.type()->kind() == c10::TypeKind::BoolType;
  });
}

void run_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  counts.launches++;
  bool is_awaited = waits(op);
  if (is_awaited) {
    counts.device_to_host++;
    counts.synchronizations++;
  }
  Call(op, stack).run(is_awaited);
}

// ---- registration -------------------------------------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

// Some operators have a kernel for the CPU and for CUDA, and are made of others for every other device.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    auto has = [&](c10::DispatchKey key) { return op && op->hasKernelForDispatchKey(key); };
    bool is_composite = has(c10::DispatchKey::CompositeImplicitAutograd) || has(c10::DispatchKey::CompositeExplicitAutograd);
    if (name.getNamespace() == "aten" && is_composite && has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::PrivateUse1))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("to.device", &to_device_dtype);
  m.impl("to.dtype_layout", &to_dtype_layout);
}

} // namespace

void sw_pretend_counts(Counts *out) {
  *out = Counts{counts.launches, counts.host_to_device, counts.device_to_host, counts.synchronizations, counts.allocations};
}

void sw_pretend_set_seed(uint64_t seed) { pretend_set_seed(seed); }
void sw_pretend_set_shapes_only() { pretend_set_shapes_only(); }
