"""The figures that a run keeps of its steps, evaluations and checkpoints: `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.runs.documents import metrics_kind, read_lines
from paceline.runs.folder import METRICS


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`; none if there is no such file.

    Raises:
        UsageError: the file can't be read.
    """
    return list(read_lines(run_dir / METRICS, metrics_kind))
