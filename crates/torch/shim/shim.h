// The C interface of the shim. Functions that can fail return an error message, or null on success; the caller frees
// the message with `sw_message_free`. No C++ exception and no Rust panic crosses this interface.
#pragma once
#include <cstddef>
#include <cstdint>

namespace at {
class Tensor;
}
namespace c10 {
class Event;
class Stream;
}
struct Block;
struct CompiledFunction;

extern "C" {
typedef char *Message;

Message sw_message_new(const char *text, size_t length);
void sw_message_free(Message message);
const char *sw_torch_version();

// ---- caching allocator ------------------------------------------------------------------------------------------
size_t sw_malloc_bytes();
size_t sw_memory_take_peak();
void sw_memory_keep();

// ---- memory -----------------------------------------------------------------------------------------------------
Message sw_block_new(int8_t device_type, int8_t device_index, size_t bytes, Block **out);
Message sw_block_zeros(size_t bytes, Block **out);
// Maps a range of a file, which starts at a page. The file does not change if the memory does.
Message sw_block_map(int file, uint64_t start, size_t bytes, Block **out);
void sw_block_free(Block *block);
void *sw_block_data(Block *block);
size_t sw_block_bytes(const Block *block);
int8_t sw_block_device_type(const Block *block);
int8_t sw_block_device_index(const Block *block);

Message sw_storage_take(at::Tensor *tensor, const char *reason, Block **out);
Message sw_storage_put(at::Tensor *tensor, Block *block); // takes the block, unless it fails
// Gives a block's memory to a tensor without elements, which then has `len` of them. Takes the block, unless it fails.
Message sw_block_into_tensor(at::Tensor *tensor, Block *block, int64_t len);
Message sw_storage_is_taken(const at::Tensor *tensor, bool *out);
Message sw_storage_bytes(const at::Tensor *tensor, size_t *out);

struct Access {
  void *data;
  size_t tensor_owners;
  size_t storage_owners;
  bool contiguous;
  bool cpu;
};
Message sw_tensor_access(at::Tensor *tensor, Access *out);

// Copies between two addresses, each on its device.
Message sw_copy_bytes(int8_t from_type, int8_t from_index, const void *from, int8_t to_type, int8_t to_index, void *to,
                      size_t bytes);

// ---- devices ----------------------------------------------------------------------------------------------------
// Whether libtorch has a back end for this type of device.
bool sw_has_device(int8_t device_type);
// Loads libtorch_cuda.so from libtorch's folder.
Message sw_device_load_cuda();
size_t sw_device_count(int8_t device_type);
// The caller frees streams with `sw_stream_free`, which does not affect the device's queue.
Message sw_stream_new(int8_t device_type, int8_t device_index, c10::Stream **out);
Message sw_stream_current(int8_t device_type, int8_t device_index, c10::Stream **out);
void sw_stream_free(c10::Stream *stream);
// The handle of the device's own library.
Message sw_stream_handle(const c10::Stream *stream, void **out);
Message sw_stream_make_current(const c10::Stream *stream);
Message sw_stream_wait_for(const c10::Stream *stream, const c10::Stream *other);
Message sw_stream_synchronize(const c10::Stream *stream);
// The tensor's memory is not used again before the work that is queued when it is freed has ended.
Message sw_stream_record(const c10::Stream *stream, const at::Tensor *tensor);

// What is queued on a stream so far. The caller frees it.
Message sw_event_new(const c10::Stream *stream, c10::Event **out);
void sw_event_free(c10::Event *event);
Message sw_stream_wait_for_event(const c10::Stream *stream, const c10::Event *event);
Message sw_event_synchronize(const c10::Event *event);

// Allocates pinned memory. The caller owns the tensor.
Message sw_pinned_bytes(size_t bytes, at::Tensor **out);
// Copies between a device and pinned memory on the current stream, while the host goes on.
Message sw_tensor_copy_async(at::Tensor *to, const at::Tensor *from);
// Replaces a tensor on the CPU by a copy in pinned memory.
Message sw_tensor_pin(at::Tensor *tensor);
// Copies a tensor's bytes to the host, through pinned memory, and waits for them.
Message sw_tensor_read(const at::Tensor *tensor, void *to, size_t bytes);

struct DeviceMemory {
  size_t free_bytes;
  size_t total_bytes;
  size_t allocated_bytes;
  size_t peak_bytes;
  size_t reserved_bytes;
  size_t allocations;
};
Message sw_device_memory(int8_t device_type, int8_t device_index, DeviceMemory *out);
Message sw_device_reset_peak(int8_t device_type, int8_t device_index);
// Kernels that give the same bits every time. Where there are none: an error, or only a warning.
Message sw_use_deterministic_algorithms(bool warn_only);

// ---- counts -----------------------------------------------------------------------------------------------------
struct OperatorCounts {
  uint64_t operators;
  uint64_t host_waits;
  uint64_t to_device;
  uint64_t to_host;
};
// Counts until `sw_count_stop`, on all threads. One at a time.
Message sw_count_start(uint64_t *handle);
void sw_count_stop(uint64_t handle, OperatorCounts *out);
// The shim itself makes the host wait.
void sw_count_host_wait();

// ---- attention --------------------------------------------------------------------------------------------------
// Causal flash attention. Query, key and value have shape (sequences, positions, heads, head dim); if `boundaries` is not null,
// (tokens, heads, head dim), and documents of at most `longest` tokens attend to themselves. `window` is negative if there is none.
Message sw_flash_attention(const at::Tensor *query, const at::Tensor *key, const at::Tensor *value,
                           const at::Tensor *boundaries, int64_t longest, int64_t window, at::Tensor **out);

// ---- autograd ---------------------------------------------------------------------------------------------------
// `grads`: one tensor per output, null if it has no gradient. `saved`: as passed to `sw_function`. The callee owns the tensors
// of both lists. It fills `results` with one owned tensor or null per input.
typedef Message (*Backward)(void *closure, at::Tensor **grads, size_t grad_count, at::Tensor **saved,
                            size_t saved_count, at::Tensor **results, size_t result_count);
typedef void (*Drop)(void *closure);

// Connects `outputs` (computed without autograd) to `inputs` with a backward node that calls `closure`, and replaces them by
// the connected tensors. The graph owns the closure from here on, even if this fails: `drop` is called exactly once.
Message sw_function(at::Tensor **inputs, size_t input_count, at::Tensor **outputs, size_t output_count,
                    at::Tensor **saved, size_t saved_count, void *closure, Backward backward, Drop drop);

// `grad_outputs` entries and `results` entries may be null.
Message sw_grad(at::Tensor **outputs, at::Tensor **grad_outputs, size_t output_count, at::Tensor **inputs,
                size_t input_count, bool retain_graph, at::Tensor **results);

// ---- compiled functions -----------------------------------------------------------------------------------------
// Loads the shared library in a file, unless one named libtorch.so is loaded. It stays loaded.
Message sw_compiled_provide_libtorch(const char *stub);
// Unpacks a package of AOTInductor into a temporary folder, loads its code, and removes the folder. The package must have code:
// libtorch would start a compiler for one that has only sources.
Message sw_compiled_load(const char *path, CompiledFunction **out);
void sw_compiled_free(CompiledFunction *function);
// Runs without autograd, on any thread. The code does not look at the arguments' shapes, so the caller has checked them. Moves the
// arguments out of their tensors, so that each is freed after its last use, and fills `results` with owned tensors.
Message sw_compiled_run(CompiledFunction *function, at::Tensor **arguments, size_t argument_count, at::Tensor **results,
                        size_t result_count);

// ---- optimizer --------------------------------------------------------------------------------------------------
Message sw_fused_adamw(at::Tensor **parameters, at::Tensor **grads, at::Tensor **first_moments,
                       at::Tensor **second_moments, at::Tensor **steps, size_t count, double lr, double beta1,
                       double beta2, double weight_decay, double eps);
}
