"""Layers that move their weights to other memory, as recurrent ones do on GPUs: `shard=N` must not lose them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs.stateful import in_turn, stateful_job, trained
from torch import Tensor, nn

import paceline
from paceline.launch.process.failure import RankFailed


class Flattening(nn.LSTM):
    """Moves its weights on a CPU where `nn.LSTM` does on a GPU: when it finds others than in its last forward."""

    def flatten_parameters(self) -> None:
        weights = [weight for weight in self._flat_weights if isinstance(weight, Tensor)]
        if len(weights) < len(self._flat_weights_names) or any(
            hasattr(weight, "device_mesh") for weight in weights
        ):
            return
        with torch.no_grad():
            flat = torch.cat([weight.flatten() for weight in weights])
            for weight, part in zip(
                weights, flat.split([weight.numel() for weight in weights]), strict=True
            ):
                weight.data = part.view(weight.shape)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Flattening(2, 6, num_layers=2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x.view(len(x), 4, 2))[0][:, -1])


class Repacked(nn.Linear):
    """Puts its weight into other memory in its third forward."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 3:
            self.weight.data = self.weight.data.clone()
        return super().forward(x)


def sequences(plan: str) -> paceline.Job:
    return stateful_job(Sequences)


@pytest.mark.parametrize(
    "plan", ["shard=2", "shard=2 zero=1", "shard=2 zero=2 microbatches=2", "data=2"]
)
@in_turn(sequences)
def test_recurrent_layers_are_trained():
    """Each forward computes with the weights that were gathered for it, and not with those of the first one."""


def test_other_layers_that_move_their_weights_are_refused(tmp_path: Path):
    """FSDP2 would go on to fill the memory that the weight was in before."""
    with pytest.raises(
        RankFailed,
        match=r"moves the parameter '0\.weight' to other memory, and shard=N would compute",
    ):
        trained(
            stateful_job(lambda: nn.Sequential(Repacked(8, 8), nn.Tanh(), nn.Linear(8, 4))),
            "shard=2",
            tmp_path,
        )
