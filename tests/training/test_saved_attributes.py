"""What a model keeps in Python attributes is there again after a resume."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint.read import open_checkpoint
from paceline.job.file import JobFile
from paceline.training.attributes import ChangingAttributes, restore_attributes

STEPS = 7


class Temperature:
    """A schedule in an object of its own."""

    def __init__(self) -> None:
        self.calls, self.name, self.lock = 0, "linear", object()

    def __call__(self) -> float:
        self.calls += 1
        return min(1.0, self.calls / 8)


class Warm(nn.Module):
    """A counter, a centre that is a plain tensor, a list, a mapping, and an object; none of them is a buffer.

    is_centered: whether the centre of the samples is kept, which depends on how a batch is cut.
    """

    def __init__(self, is_centered: bool = True) -> None:
        super().__init__()
        self.is_centered = is_centered
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.count, self.center = 0, torch.zeros(3, dtype=torch.float64)
        self.inner.history, self.inner.seen = deque([0.0], maxlen=3), {"train": 0, 3: (1, 2)}
        self.temperature, self.never_changes = Temperature(), object()

    def forward(self, x: Tensor) -> Tensor:
        output = self.out(torch.tanh(self.inner(x)))
        if self.training:
            self.count += 1
            self.inner.history.append(self.count / 8)
            self.inner.seen["train"] += 12
            output = output * self.temperature() + sum(self.inner.history) * 0.1
            if self.is_centered:
                self.center = self.center * 0.9 + 0.1 * output.detach().mean(0)
        return output * min(1.0, self.count / 8) - self.center


def make_job(**changes: Any) -> paceline.Job:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].sin())
    return paceline.Job(
        **{
            "model": Warm,
            "data": data,
            "loss": F.mse_loss,
            "batch": 12,
            "steps": STEPS,
            "validation": TensorDataset(x[:10], x[:10, :3].sin()),
            "precision": "float64",
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
            **changes,
        }
    )


def train(job: paceline.Job, plan: str, run: Path, **options: Any) -> Any:
    return paceline.train(
        job, plan, devices=f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}", run=run, **options
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("single", "single"), ("data=2", "single"), ("shard=2", "data=2"), ("single", "shard=2")],
)
def test_a_resumed_run_counts_on(before: str, after: str, tmp_path: Path) -> None:
    """Stopped at an odd step, it ends as one device's run that went through, and so does its validation loss."""
    job = make_job(model=lambda: Warm(is_centered=before == after == "single"))
    whole = train(job, "single", tmp_path / "whole")
    train(job, before, tmp_path / "cut", steps=3)
    cut = train(job, after, tmp_path / "cut", resume=True)

    resumed = load_file(tmp_path / "cut" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-12, atol=1e-12)
    assert cut["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-12)


class Centred(nn.Module):
    """A tensor that the forward puts in the place of another: plans that split the model make it a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.center = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = self.out(torch.tanh(self.inner(x)))
        if self.training:
            self.center = self.center * 0.9 + 0.1 * output.detach().mean(0)
        return output - self.center


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pipeline=2 microbatches=1", "tensor=2"),
        ("place=2", "single"),
        ("tensor=2", "place=2"),
    ],
)
def test_a_split_run_keeps_a_tensor_that_is_no_buffer(
    before: str, after: str, tmp_path: Path
) -> None:
    train(make_job(model=Centred), "single", tmp_path / "whole")
    train(make_job(model=Centred, steps=3), before, tmp_path / "run")
    train(make_job(model=Centred), after, tmp_path / "run", resume=True)

    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "run" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


def test_a_checkpoint_has_what_changed_and_nothing_else(tmp_path: Path) -> None:
    """Tensors as tensors under attributes/NAME; a model that is built anew gets all of it."""
    train(make_job(), "single", tmp_path / "run", steps=3)
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-3")

    stored = {name for name in checkpoint.tensors if name.startswith("attributes/")}
    assert stored == {"attributes/center", "attributes/.values/0"}
    model = Warm().double()
    history, seen = model.inner.history, model.inner.seen
    restore_attributes(model, checkpoint)
    assert model.count == 3 and model.temperature.calls == 3 and model.temperature.name == "linear"
    assert (
        history is model.inner.history
        and list(history) == [1 / 8, 2 / 8, 3 / 8]
        and history.maxlen == 3
    )
    assert seen is model.inner.seen and seen == {"train": 36, 3: (1, 2)}
    assert torch.equal(model.center, checkpoint.read("attributes/center"))


def test_a_model_whose_attributes_stay_has_none_in_its_checkpoints(tmp_path: Path) -> None:
    """Odd objects that never change are nobody's business, and older checkpoints, which have no attributes, load."""

    class Odd(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 3))
            self.anything, self.size = open, (1, {2})

    train(make_job(model=Odd), "shard=2", tmp_path / "run", steps=2)
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-2")

    assert not [name for name in checkpoint.tensors if name.startswith("attributes/")]
    restore_attributes(Odd(), checkpoint)


def test_evaluate_has_the_attributes(tmp_path: Path) -> None:
    """`paceline evaluate` gives the figure that the run ended with."""
    (tmp_path / "job.py").write_text(Path(__file__).read_text().replace("def make_job", "def job"))
    run = tmp_path / "run"
    paceline.train(
        JobFile.parse(str(tmp_path / "job.py")), "single", devices="cpu:0", run=run, steps=3
    )
    expected = json.loads((run / "summary.json").read_text())["validation_loss"]

    assert paceline.evaluate(run, devices="cpu:0")["validation_loss"] == expected


def test_changes_are_found_by_name() -> None:
    """New attributes count, those of objects by the way to them."""
    model = Warm()
    changing = ChangingAttributes(model)

    model.inner.scale, model.temperature.calls = 2.0, 5

    assert changing.changed() == {"inner.scale": 2.0, "temperature.calls": 5}
