// What the files of the device share.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

#include <ATen/ATen.h>

namespace pretend {

struct AtomicCounts {
  std::atomic<uint64_t> launches, host_to_device, device_to_host, synchronizations, allocations;
};
extern AtomicCounts counts;

using Kernel = std::function<void()>;

// Queues a kernel on the current stream. If only shapes are computed, it never runs.
void launch(Kernel kernel);

// A tensor on the CPU with the memory of a tensor on the device, for kernels.
at::Tensor on_host(const at::Tensor &tensor);

} // namespace pretend
