"""A rank is lost in the middle of a step: the next ranks go on from the copy in memory of the step before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from paceline.training import loop
from paceline.training.parts.memory_checkpoint import Copier
from tests.training.test_recovery import job_of, load_file

KILLED_AT = 7  # step that is not taken, or is in its update


@pytest.fixture(autouse=True)
def a_copy_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s: 1)


def train(run: Path, plan: str, job: pl.Job) -> Any:
    return pl.train(job, plan, run=run, check=False, table=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The undisturbed run under a plan, which tests share."""
    return cache(
        lambda plan: Path(
            train(tmp_path_factory.mktemp("whole") / "run", plan, job_of(None, 0)).run
        )
    )


def gone_on_from(run: Path) -> list[int]:
    """The step that each launch went on from."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [line["after"] for line in lines if "after" in line]


def equal_weights(tmp_path: Path, whole: Path | None = None) -> bool:
    expected, actual = (
        load_file(run / "model.safetensors")
        for run in (whole or tmp_path / "whole", tmp_path / "run")
    )
    return all(torch.equal(expected[name], actual[name]) for name in expected)


class Normed(nn.Module):
    """Its forwards change buffers, of a step that is then not applied too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.slow
def test_buffers_are_those_of_the_step_before(tmp_path: Path) -> None:
    """Forwards of the step that was not taken had changed them."""

    def job(mark: Path | None) -> pl.Job:
        def net() -> nn.Module:
            model = Normed().double()
            forward, calls = model.last.forward, [0]

            def counted(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                if calls[0] == KILLED_AT and mark is not None and not mark.exists() and rank() == 1:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(x)

            model.last.forward = counted  # type: ignore[method-assign]
            return model

        return replace(job_of(None, 0), model=net)

    train(tmp_path / "whole", "data=2", job(None))
    train(tmp_path / "run", "data=2", job(tmp_path / "killed"))
    assert gone_on_from(tmp_path / "run") == [0, KILLED_AT - 1] and equal_weights(tmp_path)


@pytest.mark.slow
def test_ranks_that_are_lost_again_at_once(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    """Before the first copy of the next launch: what the one before has left is still there."""

    def job(marks: Path) -> pl.Job:
        def net() -> nn.Module:
            model = job_of(None, 0).model()
            forward, calls = model[-1].forward, [0]

            def counted(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                deaths = len(list(marks.iterdir()))
                if rank() == 1 and calls[0] == {0: KILLED_AT, 1: 1, 2: 2}.get(deaths):
                    (marks / str(deaths)).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return forward(x)

            model[-1].forward = counted
            return model

        return replace(job_of(None, 0), model=net)

    (tmp_path / "marks").mkdir()
    train(tmp_path / "run", "data=2", job(tmp_path / "marks"))
    assert len(list((tmp_path / "marks").iterdir())) == 3
    # Rank 1 may be killed before rank 0 has noted the beginning of their second launch.
    assert sorted({*gone_on_from(tmp_path / "run")}) == [0, KILLED_AT - 1, KILLED_AT]
    assert equal_weights(tmp_path, whole("data=2"))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Torn(torch.optim.SGD):
    """Ends its process in the middle of an update, once."""

    mark: Path | None = None
    in_run = False
    number = 0

    def step(self, closure: Any = None) -> Any:
        if self.mark is not None and type(self).in_run:
            type(self).number += 1
            if type(self).number == KILLED_AT and rank() == self.victim and not self.mark.exists():
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)

    victim = 0


def tear_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a rank in an update of the run itself, and not while its optimizer is tried before."""
    build = loop.Loop.__init__

    def build_run(self: loop.Loop, *args: Any) -> None:
        build(self, *args)
        Torn.in_run = True

    monkeypatch.setattr(loop.Loop, "__init__", build_run)


@pytest.mark.parametrize(
    ("plan", "victim"),
    [
        ("data=2", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("data=2", 0), ("single", 0), ("shard=2", 1))
        ),
    ],
)
def test_a_rank_that_dies_in_an_update(
    tmp_path: Path, plan: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    def job(mark: Path | None) -> pl.Job:
        def optimizer(named: Any) -> Torn:
            built = Torn(named, lr=0.03, momentum=0.9)
            built.mark = mark
            return built

        return replace(job_of(None, 0), optimizer=optimizer)

    tear_in_runs(monkeypatch)
    monkeypatch.setattr(Torn, "victim", victim)
    train(tmp_path / "whole", plan, job(None))
    train(tmp_path / "run", plan, job(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert gone_on_from(tmp_path / "run") == [0, KILLED_AT - 1] and equal_weights(tmp_path)


@pytest.mark.slow
def test_a_step_of_ones_own_is_torn_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first update is before the ranks agree on anything."""

    def job(mark: Path | None) -> pl.Job:
        def step(ctx: pl.StepContext, batch: Any) -> None:
            ctx.backward(
                "net", batch, lambda output, batch: (output - batch.target).square().mean()
            )
            ctx.update("net")

        def optimizer(named: Any) -> Torn:
            built = Torn(named, lr=0.03, momentum=0.9)
            built.mark = mark
            return built

        plain = job_of(None, 0)
        return replace(
            plain,
            model=None,
            loss=None,
            optimizer=None,
            lr_schedule=None,
            clip=None,
            training_step=step,
            models={"net": plain.model},
            optimizers={"net": optimizer},
        )

    tear_in_runs(monkeypatch)
    train(tmp_path / "whole", "single", job(None))
    train(tmp_path / "run", "single", job(tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert gone_on_from(tmp_path / "run") == [0, KILLED_AT - 1] and equal_weights(tmp_path)
