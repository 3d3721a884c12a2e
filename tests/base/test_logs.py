"""Who prints what: rank 0 on the terminal, warnings once, everything of every rank in its file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.base.logs import logger


def noisy(context: Any) -> None:
    """Every way to say something."""
    warnings.simplefilter("default")
    print(f"print of {context.rank}")
    print(f"stderr of {context.rank}", file=sys.stderr)
    logger.info("info of %d", context.rank)
    logger.debug("debug of %d", context.rank)
    logging.getLogger("user").warning("all are warned")
    logging.getLogger("user").warning("warning of %d", context.rank)
    warnings.warn("old way", stacklevel=1)
    os.write(1, f"from C, {context.rank}\n".encode())
    if context.world_size > 1:
        dist.all_reduce(torch.ones(1))


def test_every_rank_has_its_log(
    run_ranks: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """A rank's file holds what it printed, logged and was warned of; another rank's words are not in it."""
    run_ranks(noisy, 3, run_dir=tmp_path)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        f"rank-{rank}.log" for rank in range(3)
    ]
    for rank in range(3):
        text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        for words in ("print of", "stderr of", "info of", "warning of"):
            assert f"{words} {rank}\n" in text
        assert "all are warned" in text
        assert "UserWarning: old way" in text
        assert not any(f"of {other}" in text for other in range(3) if other != rank)
        if rank:
            assert f"from C, {rank}" in text


def test_the_terminal_hears_rank_0_and_each_warning_once(
    run_ranks: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """INFO and prints are rank 0's; a warning of all ranks is shown once, one of a single rank with its number."""
    run_ranks(noisy, 3, run_dir=tmp_path)
    shown = capfd.readouterr()
    assert all(f"{words} 0\n" in shown.err for words in ("print of", "stderr of", "info of"))
    assert not any(
        f"{words} {rank}" in shown.err
        for words in ("print of", "stderr of", "info of")
        for rank in (1, 2)
    )
    assert shown.err.count("all are warned") == 1
    assert shown.err.count("UserWarning: old way") == 1
    assert all(f"[rank {rank}] warning: warning of {rank}\n" in shown.err for rank in range(3))
    assert "debug of" not in shown.err
    assert "print" not in shown.out  # stdout is for the result


def test_without_a_folder_nothing_is_written(
    run_ranks: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Runs that leave no folder, such as those of verify, print rank 0's words alone and make no file."""
    monkeypatch.chdir(tmp_path)
    run_ranks(noisy, 2)
    shown = capfd.readouterr()
    assert "print of 0\n" in shown.err
    assert not any(f"{words} 1" in shown.err for words in ("print of", "stderr of", "info of"))
    assert "[rank 1] warning: warning of 1" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_logs_of_a_resumed_run_follow_on(run_ranks: Callable[..., Any], tmp_path: Path):
    """A second launch in the folder adds to the files."""
    for _ in range(2):
        run_ranks(noisy, 1, run_dir=tmp_path)
    assert (tmp_path / "logs" / "rank-0.log").read_text().count("print of 0\n") == 2


def test_the_parents_logging_stays_its_own(run_ranks: Callable[..., Any]):
    """Ranks set up logging for themselves."""
    before = (list(logging.getLogger().handlers), sys.stdout, sys.stderr)
    run_ranks(noisy, 1)
    assert (list(logging.getLogger().handlers), sys.stdout, sys.stderr) == before
