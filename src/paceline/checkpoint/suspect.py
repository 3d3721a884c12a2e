"""Marks checkpoints that wrong arithmetic may have reached. Each marked folder holds a file that
says so, and a resumed run passes over these checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.runs.folder import CHECKPOINTS

SUSPECT = "SUSPECT"  # the name of the file
_STEP = re.compile(r"step-(\d+)")


def mark_suspect(run_dir: Path, *, after: int) -> None:
    """Mark all checkpoints after a step. If the disk is full, they stay unmarked."""
    for step, path in _saved(run_dir):
        if step > after:
            with suppress(OSError):
                (path / SUSPECT).write_text(
                    f"gradients were wrong after this was saved, and were last found right after step {after}\n"
                )


def suspect_steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints that are marked."""
    return sorted(step for step, path in _saved(run_dir) if (path / SUSPECT).exists())


def why_suspect(path: Path) -> str | None:
    """Return why a checkpoint should be passed over; None if it isn't marked."""
    if not (path / SUSPECT).exists():
        return None
    return (
        f"wrong arithmetic may have reached it: gradients were found wrong after it was saved; remove its file "
        f"{SUSPECT} to use it all the same"
    )


def _saved(run_dir: Path) -> Iterator[tuple[int, Path]]:
    for path in (run_dir / CHECKPOINTS).glob("step-*"):
        if match := _STEP.fullmatch(path.name):
            yield int(match[1]), path
