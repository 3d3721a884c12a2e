"""The callbacks of a trial, on its first rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from callback_jobs import JOB

import paceline as pl
from paceline.base.errors import PacelineError
from paceline.job.file import JobFile


def search(tmp_path: Path, plan: str, **options: Any) -> dict[str, Any]:
    (tmp_path / "net.py").write_text(JOB)
    try:
        pl.search(
            str(tmp_path / "net.py"),
            2,
            vary={"lr": "0.3,0.2"},
            sampler="random",
            seed=0,
            procs=2,
            plan=plan,
            run=tmp_path / "run",
            **options,
        )
    except PacelineError as error:
        print(error)
    document: dict[str, Any] = json.loads((tmp_path / "run" / "study.json").read_text())
    return document


def diaries(tmp_path: Path) -> list[list[str]]:
    return [
        path.read_text().splitlines()
        for path in sorted((tmp_path / "run" / "trials").glob("*/diary.txt"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["single", pytest.param("data=2", marks=pytest.mark.slow)])
def test_early_stopping_ends_a_trial_which_counts_as_complete(tmp_path: Path, plan: str):
    """After the step of `pl.train`; callbacks run once a trial, and can have its weights."""
    study = search(tmp_path, plan, pruner="none")
    assert [trial["state"] for trial in study["trials"]] == ["complete"] * 2
    for trial in study["trials"]:
        folder = tmp_path / "run" / "trials" / str(trial["number"])
        lr = trial["params"]["lr"]
        alone = pl.train(
            JobFile.parse(str(tmp_path / "net.py"), {"lr": str(lr)}),
            "single",
            run=tmp_path / f"alone-{lr}",
            check=False,
        )
        assert trial["steps"] == alone["steps"] < 60
        assert (folder / "diary.txt").read_text() == (alone.run_dir / "diary.txt").read_text()


def test_a_pruned_trial_tells_its_callbacks_and_ends(tmp_path: Path):
    from optuna.pruners import ThresholdPruner

    study = search(tmp_path, "data=2", pruner=ThresholdPruner(upper=1e-9))
    assert [trial["state"] for trial in study["trials"]] == ["pruned"] * 2
    assert [diary[-1] for diary in diaries(tmp_path)] == ["failure Preempted"] * 2


def test_a_callback_that_fails_fails_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the callback's name and the user's line as the reason."""
    monkeypatch.setenv("PLANTED", "error")
    study = search(tmp_path, "data=2", pruner="none")
    assert [trial["state"] for trial in study["trials"]] == ["failed"] * 2
    assert all(
        "Diary failed in on_step after step 7" in trial["reason"] and "planted" in trial["reason"]
        for trial in study["trials"]
    )
    assert [diary[-1] for diary in diaries(tmp_path)] == ["failure ZeroDivisionError"] * 2
