// Fused attention, which CUDA chooses where the CPU's operator takes the plain way, and which draws its own dropout.
#pragma once
#include "kernels.h"

namespace pretended {

// As torch chooses on a Hopper card for what isn't half as precise: the memory-efficient kernel, or plain operators.
inline int64_t choose_attention(const Tensor& query, const Tensor&, const Tensor& value, const std::optional<Tensor>&, double, bool,
                                std::optional<double>, bool) {
  bool is_fused = query.scalar_type() != at::kDouble && query.dim() == 4 && query.size(-1) == value.size(-1);
  return static_cast<int64_t>(is_fused ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

struct Scores {
  Tensor weights, log_sum, kept;
};
inline Scores attention_weights(const Tensor& query, const Tensor& key, const std::optional<Tensor>& bias, double dropout_p,
                                bool is_causal, std::optional<double> scale, uint64_t seed) {
  double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  auto scores = at::matmul(query, key.transpose(-2, -1)) * factor;
  if (bias && bias->defined()) scores = scores + *bias;
  if (is_causal) {
    auto later = at::ones({scores.size(-2), scores.size(-1)}, scores.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  auto log_sum = at::logsumexp(scores, -1);
  auto weights = at::nan_to_num(at::softmax(scores, -1), 0.0);
  auto kept = at::ones_like(weights);
  if (dropout_p > 0) kept = at::bernoulli(at::full_like(weights, 1 - dropout_p), at::detail::createCPUGenerator(seed)) / (1 - dropout_p);
  return {weights, log_sum, kept};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, bool, double dropout_p,
    bool is_causal, std::optional<double> scale) {
  ++counters.kernels;
  Aliases aliases;
  auto q = aliases.of(query), k = aliases.of(key), v = aliases.of(value);
  auto generator = at::check_generator<Generator>(default_generator(query.device().index()));
  int64_t seed = static_cast<int64_t>(generator->seed_ + generator->offset_ * 0x9E3779B97F4A7C15ull);
  if (dropout_p > 0) generator->draw();
  std::optional<Tensor> b = bias && bias->defined() ? std::optional<Tensor>(aliases.of(*bias)) : std::nullopt;
  auto scores = attention_weights(q, k, b, dropout_p, is_causal, scale, seed);
  auto options = at::TensorOptions().dtype(at::kLong);
  return {aliases.back(at::matmul(scores.weights * scores.kept, v)), aliases.back(scores.log_sum),
          aliases.back(at::scalar_tensor(seed, options)), aliases.back(at::scalar_tensor(0, options))};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor& seed, const Tensor&, double dropout_p, std::array<bool, 4> asked, bool is_causal,
    std::optional<double> scale) {
  ++counters.kernels;
  Aliases aliases;
  auto g = aliases.of(gradient), q = aliases.of(query), k = aliases.of(key), v = aliases.of(value);
  std::optional<Tensor> b = bias.defined() ? std::optional<Tensor>(aliases.of(bias)) : std::nullopt;
  auto scores = attention_weights(q, k, b, dropout_p, is_causal, scale, aliases.of(seed).item<int64_t>());
  double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  auto of_value = at::matmul((scores.weights * scores.kept).transpose(-2, -1), g);
  auto of_weights = at::matmul(g, v.transpose(-2, -1)) * scores.kept;
  auto of_scores = scores.weights * (of_weights - (of_weights * scores.weights).sum(-1, true));
  auto of_bias = asked[3] && b ? at::sum_to(of_scores, b->sizes()) : Tensor();
  return {aliases.back(at::matmul(of_scores, k) * factor), aliases.back(at::matmul(of_scores.transpose(-2, -1), q) * factor),
          aliases.back(of_value), of_bias.defined() ? aliases.back(of_bias) : of_bias};
}
}  // namespace pretended
