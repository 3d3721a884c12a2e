"""The callbacks of a trial, on its first rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import PacelineError
from paceline.jobfile import JobFile

pytestmark = pytest.mark.timeout(120)

JOB = """
import os
import torch
import torch.nn.functional as F
import paceline as pl

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(60, 4, dtype=torch.float64, generator=generator)
noise = 0.3 * torch.randn(60, dtype=torch.float64, generator=generator)
targets = (inputs @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64) + noise).unsqueeze(1)
samples = list(zip(inputs, targets))

class Diary(pl.Callback):
    def note(self, run, *words):
        with open(run.folder / "diary.txt", "a") as file:
            print(*words, file=file)

    def on_start(self, run):
        self.note(run, "start", run.step)

    def on_step(self, run, step):
        if os.environ.get("PLANTED") and step.step == 7:
            raise ZeroDivisionError("planted")

    def on_evaluation(self, run, evaluation):
        self.note(run, "evaluation", evaluation.step, len(run.state_dict()))

    def on_end(self, run, result):
        self.note(run, "end", result["steps"], result["stopped"] is not None)

    def on_failure(self, run, error):
        self.note(run, "failure", type(error).__name__)

def job(lr: float = 0.3, epochs: int = 12) -> pl.Job:
    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
                  data=samples[:40], validation=samples[40:], loss=F.mse_loss, batch=8, epochs=epochs,
                  precision="float64", optimizer=lambda named: torch.optim.SGD(named, lr=lr),
                  callbacks=[Diary(), pl.EarlyStopping(patience=2)])
"""


def search(tmp_path: Path, plan: str, **options: Any) -> dict[str, Any]:
    (tmp_path / "net.py").write_text(JOB)
    try:
        pl.search(str(tmp_path / "net.py"), 2, vary={"lr": "0.3,0.2"}, sampler="random", seed=0, procs=2, plan=plan,
                  run=tmp_path / "run", **options)
    except PacelineError as error:
        print(error)
    document: dict[str, Any] = json.loads((tmp_path / "run" / "study.json").read_text())
    return document


def diaries(tmp_path: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted((tmp_path / "run" / "trials").glob("*/diary.txt"))]


@pytest.mark.parametrize("plan", ["single", "data=2"])
def test_early_stopping_ends_a_trial_which_counts_as_complete(tmp_path: Path, plan: str):
    """After the step of `pl.train`; callbacks run once a trial, and can have its weights."""
    found = search(tmp_path, plan, pruner="none")
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 2
    for trial in found["trials"]:
        folder = tmp_path / "run" / "trials" / str(trial["number"])
        lr = trial["params"]["lr"]
        alone = pl.train(JobFile.parse(str(tmp_path / "net.py"), {"lr": str(lr)}), "single",
                         run=tmp_path / f"alone-{lr}", check=False)
        assert trial["steps"] == alone["steps"] < 60
        assert (folder / "diary.txt").read_text() == (alone.run_dir / "diary.txt").read_text()


def test_a_pruned_trial_tells_its_callbacks_and_ends(tmp_path: Path):
    from optuna.pruners import ThresholdPruner

    found = search(tmp_path, "data=2", pruner=ThresholdPruner(upper=1e-9))
    assert [trial["state"] for trial in found["trials"]] == ["pruned"] * 2
    assert [diary[-1] for diary in diaries(tmp_path)] == ["failure Preempted"] * 2


def test_a_callback_that_fails_fails_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the callback's name and the user's line as the reason."""
    monkeypatch.setenv("PLANTED", "1")
    found = search(tmp_path, "data=2", pruner="none")
    assert [trial["state"] for trial in found["trials"]] == ["failed"] * 2
    assert all("Diary failed in on_step after step 7" in trial["reason"] and "planted" in trial["reason"]
               for trial in found["trials"])
    assert [diary[-1] for diary in diaries(tmp_path)] == ["failure ZeroDivisionError"] * 2
