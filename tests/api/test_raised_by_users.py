"""Whatever a job's own code raises or prints, and wherever: it is told once, with its text, and nothing is lost."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.base.errors import CallbackError, PacelineError

pytestmark = [pytest.mark.usefixtures("nothing_left")]
POINTS = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
NAME = os.fsdecode(b"/data/caf\xe9.jpg")


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: dict[str, tuple[BaseException, str]] = {
    "no UTF-8": (ValueError(f"no {NAME}"), r"ValueError: no /data/caf\udce9.jpg"),
    "no text": (NoText(), "NoText: its text can't be made (RuntimeError)"),
    "long": (ValueError("x" * 10**6), "xxx... and 990000 more characters"),
    "binary": (OSError("\0\x1b[2J"), r"OSError: \x00\x1b[2J"),
    "group": (
        ExceptionGroup("two", [ValueError("left"), KeyError(1)]),
        "- ValueError: left\n- KeyError: 1",
    ),
    "exit": (SystemExit(0), "SystemExit: 0"),
    "interrupt": (KeyboardInterrupt("mine"), "KeyboardInterrupt: mine"),
    "generator": (GeneratorExit(), "GeneratorExit"),
}


def a_job(**changes: Any) -> pl.Job:
    return pl.Job(
        **{
            "model": lambda: nn.Linear(4, 2),
            "data": POINTS,
            "loss": F.cross_entropy,
            "batch": 4,
            "steps": 4,
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            **changes,
        }
    )


def failed(run: Path, **changes: Any) -> PacelineError:
    with pytest.raises(PacelineError) as raised:
        pl.train(a_job(**changes), "single", run=run)
    return raised.value


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str):
    """Its text is told, the run is not tried again, and its summary can be read."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise error

    error, words = ERRORS[name]
    raised = failed(tmp_path / "run", loss=loss)
    assert words in str(raised) and raised.exit_code == 1 and __file__ in str(raised)
    assert "restarts left" not in capfd.readouterr().err


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_callback(tmp_path: Path, name: str):
    """It ends the run, which is saved."""

    class Raising(pl.Callback):
        def on_step(self, run: Any, step: Any) -> None:
            raise error

        def on_failure(self, run: Any, failure: BaseException) -> None:
            raise error

    error, words = ERRORS[name]
    raised = failed(tmp_path / "run", callbacks=[Raising()])
    assert isinstance(raised, CallbackError) and words in str(raised) and raised.exit_code == 1
    assert "a checkpoint is saved" in str(raised) and list(
        (tmp_path / "run" / "checkpoints").glob("step-*")
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["no UTF-8", "exit", "interrupt", "generator"])
def test_an_error_of_a_loader_worker(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str):
    """It is this error that ends the run, and not the end of the worker."""

    def collate(samples: list[Any]) -> Any:
        raise error

    error, words = ERRORS[name]
    raised = failed(
        tmp_path / "run", batch=None, data=DataLoader(POINTS, 4, num_workers=1, collate_fn=collate)
    )
    assert words in str(raised) and raised.exit_code == 1
    assert "restarts left" not in capfd.readouterr().err


@pytest.mark.filterwarnings("always")
def test_text_that_cannot_be_encoded_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """By prints, warnings and callbacks of a run, on each rank: it ends as if they were not there."""

    class Telling(pl.Callback):
        def on_step(self, run: Any, step: Any) -> None:
            print(f"callback {NAME}", file=sys.stderr)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        print(f"loss {NAME}")
        warnings.warn(f"beware {NAME}", stacklevel=1)
        return F.cross_entropy(output, target)

    run = tmp_path / "run"
    assert pl.train(a_job(loss=loss, callbacks=[Telling()]), "data=2", run=run)["steps"] == 4
    told = capfd.readouterr().err
    assert r"loss /data/caf\udce9.jpg" in told and r"beware /data/caf\udce9.jpg" in told
    assert r"loss /data/caf\udce9.jpg" in (run / "logs" / "rank-1.log").read_text()


def test_the_reason_of_a_loss_that_is_no_number(tmp_path: Path):
    """It is the documented one, a training error's."""
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(output, target) * (float("nan") if len(calls) > 2 else 1.0)

    failed(tmp_path / "run", loss=loss)
    failure = json.loads((tmp_path / "run" / "summary.json").read_text())["failure"]
    assert (failure["reason"], failure["error"], failure["exit_code"]) == (
        "training_error",
        "TrainingError",
        1,
    )


def test_memory_that_runs_out_is_told_before_remedies(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """To look for them takes a while."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise MemoryError("no more pages")

    def look(priced: Any) -> str:
        assert (
            "rank 0 ran out of memory: no more pages; looking for what would fit"
            in capfd.readouterr().err
        )
        return "a smaller batch"

    monkeypatch.setattr("paceline.api.train.what_would_fit", look)
    assert failed(tmp_path / "run", loss=loss).exit_code == 3
    assert "a smaller batch" in capfd.readouterr().err
