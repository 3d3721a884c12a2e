"""A micro-batch that stands in for samples that aren't there leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


class Counting(nn.Module):
    """Counts its forwards in a buffer, and keeps a mean of its inputs in another one and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.last = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.last = x.detach().mean(0)
            self.mean = self.mean * 0.5 + self.last * 0.5
        return self.linear(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "calls"), [("single microbatches=4", 4 + 2), ("data=3", 2), ("shard=3 zero=2", 2)]
)
def test_stand_ins_change_no_state(plan: str, calls: int, tmp_path: Path) -> None:
    """A window of 8 samples and one of 2, cut into four micro-batches or over three ranks."""
    x = torch.arange(30.0).view(10, 3)
    job = paceline.Job(
        model=Counting,
        data=TensorDataset(x, x[:, :2].clone()),
        loss=F.mse_loss,
        batch=8,
        epochs=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        precision="float64",
    )

    paceline.train(job, plan, run=tmp_path)

    state = load_file(tmp_path / "model.safetensors")
    assert int(state["calls"]) == calls


def test_what_no_file_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A sparse buffer, here: not after the whole run, when it is saved."""

    class Sparse(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("neighbours", torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((self.neighbours @ x.T).T)

    x = torch.ones(4, 3)
    job = paceline.Job(
        model=Sparse,
        data=TensorDataset(x, x[:, :2].clone()),
        loss=F.mse_loss,
        batch=2,
        epochs=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )

    with pytest.raises(
        paceline.base.errors.PacelineError,
        match=r"buffers/neighbours.*sparse(.|\n)*persistent=False",
    ):
        paceline.train(job, "single", run=tmp_path)

    assert not (tmp_path / "metrics.jsonl").exists()
