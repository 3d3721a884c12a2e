"""`torch_private/pipelining.py`: the gradients of inputs first, those of weights later."""

from __future__ import annotations

import torch
from torch import nn

from paceline.torch_private.pipelining import stage_backward_input, stage_backward_weight


def test_the_halves_make_a_backward():
    """The first gives the inputs' gradients and groups of weights, and the second the weights'."""
    layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.ones(4, 2, requires_grad=True)
    wanted = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])

    output, weights = layers(x), [*layers.parameters()]
    gradients, groups = stage_backward_input(
        [output.clone()], [torch.ones_like(output)], [x], iter(weights)
    )
    assert torch.equal(gradients[0], wanted[0])
    assert all(weight.grad is None for weight in weights)
    edges = {torch.autograd.graph.get_gradient_edge(weight).node: weight for weight in weights}
    assert {edges[node] for group in groups for node in group["params"]} == {*weights}
    stage_backward_weight(iter(weights), groups)
    for weight, gradient in zip(weights, wanted[1:], strict=True):
        assert weight.grad is not None and torch.equal(weight.grad, gradient)


def test_hooks_after_accumulation_are_not_called():
    """`strategies/stages/engine.py` calls them."""
    layer, x, called = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True), []
    layer.weight.register_post_accumulate_grad_hook(called.append)
    output = layer(x)
    _, groups = stage_backward_input(
        [output.clone()], [torch.ones_like(output)], [x], iter(layer.parameters())
    )
    stage_backward_weight(iter(layer.parameters()), groups)
    assert layer.weight.grad is not None and not called
