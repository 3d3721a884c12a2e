"""A checkpoint that nobody waits for is written so that the steps beside it have the cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import pieces_of, write
from paceline.checkpoint.files import BUFFER_BYTES
from paceline.checkpoint.pace import SHARE, Pace
from paceline.checkpoint.write import Writer


class Clock(threading.Event):
    """What is waited for, in a time that passes by itself alone. core_s: that the thread has had of a core."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.core_s = 100.0, 5.0
        self.pauses_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout > 0
        self.pauses_s.append(timeout)
        self.now_s += timeout
        return False

    def compute(self, seconds: float) -> None:
        self.now_s, self.core_s = self.now_s + seconds, self.core_s + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(time, "thread_time", lambda: clock.core_s)
    return clock


def test_a_thread_has_its_share_of_a_core(clock: Clock):
    """Each pause makes up for what a buffer took."""
    pace = Pace(1000, 1e6, clock)
    for used_s in (0.1, 0.3):
        clock.compute(used_s)
        pace.wrote(100)
    assert [
        used_s / (used_s + pause_s)
        for used_s, pause_s in zip((0.1, 0.3), clock.pauses_s, strict=True)
    ] == (pytest.approx([SHARE, SHARE]))


def test_pauses_have_an_end(clock: Clock):
    """The next save would wait for this one."""
    pace = Pace(1000, 4.0, clock)
    for _ in range(10):
        clock.compute(0.2)
        pace.wrote(100)
    assert sum(clock.pauses_s) == pytest.approx(2.0)


def test_what_is_slow_anyway_does_not_pause(clock: Clock):
    pace = Pace(1000, 4.0, clock)
    for _ in range(10):
        clock.compute(0.5)
        pace.wrote(100)
    Pace(1000, 0.0, clock).wrote(100)
    assert not clock.pauses_s


def test_a_save_that_is_waited_for_does_not_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is written slowly until then, and at once from then on."""
    paused, wait = threading.Event(), threading.Event.wait

    def wrote(self: Pace, num_bytes: int) -> None:
        paused.set()
        wait(self.hurry, 1e6)

    monkeypatch.setattr(Pace, "wrote", wrote)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="once")
    writer.save(1, pieces_of("w", torch.zeros(3 * BUFFER_BYTES, dtype=torch.uint8)))
    assert paused.wait(30)
    assert not (tmp_path / "checkpoints" / "step-1" / write.COMMIT).exists()
    writer.wait()
    assert (tmp_path / "checkpoints" / "step-1" / write.COMMIT).exists()
