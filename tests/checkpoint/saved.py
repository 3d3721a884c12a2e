"""What of a run's checkpoints is on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoint import newest_checkpoint


def names(run_dir: Path) -> list[str]:
    """Of the folders in `checkpoints/`, in order."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def newest_step(run_dir: Path) -> int:
    """Of the newest whole checkpoint, which nothing warns of."""
    checkpoint = newest_checkpoint(run_dir, accept=lambda _: None, warn=pytest.fail)
    assert checkpoint is not None
    return checkpoint.step
