"""One run, one folder, one writer."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import UsageError
from paceline.runs import folder


def test_fresh_names_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs that begin in one second get folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda _: "20300101-120000")
    names = []
    for _ in range(3):
        names.append(str(folder.fresh_name("digits")))
        Path(names[-1]).mkdir(parents=True)
    assert names == [
        "runs/digits-20300101-120000",
        "runs/digits-20300101-120000-2",
        "runs/digits-20300101-120000-3",
    ]


@pytest.mark.parametrize("name", [folder.METRICS, folder.SUMMARY, folder.CHECKPOINTS])
def test_a_folder_with_a_run_is_refused(tmp_path: Path, name: str):
    """An earlier run is not written over; it can be resumed."""
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"already holds a run(?s:.*)--resume goes on with it"):
        folder.check_free(tmp_path, resume=False)
    folder.check_free(tmp_path, resume=True)


def test_an_empty_or_missing_folder_is_free(tmp_path: Path):
    """A folder that holds something else, or doesn't exist yet, will do."""
    (tmp_path / "notes.txt").touch()
    folder.check_free(tmp_path, resume=False)
    folder.check_free(tmp_path / "new", resume=False)


def test_pipes_hold_nobody_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A pipe in the place of COMMIT is no checkpoint: the run goes on from the one before it. One in the place of a
    run's file is named."""
    inputs = torch.randn(16, 4)
    job = pl.Job(
        model=lambda: torch.nn.Linear(4, 1),
        data=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        batch=4,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        steps=4,
    )
    pl.train(job, "single", run=tmp_path, save_every=2, table=False)
    commit = tmp_path / "checkpoints" / "step-4" / "COMMIT"
    commit.unlink()
    os.mkfifo(commit)
    pl.train(job, "single", run=tmp_path, resume=True, table=False)
    assert "resumed from step-2" in capfd.readouterr().err
    for name in (folder.SUMMARY, folder.METRICS):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(
            UsageError, match=f"{name} is a pipe, a socket or a device(?s:.*)remove it"
        ):
            pl.train(job, "single", run=tmp_path, resume=True)
        with pytest.raises(UsageError, match="is no regular file"):
            pl.report(tmp_path)
        (tmp_path / name).unlink()


def test_a_file_is_no_folder(tmp_path: Path):
    """A file in the place of the folder is named."""
    (tmp_path / "run").touch()
    with pytest.raises(UsageError, match="run is a file and not a run folder"):
        folder.check_free(tmp_path / "run", resume=True)


def test_a_claimed_folder_is_in_use(tmp_path: Path):
    """A second claim is refused and names the process; after the first ends the folder is free again."""
    with folder.claimed(tmp_path / "run") as path:
        assert path.is_dir()
        with (
            pytest.raises(
                UsageError, match=rf"in use by a live run \(process {os.getpid()}\)(?s:.*)--run"
            ),
            folder.claimed(tmp_path / "run"),
        ):
            pytest.fail("the folder was given to two runs")
    (tmp_path / "run" / ".lock").write_text("12345678901")
    with folder.claimed(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())


def test_a_dead_run_holds_nothing(tmp_path: Path, start_child: Any, wait_for: Callable[..., None]):
    """The lock of a process that was killed is gone with it, though its number still stands in the file."""

    def hold() -> None:
        with folder.claimed(tmp_path):
            print("held", flush=True)
            os.read(os.pipe()[0], 1)

    child = start_child(hold)
    wait_for(lambda: "held" in child.stderr)
    with pytest.raises(UsageError, match=f"process {child.pid}"), folder.claimed(tmp_path):
        pytest.fail("the folder was given to two runs")
    os.kill(child.pid, 9)
    assert child.exit_code() == -9
    with folder.claimed(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_what_outlives_a_killed_run_is_waited_for(
    tmp_path: Path,
    start_child: Any,
    wait_for: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
):
    """Its ranks may end a little later than the process that was killed, and who goes on is not refused."""

    def hold() -> None:
        with folder.claimed(tmp_path):
            if (pid := os.fork()) == 0:
                signal.alarm(60)
                signal.pause()
            print(f"held by {pid} too", flush=True)
            os.read(os.pipe()[0], 1)

    child = start_child(hold)
    wait_for(lambda: "too" in child.stderr)
    fork = int(child.stderr.split("held by ")[1].split()[0])
    os.kill(child.pid, 9)
    assert child.exit_code() == -9
    monkeypatch.setattr(folder, "_ORPHANS_S", 0.0)
    with pytest.raises(UsageError, match="in use by a live run"), folder.claimed(tmp_path):
        pytest.fail("the folder was given to two runs")
    monkeypatch.setattr(folder, "_ORPHANS_S", 60.0)
    looks, runs = list[bool](), folder._runs

    def runs_then_ends(pid: str) -> bool:
        looks.append(runs(pid))
        if len(looks) == 2:
            os.kill(fork, 9)
        return looks[-1]

    monkeypatch.setattr(folder, "_runs", runs_then_ends)
    with folder.claimed(tmp_path):
        assert len(looks) >= 2 and not any(looks)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    """The message names the folder and the reason."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            UsageError, match=r"can't write the run folder .*Not a directory(?s:.*)--run DIR"
        ),
        folder.claimed(tmp_path / "file" / "run"),
    ):
        pytest.fail("a file became a folder")


def test_a_file_system_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody can hold such a folder, so it is not said to be in use."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with folder.claimed(tmp_path / "run"):
        folder.wait_until_unclaimed(tmp_path / "run", timeout_s=0.0)


def test_a_name_that_no_folder_can_have(tmp_path: Path):
    """It is refused like a folder that can't be written."""
    with pytest.raises(UsageError, match=r"can't write the run folder .*File name too long"):
        folder.check_free(tmp_path / ("a" * 300), resume=False)


def test_reading_documents(tmp_path: Path):
    """A JSON object is read; anything else is not the folder of a run."""
    (tmp_path / folder.PLAN).write_text(json.dumps({"plan": "data=2"}))
    assert folder.read_document(tmp_path, folder.PLAN) == {"plan": "data=2"}
    for text in ("{", "[1]"):
        (tmp_path / folder.PLAN).write_text(text)
        with pytest.raises(UsageError, match=r"plan\.json"):
            folder.read_document(tmp_path, folder.PLAN)
    with pytest.raises(UsageError, match=r"does not say which job it is of"):
        folder.read_document(tmp_path, folder.JOB)
    with pytest.raises(UsageError, match=r"is not the folder of a run: it has no job\.json"):
        folder.read_document(tmp_path / "nothing", folder.JOB)


def test_a_run_that_is_over_holds_nothing_though_a_fork_of_it_lives(tmp_path: Path):
    """A pool's process ends a little after the search that it was for."""
    with folder.claimed(tmp_path):
        pid = os.fork()
        if pid == 0:
            signal.pause()
    try:
        with folder.claimed(tmp_path):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_ranks_that_were_lost_before_there_was_a_folder_hold_none(tmp_path: Path):
    """Those that start again make it."""
    folder.wait_until_unclaimed(tmp_path / "run", timeout_s=1.0)
    assert not (tmp_path / "run").exists()
