// libtorch's CUDA streams. Compiled with the cargo feature `cuda` only; needs no CUDA headers.
#include "shim.h"

#include <cstring>

#include <c10/core/impl/VirtualGuardImpl.h>

// Declared here because libtorch_cuda's header needs CUDA's headers.
namespace at::cuda {
int warp_size();
}

// A reference to a function of libtorch_cuda that the linker cannot optimize away keeps that library linked; without it, CUDA
// would silently be unavailable.
static int (*volatile keep_libtorch_cuda)() = at::cuda::warp_size;

extern "C" {

Message sw_cuda_current_stream(int8_t device_index, void **out) {
  try {
    TORCH_CHECK(keep_libtorch_cuda != nullptr, "libtorch_cuda is not linked");
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *out = guard.getStream(c10::Device(c10::DeviceType::CUDA, device_index)).native_handle();
    return nullptr;
  } catch (const std::exception &error) {
    return sw_message_new(error.what(), std::strlen(error.what()));
  } catch (...) {
    return sw_message_new("unknown", 7);
  }
}
}
