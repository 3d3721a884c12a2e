"""Complex numbers that safetensors has no name for: saved in pairs, and complex again wherever Paceline reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.data import regression
from torch import Tensor, nn

import paceline
from paceline.checkpoint import load_tensors, open_checkpoint
from paceline.checkpoint.dtypes import save_tensors

STEPS = 6


class Waves(nn.Module):
    """complex128 in parameters, in the moments of their optimizer, and in a buffer that training changes."""

    def __init__(self, turns: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.middle = nn.ModuleList([Filter(turns) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Filter(nn.Module):
    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns = turns
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.register_buffer("phase", torch.ones(5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.turns:
            self.phase.mul_(torch.tensor(0.96 + 0.28j, dtype=torch.complex128))
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight * self.phase, n=8)


def waves(**changes: Any) -> paceline.Job:
    fields: dict[str, Any] = {
        "model": Waves,
        "data": regression(40),
        "loss": F.mse_loss,
        "batch": 12,
        "steps": STEPS,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2, eps=1e-3),
        "precision": "float64",
    }
    return paceline.Job(**{**fields, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "shard=2"),
        ("shard=3", "data=2"),
        ("shard=2 zero=1", "pipeline=2 microbatches=1"),
        ("pipeline=2 microbatches=1", "tensor=2"),
        ("tensor=2", "servers=1 workers=2"),
        ("place=2", "single"),
        ("servers=1 workers=2", "data=2"),
    ],
)
def test_a_run_goes_on_under_another_plan(before: str, after: str, tmp_path: Path) -> None:
    """The weights, buffers and moments are those of one device that never stopped."""
    # Servers keep no buffers that a forward changes.
    changes = {"model": lambda: Waves(turns=False)} if "server" in before + after else {}
    paceline.train(waves(**changes), "single", run=tmp_path / "whole", timeout_s=60)
    paceline.train(waves(**changes, steps=3), before, run=tmp_path / "cut", timeout_s=60)
    paceline.train(waves(**changes), after, run=tmp_path / "cut", resume=True, timeout_s=60)

    whole, cut = (
        open_checkpoint(tmp_path / run / "checkpoints" / f"step-{STEPS}")
        for run in ("whole", "cut")
    )
    assert whole.tensors["optimizer/middle.0.weight/exp_avg"].dtype == torch.complex128
    for name, entry in whole.tensors.items():
        if name in cut.tensors:
            torch.testing.assert_close(cut.read(name), whole.read(name), rtol=1e-11, atol=1e-12)
            assert cut.tensors[name].dtype == entry.dtype
    assert {
        name for name in whole.tensors if name.startswith(("parameters/", "buffers/"))
    } <= cut.tensors.keys()
    exported, expected = (
        load_tensors(tmp_path / run / "model.safetensors") for run in ("cut", "whole")
    )
    assert exported["middle.1.weight"].dtype == exported["middle.1.phase"].dtype == torch.complex128
    Waves().double().load_state_dict(exported)
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_verify_compares_complex_numbers() -> None:
    """Its reference, and what it reads of a plan's checkpoint, are complex too."""
    (certificate,) = paceline.verify(waves(), ["shard=2"], steps=3)
    assert certificate.passed, certificate.describe()
    assert certificate.weakness is None and certificate.resumed_from == "single"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_a_model_returns_is_complex_again(tmp_path: Path) -> None:
    """A run's folder has its model and predictions in files that are read back in the dtypes they were written in."""
    tensors = {
        "odd": torch.rand(3),
        "pair": torch.rand(3, dtype=torch.complex128),
        "half": torch.rand(3, 2).half().view(torch.complex32),
        "whole": torch.rand(2, dtype=torch.complex64),
    }
    save_tensors(tmp_path / "predictions.safetensors", tensors)

    read = load_tensors(tmp_path / "predictions.safetensors")

    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(
            torch.view_as_real(read[name].cfloat()), torch.view_as_real(tensor.cfloat())
        )
        read[name].clone().copy_(tensor)  # a mapped file is no aligned memory
