"""A study goes on after its controller was killed: no trial is lost, none counts twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from jobs.studies import WORKS

import paceline as pl
from paceline.base.errors import PacelineError, UsageError
from paceline.searches.storage import JOURNAL, open_storage

SLOW = {**WORKS, "pause_s": 0.02}


def kill_after(child: Any, seconds: float, wait_for: Callable[..., None]) -> None:
    """Kill a search so long after its first ranks; they go with it."""
    wait_for(lambda: len(psutil.Process(child.pid).children(recursive=True)) >= 2)
    everyone = psutil.Process(child.pid).children(recursive=True)
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        everyone = psutil.Process(child.pid).children(recursive=True) or everyone
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    assert child.exit_code() == -signal.SIGKILL, child.stderr
    for left in Path(tempfile.gettempdir()).glob("paceline-*"):  # nobody was there to remove it
        shutil.rmtree(left)
    wait_for(
        lambda: (
            not any(
                process.is_running() and process.status() != psutil.STATUS_ZOMBIE
                for process in everyone
            )
        )
    )


def finished(run: Path, storage: str | None) -> dict[int, Any]:
    """When each trial that has ended did so, and with which value."""
    try:
        study = optuna.load_study(study_name="run", storage=open_storage(storage, run))
    except KeyError:  # killed before the study was made
        return {}
    return {
        trial.number: (trial.datetime_complete, trial.values)
        for trial in study.trials
        if trial.state.is_finished()
    }


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("kills", "trials", "storage"),
    [
        (4, 8, None),
        (4, 8, "sqlite"),
        pytest.param(10, 30, None, marks=[pytest.mark.slow, pytest.mark.timeout(550)]),
    ],
)
def test_a_study_whose_controller_is_killed_again_and_again_ends_with_the_right_number_of_trials(
    job: str,
    tmp_path: Path,
    start_child: Callable[..., Any],
    wait_for: Callable[..., None],
    kills: int,
    trials: int,
    storage: str | None,
):
    """Wherever it was: between asking and telling, in the middle of a line of the journal, or at the end."""
    run, rng = tmp_path / "run", random.Random(0)
    options = {
        "settings": SLOW,
        "procs": 2,
        "run": run,
        "resume": True,
        "storage": f"sqlite:///{tmp_path}/study.db" if storage else None,
        "plan": lambda params: "data=2" if params["width"] % 2 else "single",
    }
    ended: dict[int, Any] = {}
    for _ in range(kills):
        kill_after(
            start_child(lambda: pl.search(job, trials, **options)), rng.uniform(0.2, 1.2), wait_for
        )
        now = finished(run, options["storage"])
        assert ended.items() <= now.items()  # none ran twice
        ended = now
    study = pl.search(job, trials, **options)
    assert ended.items() <= finished(run, options["storage"]).items()
    assert [trial["number"] for trial in study["trials"]] == list(range(trials))
    print(f"{kills} kills: {len(ended)} of {trials} trials had ended when the last one came")
    assert {trial["state"] for trial in study["trials"]} <= {"complete", "pruned"}
    assert all(
        trial["plan"] == ("data=2" if trial["params"]["width"] % 2 else "single")
        for trial in study["trials"]
    )


def test_a_trial_that_was_running_starts_again_with_its_parameters(
    job: str, tmp_path: Path, wait_for: Callable[..., None], start_child: Callable[..., Any]
):
    """As the controller is alone in writing what was sampled, it finds it again."""
    run = tmp_path / "run"
    child = start_child(
        lambda: pl.search(job, 1, settings={**SLOW, "epochs": 1000}, procs=1, run=run)
    )
    wait_for(lambda: (run / "trials" / "0" / "metrics.jsonl").exists())
    kill_after(child, 0.1, wait_for)
    with pytest.raises(UsageError, match="begun with fixed"):
        pl.search(job, 1, settings=SLOW, procs=1, run=run, resume=True)
    study = optuna.load_study(study_name="run", storage=open_storage(None, run))
    (before,) = study.trials
    assert before.state == optuna.trial.TrialState.RUNNING
    with pytest.raises(PacelineError, match="1 pruned"):
        pl.search(
            job,
            1,
            settings={**SLOW, "epochs": 1000},
            procs=1,
            run=run,
            resume=True,
            pruner=optuna.pruners.ThresholdPruner(upper=-1.0),
        )
    (after,) = json.loads((run / "study.json").read_text())["trials"]
    assert after["params"] == before.params and after["number"] == 0


@pytest.mark.slow
def test_a_torn_journal_and_a_lock_that_is_left_are_put_right(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a kill in the middle of a write leaves would make the journal unreadable, or be waited for."""
    from optuna.storages.journal import JournalFileSymlinkLock

    run = tmp_path / "run"
    pl.search(job, 2, settings=WORKS, procs=1, run=run)
    with open(run / JOURNAL, "a") as file:
        file.write('{"op_code": 4, "work')
    (run / f"{JOURNAL}.lock").symlink_to(run / JOURNAL)
    monkeypatch.setattr(JournalFileSymlinkLock.__init__, "__defaults__", (1000,))  # seconds
    study = pl.search(job, 4, settings=WORKS, procs=1, run=run, resume=True)
    assert len(study["trials"]) == 4


def test_a_resumed_study_draws_other_trials_than_before(job: str, tmp_path: Path):
    """The sampler's seed is not begun anew."""
    run = tmp_path / "run"
    for trials in (2, 4):
        study = pl.search(
            job,
            trials,
            settings=WORKS,
            procs=1,
            run=run,
            sampler="random",
            pruner="none",
            resume=True,
        )
    assert len({trial["params"]["lr"] for trial in study["trials"]}) == 4


def test_a_study_that_chooses_from_other_values_now_is_refused_before_a_trial(
    job: str, tmp_path: Path
):
    """Optuna can't go on with it. Other ends of a range, and another parameter, are no reason."""
    run = tmp_path / "run"
    pl.search(job, 1, settings={**WORKS, "pause_s": 0}, vary={"epochs": "1,2"}, procs=1, run=run)
    for vary, message in (
        ({"epochs": "1,2,3"}, r"epochs from 1 or 2, and it is from 1 or 2 or 3 now"),
        ({"epochs": "1..2"}, r"epochs from 1 or 2, and it is from 1\.\.2 now"),
        ({"epochs": "1,2", "lr": "1e-4..1e-1"}, r"lr from 0\.0001\.\.0\.1:log, and it is from"),
    ):
        with pytest.raises(UsageError, match=message):
            pl.search(
                job, 2, settings={**WORKS, "pause_s": 0}, vary=vary, procs=1, run=run, resume=True
            )
    text = Path(job).read_text()
    Path(job).write_text(text.replace('["relu", "tanh"]', '["relu", "tanh", "silu"]'))
    with pytest.raises(
        UsageError, match=r"net\.act from relu or tanh, and it is from relu or tanh or silu now"
    ):
        pl.search(
            job,
            2,
            settings={**WORKS, "pause_s": 0},
            vary={"epochs": "1,2"},
            procs=1,
            run=run,
            resume=True,
        )
    Path(job).write_text(
        text.replace("epochs: int = 3", "decay: Literal[0, 1] = 0, epochs: int = 3")
    )
    study = pl.search(
        job,
        2,
        settings={**WORKS, "pause_s": 0},
        vary={"epochs": "1,2", "width": "2..32"},
        procs=1,
        run=run,
        resume=True,
    )
    assert [trial["state"] for trial in study["trials"]] == ["complete"] * 2


def test_a_folder_with_a_search_is_not_taken_for_another(job: str, tmp_path: Path):
    """Unless it is resumed, and then for the same objectives."""
    run = tmp_path / "run"
    pl.search(job, 1, settings=WORKS, procs=1, run=run)
    with pytest.raises(UsageError, match="already holds a search"):
        pl.search(job, 2, settings=WORKS, procs=1, run=run)
    with pytest.raises(
        UsageError, match="begun with objectives \\['validation_loss'\\], not \\['worst:max'\\]"
    ):
        pl.search(job, 2, settings=WORKS, procs=1, run=run, resume=True, objective="worst:max")
    assert len(json.loads((run / "study.json").read_text())["trials"]) == 1


def test_a_search_that_is_asked_to_stop_says_how_to_go_on(
    job: str, tmp_path: Path, start_child: Callable[..., Any], wait_for: Callable[..., None]
):
    """Ctrl-C leaves study.json, and exit code 5."""
    run = tmp_path / "run"
    child = start_child(lambda: pl.search(job, 200, settings=SLOW, procs=2, run=run))
    wait_for(lambda: (run / "trials" / "2").exists())
    os.kill(child.pid, signal.SIGINT)
    assert child.exit_code() == 5
    assert "stopped by SIGINT" in child.stderr and "--resume" in child.stderr
    assert json.loads((run / "study.json").read_text())["trials"]
