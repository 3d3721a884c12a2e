"""The types of the documents in a run folder, by file, and a reader that checks documents against
them.

The reader checks because somebody else may have written a document. Fields that are not named here
may hold anything.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

import msgspec

from paceline.base.errors import UsageError

Real = Annotated[
    float, msgspec.Meta(ge=-1e300, le=1e300)
]  # sums and products with units stay finite
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Figures = dict[str, Real | None]
Computed = (
    float  # by the job's own functions, or of its model: NaN and infinity are such figures, too
)


class PlanDocument(TypedDict, total=False):
    """The content of plan.json."""

    plan: Required[str]
    world_size: Count
    devices: str


class JobDocument(TypedDict, total=False):
    """The content of job.json."""

    path: Required[str]
    function: Required[str]
    settings: Required[dict[str, Any]]


class CheckDocument(TypedDict, total=False):
    """The check of the first update, in summary.json."""

    verdict: Required[str]
    reason: str | None


class FailureDocument(TypedDict, total=False):
    """The error that ended a run, in summary.json."""

    reason: Required[str]
    message: Required[str]
    hint: str | None
    where: str | None
    rank: Count
    step: Count


class SummaryDocument(TypedDict, total=False):
    """The content of summary.json. It has `steps` if the run did not fail."""

    plan: str
    steps: Count
    samples: Count
    samples_per_s: Real | None
    step_s: Real | None
    later_step_s: Real | None
    input_s: Real | None
    wall_s: Real | None
    core_wait_s: Real | None
    save_blocked_s: Real | None
    final_loss: Real | None
    validation_loss: Computed | None
    peak_memory_bytes: Real | None
    bytes_sent: Real | None
    metrics: dict[str, Computed | str | bool | None] | None
    check: CheckDocument | None
    staleness: dict[str, Count] | None
    workers: dict[str, Figures] | None
    failure: FailureDocument


class RankMemoryDocument(TypedDict, total=False):
    """The memory of ranks that are alike, in predicted.json."""

    rank: Required[str | int]
    ledger: Required[dict[str, Real]]


class ConsideredDocument(TypedDict, total=False):
    """A plan that was considered when the run's plan was chosen."""

    plan: Required[str]
    step_s: Required[Real]
    peak_memory_bytes: Required[Real]


class PredictedDocument(TypedDict, total=False):
    """The content of predicted.json."""

    step_s: Real | None
    step_s_low: Real | None
    step_s_high: Real | None
    peak_memory_bytes: Real | None
    breakdown: dict[str, Real] | None
    ledger: dict[str, Real] | None
    ranks: list[RankMemoryDocument] | None
    considered: list[ConsideredDocument]


class StepRow(TypedDict, total=False):
    """A line of metrics.jsonl with a loss: a step."""

    step: Required[Count]
    loss: Required[Real | None]
    step_s: Required[Real]
    samples: Required[Count]
    lr: Real | None
    metrics: dict[str, Real | None] | None


class OtherRow(TypedDict, total=False):
    """A line of metrics.jsonl without a loss: an evaluation or a save."""

    step: Required[Count]
    validation_loss: Computed | None
    metrics: dict[str, Computed | None] | None
    saved: bool


class TrialDocument(TypedDict, total=False):
    """A trial, in study.json."""

    number: Required[Count]
    state: Required[str]
    params: Required[dict[str, Any]]
    value: Real | None
    values: list[Real] | None
    ended_s: Real | None


class ObjectiveDocument(TypedDict, total=False):
    """An objective, in study.json."""

    name: Required[str]
    direction: Required[str]


class BestTrialDocument(TypedDict, total=False):
    """The best trial, in study.json."""

    trial: Required[Count]
    value: Required[Real | None]
    params: Required[dict[str, Any]]
    command: str | None


class StudyDocument(TypedDict, total=False):
    """The content of study.json."""

    study: Required[str]
    trials: Required[list[TrialDocument]]
    objectives: Required[Annotated[list[ObjectiveDocument], msgspec.Meta(min_length=1)]]
    best: BestTrialDocument | None
    pareto: list[TrialDocument] | None
    importances: dict[str, Real | dict[str, Real]] | None
    test: dict[str, Real | None] | None


class TraceEvent(TypedDict, total=False):
    """An event of trace.json that has a duration."""

    ts: Required[Real]
    dur: Required[Real]
    pid: Required[int | str]
    cat: Required[str]
    ph: Required[str]


def read(path: Path, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """Read a document of that kind.

    Raises:
        UsageError: the file doesn't exist, is no JSON, or holds something else.
    """
    try:
        return checked(json.loads(_bytes(path)), kind, path)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def read_lines(path: Path, kind_of: Any = lambda row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file as documents, as `rows` does. If there is no file, there are no
    lines.

    Raises:
        UsageError: the file can't be read.
    """
    try:
        data = _bytes(path) if path.exists() else b""
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    yield from rows(data, path, kind_of)


def rows(
    data: bytes, path: Path, kind_of: Any = lambda row: dict[str, Any], *, after: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a part of a file, each as a document.

    A damaged line is named on stderr and passed over. A last line without its end is left out:
    either the run was killed while writing it, or it is being written now.

    Args:
        data: The content of the file after its first `after` bytes.
        kind_of: Gives the kind of a line's document.
    """
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
            msgspec.convert(row, kind_of(row))
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            _tell(
                f"{path} is damaged in line {number}{f' after byte {after}' if after else ''}: {error}"
            )
        else:
            yield row


@cache
def _tell(damage: str) -> None:
    print(f"warning: {damage}; the line is passed over", file=sys.stderr)


def _bytes(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.read_bytes()


def checked(document: Any, kind: Any, where: Any) -> dict[str, Any]:
    """Return the document unchanged after checking that its named fields have the types of that
    kind.

    Raises:
        UsageError: a field has another type.
    """
    try:
        msgspec.convert(document, kind)
    except (
        msgspec.ValidationError,
        UnicodeEncodeError,
    ) as error:  # JSON can hold half of a surrogate pair
        raise UsageError(f"{where} is damaged: {error}") from error
    whole: dict[str, Any] = document
    return whole


def metrics_kind(row: Any) -> Any:
    """Return the kind of a line of metrics.jsonl."""
    return StepRow if isinstance(row, dict) and "loss" in row else OtherRow
