"""Compares two runs, and checks whether a figure of the second is worse than a limit allows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from paceline.base.errors import UsageError
from paceline.base.tables import aligned, in_mib, in_ms, number
from paceline.reports.diagnosis import core_wait
from paceline.reports.record import RunRecord

# The figures of summary.json that can be compared, and whether less is better.
_LESS_IS_BETTER = {
    "step_s": True,
    "samples_per_s": False,
    "final_loss": True,
    "validation_loss": True,
    "peak_memory_bytes": True,
    "wall_s": True,
    "input_s": True,
    "save_blocked_s": True,
    "bytes_sent": True,
}
_UNITS = {"step_s": in_ms, "input_s": in_ms, "peak_memory_bytes": in_mib, "bytes_sent": in_mib}
_WARM_UP_STEPS = 10  # first steps of a run, which its figures leave out, too
# A run is cut into so many parts, whose step times are compared. Fewer parts can't show the effect
# of chance.
NUM_PARTS = 8
_SPEEDS = ("step_s", "samples_per_s")
_CONDITION = re.compile(r"([a-z_0-9]+)\s*>\s*(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Condition:
    """A limit on how much worse a figure of the second run may be."""

    figure: str  # of summary.json, or a metric's name
    limit: float  # the part by which the figure may be worse: 0.05 for 5 %

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition.

        Raises:
            UsageError: the text is not FIGURE>X%.

        >>> Condition.parse("step_s>5%")
        Condition(figure='step_s', limit=0.05)
        """
        match = _CONDITION.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not FIGURE>X%", hint='--fail-if "step_s>5%"')
        return cls(match[1], float(match[2]) / 100)

    def __str__(self) -> str:
        return f"{self.figure}>{100 * self.limit:g}%"


@dataclass(frozen=True)
class FigureChange:
    """A figure of two runs, and by how much it differs."""

    figure: str
    first: Any
    second: Any
    # The part by which the second run is worse, negative if it is better; None if that means
    # nothing. Speeds are compared by the quietest part of each run.
    worse: float | None = None
    chance: float = 0.0  # a part by which equal runs differ too, as their own steps show


@dataclass(frozen=True)
class Comparison:
    """Two runs and their differences."""

    first: RunRecord
    second: RunRecord
    changes: tuple[FigureChange, ...]
    failed: tuple[Condition, ...]  # conditions that the second run does not meet

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison for `--json`."""
        return {
            "first": str(self.first.path),
            "second": str(self.second.path),
            "figures": {
                each.figure: {
                    "first": each.first,
                    "second": each.second,
                    "worse": each.worse,
                    "chance": each.chance,
                }
                for each in self.changes
            },
            "failed": [str(condition) for condition in self.failed],
        }

    def describe(self) -> str:
        """Return the comparison as text, with one line per figure."""
        return aligned(
            ("figure", self.first.name, self.second.name, "change"),
            [
                (
                    each.figure,
                    *(_shown(each.figure, value) for value in (each.first, each.second)),
                    _change(each),
                )
                for each in self.changes
            ],
        )


def compare(
    first: RunRecord, second: RunRecord, conditions: Sequence[Condition] = ()
) -> Comparison:
    """Compare two runs that have ended.

    Raises:
        UsageError: one of the runs did not end, or a condition names a figure that they don't have.
    """
    for record in (first, second):
        if not record.summary:
            raise UsageError(
                f"{record.path} did not end, so it has no figures to compare",
                hint=f"paceline train JOB --run {record.path} --resume ends it",
            )
    changes = {change.figure: change for change in _changes(first, second)}
    for condition in conditions:
        if (named := changes.get(condition.figure)) is None or named.worse is None:
            known = ", ".join(name for name, each in changes.items() if each.worse is not None)
            raise UsageError(
                f"--fail-if {condition}: both runs need a figure {condition.figure!r} that can be worse",
                hint=f"they have {known}",
            )
    failed = [
        condition
        for condition in conditions
        if _is_worse(changes[condition.figure], condition.limit)
    ]
    return Comparison(first, second, tuple(changes.values()), tuple(failed))


def _is_worse(change: FigureChange, limit: float) -> bool:
    assert change.worse is not None
    return change.worse - change.chance > limit


def _changes(first: RunRecord, second: RunRecord) -> list[FigureChange]:
    changes = [FigureChange("plan", first.plan["plan"], second.plan["plan"])]
    for name, less_is_better in _LESS_IS_BETTER.items():
        before, after = first.summary.get(name), second.summary.get(name)
        if before is None and after is None:
            continue
        worse: float | None = None
        chance = 0.0
        if before is not None and after is not None:
            if name in _SPEEDS:
                worse, chance = _slower(first, second, by_sample=name == "samples_per_s")
            else:
                worse = _worse(before, after, less_is_better=less_is_better)
        changes.append(FigureChange(name, before, after, worse, chance))
    metrics, other = first.summary.get("metrics") or {}, second.summary.get("metrics") or {}
    return [
        *changes,
        *(FigureChange(name, metrics.get(name), other.get(name)) for name in {**metrics, **other}),
    ]


def _worse(first: float, second: float, *, less_is_better: bool) -> float | None:
    if math.isfinite(first) != math.isfinite(second):  # a loss that is not a number
        return math.inf if math.isfinite(first) else -math.inf
    if not (first > 0 and second > 0):
        return 0.0 if first == second or not math.isfinite(first) else None
    return second / first - 1 if less_is_better else first / second - 1


def _slower(first: RunRecord, second: RunRecord, *, by_sample: bool) -> tuple[float, float]:
    """Return the part by which the second run's steps take longer, and the part that chance
    explains.

    Other work on the machine makes steps longer, never shorter, and often for a while. So the
    quietest eighth of each run, by its median step, is compared with that of the other.

    The part that chance explains is three times the standard error of the ratio of both runs'
    means. The error is computed from the spread of the runs' eighths: neighbouring steps are slow
    together, so single steps say too little. If other work lasted as long as the second run, no
    spread shows it. Therefore the part of the time in which a rank of the second run waited for a
    core is added.
    """
    before, after = _part_medians_s(first), _part_medians_s(second)
    samples = [_samples_a_step(record) for record in (first, second)] if by_sample else [1.0, 1.0]
    if not before or not after or min(*before, *after, *samples) <= 0:
        return 0.0, math.inf
    ratio = min(after) / min(before) * samples[0] / samples[1]
    spread = math.hypot(
        *(stdev(medians) / math.sqrt(NUM_PARTS) / mean(medians) for medians in (before, after))
    )
    waited = core_wait(second)
    return ratio - 1, 3 * spread + waited / (1 - waited)


def _part_medians_s(record: RunRecord) -> list[float]:
    """Return the median step of each part of a run, in seconds; none if the run is too short."""
    times = [row["step_s"] for row in record.steps[_WARM_UP_STEPS:]]
    size = len(times) // NUM_PARTS
    return (
        [median(times[start : start + size]) for start in range(0, size * NUM_PARTS, size)]
        if size
        else []
    )


def _samples_a_step(record: RunRecord) -> float:
    """Return the samples of a step; 0 if the run does not record them."""
    return float(
        (record.summary.get("samples_per_s") or 0.0) * (record.summary.get("step_s") or 0.0)
    )


def _shown(figure: str, value: Any) -> str:
    return "-" if value is None else _UNITS.get(figure, number)(value)


def _change(change: FigureChange) -> str:
    if change.worse is None:
        return ""
    if abs(change.worse) <= change.chance:
        return "within what chance explains"
    where = (
        " where each run was quietest" if change.figure in _SPEEDS else ""
    )  # the figures beside it do not belong to it
    return f"{100 * abs(change.worse):.1f} % {'worse' if change.worse > 0 else 'better'}{where}"
