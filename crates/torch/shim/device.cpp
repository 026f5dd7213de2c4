// Devices other than the CPU, whichever they are: libtorch's interfaces to their streams and their memory.
#include "guarded.h"
#include "shim.h"

#include <dlfcn.h>
#include <string>

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

c10::DeviceType type_of(int8_t device_type) { return static_cast<c10::DeviceType>(device_type); }

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

Message sw_device_stream(int8_t device_type, int8_t device_index, void **out) {
  return guarded([&] {
    c10::impl::VirtualGuardImpl guard(type_of(device_type));
    *out = guard.getStreamNativeHandle(guard.getStream(c10::Device(type_of(device_type), device_index)));
  });
}

Message sw_device_memory(int8_t device_type, int8_t device_index, DeviceMemory *out) {
  return guarded([&] {
    c10::DeviceAllocator *allocator = c10::getDeviceAllocator(type_of(device_type));
    auto [free, total] = allocator->getMemoryInfo(device_index);
    auto stats = allocator->getDeviceStats(device_index);
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *out = {free, total, static_cast<size_t>(stats.allocated_bytes[all].current),
            static_cast<size_t>(stats.allocated_bytes[all].peak), static_cast<size_t>(stats.reserved_bytes[all].current)};
  });
}

Message sw_device_reset_peak(int8_t device_type, int8_t device_index) {
  return guarded([&] { c10::getDeviceAllocator(type_of(device_type))->resetPeakStats(device_index); });
}

Message sw_use_deterministic_algorithms() {
  return guarded([] { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); });
}
}
