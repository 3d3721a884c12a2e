"""Forwards read a plain leaf in the place of a split parameter, whose gradient becomes the parameter's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs.split_layers import Fused, Stack, points_job
from torch import nn

import paceline
from paceline.strategies.tensor.leaf import give_leaf, leaf_of


@pytest.fixture
def parameter() -> Iterator[Any]:
    """Of which this rank has two of four rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        part = DTensor.from_local(
            torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False
        )
        yield nn.Parameter(part)
    finally:
        dist.destroy_process_group()


def test_gradients_add_up_until_they_are_let_go(parameter: Any) -> None:
    """Those of two micro-batches are one sum, in one memory; the next step begins anew."""
    give_leaf(parameter)
    leaf: Any = leaf_of(parameter)

    (leaf * 2).sum().backward()
    first = parameter.grad
    (leaf * 3).sum().backward()
    assert parameter.grad is first and parameter.grad.shape == (4, 3)
    assert parameter.grad.to_local().unique().tolist() == [5.0] and leaf.grad is None

    parameter.grad = None
    (leaf * 4).sum().backward()
    assert parameter.grad.to_local().unique().tolist() == [4.0]


def test_who_waits_for_the_gradient_is_told(parameter: Any) -> None:
    """Once for each backward, when it is there."""
    seen: list[list[float]] = []
    parameter.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.to_local().unique().tolist())
    )
    give_leaf(parameter)

    for _ in range(2):
        (leaf_of(parameter) * 2).sum().backward()  # type: ignore[operator]

    assert seen == [[2.0], [4.0]]


def test_an_update_is_seen_by_the_next_forward(parameter: Any) -> None:
    """The leaf shares the parameter's memory, and is frozen where the parameter is."""
    give_leaf(parameter)
    with torch.no_grad():
        parameter.to_local().mul_(7)
    assert leaf_of(parameter).unique().tolist() == [7.0]  # type: ignore[union-attr]

    parameter.requires_grad_(False)
    give_leaf(parameter)
    assert not leaf_of(parameter).requires_grad  # type: ignore[union-attr]
    assert leaf_of(nn.Parameter(torch.ones(2))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2 microbatches=2",
        "data=2 tensor=2",
        "tensor=2 recompute=full",
        "pipeline=2 tensor=2 schedule=zero-bubble",
    ],
)
def test_gradients_are_those_of_one_device(plan: str) -> None:
    """Of several micro-batches, with sums over replicas that wait for them, and where a backward is
    done in two parts."""
    (certificate,) = paceline.verify(
        points_job(lambda: Stack(Fused(), Fused()), clip=0.5), [plan], steps=2
    )
    assert certificate.passed, certificate.describe()
