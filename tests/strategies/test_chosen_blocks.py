"""A module that calls other blocks for other samples: under shard=N it is gathered as one."""

from __future__ import annotations

import pytest
import torch
from corpus.experts import Routed
from jobs.stateful import in_turn, stateful_job
from torch import Tensor, nn

from paceline.model.forward_effects import choosing, may_choose


class Net(nn.Module):
    """One layer of experts that stands in no list, beside layers that do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.routed = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), Routed(6)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x + self.routed(x))


class AtTheTop(Routed):
    """The model itself chooses."""


def at_the_top() -> nn.Module:
    return nn.Sequential(AtTheTop(6), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (Net, "shard=2"),
        (at_the_top, "shard=2 zero=2 microbatches=3"),
        *(
            pytest.param(kind, plan, marks=pytest.mark.slow)
            for kind in (Net, at_the_top, lambda: nn.ModuleDict({"a": Net()})["a"])
            for plan in ("shard=3", "shard=2 zero=2 microbatches=3")
        ),
    ],
)
@in_turn(lambda kind, plan: stateful_job(kind, batch=7))
def test_ranks_may_choose_other_blocks():
    """FSDP2 gathers what all ranks call."""


def test_only_modules_that_choose_are_named():
    """The layers of the list are called alike, and the experts are not."""
    torch.manual_seed(0)
    model = Net()
    blocks = {
        name: module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()
    }
    batches = [torch.randn(2, 8) for _ in range(4)]
    assert choosing(model, blocks, [lambda x=x: model(x) for x in batches]) == {"routed"}
    assert may_choose(model, blocks) and not may_choose(model, ["layers.0", "layers.1"])
    assert not any(module._forward_pre_hooks for module in model.modules())
