// Functions that AOTInductor has compiled, loaded by libtorch's own loader.
#include "guarded.h"
#include "shim.h"

#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <link.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

// With `run_single_threaded` off, the container queues runs that come from several threads.
struct CompiledFunction {
  explicit CompiledFunction(const std::string &path)
      : loader(path, /*model_name=*/"model", /*run_single_threaded=*/false, /*num_runners=*/1) {}
  torch::inductor::AOTIModelPackageLoader loader;
};

namespace {

// Whether the loader has made this folder: aotinductor_ and six characters, in the folder for temporary files.
bool is_unpacked(const std::filesystem::path &folder) {
  const std::string prefix = "aotinductor_", name = folder.filename().string();
  std::error_code error;
  return name.size() == prefix.size() + 6 && name.rfind(prefix, 0) == 0 &&
         std::filesystem::equivalent(folder.parent_path(), std::filesystem::temp_directory_path(error), error);
}

// The folders into which the loader has unpacked what this process has mapped.
std::set<std::filesystem::path> unpacked_folders() {
  std::set<std::filesystem::path> folders;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *found) {
        std::filesystem::path folder(info->dlpi_name ? info->dlpi_name : "");
        while (folder.has_relative_path() && !is_unpacked(folder))
          folder = folder.parent_path();
        if (folder.has_relative_path())
          static_cast<std::set<std::filesystem::path> *>(found)->insert(folder);
        return 0;
      },
      &folders);
  return folders;
}

} // namespace

extern "C" {

Message sw_compiled_provide_libtorch(const char *stub) {
  return guarded([&] {
    if (dlopen("libtorch.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr)
      TORCH_CHECK(dlopen(stub, RTLD_NOW | RTLD_GLOBAL) != nullptr, dlerror());
  });
}

Message sw_compiled_load(const char *path, CompiledFunction **out) {
  return guarded([&] {
    // One at a time, so that a new folder is this one's.
    static std::mutex loading;
    std::lock_guard guard(loading);
    auto before = unpacked_folders();
    auto function = std::make_unique<CompiledFunction>(path);
    // The loader removes its folder when it is destroyed, but a rank that is killed destroys nothing. Mapped code needs no file.
    for (const auto &folder : unpacked_folders()) {
      std::error_code ignored;
      if (before.count(folder) == 0)
        std::filesystem::remove_all(folder, ignored);
    }
    *out = function.release();
  });
}

void sw_compiled_free(CompiledFunction *function) { delete function; }

Message sw_compiled_run(CompiledFunction *function, at::Tensor **arguments, size_t argument_count, at::Tensor **results,
                        size_t result_count) {
  return guarded([&] {
    c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> inputs;
    inputs.reserve(argument_count);
    for (size_t i = 0; i < argument_count; i++) {
      at::Tensor argument = std::move(*arguments[i]);
      // Throws the reason if the storage's memory has been taken; the compiled code would only say that it failed.
      if (argument.numel() > 0)
        argument.const_data_ptr();
      inputs.push_back(argument.requires_grad() ? argument.detach() : std::move(argument));
    }
    auto outputs = function->loader.boxed_run(std::move(inputs));
    TORCH_CHECK(outputs.size() == result_count, "it returned ", outputs.size(), " tensors, but ", result_count,
                " were expected");
    for (size_t i = 0; i < result_count; i++)
      results[i] = new at::Tensor(std::move(outputs[i]));
  });
}
}
