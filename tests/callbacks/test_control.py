"""Callbacks see and control a run, under any plan as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.errors import CallbackError, JobError

pytestmark = pytest.mark.timeout(120)

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 4, dtype=torch.float64, generator=GENERATOR)
TARGETS = (INPUTS @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64)
           + 0.3 * torch.randn(60, dtype=torch.float64, generator=GENERATOR)).unsqueeze(1)
SAMPLES = list(zip(INPUTS, TARGETS, strict=True))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def job(callbacks: list[pl.Callback], **changes: Any) -> pl.Job:
    """A regression that overshoots: 5 steps an epoch, and its validation loss goes up and down."""
    fields: dict[str, Any] = {"epochs": 12, "validation": SAMPLES[40:],
                              "metrics": {"error": lambda output, target: (output - target).abs().mean()}}
    return pl.Job(model=net, data=SAMPLES[:40], loss=F.mse_loss, batch=8, precision="float64", callbacks=callbacks,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.3), **{**fields, **changes})


def train(callbacks: list[pl.Callback], plan: str, run: Path, *, resume: bool = False, steps: int | None = None,
          save_every: int | None = None, **changes: Any) -> Any:
    return pl.train(job(callbacks, **changes), plan, run=run, resume=resume, steps=steps, save_every=save_every)


class Diary(pl.Callback):
    """Writes down all that it is told, and the sum of the weights where it can be had."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, run: Any) -> None:
        self.events.append(("start", run.step))

    def on_step(self, run: Any, step: Any) -> None:
        self.events.append(("step", step.step, step.epoch, step.samples, step.loss, step.lr))

    def on_epoch(self, run: Any, epoch: Any) -> None:
        self.events.append(("epoch", epoch.step, epoch.epoch, epoch.loss))

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        weights = run.state_dict()
        assert weights.keys() == net().state_dict().keys()
        self.events.append(("evaluation", evaluation.step, *evaluation.figures.values(),
                            *(float(tensor.sum()) for tensor in weights.values())))

    def on_save(self, run: Any, checkpoint: Any) -> None:
        assert (checkpoint.path / "COMMIT").exists()
        self.events.append(("save", checkpoint.step))

    def on_end(self, run: Any, result: Any) -> None:
        self.events.append(("end", result["steps"]))


def run_once(plan: str, run: Path) -> tuple[list[tuple[Any, ...]], Any]:
    diary = Diary()
    result = train([diary, pl.EarlyStopping(patience=2), pl.KeepBest("error", n=2, mode="min")], plan, run)
    return diary.events, result


def assert_same(events: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """The same events in the same order, their figures but for rounding."""
    assert [event[:2] for event in events] == [event[:2] for event in expected]
    for event, other in zip(events, expected, strict=True):
        assert event[2:] == pytest.approx(other[2:], rel=1e-9, abs=1e-12), event[0]


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "pipeline=2", "server=1 workers=2"])
def test_callbacks_hear_and_do_the_same_under_any_plan(plan: str, tmp_path: Path):
    """Events, weights, the step of early stopping, the best checkpoints and the model that comes back."""
    expected, one_device = run_once("single", tmp_path / "single")
    events, result = run_once(plan, tmp_path / "plan")
    assert_same(events, expected)
    assert len([event for event in events if event[0] == "step"]) == result["steps"] == 40
    assert result["stopped"] == one_device["stopped"]
    assert result.best.step == one_device.best.step
    for ours, theirs in ((result, one_device), (result.best, one_device.best)):
        for name, tensor in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], tensor)
        assert torch.equal(ours.model()[0].weight, ours.state_dict()["0.weight"])
    kept = {path.name for path in (tmp_path / "plan" / "checkpoints").iterdir()}
    assert kept == {path.name for path in (tmp_path / "single" / "checkpoints").iterdir()}
    assert f"step-{result.best.step}" in kept
    again = pl.open(tmp_path / "plan", job=job([]))
    assert again.history == result.history and again.metrics == result.metrics and again.best.step == result.best.step


class Fails(pl.Callback):
    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        if evaluation.step == 10:
            raise ZeroDivisionError("planted")


def test_an_exception_ends_the_run_with_a_checkpoint(tmp_path: Path):
    """The user's exception is the cause, its line is told, and the run can be resumed."""
    with pytest.raises(CallbackError, match=r"(?s)test_control.*Fails failed in on_evaluation after step 10.*planted"):
        train([Fails()], "data=2", tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-10"]
    assert not (tmp_path / "summary.json").exists()
    assert train([], "single", tmp_path, resume=True)["steps"] == 60


@pytest.mark.parametrize(("callbacks", "words"), [
    ([pl.EarlyStopping("acuracy")], "EarlyStopping looks at 'acuracy'"), ([pl.EarlyStopping], "not the class"),
    ([print], "instances of pl.Callback"), ([pl.KeepBest("loss")], "no figure of an evaluation"),
])
def test_callbacks_that_make_no_sense_are_refused(callbacks: list[Any], words: str):
    with pytest.raises(JobError, match=words):
        job(callbacks)


class Counts(pl.Callback):
    """Has state, and stops in a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after, self.steps, self.told = stop_after, 0, []

    def on_step(self, run: Any, step: Any) -> None:
        self.steps += 1
        self.told.append(step.step)
        if self.steps == self.stop_after:
            run.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Kills(pl.Callback):
    """Interrupts the run after an evaluation."""

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        if evaluation.step == 35:
            raise KeyError("interrupted")


@pytest.mark.parametrize("plan", ["data=2", "server=1 workers=2"])
def test_a_run_that_goes_on_under_another_plan_has_its_callbacks_state(plan: str, tmp_path: Path):
    """Early stopping counts on, and stops where the uninterrupted run does, with the same best checkpoints."""
    one_device = train([Counts(), pl.EarlyStopping(patience=2), pl.KeepBest()], "single", tmp_path / "whole")
    with pytest.raises(CallbackError):
        train([Counts(), pl.EarlyStopping(patience=2), pl.KeepBest(), Kills()], plan, tmp_path / "parts")
    counts = Counts()
    result = train([counts, pl.EarlyStopping(patience=2), pl.KeepBest()], "shard=2", tmp_path / "parts", resume=True)
    assert (result["steps"], result["stopped"]) == (one_device["steps"], one_device["stopped"])
    assert counts.told == list(range(36, 41)) and counts.steps == 40
    assert result.best.step == one_device.best.step
    torch.testing.assert_close(result.best.state_dict(), one_device.best.state_dict())
    exported = result.export(tmp_path / "model.safetensors")
    assert exported.read_bytes()[8:9] == b"{"


@pytest.mark.parametrize("plan", ["single", "data=2", "server=1 workers=2", "data=2 local=2"])
def test_stopping_from_a_step_ends_all_ranks_after_the_same_one(plan: str, tmp_path: Path):
    """The run is done, and what is saved is what the step left."""
    counts = Counts(stop_after=3)
    result = train([counts], plan, tmp_path, epochs=2000)
    assert 3 <= result["steps"] < 10_000 and result["stopped"] == "enough"
    assert counts.told == list(range(1, result["steps"] + 1))
    assert (tmp_path / "summary.json").exists() and (tmp_path / "checkpoints" / f"step-{result['steps']}").exists()
