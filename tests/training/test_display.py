"""Progress: a live line on a terminal, plain lines elsewhere, and a log that holds no drawing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.base.logs import logger
from paceline.training import display
from paceline.training.display import Display, Progress

PROGRESS = Progress(
    step=30,
    total_steps=1000,
    epoch=1,
    loss=0.51234,
    samples_per_s=12_345.6,
    step_s=0.004,
    memory_bytes=300 * 2**20,
    predicted_step_s=0.005,
)


def test_progress_in_a_line():
    """Step, epoch from 1, loss, speed, measured and predicted step time, memory and time left."""
    assert str(PROGRESS) == (
        "step 30/1000  epoch 2  loss 0.5123  12,346 samples/s  4 ms/step (predicted 5 ms)  "
        "300 MiB, 0:00:04 left"
    )


def test_progress_of_a_stream():
    """Without a known end and a prediction nothing is made up."""
    shown = str(
        Progress(
            step=7,
            total_steps=None,
            epoch=0,
            loss=2.0,
            samples_per_s=3.0,
            step_s=2.5,
            memory_bytes=0,
            predicted_step_s=None,
        )
    )
    assert shown == "step 7  epoch 1  loss 2.0000  3 samples/s  2,500 ms/step  0 MiB"


def work(context: Any) -> bool:
    """What rank 0 of a run shows. Returns whether it was live."""
    shown = Display(shown=context.rank == 0)
    assert shown.live is None, "a run that is refused before its first step would not close it"
    shown.say("said")
    for _ in range(3):
        shown.last_s -= 60
        if shown.due():
            shown.update(PROGRESS)
    live = shown.live is not None
    print("printed")
    logger.warning("warned")
    shown.close()
    print("after", file=sys.stderr)
    return live


@pytest.mark.slow
def test_plain_lines_where_there_is_no_terminal(
    run_ranks: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Progress is a plain line, in the log too; the other ranks are silent."""
    assert run_ranks(work, 2, run_dir=tmp_path) == [False, False]
    shown = capfd.readouterr().err
    for text in (shown, (tmp_path / "logs" / "rank-0.log").read_text()):
        assert text.count(str(PROGRESS)) == 3
        assert text.count("said\n") == text.count("printed\n") == 1
        assert "\x1b" not in text
    assert str(PROGRESS) not in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_plain_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch):
    """Off a terminal a line is due at once, then after ever longer pauses, at last every 30 seconds."""
    now_s = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now_s)
    shown, hidden, due = Display(shown=True), Display(shown=False), []
    for _ in range(100):
        now_s += 1.0
        due += [now_s] if shown.due() else []
        assert not hidden.due()
    assert due == [101.0, 102.0, 104.0, 108.0, 116.0, 132.0, 162.0, 192.0]


def test_a_live_line_on_a_terminal(
    start_child: Any, run_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is printed or warned of meanwhile stands above the line, and the log holds the words alone."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    parent_fd, child_fd = os.openpty()

    def on_terminal() -> None:
        os.dup2(child_fd, 2)
        assert run_ranks(work, 1, run_dir=tmp_path) == [True]

    child = start_child(on_terminal)
    assert child.exit_code() == 0, child.stderr
    os.close(child_fd)
    terminal = b""
    while True:
        try:
            terminal += os.read(parent_fd, 4096)
        except OSError:  # all of it is read
            break
    os.close(parent_fd)
    shown, log = terminal.decode(), (tmp_path / "logs" / "rank-0.log").read_text()
    assert "loss 0.5123" in shown
    assert "\x1b" in shown
    for words in ("said", "printed", "warned", "after"):
        assert shown.count(words) == log.count(words) == 1
    assert "\x1b" not in log
    assert "loss" not in log
