// The device's kernels for attention.
#include "device.h"

#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/library.h>

namespace {

using namespace pretend;

constexpr int64_t FLASH = 1, EFFICIENT = 2;

// As on a GPU: flash attention is for 16-bit numbers.
int64_t fused_sdp_choice(const at::Tensor &query, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &mask, double,
                         bool, std::optional<double>, bool) {
  bool is_flash = !mask && (query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf);
  return is_flash ? FLASH : EFFICIENT;
}

// libtorch chooses a kernel by the device. Here it is the one that it would choose for the CPU.
at::Tensor scaled_dot_product_attention(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                                        const std::optional<at::Tensor> &mask, double dropout, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa) {
  if (enable_gqa) {
    int64_t times = query.size(1) / key.size(1);
    return at::scaled_dot_product_attention(query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), mask, dropout,
                                        is_causal, scale, false);
  }
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

// Flash attention with documents, a window, and key heads that several query heads share. It computes document by document, on the
// CPU's tensors, what the model computes there.
struct FlashCall {
  at::Tensor query, key, value;
  // The boundaries of documents, or undefined. Then there is a dimension of sequences, each of which is one.
  at::Tensor boundaries;
  int64_t window; // negative if there is none

  // Query, key and value of each document (1, heads, positions, head dim), key and value expanded.
  struct Document {
    at::Tensor query, key, value;
    std::optional<at::Tensor> bias;
  };

  int64_t times() const { return query.size(-2) / key.size(-2); }

  std::vector<at::Tensor> split(const at::Tensor &tensor) const {
    std::vector<at::Tensor> parts;
    if (!boundaries.defined()) {
      for (const at::Tensor &part : tensor.split(1))
        parts.push_back(part.transpose(1, 2));
      return parts;
    }
    const int32_t *first = boundaries.const_data_ptr<int32_t>();
    for (int64_t i = 0; i + 1 < boundaries.numel(); i++)
      parts.push_back(tensor.slice(0, first[i], first[i + 1]).unsqueeze(0).transpose(1, 2));
    return parts;
  }

  at::Tensor join(const std::vector<at::Tensor> &parts) const {
    std::vector<at::Tensor> arranged;
    for (const at::Tensor &part : parts)
      arranged.push_back(boundaries.defined() ? part.transpose(1, 2).squeeze(0) : part.transpose(1, 2));
    return at::cat(arranged, 0);
  }

  std::vector<Document> documents() const {
    std::vector<Document> documents;
    auto queries = split(query), keys = split(key), values = split(value);
    for (size_t i = 0; i < queries.size(); i++) {
      int64_t positions = queries[i].size(2);
      std::optional<at::Tensor> bias;
      if (window >= 0 && window < positions) {
        at::Tensor all = at::ones({positions, positions}, at::kBool);
        at::Tensor is_hidden = all.tril().logical_and(all.triu(1 - window)).logical_not();
        bias = at::zeros({positions, positions}, query.options()).masked_fill(is_hidden, -std::numeric_limits<double>::infinity());
      }
      auto expand = [&](const at::Tensor &heads) { return times() == 1 ? heads : heads.repeat_interleave(times(), 1); };
      documents.push_back({queries[i], expand(keys[i]), expand(values[i]), bias});
    }
    return documents;
  }

  static std::tuple<at::Tensor, at::Tensor> attend(const Document &document) {
    return at::_scaled_dot_product_flash_attention_for_cpu(document.query, document.key, document.value, 0., !document.bias,
                                                           document.bias);
  }

  at::Tensor forward() const {
    std::vector<at::Tensor> outputs;
    for (const Document &document : documents())
      outputs.push_back(std::get<0>(attend(document)));
    return join(outputs);
  }

  std::array<at::Tensor, 3> backward(const at::Tensor &grad) const {
    std::array<std::vector<at::Tensor>, 3> parts;
    auto grads = split(grad);
    auto all = documents();
    for (size_t i = 0; i < all.size(); i++) {
      auto [output, logsumexp] = attend(all[i]);
      auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grads[i], all[i].query, all[i].key, all[i].value, output, logsumexp, 0., !all[i].bias, all[i].bias);
      auto reduce = [&](const at::Tensor &heads) {
        return times() == 1 ? heads : heads.unflatten(1, {heads.size(1) / times(), times()}).sum(2);
      };
      parts[0].push_back(query);
      parts[1].push_back(reduce(key));
      parts[2].push_back(reduce(value));
    }
    return {join(parts[0]), join(parts[1]), join(parts[2])};
  }
};

FlashCall flash_call(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                     const std::optional<at::Tensor> &boundaries, bool is_causal, const std::optional<c10::SymInt> &left) {
  TORCH_CHECK(is_causal, "the pretend device has causal flash attention only");
  counts.launches++;
  at::Tensor documents = boundaries && boundaries->defined() ? on_host(*boundaries) : at::Tensor();
  int64_t window = left && left->expect_int() >= 0 ? left->expect_int() + 1 : -1;
  return {on_host(query), on_host(key), on_host(value), documents, window};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
flash_attention_forward(const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                        const std::optional<at::Tensor> &boundaries, const std::optional<at::Tensor> &, c10::SymInt, c10::SymInt,
                        double, bool is_causal, bool, std::optional<double>, std::optional<c10::SymInt> left,
                        std::optional<c10::SymInt>, const std::optional<at::Tensor> &, const std::optional<at::Tensor> &,
                        const std::optional<at::Tensor> &, std::optional<int64_t>) {
  at::Tensor output = at::empty(query.sizes(), query.options());
  FlashCall call = flash_call(query, key, value, boundaries, is_causal, left);
  launch([call, to = on_host(output)]() mutable { to.copy_(call.forward()); });
  // What the backward pass does not read here.
  at::Tensor nothing = at::empty({0}, query.options());
  return {output, nothing, nothing, nothing, nothing};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
flash_attention_backward(const at::Tensor &grad, const at::Tensor &query, const at::Tensor &key, const at::Tensor &value,
                         const at::Tensor &, const at::Tensor &, const at::Tensor &boundaries, const at::Tensor &, c10::SymInt,
                         c10::SymInt, double, bool is_causal, const at::Tensor &, const at::Tensor &, std::optional<double>,
                         std::optional<c10::SymInt> left, std::optional<c10::SymInt>) {
  std::array<at::Tensor, 3> grads;
  const at::Tensor *inputs[] = {&query, &key, &value};
  std::array<at::Tensor, 3> targets;
  for (size_t i = 0; i < 3; i++) {
    grads[i] = at::empty(inputs[i]->sizes(), inputs[i]->options());
    targets[i] = on_host(grads[i]);
  }
  FlashCall call = flash_call(query, key, value, boundaries, is_causal, left);
  launch([call, targets, grad = on_host(grad)]() mutable {
    auto computed = call.backward(grad);
    for (size_t i = 0; i < 3; i++)
      targets[i].copy_(computed[i]);
  });
  return {grads[0], grads[1], grads[2]};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("_flash_attention_forward", &flash_attention_forward);
  m.impl("_flash_attention_backward", &flash_attention_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", &scaled_dot_product_attention); }

} // namespace
