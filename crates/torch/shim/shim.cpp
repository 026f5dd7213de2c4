#include "guarded.h"
#include "shim.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/headeronly/version.h>

// c10::Allocator works for CPU and CUDA; the data pointer carries the device, because a taken storage no longer knows its own.
struct Block {
  c10::DataPtr data;
  c10::Allocator *allocator;
  size_t bytes;
};

namespace {

// MKL chooses the kernel of a vector function in the first call. If several threads make it at once, one of them may get a kernel of low
// accuracy: 4e-4 for f32, 1e-9 for f64 (pytorch/pytorch#188792). So one thread makes the first call of every function that libtorch uses,
// before any other code of the program runs.
const bool kernels_are_chosen = [] {
  at::NoGradGuard no_grad;
  try {
    for (auto dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor x = at::full({1}, 0.5, dtype);
      x.acos(), x.asin(), x.atan(), x.cos(), x.erf(), x.erfc(), x.erfinv(), x.exp(), x.log(), x.log10(), x.log2(), x.sin(), x.sqrt(),
          x.tan(), x.tanh(), x.trunc();
    }
  } catch (const std::exception &) {
    // A libtorch without such functions has no race, either.
  }
  return true;
}();

std::vector<at::Tensor> list(at::Tensor *const *tensors, size_t count) {
  std::vector<at::Tensor> result;
  result.reserve(count);
  for (size_t i = 0; i < count; i++)
    result.push_back(tensors[i] ? *tensors[i] : at::Tensor());
  return result;
}

at::Tensor *owned(const at::Tensor &tensor) { return tensor.defined() ? new at::Tensor(tensor) : nullptr; }

std::vector<at::Tensor *> owned(const std::vector<at::Tensor> &tensors) {
  std::vector<at::Tensor *> result;
  result.reserve(tensors.size());
  for (const auto &tensor : tensors)
    result.push_back(owned(tensor));
  return result;
}

c10::StorageImpl &storage_of(const at::Tensor &tensor) {
  TORCH_CHECK(tensor.defined() && tensor.has_storage(), "the tensor has no storage");
  return *tensor.storage().unsafeGetStorageImpl();
}

// A storage without memory keeps its size in bytes, so that its views stay well-formed, and throws on access. A storage of zero
// bytes has nothing to miss: it can be taken from and put into at any time.
bool is_taken(c10::StorageImpl &storage) {
  return storage.nbytes() > 0 && storage._mutable_data_ptr_no_checks().get() == nullptr;
}

// Memory that is longer than its storage. It remembers its length for when it is taken out again.
struct Longer {
  c10::DataPtr data;
  size_t bytes;
};

void delete_longer(void *longer) { delete static_cast<Longer *>(longer); }

struct Closure : torch::CustomClassHolder {
  Closure(void *data, Backward backward, Drop drop) : data(data), backward(backward), drop(drop) {}
  ~Closure() override { drop(data); }
  void *data;
  Backward backward;
  Drop drop;
};

// The other arguments of `RustFunction::forward`, behind a pointer so that autograd does not see the tensors.
struct Tied {
  std::vector<at::Tensor> outputs, saved;
  c10::intrusive_ptr<Closure> closure;
};

struct RustFunction : torch::autograd::Function<RustFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext *context, at::TensorList inputs,
                                                Tied *tied) {
    context->set_materialize_grads(false);
    context->saved_data["closure"] = c10::IValue::make_capsule(tied->closure);
    context->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    context->save_for_backward(tied->saved);
    return tied->outputs;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                 torch::autograd::variable_list grads) {
    auto closure = c10::static_intrusive_pointer_cast<Closure>(context->saved_data["closure"].toCapsule());
    auto saved_variables = context->get_saved_variables(); // throws if the graph has been freed already
    auto saved = owned(saved_variables);
    auto given = owned(grads);
    std::vector<at::Tensor *> raw(context->saved_data["inputs"].toInt(), nullptr);
    Message failure = closure->backward(closure->data, given.data(), given.size(), saved.data(), saved.size(),
                                        raw.data(), raw.size());
    torch::autograd::variable_list results;
    for (at::Tensor *tensor : raw) {
      results.push_back(tensor ? std::move(*tensor) : at::Tensor());
      delete tensor;
    }
    results.emplace_back(); // for `tied`, which is not a tensor
    if (failure) {
      std::string text(failure);
      sw_message_free(failure);
      TORCH_CHECK(false, text);
    }
    return results;
  }
};

// Memory as a tensor of bytes.
at::Tensor bytes_at(int8_t device_type, int8_t device_index, void *data, size_t bytes) {
  c10::Device device(static_cast<c10::DeviceType>(device_type), device_index);
  c10::DeviceGuard guard(device);
  // The allocator knows the device by the name that its tensors have.
  c10::Device own = c10::GetAllocator(device.type())->allocate(0).device();
  auto options = at::TensorOptions().dtype(at::kByte).device(own);
  return at::for_blob(data, {static_cast<int64_t>(bytes)}).options(options).target_device(own).make_tensor();
}

// A range of a file in memory.
struct Mapping {
  void *data;
  size_t bytes;
};

void unmap(void *context) {
  std::unique_ptr<Mapping> mapping(static_cast<Mapping *>(context));
  munmap(mapping->data, mapping->bytes);
}

// Makes a block the memory of a storage of `bytes` bytes, and deletes the block.
void put(c10::StorageImpl &storage, Block *block, size_t bytes) {
  TORCH_CHECK(block->bytes >= bytes, "the storage needs ", bytes, " bytes, but the block has ", block->bytes);
  TORCH_CHECK(block->data.device() == storage.device(), "the storage is on ", storage.device().str(),
              ", but the block is on ", block->data.device().str());
  storage.clear_data_ptr_access_error_msg_();
  storage.set_nbytes(bytes);
  if (block->bytes > bytes) {
    void *data = block->data.get();
    auto *longer = new Longer{std::move(block->data), block->bytes};
    storage.set_data_ptr_noswap(c10::DataPtr(data, longer, &delete_longer, storage.device()));
  } else {
    storage.set_data_ptr_noswap(std::move(block->data));
  }
  storage.set_allocator(block->allocator);
  delete block;
}

} // namespace

// Defined in memory.cpp.
c10::DataPtr sw_cpu_zeros(size_t bytes);

extern "C" {

Message sw_message_new(const char *text, size_t length) {
  char *copy = static_cast<char *>(std::malloc(length + 1));
  if (copy == nullptr)
    std::abort();
  std::memcpy(copy, text, length);
  copy[length] = 0;
  return copy;
}

void sw_message_free(Message message) { std::free(message); }

const char *sw_torch_version() { return TORCH_VERSION; }

Message sw_block_new(int8_t device_type, int8_t device_index, size_t bytes, Block **out) {
  return guarded([&] {
    c10::Device device(static_cast<c10::DeviceType>(device_type), device_index);
    c10::DeviceGuard guard(device);
    c10::Allocator *allocator = c10::GetAllocator(device.type());
    *out = new Block{allocator->allocate(bytes), allocator, bytes};
  });
}

Message sw_block_zeros(size_t bytes, Block **out) {
  return guarded([&] { *out = new Block{sw_cpu_zeros(bytes), c10::GetAllocator(c10::DeviceType::CPU), bytes}; });
}

Message sw_block_map(int file, uint64_t start, size_t bytes, Block **out) {
  return guarded([&] {
    TORCH_CHECK(bytes > 0, "there is nothing to map");
    void *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, static_cast<off_t>(start));
    TORCH_CHECK(data != MAP_FAILED, "a file cannot be mapped: ", std::strerror(errno));
    auto *mapping = new Mapping{data, bytes};
    c10::Device cpu(c10::DeviceType::CPU);
    *out = new Block{c10::DataPtr(data, mapping, &unmap, cpu), c10::GetAllocator(cpu.type()), bytes};
  });
}

void sw_block_free(Block *block) { delete block; }
void *sw_block_data(Block *block) { return block->data.get(); }
size_t sw_block_bytes(const Block *block) { return block->bytes; }
int8_t sw_block_device_type(const Block *block) { return static_cast<int8_t>(block->data.device().type()); }
int8_t sw_block_device_index(const Block *block) { return block->data.device().index(); }

Message sw_storage_take(at::Tensor *tensor, const char *reason, Block **out) {
  return guarded([&] {
    c10::StorageImpl &storage = storage_of(*tensor);
    TORCH_CHECK(!is_taken(storage), "the storage's memory has been taken already");
    TORCH_CHECK(storage.allocator() != nullptr, "the storage's memory does not come from a libtorch allocator");
    c10::Device device = storage.device();
    c10::DataPtr data = storage.set_data_ptr(c10::DataPtr(nullptr, device));
    size_t bytes = storage.nbytes();
    if (data.get_deleter() == &delete_longer) {
      std::unique_ptr<Longer> longer(static_cast<Longer *>(data.release_context()));
      data = std::move(longer->data);
      bytes = longer->bytes;
    }
    *out = new Block{std::move(data), storage.allocator(), bytes};
    if (storage.nbytes() > 0)
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(reason));
  });
}

Message sw_storage_put(at::Tensor *tensor, Block *block) {
  return guarded([&] {
    c10::StorageImpl &storage = storage_of(*tensor);
    TORCH_CHECK(is_taken(storage) || storage.nbytes() == 0, "the storage has memory; take it before putting other memory in");
    put(storage, block, storage.nbytes());
  });
}

Message sw_block_into_tensor(at::Tensor *tensor, Block *block, int64_t len) {
  return guarded([&] {
    c10::StorageImpl &storage = storage_of(*tensor);
    TORCH_CHECK(storage.nbytes() == 0, "the tensor has memory already");
    put(storage, block, len * tensor->element_size());
    tensor->unsafeGetTensorImpl()->set_sizes_contiguous({len});
  });
}

Message sw_storage_is_taken(const at::Tensor *tensor, bool *out) {
  return guarded([&] { *out = is_taken(storage_of(*tensor)); });
}

Message sw_storage_bytes(const at::Tensor *tensor, size_t *out) {
  return guarded([&] { *out = storage_of(*tensor).nbytes(); });
}

Message sw_tensor_access(at::Tensor *tensor, Access *out) {
  return guarded([&] {
    storage_of(*tensor);
    *out = Access{tensor->mutable_data_ptr(), tensor->use_count(), tensor->storage().use_count(),
                  tensor->is_contiguous(), tensor->is_cpu()};
  });
}

Message sw_copy_bytes(int8_t from_type, int8_t from_index, const void *from, int8_t to_type, int8_t to_index, void *to,
                      size_t bytes) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    if (bytes > 0)
      bytes_at(to_type, to_index, to, bytes).copy_(bytes_at(from_type, from_index, const_cast<void *>(from), bytes));
  });
}

Message sw_function(at::Tensor **inputs, size_t input_count, at::Tensor **outputs, size_t output_count,
                    at::Tensor **saved, size_t saved_count, void *data, Backward backward, Drop drop) {
  // First: from here on the closure is dropped with its last owner, whatever happens.
  auto closure = c10::make_intrusive<Closure>(data, backward, drop);
  return guarded([&] {
    Tied tied{list(outputs, output_count), list(saved, saved_count), std::move(closure)};
    auto variables = list(inputs, input_count);
    auto results = RustFunction::apply(at::TensorList(variables), &tied);
    for (size_t i = 0; i < output_count; i++)
      *outputs[i] = results[i];
  });
}

Message sw_grad(at::Tensor **outputs, at::Tensor **grad_outputs, size_t output_count, at::Tensor **inputs,
                size_t input_count, bool retain_graph, at::Tensor **results) {
  return guarded([&] {
    auto grads = torch::autograd::grad(list(outputs, output_count), list(inputs, input_count),
                                       list(grad_outputs, output_count), retain_graph, /*create_graph=*/false,
                                       /*allow_unused=*/true);
    for (size_t i = 0; i < input_count; i++)
      results[i] = owned(grads[i]);
  });
}

Message sw_fused_adamw(at::Tensor **parameters, at::Tensor **grads, at::Tensor **first_moments,
                       at::Tensor **second_moments, at::Tensor **steps, size_t count, double lr, double beta1,
                       double beta2, double weight_decay, double eps) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    at::_fused_adamw_(list(parameters, count), list(grads, count), list(first_moments, count),
                      list(second_moments, count), {}, list(steps, count), lr, beta1, beta2, weight_decay, eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  });
}
}
