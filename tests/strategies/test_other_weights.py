"""Blocks that a forward runs with other weights than their own (torch.func.functional_call)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from paceline.base.errors import PlanRefused
from paceline.model.units import find_units
from paceline.strategies.shard.run import _refuse_other_weights


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(
            self.net, {name: 2 * p for name, p in self.net.named_parameters()}, (x,)
        )


def test_its_blocks_are_no_units():
    """A unit of shard=N gathers its own weights, and one of recompute=full runs again with them."""
    assert list(find_units(Outer().net)) == ["0", "1"]
    assert find_units(Outer()) == {}


def test_what_was_not_seen_beforehand_is_refused():
    """A function elsewhere may swap weights."""
    block = nn.Linear(2, 2)
    places = [(block, "weight", "net.0.weight")]
    block.register_forward_pre_hook(
        lambda module, inputs: _refuse_other_weights(places, module, inputs)
    )
    block(torch.zeros(1, 2))

    with pytest.raises(PlanRefused, match=r"'net\.0\.weight'"):
        functional_call(block, {"weight": torch.ones(2, 2)}, (torch.zeros(1, 2),))
