"""Temporary folders end with their owner, killed or not."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.base.temporary import temporary_folder
from paceline.launch.process.heartbeats import HeartbeatTable


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders lie."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def fill(lives: Path, word: str) -> None:
    """Own a folder with something in it, and live."""
    with temporary_folder(word) as folder:
        (folder / "store").mkdir()
        (folder / "store" / "file").write_text("something")
        lives.touch()
        signal.pause()


def test_what_a_killed_owner_left_is_removed_by_the_next(
    start_child: Callable[..., Any], wait_for: Callable[..., None], tmp_path: Path, temporary: Path
) -> None:
    """And nothing else: neither what another owner uses, nor folders of another make."""
    owners = [
        start_child(lambda number=number: fill(tmp_path / f"{number}", f"of-{number}"))
        for number in range(2)
    ]
    for number in range(2):
        wait_for((tmp_path / f"{number}").exists)
    (temporary / "paceline-of-somebody").mkdir()
    os.kill(owners[0].pid, signal.SIGKILL)
    assert owners[0].exit_code() == -signal.SIGKILL

    with temporary_folder() as folder:
        names = {path.name.rpartition("-")[0] for path in temporary.iterdir() if path != folder}

    assert names == {"paceline-of-1", "paceline-of"}
    assert not folder.exists()


def test_a_fork_that_outlives_its_owner_keeps_the_folder(
    start_child: Callable[..., Any], wait_for: Callable[..., None], tmp_path: Path, temporary: Path
) -> None:
    """It may still write there."""

    def keep_folder() -> None:
        with temporary_folder("kept"):
            if os.fork() == 0:
                (tmp_path / "pid").write_text(str(os.getpid()))
                signal.pause()
            wait_for((tmp_path / "pid").exists)
            os._exit(0)

    assert start_child(keep_folder).exit_code() == 0
    fork = int((tmp_path / "pid").read_text())
    try:
        with temporary_folder():
            assert list(temporary.glob("paceline-kept-*"))
    finally:
        os.kill(fork, signal.SIGKILL)

    def is_removed() -> bool:
        with temporary_folder():
            return not list(temporary.glob("paceline-kept-*"))

    wait_for(is_removed)  # once the fork's end has given the lock back


def test_who_cleans_old_files_away_passes_over_a_folder_in_use() -> None:
    """systemd-tmpfiles looks for a lock of each folder, of any kind, before it looks into it."""
    with temporary_folder() as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_nothing_is_opened_that_waits_or_is_of_another_user(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pipe would hold up everybody's starts, and the lock of another user's folder is not ours to take."""
    for name in ("paceline-pipe", "paceline-link", "paceline-theirs"):
        (temporary / name).mkdir()
    os.mkfifo(temporary / "paceline-pipe" / "owner.lock")
    (temporary / "paceline-link" / "owner.lock").symlink_to(
        temporary / "paceline-pipe" / "owner.lock"
    )
    (temporary / "paceline-theirs" / "owner.lock").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with temporary_folder():
        pass

    assert {path.name for path in temporary.iterdir()} == {
        "paceline-pipe",
        "paceline-link",
        "paceline-theirs",
    }
    os.mkfifo(temporary / "paceline-signs-mine")
    assert not HeartbeatTable.of_launch("mine", 2).is_shared
