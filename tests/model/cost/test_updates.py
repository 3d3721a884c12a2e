"""Adam's and AdamW's updates on accelerators are one kernel's, where the job leaves that to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _foreach_utils

from paceline.model.cost.updates import let_fuse


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, which has both kinds of update, counts among the devices on which torch prefers one of them."""
    monkeypatch.setattr(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


class OwnAdam(torch.optim.AdamW):
    pass


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(*shape, generator=drawn, dtype=torch.float64).to(dtype))
        for shape in ((3, 5), (7,))
    ]


def chosen(
    make: Callable[..., torch.optim.Optimizer], given: list[nn.Parameter], **options: Any
) -> list[Any]:
    optimizer = make(given, lr=0.01, **options)
    let_fuse(optimizer)
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_updates_are_fused_where_torch_chooses(make: Callable[..., torch.optim.Optimizer]):
    assert chosen(make, parameters()) == [True]
    for options in (
        {"foreach": True},
        {"foreach": False},
        {"fused": False},
        {"capturable": True},
        {"differentiable": True},
    ):
        assert chosen(make, parameters(), **options) == [options.get("fused")]


@pytest.mark.usefixtures("accelerated")
def test_what_the_kernel_does_not_take_is_left_to_torch():
    turned = nn.Parameter(torch.randn(5, 3).T)
    assert chosen(torch.optim.AdamW, [*parameters(), turned]) == [None]
    assert chosen(torch.optim.AdamW, parameters(torch.complex64)) == [None]
    assert chosen(OwnAdam, parameters()) == [None]
    assert chosen(torch.optim.SGD, parameters()) == [None]
    tensor_rate = torch.optim.AdamW(parameters(), lr=torch.tensor(0.01))
    let_fuse(tensor_rate)
    assert tensor_rate.param_groups[0]["fused"] is None


def test_updates_on_cpus_are_left_to_torch():
    assert chosen(torch.optim.AdamW, parameters()) == [None]


@pytest.mark.usefixtures("accelerated")
def test_fused_updates_are_the_same_whatever_lies_in_the_gradients_place():
    """Gradients of another order in memory, and none at all."""
    made = []
    for is_fused in (True, False):
        given = parameters()
        optimizer = torch.optim.AdamW(
            given, lr=0.01, weight_decay=0.1, foreach=None if is_fused else False
        )
        let_fuse(optimizer)
        assert optimizer.param_groups[0]["fused"] is (True if is_fused else None)
        drawn = torch.Generator().manual_seed(1)
        for step in range(4):
            given[0].grad = torch.randn(5, 3, generator=drawn, dtype=torch.float64).T
            given[1].grad = (
                torch.randn(7, generator=drawn, dtype=torch.float64) if step != 1 else None
            )
            optimizer.step()
        made.append(given)
    for actual, expected in zip(*made, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)
