// libtorch's CUDA streams. Compiled with the cargo feature `cuda` only.
#include "shim.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAStream.h>

extern "C" {

// Naming a function of libtorch_cuda keeps that library linked; without it CUDA would silently be unavailable.
int sw_cuda_warp_size() {
  try {
    return at::cuda::warp_size();
  } catch (...) {
    return 0;
  }
}

Message sw_cuda_current_stream(int8_t device_index, void **out) {
  try {
    *out = c10::cuda::getCurrentCUDAStream(device_index).stream();
    return nullptr;
  } catch (const std::exception &error) {
    return sw_message_new(error.what(), std::strlen(error.what()));
  }
}
}
