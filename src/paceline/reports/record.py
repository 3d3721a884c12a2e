"""A run folder as values: what it measured, what was predicted for it, what happened to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.callbacks.handle import read_history
from paceline.errors import UsageError
from paceline.runtime import folder
from paceline.runtime.trace import PICTURE, TRACE

CERTIFICATE = "certificate.json"
STUDY = "study.json"


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds. Times are in seconds, memory is in bytes.

    summary: empty of a run that did not end. predicted: empty where there was no prediction. steps, evaluations,
    saves: the lines of metrics.jsonl by kind. events: of parameter servers. schedule: the picture that `--trace` draws.
    traced: the trace's complete events, each with its kind, start and duration in microseconds.
    """

    path: Path
    plan: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    saves: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    schedule: str | None = None
    traced: tuple[Mapping[str, Any], ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, run: str | Path) -> RunRecord:
        """
        Raises:
            UsageError: this is no run folder, or one of its files is damaged.
        """
        path = Path(run)
        if not (path / folder.PLAN).exists():
            raise UsageError(f"{path} is not the folder of a run: it has no {folder.PLAN}",
                             hint="paceline train JOB --run DIR writes one")
        rows = read_history(path)
        trace = _read(path, TRACE)
        picture = path / PICTURE
        return cls(path, _read(path, folder.PLAN), folder.read_summary(path), _read(path, folder.PREDICTED),
                   tuple(row for row in rows if "loss" in row),
                   tuple(row for row in rows if "validation_loss" in row),
                   tuple(row for row in rows if row.get("saved")), tuple(_lines(path / folder.EVENTS)),
                   picture.read_text() if picture.exists() else None,
                   tuple(event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"),
                   _read(path, folder.ORIGIN), _read(path, folder.JOB))

    @property
    def name(self) -> str:
        return self.path.resolve().name


def _read(path: Path, name: str) -> dict[str, Any]:
    return dict(folder.read_document(path, name)) if (path / name).exists() else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON; a last line that a killed run left unfinished is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
