// A device inside libtorch that computes on the CPU. See src/lib.rs for what it is for.
//
// Its tensors are PrivateUse1 tensors: the autograd engine knows that back end. tch has no name for it, but passes
// `Device::Mps` as MPS, and reports a device that it does not know as `Device::Mps`. So a request for memory on MPS gets
// PrivateUse1 memory, and to tch both are one device.
//
// Most operators have no kernel here. The fallback runs the CPU's on the same memory, so results have the CPU's bits.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/to_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
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
}

namespace {

using c10::DeviceIndex, c10::DeviceType, c10::IntArrayRef, c10::SymIntArrayRef, c10::Stream;

const c10::Device DEVICE(DeviceType::PrivateUse1, 0);

struct {
  std::atomic<uint64_t> launches, host_to_device, device_to_host, synchronizations, allocations;
} counts;

// ---- memory -----------------------------------------------------------------------------------------------------

// Device memory has two addresses. Tensors have the one in `device`, where nothing can be read or written: host code that
// follows a tensor's pointer gets a segmentation fault. Kernels use the one in `kernel`.
class Arena {
public:
  Arena() : device(reserve(PROT_NONE)), kernel(reserve(PROT_READ | PROT_WRITE)) {}

  void *allocate(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    counts.allocations++;
    auto found = free_blocks.lower_bound(bytes);
    if (found != free_blocks.end() && found->first <= bytes + bytes / WASTE) {
      size_t reused_bytes = found->first;
      void *reused = found->second.back();
      found->second.pop_back();
      if (found->second.empty())
        free_blocks.erase(found);
      used_blocks[reused] = reused_bytes;
      return reused;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    TORCH_CHECK(bytes <= ARENA_BYTES - end, "the pretend device has no memory left for ", bytes, " bytes");
    void *fresh = device + end;
    end += bytes;
    used_blocks[fresh] = bytes;
    poison(fresh, bytes);
    return fresh;
  }

  // The next allocation of that size gets this block: whoever still reads it reads something else.
  void release(void *data) {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = used_blocks.find(data);
    TORCH_INTERNAL_ASSERT(found != used_blocks.end());
    poison(data, found->second);
    free_blocks[found->second].push_back(data);
    used_blocks.erase(found);
  }

  // The address that kernels use.
  void *for_kernel(void *data) const {
    return data == nullptr ? nullptr : kernel + (static_cast<char *>(data) - device);
  }

private:
  static constexpr size_t ARENA_BYTES = size_t(64) << 30;
  static constexpr size_t ALIGNMENT = 512;
  // A reused block may be larger than the request by an eighth.
  static constexpr size_t WASTE = 8;
  // A NaN in every floating-point type, and an index that is out of bounds.
  static constexpr int POISON = 0xFF;

  // Address space only: pages become resident when they are first written.
  static char *reserve(int protection) {
    void *data = mmap(nullptr, ARENA_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "the pretend device cannot reserve its address space");
    return static_cast<char *>(data);
  }

  void poison(void *data, size_t bytes) { std::memset(for_kernel(data), POISON, bytes); }

  char *const device, *const kernel;
  std::mutex mutex;
  size_t end = 0;
  std::map<size_t, std::vector<void *>> free_blocks;
  std::unordered_map<void *, size_t> used_blocks;
};

Arena &arena() {
  // Never destroyed: tensors may outlive everything.
  static Arena *arena = new Arena;
  return *arena;
}

void release(void *data) {
  if (data != nullptr)
    arena().release(data);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void *data = bytes == 0 ? nullptr : arena().allocate(bytes);
    return {data, data, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void *to, const void *from, size_t count) const override {
    std::memcpy(arena().for_kernel(to), arena().for_kernel(const_cast<void *>(from)), count);
  }
};

Allocator allocator;

// ---- what libtorch asks of a back end -----------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
};

// One device with one stream, on which every call has ended when it returns.
template <DeviceType TYPE> struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(TYPE, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  Stream getStream(c10::Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(c10::Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void **event, const Stream &, const DeviceIndex, const c10::EventFlag) const override { *event = this_event(); }
  void block(void *, const Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  void destroyEvent(void *, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream &) const override { return true; }
  void synchronizeStream(const Stream &) const override { counts.synchronizations++; }
  void synchronizeEvent(void *) const override { counts.synchronizations++; }
  void synchronizeDevice(const DeviceIndex) const override { counts.synchronizations++; }
  void recordDataPtrOnStream(const c10::DataPtr &, const Stream &) const override {}

private:
  // Not null, which would be no event.
  void *this_event() const { return const_cast<Guard *>(this); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard<DeviceType::PrivateUse1>);
C10_REGISTER_GUARD_IMPL(MPS, Guard<DeviceType::MPS>);

Hooks hooks;
const bool is_registered = [] {
  c10::register_privateuse1_backend("pretend");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(DeviceType::PrivateUse1, &allocator);
  c10::SetAllocator(DeviceType::MPS, &allocator);
  return true;
}();

// ---- operators without arithmetic ---------------------------------------------------------------------------------

using Kind = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<at::Device>;
using MemoryFormat = std::optional<at::MemoryFormat>;

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(SymIntArrayRef size, Kind kind, Layout, Place, std::optional<bool>, MemoryFormat format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, kind.value_or(at::kFloat), format);
}

at::Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, Kind kind, Layout, Place, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS,
                                           kind.value_or(at::kFloat));
}

// A tensor on the CPU with the memory of a tensor on the device, for kernels.
at::Tensor on_host(const at::Tensor &tensor) {
  void *data = arena().for_kernel(tensor.storage().mutable_data());
  int64_t len = tensor.storage().nbytes() / tensor.element_size();
  return at::from_blob(data, {len}, tensor.options().device(at::kCPU))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// libtorch waits for the CUDA device in a copy to or from pageable memory, unless it is `non_blocking`.
at::Tensor &copy_(at::Tensor &to, const at::Tensor &from, bool non_blocking) {
  if (to.is_cpu() || from.is_cpu()) {
    (to.is_cpu() ? counts.device_to_host : counts.host_to_device)++;
    if (!non_blocking)
      counts.synchronizations++;
  } else {
    counts.launches++;
  }
  at::Tensor target = to.is_cpu() ? to : on_host(to);
  target.copy_(from.is_cpu() ? from : on_host(from));
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor &tensor) {
  counts.device_to_host++;
  counts.synchronizations++;
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

at::Tensor to_device(const at::Tensor &host) {
  at::Tensor result = at::detail::empty_strided_generic(host.sizes(), host.strides(), &allocator, KEYS, host.scalar_type());
  on_host(result).copy_(host);
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

class Call {
public:
  Call(const c10::OperatorHandle &op, torch::jit::Stack *stack) : op(op), stack(stack) {}

  void run() {
    for_each(op.schema().arguments().size(), [this](const at::Tensor &tensor) { return enter(tensor); });
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      op.callBoxed(stack);
    }
    for (const Argument &argument : arguments)
      take_resized(argument);
    for_each(op.schema().returns().size(), [this](const at::Tensor &tensor) { return leave(tensor); });
  }

private:
  // Replaces the tensors among the last `count` values of the stack.
  template <typename Replace> void for_each(size_t count, Replace replace) {
    for (size_t at = stack->size() - count; at < stack->size(); at++) {
      c10::IValue &value = (*stack)[at];
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
        value = at::Device(at::kCPU);
      }
    }
  }

  at::Tensor enter(const at::Tensor &tensor) {
    if (!is_on_device(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0, op.operator_name(), " on the pretend device got a tensor of shape ",
                  tensor.sizes(), " on ", tensor.device());
      return tensor;
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
  if (waits(op)) {
    counts.device_to_host++;
    counts.synchronizations++;
  }
  Call(op, stack).run();
}

// ---- attention ----------------------------------------------------------------------------------------------------

// libtorch chooses a kernel by the device. Here it is the one that it would choose for the CPU.
at::Tensor scaled_dot_product_attention(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                                        const std::optional<at::Tensor> &mask, double dropout, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa) {
  constexpr int64_t FLASH = 1;
  std::optional<at::Tensor> bias = mask, host_bias;
  if (mask && mask->scalar_type() == at::kBool) {
    at::Tensor zeros = at::zeros_like(*mask, query.options());
    bias = zeros.masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  if (bias)
    host_bias = on_host(*bias);
  int64_t choice = at::_fused_sdp_choice(on_host(query), on_host(key), on_host(value), host_bias, dropout, is_causal, scale,
                                         enable_gqa);
  if (choice == FLASH)
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, bias, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, is_causal, std::nullopt, scale,
                                                            enable_gqa));
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
  m.impl("scaled_dot_product_attention", &scaled_dot_product_attention);
  m.impl("to.device", &to_device_dtype);
  m.impl("to.dtype_layout", &to_dtype_layout);
}

} // namespace

void sw_pretend_counts(Counts *out) {
  *out = Counts{counts.launches, counts.host_to_device, counts.device_to_host, counts.synchronizations, counts.allocations};
}
