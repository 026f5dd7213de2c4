// Devices other than the CPU, whichever they are: libtorch's interfaces to their streams and their memory.
#include "guarded.h"
#include "shim.h"

#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

c10::DeviceType type_of(int8_t device_type) { return static_cast<c10::DeviceType>(device_type); }

c10::impl::VirtualGuardImpl guard_of(const c10::Stream &stream) { return c10::impl::VirtualGuardImpl(stream.device_type()); }

} // namespace

extern "C" {

bool sw_has_device(int8_t device_type) { return c10::impl::hasDeviceGuardImpl(type_of(device_type)); }

Message sw_device_load_cuda() {
  return guarded([] {
    Dl_info info;
    TORCH_CHECK(dladdr(reinterpret_cast<void *>(&c10::GetAllocator), &info) != 0, "libtorch's folder is not known");
    std::string folder(info.dli_fname);
    folder.resize(folder.rfind('/') + 1);
    // Its kernels register themselves. It stays loaded.
    TORCH_CHECK(dlopen((folder + "libtorch_cuda.so").c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr, dlerror());
    // The allocator knows no device before that.
    if (sw_device_count(static_cast<int8_t>(c10::DeviceType::CUDA)) > 0)
      at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  });
}

size_t sw_device_count(int8_t device_type) {
  if (!sw_has_device(device_type))
    return 0;
  return static_cast<size_t>(c10::impl::VirtualGuardImpl(type_of(device_type)).deviceCount());
}

Message sw_stream_new(int8_t device_type, int8_t device_index, c10::Stream **out) {
  return guarded([&] {
    c10::impl::VirtualGuardImpl guard(type_of(device_type));
    *out = new c10::Stream(guard.getStreamFromGlobalPool(c10::Device(type_of(device_type), device_index)));
  });
}

Message sw_stream_current(int8_t device_type, int8_t device_index, c10::Stream **out) {
  return guarded([&] {
    c10::impl::VirtualGuardImpl guard(type_of(device_type));
    *out = new c10::Stream(guard.getStream(c10::Device(type_of(device_type), device_index)));
  });
}

void sw_stream_free(c10::Stream *stream) { delete stream; }

Message sw_stream_handle(const c10::Stream *stream, void **out) {
  return guarded([&] { *out = guard_of(*stream).getStreamNativeHandle(*stream); });
}

Message sw_stream_make_current(const c10::Stream *stream) {
  return guarded([&] { guard_of(*stream).exchangeStream(*stream); });
}

Message sw_stream_wait_for(const c10::Stream *stream, const c10::Stream *other) {
  return guarded([&] {
    c10::Event event(other->device_type());
    event.record(*other);
    event.block(*stream);
  });
}

Message sw_stream_synchronize(const c10::Stream *stream) {
  return guarded([&] {
    sw_count_host_wait();
    guard_of(*stream).synchronizeStream(*stream);
  });
}

Message sw_stream_record(const c10::Stream *stream, const at::Tensor *tensor) {
  return guarded([&] { guard_of(*stream).recordDataPtrOnStream(tensor->storage().data_ptr(), *stream); });
}

Message sw_event_new(const c10::Stream *stream, c10::Event **out) {
  return guarded([&] {
    auto event = std::make_unique<c10::Event>(stream->device_type());
    event->record(*stream);
    *out = event.release();
  });
}

void sw_event_free(c10::Event *event) { delete event; }

Message sw_stream_wait_for_event(const c10::Stream *stream, const c10::Event *event) {
  return guarded([&] { event->block(*stream); });
}

Message sw_event_synchronize(const c10::Event *event) {
  return guarded([&] {
    sw_count_host_wait();
    event->synchronize();
  });
}

Message sw_tensor_copy_async(at::Tensor *to, const at::Tensor *from) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    to->copy_(*from, /*non_blocking=*/true);
  });
}

Message sw_pinned_bytes(size_t bytes, at::Tensor **out) {
  return guarded([&] {
    auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    *out = new at::Tensor(at::empty({static_cast<int64_t>(bytes)}, options));
  });
}

Message sw_tensor_pin(at::Tensor *tensor) {
  return guarded([&] { *tensor = tensor->pin_memory(); });
}

Message sw_tensor_read(const at::Tensor *tensor, void *to, size_t bytes) {
  return guarded([&] {
    TORCH_CHECK(tensor->nbytes() == bytes, "a tensor of ", tensor->nbytes(), " bytes does not fill ", bytes);
    at::Tensor host = at::empty(tensor->sizes(), tensor->options().device(at::kCPU).pinned_memory(true));
    host.copy_(*tensor);
    std::memcpy(to, host.const_data_ptr(), bytes);
  });
}

Message sw_flash_attention(const at::Tensor *query, const at::Tensor *key, const at::Tensor *value,
                           const at::Tensor *boundaries, int64_t longest, int64_t window, at::Tensor **out) {
  return guarded([&] {
    std::optional<at::Tensor> documents;
    if (boundaries != nullptr)
      documents = *boundaries;
    std::optional<int64_t> left, right;
    if (window >= 0) {
      left = window - 1;
      right = 0;
    }
    auto results = at::_flash_attention_forward(*query, *key, *value, documents, documents, longest, longest, /*dropout_p=*/0.,
                                                /*is_causal=*/true, /*return_debug_mask=*/false, /*scale=*/std::nullopt, left, right);
    *out = new at::Tensor(std::get<0>(results));
  });
}

Message sw_device_memory(int8_t device_type, int8_t device_index, DeviceMemory *out) {
  return guarded([&] {
    c10::DeviceAllocator *allocator = c10::getDeviceAllocator(type_of(device_type));
    auto [free, total] = allocator->getMemoryInfo(device_index);
    auto stats = allocator->getDeviceStats(device_index);
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *out = {free, total, static_cast<size_t>(stats.allocated_bytes[all].current),
            static_cast<size_t>(stats.allocated_bytes[all].peak), static_cast<size_t>(stats.reserved_bytes[all].current),
            static_cast<size_t>(stats.allocation[all].allocated)};
  });
}

Message sw_device_reset_peak(int8_t device_type, int8_t device_index) {
  return guarded([&] { c10::getDeviceAllocator(type_of(device_type))->resetPeakStats(device_index); });
}

Message sw_use_deterministic_algorithms(bool warn_only) {
  return guarded([&] { at::globalContext().setDeterministicAlgorithms(true, warn_only); });
}
}
