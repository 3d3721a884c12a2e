"""Callbacks of a run whose ranks are killed and start again."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.callbacks.controller import RunController
from paceline.launch.local import ranks
from paceline.training.parts.memory_checkpoint import Copier

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(60, 4, dtype=torch.float64, generator=GENERATOR)
TARGETS = (
    INPUTS @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64)
    + 0.3 * torch.randn(60, dtype=torch.float64, generator=GENERATOR)
).unsqueeze(1)
SAMPLES = list(zip(INPUTS, TARGETS, strict=True))


class Counts(pl.Callback):
    """Has state: the steps that it was told of."""

    def __init__(self) -> None:
        self.steps = 0
        self.told: list[int] = []
        self.starts: list[tuple[int, int]] = []

    def on_start(self, run: Any) -> None:
        self.starts.append((run.step, run.restarts))

    def on_step(self, run: Any, step: Any) -> None:
        self.steps += 1
        self.told.append(step.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Looks(pl.Callback):
    """Has no state."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.evaluated: list[int] = []

    def on_step(self, run: Any, step: Any) -> None:
        self.told.append(step.step)

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        self.evaluated.append(evaluation.step)


def train(
    run: Path,
    plan: str,
    callbacks: list[pl.Callback],
    *,
    killed: Path | None = None,
    **options: Any,
) -> Any:
    """Train 5 steps an epoch. killed: a file that the rank makes that dies in its 13th loss of the run."""
    num_losses = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal num_losses
        num_losses += output.requires_grad
        if killed is not None and num_losses == 13:
            try:
                os.close(os.open(killed, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, target)

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    job = pl.Job(
        model=net,
        data=SAMPLES[:40],
        loss=loss,
        batch=8,
        epochs=12,
        precision="float64",
        callbacks=callbacks,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3),
        validation=SAMPLES[40:],
    )
    return pl.train(job, plan, run=run, check=False, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(
        tmp_path_factory.mktemp("whole") / "run",
        "single",
        [pl.EarlyStopping(patience=2), pl.KeepBest()],
    )


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory has no room for copies of the state."""
    monkeypatch.setattr(ranks, "_copies", lambda devices, restarts: nullcontext())


@pytest.mark.slow
def test_callbacks_keep_what_they_know_where_ranks_go_on_from_a_copy(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
):
    """All are told of everything once; the run ends as one without a death. Every step is copied: KeepBest's
    checkpoints would be newer than copies that are farther apart."""
    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s, **share: 1)
    counts, looks = Counts(), Looks()
    result = train(
        tmp_path / "run",
        "data=2",
        [counts, looks, pl.EarlyStopping(patience=2), pl.KeepBest()],
        killed=tmp_path / "killed",
    )
    assert (tmp_path / "killed").exists()
    assert (result["steps"], result["stopped"]) == (undisturbed["steps"], undisturbed["stopped"])
    assert (
        looks.told == counts.told == list(range(1, result["steps"] + 1))
        and counts.steps == result["steps"]
    )
    assert looks.evaluated == list(range(5, 41, 5))
    (first, _), (again, restarts) = counts.starts
    assert (first, restarts) == (0, 1) and 0 < again <= 12
    assert result.best.step == undisturbed.best.step
    torch.testing.assert_close(result.best.state_dict(), undisturbed.best.state_dict())


def test_steps_that_lost_ranks_told_nobody_of_are_told_where_others_go_on(tmp_path: Path):
    """Rank 0 says now and then that there are steps, and may be killed before it does."""
    looks = Looks()
    job = pl.Job(
        model=lambda: torch.nn.Linear(4, 1),
        data=SAMPLES,
        loss=F.mse_loss,
        batch=8,
        epochs=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3),
        callbacks=[looks],
    )
    controller = RunController([looks], job, plan="single", folder=tmp_path)

    def take(steps: range) -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(
                json.dumps({"step": n, "epoch": 0, "samples": 8 * n, "loss": 1.0}) + "\n"
                for n in steps
            )

    controller.on_question({"event": "start", "step": 0}, lambda order: None)
    take(range(1, 4))
    controller.on_report()
    take(range(4, 6))
    controller.on_question({"event": "start", "step": 5, "keeps": True}, lambda order: None)
    take(range(6, 7))
    controller.on_report()
    assert looks.told == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.usefixtures("no_copies")
def test_callbacks_go_back_to_the_checkpoint_from_which_ranks_start_again(
    tmp_path: Path, undisturbed: Any
):
    """Those with state are told again of what follows it, others of nothing twice; the run ends as one without."""
    counts, looks = Counts(), Looks()
    result = train(
        tmp_path / "run",
        "data=2",
        [counts, looks, pl.EarlyStopping(patience=2), pl.KeepBest()],
        killed=tmp_path / "killed",
        save_every=5,
        restarts=1,
    )
    assert (tmp_path / "killed").exists()
    assert (result["steps"], result["stopped"]) == (undisturbed["steps"], undisturbed["stopped"])
    assert looks.told == list(range(1, result["steps"] + 1)) and looks.evaluated == list(
        range(5, 41, 5)
    )
    assert counts.starts == [(0, 0), (10, 1)] and counts.steps == result["steps"]
    before, after = counts.told[:-30], counts.told[-30:]
    assert (
        before == list(range(1, len(before) + 1))
        and 10 <= len(before) <= 13
        and after == list(range(11, 41))
    )
    assert result.best.step == undisturbed.best.step
    torch.testing.assert_close(result.best.state_dict(), undisturbed.best.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("no_copies")
def test_callbacks_begin_anew_where_ranks_do(tmp_path: Path):
    """Without a checkpoint state is what it was before the first step."""
    counts = Counts()
    result = train(
        tmp_path / "run",
        "data=2",
        [counts, pl.EarlyStopping(patience=2)],
        killed=tmp_path / "killed",
        restarts=1,
    )
    assert counts.starts == [(0, 0), (0, 1)] and counts.steps == result["steps"] == 40


def test_a_worker_that_starts_again_alone_changes_nothing_for_callbacks(tmp_path: Path):
    """The others went on: each step is told once, and nothing goes back."""
    counts, looks = Counts(), Looks()
    result = train(
        tmp_path / "run",
        "servers=1 workers=2 staleness=2",
        [counts, looks],
        killed=tmp_path / "killed",
        restarts=1,
    )
    assert (tmp_path / "killed").exists() and result["steps"] == 60
    assert counts.told == looks.told == list(range(1, 61)) and counts.starts == [(0, 0)]
    assert looks.evaluated == list(range(5, 61, 5))
