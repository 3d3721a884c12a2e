"""Signs of life outlive the rank that gave them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.launch.process.heartbeats import PHASES, Heartbeat, HeartbeatTable


def test_a_sign_is_read_by_the_parent_after_its_rank_died():
    """What a fork wrote stays readable when it is gone, and the entries of other ranks are their own."""
    board = HeartbeatTable(3)
    if (pid := os.fork()) == 0:
        board.write(1, 7, "backward")
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    sign = board.read(1)
    assert (sign.step, sign.phase) == (7, "backward")
    assert sign.time_s >= board.read(2).time_s
    assert [(board.read(rank).step, board.read(rank).phase) for rank in (0, 2)] == [
        (0, "start")
    ] * 2


def test_a_sign_is_never_half_written():
    """Whoever reads while its rank writes sees an earlier sign or the next one, and no time but of one of them."""
    board, started_s = HeartbeatTable(2), time.monotonic()
    if (pid := os.fork()) == 0:
        while True:
            board.write(1, 7, "backward")
    try:
        while board.read(1).step == 0:
            pass
        signs = {
            (sign.step, sign.phase, sign.time_s >= started_s)
            for sign in (board.read(1) for _ in range(100_000))
        }
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert signs == {(7, "backward", True)}


def test_every_phase_can_be_written():
    """Each phase comes back as it was written; an unknown one is our own mistake."""
    board = HeartbeatTable(1)
    for step, phase in enumerate(PHASES):
        board.write(0, step, phase)
        assert (board.read(0).step, board.read(0).phase) == (step, phase)
    with pytest.raises(ValueError, match="tuple"):
        board.write(0, 1, "lunch")


def test_a_sign_in_words():
    """Before the first step there is no number to tell."""
    assert str(Heartbeat(12, "reduce", 0.0)) == "step 12 (reduce)"
    assert str(Heartbeat(0, "build", 0.0)) == "start (build)"


def test_ranks_that_somebody_else_started_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each opens it; none is left behind, and what they opened goes on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tables = [HeartbeatTable.of_launch("abc", 3) for _ in range(2)]
    for rank, table in enumerate(tables):
        table.write(rank, 3, "reduce")
    for table in tables:
        table.remove()

    assert [str(tables[0].read(rank)) for rank in range(3)] == [
        *["step 3 (reduce)"] * 2,
        "start (start)",
    ]
    assert not [*tmp_path.iterdir()]
