// Counts what libtorch is asked to do, on any device.
#include "guarded.h"
#include "shim.h"

#include <atomic>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace {

struct {
  std::atomic<uint64_t> operators, host_waits, to_device, to_host;
} counts;

bool is_on_device(const c10::IValue &value) { return value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cpu(); }

// Called before every operator, also before those that others consist of.
std::unique_ptr<at::ObserverContext> count(const at::RecordFunction &call) {
  counts.operators++;
  std::string_view name(call.name());
  auto inputs = call.inputs();
  if (name == "aten::copy_" && inputs.size() >= 3 && is_on_device(inputs[0]) != is_on_device(inputs[1])) {
    (is_on_device(inputs[0]) ? counts.to_device : counts.to_host)++;
    if (!inputs[2].toBool())
      counts.host_waits++;
  }
  // Values that the host reads, and results whose shapes depend on the elements.
  bool is_read = name == "aten::_local_scalar_dense" || name == "aten::nonzero";
  if (is_read && !inputs.empty() && is_on_device(inputs[0])) {
    counts.to_host++;
    counts.host_waits++;
  }
  return nullptr;
}

} // namespace

Message sw_count_start(uint64_t *handle) {
  return guarded([&] {
    counts.operators = counts.host_waits = counts.to_device = counts.to_host = 0;
    *handle = at::addGlobalCallback(at::RecordFunctionCallback(&count).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  });
}

void sw_count_stop(uint64_t handle, OperatorCounts *out) {
  at::removeCallback(handle);
  *out = {counts.operators, counts.host_waits, counts.to_device, counts.to_host};
}

void sw_count_host_wait() { counts.host_waits++; }
