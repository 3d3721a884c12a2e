"""Hooks that a user registers on parameters and modules see under shard=N what they see on whole replicas."""

from __future__ import annotations

import pytest
import torch
from jobs.perceptrons import ResidualNet
from jobs.stateful import in_turn, stateful_job
from torch import Tensor, nn


def masked() -> nn.Module:
    """One hook that stays, and one that is removed again."""
    net = ResidualNet()
    mask = (torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.5).double()
    for p in (net.first.weight, net.blocks[1].linear.weight):
        p.register_hook(lambda gradient: gradient * mask)
        p.register_hook(lambda gradient: gradient * 0).remove()
    return net


def halved() -> nn.Module:
    net = ResidualNet()

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    for p in (net.first.weight, net.blocks[1].linear.weight):
        p.register_post_accumulate_grad_hook(halve)
    return net


def scaled() -> nn.Module:
    net = ResidualNet()
    net.blocks[1].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g * 0.5 for g in inputs)
    )
    return net


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (masked, "shard=2"),
        (scaled, "shard=2 zero=1"),
        *(
            pytest.param(model, plan, marks=pytest.mark.slow)
            for model, plan in (
                (masked, "shard=2 zero=1"),
                (masked, "data=2 shard=2"),
                (halved, "shard=2"),
                (halved, "shard=2 zero=1"),
                (halved, "data=2 shard=2"),
                (scaled, "shard=2"),
                (scaled, "data=2 shard=2"),
            )
        ),
    ],
)
@in_turn(lambda model, plan: stateful_job(model))
def test_hooks_are_kept():
    """On parameters of blocks and of the root, and on modules."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [f"shard=2 zero={zero} microbatches=2" for zero in (2, 1, 3)])
@pytest.mark.parametrize("model", [halved, masked])
@in_turn(lambda model, plan: stateful_job(model), reference="data=2 microbatches=2")
def test_hooks_with_several_micro_batches():
    """A hook on what has accumulated sees all of it, also where FSDP2 would reduce each micro-batch by itself."""
