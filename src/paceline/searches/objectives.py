"""The objectives of a search, and the limits by which it refuses trials before training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.base.errors import UsageError, nearest
from paceline.job import Job

VALIDATION_LOSS = "validation_loss"
# Figures that are known before training: the number of parameters, the planner's step time, and its
# memory of the fullest rank without the memory of libraries.
PREDICTED = ("parameters", "step_ms", "memory_mb")
# Figures that are known after the training of any job.
_MEASURED = ("loss", "samples_per_s")


@dataclass(frozen=True, slots=True)
class Objective:
    """A figure of a trial that a search minimises, or maximises if it says so: "validation_loss",
    "accuracy:max".
    """

    name: str
    direction: Literal["minimize", "maximize"] = "minimize"

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read an objective from text.

        >>> Objective.parse("accuracy:max"), Objective.parse("top:5")
        (Objective(name='accuracy', direction='maximize'), Objective(name='top:5', direction='minimize'))
        """
        name, _, way = text.rpartition(":")
        return cls(
            name if way in ("min", "max") else text, "maximize" if way == "max" else "minimize"
        )

    def __str__(self) -> str:
        way = "max" if self.direction == "maximize" else "min" if ":" in self.name else ""
        return f"{self.name}:{way}" if way else self.name


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest, or smallest, value of a predicted figure that is worth training:
    "step_ms<=2".
    """

    name: str
    bound: float
    is_most: bool = True

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read a limit from text.

        >>> Limit.parse("parameters<=1e5")
        Limit(name='parameters', bound=100000.0, is_most=True)

        Raises:
            UsageError: it can't be read, or the figure is not known before training.
        """
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([0-9.eE+-]+)\s*", text)
        try:
            bound = float(match[3]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or math.isnan(bound):
            raise UsageError(
                f"limit '{text}' must be NAME<=NUMBER or NAME>=NUMBER", hint="--limit 'step_ms<=2'"
            )
        if match[1] not in PREDICTED:
            raise UsageError(
                f"limits can't be on '{match[1]}', {nearest(match[1], PREDICTED)}",
                hint="limits are on what is known before training",
            )
        return cls(match[1], bound, match[2] == "<=")

    def breach(self, figures: Mapping[str, float]) -> str | None:
        """Say how the figures pass the limit; None if they don't."""
        value = figures[self.name]
        if value <= self.bound if self.is_most else value >= self.bound:
            return None
        return f"{self.name} is {value:.4g} and may be {self.bound:g} at {'most' if self.is_most else 'least'}"


def parse_objectives(texts: str | Iterable[str] | None) -> tuple[Objective, ...]:
    """Read objectives from texts; by default the validation loss.

    Raises:
        UsageError: an objective is given twice.
    """
    words = [texts] if isinstance(texts, str) else list(texts or ())
    objectives = tuple(Objective.parse(word) for word in words or [VALIDATION_LOSS])
    names = [objective.name for objective in objectives]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"objective '{twice[0]}' is given twice")
    return objectives


def check_reported(objectives: Sequence[Objective], job: Job) -> None:
    """Refuse an objective that trials of this job won't report.

    Raises:
        UsageError: with the names that they report.
    """
    evaluated = (VALIDATION_LOSS, *job.metrics) if job.validation is not None else ()
    known = (*evaluated, *_MEASURED, *PREDICTED)
    for objective in objectives:
        is_computed = job.compute is not None and job.validation is not None
        if objective.name not in known and not is_computed:  # its figures are known when it runs
            if ":" in objective.name:
                raise UsageError(
                    f"the job reports no '{objective.name}'; an objective is NAME, NAME:min or NAME:max"
                )
            hint = (
                "give the Job validation=, or search for another --objective"
                if objective.name == VALIDATION_LOSS
                else None
            )
            raise UsageError(
                f"the job reports no '{objective.name}', {nearest(objective.name, known)}",
                hint=hint,
            )


def final_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures by which a finished training is judged."""
    figures = {
        VALIDATION_LOSS: summary["validation_loss"],
        **summary["metrics"],
        "loss": summary["final_loss"],
        "samples_per_s": summary["samples_per_s"],
    }
    return {name: value for name, value in figures.items() if value is not None}
