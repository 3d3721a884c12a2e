"""Callbacks see and control a run, under any plan as on one device."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline as pl
from paceline.base.errors import CallbackError, JobError, OutOfMemory, UsageError
from paceline.callbacks.controller import RunController
from paceline.launch.process.failure import RankFailed
from paceline.training import loop
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.saves import Saves
from paceline.training.run import TrainingRun

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 4, dtype=torch.float64, generator=GENERATOR)
TARGETS = (
    INPUTS @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64)
    + 0.3 * torch.randn(60, dtype=torch.float64, generator=GENERATOR)
).unsqueeze(1)
SAMPLES = list(zip(INPUTS, TARGETS, strict=True))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def job(callbacks: list[pl.Callback], **changes: Any) -> pl.Job:
    """A regression that overshoots: 5 steps an epoch, and its validation loss goes up and down."""
    fields: dict[str, Any] = {
        "epochs": 12,
        "validation": SAMPLES[40:],
        "metrics": {"error": lambda output, target: (output - target).abs().mean()},
    }
    fields |= {"model": net, "batch": 8, **changes}
    return pl.Job(
        data=SAMPLES[:40],
        loss=F.mse_loss,
        precision="float64",
        callbacks=callbacks,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3),
        **fields,
    )


def train(
    callbacks: list[pl.Callback],
    plan: str,
    run: Path,
    *,
    resume: bool = False,
    steps: int | None = None,
    save_every: int | None = None,
    **changes: Any,
) -> Any:
    return pl.train(
        job(callbacks, **changes), plan, run=run, resume=resume, steps=steps, save_every=save_every
    )


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
        self.events.append(
            (
                "evaluation",
                evaluation.step,
                *evaluation.figures.values(),
                *(float(tensor.sum()) for tensor in weights.values()),
            )
        )

    def on_save(self, run: Any, checkpoint: Any) -> None:
        assert (checkpoint.path / "COMMIT").exists()
        self.events.append(("save", checkpoint.step))

    def on_end(self, run: Any, result: Any) -> None:
        self.events.append(("end", result["steps"]))


def run_once(plan: str, run: Path) -> tuple[list[tuple[Any, ...]], Any]:
    diary = Diary()
    result = train(
        [diary, pl.EarlyStopping(patience=2), pl.KeepBest("error", n=2, mode="min")], plan, run
    )
    return diary.events, result


def assert_same(events: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """The same events in the same order, their figures but for rounding."""
    assert [event[:2] for event in events] == [event[:2] for event in expected]
    for event, other in zip(events, expected, strict=True):
        assert event[2:] == pytest.approx(other[2:], rel=1e-9, abs=1e-12), event[0]


@pytest.mark.slow
def test_an_epoch_is_told_its_evaluation_though_nobody_hears_of_evaluations(tmp_path: Path):
    """What on_epoch gets is the evaluation of the epoch's last step."""

    class Epochs(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, Any]] = []

        def on_epoch(self, run: Any, epoch: Any) -> None:
            self.seen.append((epoch.step, epoch.evaluation))

    epochs = Epochs()
    result = train([epochs], "single", tmp_path, epochs=2)
    assert [(step, evaluation and evaluation.step) for step, evaluation in epochs.seen] == [
        (5, 5),
        (10, 10),
    ]
    assert epochs.seen[-1][1].figures.keys() == {"validation_loss", "error"}
    assert epochs.seen[-1][1].validation_loss == result["validation_loss"]


def test_servers_end_each_epoch_that_callbacks_hear_of(tmp_path: Path):
    """Without validation data nothing else is due there."""
    diary = Diary()
    train([diary], "servers=1 workers=2", tmp_path, epochs=2, validation=None, metrics={})
    assert [event[1] for event in diary.events if event[0] == "epoch"] == [5, 10]


@pytest.fixture(scope="module")
def one_device_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[Any, ...]], Any]:
    return run_once("single", tmp_path_factory.mktemp("single") / "run")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2", "pipeline=2", "servers=1 workers=2"])
def test_callbacks_hear_and_do_the_same_under_any_plan(
    plan: str, tmp_path: Path, one_device_run: Any
):
    """Events, weights, the step of early stopping, the best checkpoints and the model that comes back."""
    expected, one_device = one_device_run
    events, result = run_once(plan, tmp_path / "plan")
    assert_same(events, expected)
    assert len([event for event in events if event[0] == "step"]) == result["steps"] == 40
    assert result["stopped"] == one_device["stopped"]
    assert result.best.step == one_device.best.step
    for actual, expected_result in ((result, one_device), (result.best, one_device.best)):
        for name, tensor in expected_result.state_dict().items():
            torch.testing.assert_close(actual.state_dict()[name], tensor)
        assert torch.equal(actual.model()[0].weight, actual.state_dict()["0.weight"])
    kept = {path.name for path in (tmp_path / "plan" / "checkpoints").iterdir()}
    assert kept == {path.name for path in (one_device.run / "checkpoints").iterdir()}
    assert f"step-{result.best.step}" in kept
    again = pl.open(tmp_path / "plan", job=job([]))
    assert (
        again.history == result.history
        and again.metrics == result.metrics
        and again.best.step == result.best.step
    )


class Looks(pl.Callback):
    """Reads the weights before the first step."""

    def on_start(self, run: Any) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in run.state_dict().items()}


def test_weights_before_the_first_step_are_those_of_all_servers(tmp_path: Path):
    """Server 0 may ask callbacks before the other servers have joined it."""
    looks = Looks()
    assert train([looks], "servers=2 workers=1", tmp_path, epochs=1)["steps"] == 5
    assert looks.shapes == {
        name: tuple(tensor.shape) for name, tensor in net().state_dict().items()
    }


class Fails(pl.Callback):
    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        if evaluation.step == 10:
            raise ZeroDivisionError("planted")


def test_an_exception_ends_the_run_with_a_checkpoint(tmp_path: Path):
    """The user's exception is the cause, its line is told, and the run can be resumed."""
    with pytest.raises(
        CallbackError,
        match=r"(?s)test_control.*Fails failed in on_evaluation after step 10.*planted",
    ):
        train([Fails()], "data=2", tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-10"]
    assert (
        json.loads((tmp_path / "summary.json").read_text())["failure"]["reason"] == "callback_error"
    )
    assert train([], "single", tmp_path, resume=True)["steps"] == 60


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([pl.EarlyStopping("acuracy")], "EarlyStopping looks at 'acuracy'"),
        ([pl.EarlyStopping], "not the class"),
        ([print], "instances of pl.Callback"),
        ([pl.KeepBest("loss")], "no figure of an evaluation"),
    ],
)
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


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "servers=1 workers=2"])
def test_a_run_that_goes_on_under_another_plan_has_its_callbacks_state(plan: str, tmp_path: Path):
    """Early stopping counts on, and stops where the uninterrupted run does, with the same best checkpoints."""
    one_device = train(
        [Counts(), pl.EarlyStopping(patience=2), pl.KeepBest()], "single", tmp_path / "whole"
    )
    with pytest.raises(CallbackError):
        train(
            [Counts(), pl.EarlyStopping(patience=2), pl.KeepBest(), Kills()],
            plan,
            tmp_path / "parts",
        )
    counts = Counts()
    result = train(
        [counts, pl.EarlyStopping(patience=2), pl.KeepBest()],
        "shard=2",
        tmp_path / "parts",
        resume=True,
    )
    assert (result["steps"], result["stopped"]) == (one_device["steps"], one_device["stopped"])
    assert counts.told == list(range(36, 41)) and counts.steps == 40
    assert result.best.step == one_device.best.step
    torch.testing.assert_close(result.best.state_dict(), one_device.best.state_dict())
    exported = result.export(tmp_path / "model.safetensors")
    assert exported.read_bytes()[8:9] == b"{"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2", "servers=1 workers=2", "data=2 local=2"])
def test_stopping_from_a_step_ends_all_ranks_after_the_same_one(plan: str, tmp_path: Path):
    """The run is done, and what is saved is what the step left."""
    counts = Counts(stop_after=3)
    result = train([counts], plan, tmp_path, epochs=2000)
    assert 3 <= result["steps"] < 10_000 and result["stopped"] == "enough"
    assert counts.told == list(range(1, result["steps"] + 1))
    assert (tmp_path / "summary.json").exists() and (
        tmp_path / "checkpoints" / f"step-{result['steps']}"
    ).exists()


@pytest.mark.slow
def test_keep_best_deletes_its_own_checkpoints_alone(tmp_path: Path):
    """Those of `save_every` stay; of its own the best stay, and the newest. One that is resumed goes on with them."""
    with pytest.raises(CallbackError):
        train([pl.KeepBest(), Kills()], "single", tmp_path, save_every=20)
    result = train([keeps := pl.KeepBest()], "data=2", tmp_path, resume=True, save_every=20)
    kept = {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {20, 30, 35, 40, 60} and result.best.step == 30
    assert keeps.saved_steps == [30]


class Tied(torch.nn.Module):
    """A head that shares the weight of the embedding, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("again", self.scale)
        self.register_buffer("hidden", torch.ones(1, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.embed(x).tanh()) * self.scale).sum(-1, keepdim=True) * self.hidden


class Loads(pl.Callback):
    """Gives the weights to a model of its own."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        Tied().double().load_state_dict(run.state_dict(), strict=True)
        self.loaded.append(evaluation.step)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2", "shard=2", "servers=1 workers=2"])
def test_weights_have_the_names_of_the_models_own_state_dict(plan: str, tmp_path: Path):
    """Ties too: in a callback, from the result, exported, and in model.safetensors; all load strictly."""
    result = train([loads := Loads()], plan, tmp_path, model=Tied, epochs=2)
    assert loads.loaded == [5, 10]
    weights = result.state_dict()
    assert weights["head.weight"] is weights["embed.weight"] and "hidden" not in weights
    for read in (
        weights,
        load_file(result.export(tmp_path / "out.safetensors")),
        load_file(tmp_path / "model.safetensors"),
    ):
        model = Tied().double()
        assert set(read) == set(model.state_dict())
        model.load_state_dict(read, strict=True)
        torch.testing.assert_close(model(INPUTS), result.model()(INPUTS), rtol=0, atol=0)


def test_a_model_that_does_not_fit_in_memory_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = train([], "single", tmp_path, epochs=1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    for assembled in (result.model, result.state_dict):
        with pytest.raises(
            OutOfMemory,
            match=r"the whole model has .* GiB and this machine has(?s:.*)hint: paceline",
        ):
            assembled()
    assert (
        load_file(result.export(tmp_path / "out.safetensors")).keys() == net().state_dict().keys()
    )  # by tensors


class Pretrained(torch.nn.Linear):
    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        torch.save(self.state_dict(), f"{folder}/weights.pt")


def test_a_model_with_save_pretrained_is_written_by_it(tmp_path: Path):
    """Another is refused with what can be done."""
    result = train([], "data=2", tmp_path / "a", epochs=1, model=lambda: Pretrained(4, 1))
    written = torch.load(
        result.save_pretrained(tmp_path / "model") / "weights.pt", weights_only=True
    )
    torch.testing.assert_close(written, result.state_dict(), rtol=0, atol=0)
    with pytest.raises(
        UsageError, match=r"a Sequential has no save_pretrained(?s:.*)result\.export"
    ):
        train([], "single", tmp_path / "b", epochs=1).save_pretrained(tmp_path / "other")


def test_a_save_that_has_begun_is_waited_for_when_a_callback_fails(tmp_path: Path):
    """The report says that a checkpoint is saved, and the ranks end within seconds of it."""
    saving = ["step 5"]
    looped, saves = object.__new__(loop.Loop), object.__new__(Saves)
    run: Any = SimpleNamespace(
        run_dir=tmp_path,
        settings=SimpleNamespace(save_on_stop=True, controller=None),
        step=5,
        context=SimpleNamespace(rank=0, beat=lambda phase: None),
    )
    looped.run, looped.saves, saves.run, saves.saved_step = run, saves, run, 5
    saves.comparisons, saves.writer = Mock(), Mock(wait=saving.clear)

    def fail() -> None:
        Callbacks(run).heed({"failed": "it failed"})

    looped.restore = fail  # type: ignore[method-assign]
    with pytest.raises(CallbackError, match="it failed; a checkpoint is saved"):
        looped.train()
    assert not saving


def test_an_evaluation_that_is_asked_for_comes_before_the_save():
    """So the checkpoint has what callbacks learn from it."""
    run, saves, save = object.__new__(TrainingRun), object.__new__(Saves), Mock()
    saves.run, saves.writer, saves._prepares = run, None, False
    saves.save = save  # type: ignore[method-assign]
    run.due = {"save", "evaluate"}
    saves.settled()
    assert not save.called and run.due == {"save", "evaluate"}
    assert run.takes("evaluate")
    saves.settled()
    assert save.called and not run.due


class StopsItself(torch.nn.Module):
    """A worker that is asked to stop in its third training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_steps = torch.nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += self.training
        if self.training and self.num_steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.linear(x)


@pytest.mark.parametrize("with_callbacks", [False, True])
def test_servers_do_not_evaluate_before_a_stop_by_signal_unless_callbacks_count_evaluations(
    with_callbacks: bool, tmp_path: Path
):
    """Every step ends an epoch here."""
    with pytest.raises(RankFailed, match="after step 3; a checkpoint is saved"):
        train(
            [pl.EarlyStopping(patience=9)] if with_callbacks else [],
            "servers=1 workers=2",
            tmp_path,
            model=StopsItself,
            batch=40,
        )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["step"] for line in lines if "validation_loss" in line]
    assert evaluated == ([1, 2, 3] if with_callbacks else [1, 2])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("hook", ["on_step", "on_evaluation"])
def test_a_callback_that_does_not_return_is_named(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hang_begins: Path,
    hook: str,
):
    """It is told with its method after the patience, and the run goes on when it returns."""
    told, tell_slow = threading.Event(), RunController.tell_slow

    def tell(self: RunController, after_s: float) -> None:
        tell_slow(self, after_s)
        if self._running and self.run.step == 5:
            told.set()

    class Waits(pl.Callback):
        pass

    setattr(Waits, hook, lambda self, run, report: told.wait() if report.step == 5 else None)
    monkeypatch.setattr(RunController, "tell_slow", tell)
    result = pl.train(
        job([Waits()], epochs=None, steps=10), "data=2", run=tmp_path / "run", timeout_s=1.0
    )
    assert result["steps"] == 10
    assert (
        f"warning: Waits.{hook} has not returned, and callbacks have had 1 s for what follows step 5"
        in (capfd.readouterr().err)
    )
