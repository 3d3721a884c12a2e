// Cells of recurrent layers, which CUDA computes in one kernel each where cuDNN isn't there.
#pragma once
#include "kernels.h"

namespace pretended {
using MaybeTensor = std::optional<Tensor>;

inline Tensor sum_of_gates(Aliases& aliases, const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? aliases.of(gates) + aliases.of(*bias) : aliases.of(gates);
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  ++counters.kernels;
  Aliases aliases;
  auto gates = (sum_of_gates(aliases, input_gates, input_bias) + sum_of_gates(aliases, hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * aliases.of(cx) + in * cell;
  return {aliases.back(out * cy.tanh()), aliases.back(cy), aliases.back(at::cat({in, forget, cell, out}, 1))};
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& of_hy, const MaybeTensor& of_cy, const Tensor& cx,
                                                             const Tensor& cy, const Tensor& workspace, bool has_bias) {
  ++counters.kernels;
  Aliases aliases;
  auto gates = aliases.of(workspace).chunk(4, 1);
  auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  auto squashed = aliases.of(cy).tanh();
  auto gradient = at::zeros_like(squashed), of_out = at::zeros_like(squashed);
  if (of_hy && of_hy->defined()) {
    auto of_h = aliases.of(*of_hy);
    of_out = of_h * squashed;
    gradient = of_h * out * (1 - squashed * squashed);
  }
  if (of_cy && of_cy->defined()) gradient = gradient + aliases.of(*of_cy);
  auto of_gates = at::cat({gradient * cell * in * (1 - in), gradient * aliases.of(cx) * forget * (1 - forget),
                           gradient * in * (1 - cell * cell), of_out * out * (1 - out)}, 1);
  auto of_bias = has_bias ? aliases.back(of_gates.sum(0)) : Tensor();
  return {aliases.back(of_gates), aliases.back(gradient * forget), of_bias};
}

inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                           const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  ++counters.kernels;
  Aliases aliases;
  auto in = sum_of_gates(aliases, input_gates, input_bias).chunk(3, 1);
  auto hidden = sum_of_gates(aliases, hidden_gates, hidden_bias).chunk(3, 1);
  auto before = aliases.of(hx);
  auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  auto fresh = (in[2] + hidden[2] * reset).tanh();
  auto workspace = at::cat({reset, update, fresh, before, hidden[2]}, 1);
  return {aliases.back(fresh + update * (before - fresh)), aliases.back(workspace)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& of_hy, const Tensor& workspace, bool has_bias) {
  ++counters.kernels;
  Aliases aliases;
  auto saved = aliases.of(workspace).chunk(5, 1);
  auto reset = saved[0], update = saved[1], fresh = saved[2], before = saved[3], hidden = saved[4];
  auto gradient = aliases.of(of_hy);
  auto of_update = gradient * (before - fresh) * update * (1 - update);
  auto of_fresh = gradient * (1 - update) * (1 - fresh * fresh);
  auto of_reset = of_fresh * hidden * reset * (1 - reset);
  auto of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  auto of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  auto bias = [&](const Tensor& gates) { return has_bias ? aliases.back(gates.sum(0)) : Tensor(); };
  auto input_bias = bias(of_input), hidden_bias = bias(of_hidden);
  return {aliases.back(of_input), aliases.back(of_hidden), aliases.back(gradient * update), input_bias, hidden_bias};
}
}  // namespace pretended
