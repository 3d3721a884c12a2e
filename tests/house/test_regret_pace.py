"""When the regret benchmark waits."""

from __future__ import annotations

import os

import pytest

from benchmarks.regret import __main__ as regret
from benchmarks.regret import pace
from benchmarks.regret.pace import MOST_WAITS, USUAL, Pace


def test_a_machine_that_is_slower_than_it_was_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    paces, waits = [100.0, 80.0, 84.0, 86.0], []
    monkeypatch.setattr(pace, "in_a_fork", lambda work, timeout_s: paces.pop(0))
    monkeypatch.setattr(pace.time, "sleep", waits.append)
    machine = Pace()
    machine.wait_until_usual()
    assert waits == []

    machine.wait_until_usual()
    assert len(waits) == 2 and paces == [] and USUAL == 0.85


def test_it_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    """Of a machine that becomes slower and slower."""
    paces, waits = [100.0 * 0.8**number for number in range(100)], []
    monkeypatch.setattr(pace, "in_a_fork", lambda work, timeout_s: paces.pop(0))
    monkeypatch.setattr(pace.time, "sleep", waits.append)
    machine = Pace()
    for _ in range(2):
        machine.wait_until_usual()

    assert len(waits) == MOST_WAITS


def test_a_pace_that_lasts_is_the_usual_one(monkeypatch: pytest.MonkeyPatch):
    """The best pace may have lasted for a second."""
    paces, waits = [100.0, *[10.0] * 100], []
    monkeypatch.setattr(pace, "in_a_fork", lambda work, timeout_s: paces.pop(0))
    monkeypatch.setattr(pace.time, "sleep", waits.append)
    machine = Pace()
    for _ in range(3):
        machine.wait_until_usual()

    assert len(waits) == 3


@pytest.mark.parametrize("before", [None, "7"])
def test_threads_of_a_case_are_given_back(monkeypatch: pytest.MonkeyPatch, before: str | None):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    with regret._threads(1):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ.get("OMP_NUM_THREADS") == before
