"""Reads a run folder as values: its measurements, its prediction, and its history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError
from paceline.runs import documents, folder
from paceline.runs.metrics import read_history
from paceline.training.trace import PICTURE, TRACE

if TYPE_CHECKING:
    from paceline.runs.journal import Launch

CERTIFICATE = "certificate.json"


@dataclass(frozen=True)
class Start:
    """One start of the ranks."""

    launch: Launch
    reached: int | None  # the last update before; None at the first start

    @property
    def undone(self) -> int:
        """The number of updates that were applied before and are computed again."""
        return max(0, (self.reached or 0) - self.launch.after)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder. Times are in seconds, memory is in bytes."""

    path: Path
    plan: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict)  # empty if the run did not end
    predicted: Mapping[str, Any] = field(default_factory=dict)  # empty without a prediction
    # The lines of metrics.jsonl by kind.
    steps: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    saves: tuple[Mapping[str, Any], ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()  # of parameter servers
    schedule: str | None = None  # the picture that `--trace` draws
    # The trace's complete events, each with its kind, start and duration in microseconds.
    traced: tuple[Mapping[str, Any], ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    failure: Mapping[str, Any] = field(default_factory=dict)  # why the run did not end, if known
    saved_step: int = 0  # of the newest checkpoint; 0 without one

    @classmethod
    def read(cls, run: str | Path) -> RunRecord:
        """Read a run folder.

        Raises:
            UsageError: this is no run folder, or one of its files is damaged.
        """
        path = Path(run)
        if not (path / folder.PLAN).exists():
            raise UsageError(
                f"{path} is not the folder of a run: it has no {folder.PLAN}",
                hint="paceline train JOB --run DIR writes one",
            )
        rows = read_history(path)
        logged = {row["step"]: {"metrics": row["logged"]} for row in rows if "logged" in row}
        trace = _read(path, TRACE)
        return cls(
            path,
            _read(path, folder.PLAN),
            folder.read_summary(path),
            _read(path, folder.PREDICTED),
            tuple(row | logged.get(row["step"], {}) for row in rows if "loss" in row),
            tuple(row for row in rows if "validation_loss" in row),
            tuple(row for row in rows if row.get("saved")),
            tuple(documents.read_lines(path / folder.EVENTS)),
            _picture(path / PICTURE),
            tuple(_events(trace)),
            _read(path, folder.ORIGIN),
            _read(path, folder.JOB),
            folder.read_failure(path),
            max(folder.checkpoints_of(path), default=0),
        )

    def starts(self) -> list[Start]:
        """Return each start of the ranks, as the journal records them. Damaged lines are left out;
        `paceline audit` names them.

        Raises:
            UsageError: the journal can't be read.
        """
        from paceline.runs import journal

        path, starts, reached = self.path / folder.JOURNAL, list[Start](), None
        try:
            for _, record in journal.read(path) if path.exists() else ():
                if isinstance(record, journal.Launch):
                    starts.append(Start(record, reached))
                    reached = record.after
                elif record is not None:
                    reached = max(reached or 0, record.step)
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from error
        return starts

    @property
    def name(self) -> str:
        return self.path.resolve().name


def _read(path: Path, name: str) -> dict[str, Any]:
    return dict(folder.read_document(path, name)) if (path / name).exists() else {}


def _events(trace: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    events = trace.get("traceEvents", ())
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict) and event.get("ph") == "X":
            yield documents.checked(event, documents.TraceEvent, TRACE)


def _picture(path: Path) -> str | None:
    try:
        return path.read_text() if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
