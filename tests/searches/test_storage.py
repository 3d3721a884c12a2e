"""Studies in databases: shared ones, ones that are down or locked, and what controllers of dead machines leave."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from jobs.studies import WORKS
from later import needed

import paceline as pl
from paceline.base.errors import PacelineError
from paceline.searches import storage
from paceline.searches.storage import Heartbeats, StorageError, open_storage, opened
from paceline.searches.trials import counted


def _postgres(name: str) -> str | None:
    paths = [*Path("/usr/lib/postgresql").glob(f"*/bin/{name}")]
    return str(paths[-1]) if paths else shutil.which(name)


@pytest.fixture
def postgres() -> Iterator[str]:
    """The URL of a database in a server that lives as long as the test."""
    initdb, server = _postgres("initdb"), _postgres("pg_ctl")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed: apt install postgresql")
    needed("psycopg", "'psycopg[binary]'")
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path may have 107 bytes
    as_user: dict[str, Any] = {}
    if os.getuid() == 0:  # the server refuses to be root
        owner = pwd.getpwnam("postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        as_user = {"user": owner.pw_uid, "group": owner.pw_gid}

    def run(*words: str) -> None:
        subprocess.run(
            words, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=200, **as_user
        )

    try:
        run(initdb, "-D", f"{folder}/data", "-U", "paceline", "-A", "trust")
        run(
            server,
            "-D",
            f"{folder}/data",
            "-l",
            f"{folder}/log",
            "-w",
            "-o",
            f"-k {folder} -c listen_addresses=''",
            "start",
        )
        yield f"postgresql+psycopg://paceline@/postgres?host={folder}"
    finally:
        subprocess.run(
            [server, "-D", f"{folder}/data", "-m", "immediate", "stop"],
            cwd="/",
            stdout=subprocess.DEVNULL,
            **as_user,
        )
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_two_controllers_share_a_study_in_postgresql(
    job: str, tmp_path: Path, postgres: str, start_child: Callable[..., Any]
):
    """Each has its own run folder; together they run as many trials as were asked for."""

    def half(name: str) -> Callable[[], Any]:
        return lambda: pl.search(
            job,
            10,
            settings={**WORKS, "pause_s": 0.01},
            procs=1,
            storage=postgres,
            study="shared",
            run=tmp_path / name,
            pruner="none",
        )

    children = [start_child(half(name)) for name in ("one", "two")]
    for child in children:
        assert child.exit_code() == 0, child.stderr
    with opened(postgres, tmp_path) as database:
        study = optuna.load_study(study_name="shared", storage=database)
        assert [trial.state.name for trial in counted(study)] == ["COMPLETE"] * 10
    assert all(list((tmp_path / name / "trials").iterdir()) for name in ("one", "two"))


@pytest.mark.slow
def test_a_database_that_is_down(job: str, tmp_path: Path):
    """The message names it, and what can be done."""
    with pytest.raises(
        StorageError, match=r"(?s)can't use the study's database postgresql.*is the database up"
    ):
        pl.search(
            job,
            2,
            settings=WORKS,
            procs=1,
            run=tmp_path / "run",
            storage=f"postgresql+psycopg://paceline@/postgres?host={tmp_path}",
        )


def test_a_database_that_stays_locked(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is waited for first."""
    monkeypatch.setattr(storage, "_BUSY_S", 0.2)
    path = tmp_path / "study.db"
    with opened(f"sqlite:///{path}", tmp_path):
        pass
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            StorageError, match=r"(?s)database is locked.*another process keeps it locked"
        ):
            pl.search(
                job, 2, settings=WORKS, procs=1, run=tmp_path / "run", storage=f"sqlite:///{path}"
            )
    finally:
        connection.close()


def test_an_unknown_kind_of_database(tmp_path: Path):
    """And a folder that isn't there."""
    with pytest.raises(StorageError, match=r"(?s)sqlit.*hint: sqlite:///FILE.db"):
        open_storage("sqlit:///study.db", tmp_path)
    with pytest.raises(PacelineError, match="unable to open"):
        open_storage(f"sqlite:///{tmp_path}/none/study.db", tmp_path)


@pytest.mark.slow
def test_trials_of_a_machine_that_says_nothing_any_more_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., None]
):
    """Under another number, with their parameters; they count once."""
    monkeypatch.setattr(storage, "HEARTBEAT_S", 1.0)
    monkeypatch.setattr(storage, "_GRACE_S", 1.0)
    with opened(f"sqlite:///{tmp_path}/study.db", tmp_path) as database:
        study = optuna.create_study(storage=database)
        with pytest.warns(UserWarning, match="Heartbeat"):
            lost = study.ask()
        value = lost.suggest_float("x", 0, 1)
        Heartbeats(study).beat([lost._trial_id])

        def is_given_up() -> bool:
            Heartbeats(study).beat([])
            return len(study.trials) == 2

        wait_for(is_given_up)
        again = counted(study)
        assert [(trial.number, trial.state.name, trial.params) for trial in again] == [
            (1, "WAITING", {"x": value})
        ]
