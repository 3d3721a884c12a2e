"""What changes during a run: a field's values by the step or the epoch from which each holds."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from paceline.base.errors import JobError, nearest

T = TypeVar("T")
VALIDATION_LOSS = (
    "validation_loss"  # what an evaluation calls the loss, beside the metrics' own names
)
# Figures of every run, by the names that a summary, an objective or a logger has for them: a metric of such a name
# would take its place, or the figure the metric's.
FIGURES = frozenset(
    (
        VALIDATION_LOSS,
        "loss",
        "final_loss",
        "step",
        "steps",
        "epoch",
        "samples",
        "samples_per_s",
        "lr",
        "gradient_norm",
        "loss_scale",
        "step_s",
        "later_step_s",
        "step_ms",
        "input_s",
        "wall_s",
        "core_wait_s",
        "save_blocked_s",
        "copy_blocked_s",
        "bytes_sent",
        "peak_memory_bytes",
        "memory_mb",
        "parameters",
        "plan",
        "world_size",
        "metrics",
        "check",
        "failure",
        "predicted",
        "staleness",
        "workers",
        "spikes",
        "skipped_steps",
        "stopped",
    )
)


@dataclass(frozen=True)
class Phases(Generic[T]):
    """Values in the order in which they hold. starts: of each, the first step or epoch; the first one is 0."""

    unit: Literal["step", "epoch"]
    starts: tuple[int, ...]
    values: tuple[T, ...]

    def at(self, step: int, epoch: int) -> T:
        """The value in an optimizer step, which lies in this epoch; both count from 0."""
        here = step if self.unit == "step" else epoch
        return [
            value for start, value in zip(self.starts, self.values, strict=True) if start <= here
        ][-1]

    def next_step(self, step: int) -> int | None:
        """The first step after this one with another value; None if only a new epoch brings one."""
        return (
            min((start for start in self.starts if start > step), default=None)
            if self.unit == "step"
            else None
        )

    def is_last(self, step: int, epoch: int) -> bool:
        """Whether the value stays from here on."""
        return (step if self.unit == "step" else epoch) >= self.starts[-1]

    def __str__(self) -> str:
        return f"by_{self.unit}({{{', '.join(f'{s}: {v}' for s, v in zip(self.starts, self.values, strict=True))}}})"


def _phases(unit: Literal["step", "epoch"], values: Mapping[int, Any]) -> Phases[Any]:
    if (
        not isinstance(values, Mapping)
        or not values
        or any(
            isinstance(start, bool) or not isinstance(start, int) or start < 0 for start in values
        )
    ):
        raise JobError(
            f"by_{unit} takes a mapping from the {unit} from which a value holds to it, got {values!r}",
            hint=f"by_{unit}({{0: 64, 1000: 128}})",
        )
    if 0 not in values:
        raise JobError(
            f"by_{unit} has no value for {unit} 0: its first one begins at {min(values)}"
        )
    starts = sorted(values)
    return Phases(unit, tuple(starts), tuple(values[start] for start in starts))


def by_step(values: Mapping[int, T]) -> T:
    """A field's values by the optimizer step, counted from 0, from which each holds; for `batch`, `collate`, `freeze`.

    Its type is that of the values, as it stands in a field's place.

    Raises:
        JobError: a key is no step, or step 0 has no value.
    """
    return cast("T", _phases("step", values))


def by_epoch(values: Mapping[int, T]) -> T:
    """The same by the epoch, counted from 0.

    Raises:
        JobError: a key is no epoch, or epoch 0 has no value.
    """
    return cast("T", _phases("epoch", values))


class StepWindows(Protocol):
    """Where each step's window lies, where steps have windows of other sizes."""

    def first_step(self, epoch: int) -> int:
        """Steps before an epoch."""

    def epoch(self, step: int) -> int:
        """The epoch that a step lies in."""

    def window(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, where its window starts there, and how many samples it has."""

    def fewest(self, steps: int) -> int:
        """Samples of the smallest of so many first windows."""


class ChangingBatch(int, metaclass=ABCMeta):
    """A job's batch where steps have batches of other sizes; as a number the one by which memory is planned."""

    @abstractmethod
    def windows(self, num_samples: int, *, drop_last: bool) -> StepWindows:
        """Where they lie in data of so many samples."""

    def __format__(self, spec: str) -> str:
        return format(str(self) if not spec else int(self), spec)


class BatchSizes(ChangingBatch):
    """The sizes of a job's batch in phases; as a number the greatest, which memory and ranks must suit."""

    phases: Phases[int]

    def __new__(cls, phases: Phases[int]) -> BatchSizes:
        made = super().__new__(cls, max(phases.values))
        made.phases = phases
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.phases,)

    def windows(self, num_samples: int, *, drop_last: bool) -> StepWindows:
        return PhasedWindows(num_samples, self.phases, drop_last=drop_last)

    def __str__(self) -> str:
        return str(self.phases)


@dataclass(frozen=True)
class Collates:
    """The collate functions of a job in phases; called, the last one, which evaluations use."""

    phases: Phases[Callable[[list[Any]], Any]]

    def __call__(self, samples: list[Any]) -> Any:
        return self.phases.values[-1](samples)


@dataclass(frozen=True)
class Monitored:
    """A schedule that is stepped by this figure of each epoch's evaluation; see `monitored`."""

    metric: str
    build: Callable[[Any], Any]

    def __call__(self, optimizer: Any) -> Any:
        return self.build(optimizer)


def monitored(metric: str, lr_schedule: Callable[[Any], Any]) -> Monitored:
    """A job's `lr_schedule` that builds a ReduceLROnPlateau which follows this metric of the job.

    Without it, it follows "validation_loss".
    """
    return Monitored(metric, lr_schedule)


def value_at(field: Any, step: int, epoch: int) -> Any:
    """What a field is in a step; the field itself if it has no phases."""
    phases = field if isinstance(field, Phases) else getattr(field, "phases", None)
    return phases.at(step, epoch) if isinstance(phases, Phases) else field


def patterns(freeze: Any) -> Phases[tuple[str, ...]]:
    """A job's `freeze` as tuples of patterns in phases."""
    phases = freeze if isinstance(freeze, Phases) else Phases("step", (0,), (freeze,))
    return Phases(
        phases.unit,
        phases.starts,
        tuple((value,) if isinstance(value, str) else tuple(value) for value in phases.values),
    )


def matching_pattern(pattern: str, names: Iterable[str]) -> set[str]:
    """Names that one pattern stands for."""
    return {
        name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    }


def matching(wanted: Iterable[str], names: Sequence[str]) -> set[str]:
    """Names that a pattern stands for: itself, all below it, or those that it matches with its wildcards.

    Raises:
        JobError: a pattern stands for none.

    >>> sorted(matching(["body", "*.bias"], ["body.0.weight", "head.bias", "head.weight"]))
    ['body.0.weight', 'head.bias']
    """
    matches: set[str] = set()
    for pattern in wanted:
        some = matching_pattern(pattern, names)
        if not some:
            raise JobError(f"freeze='{pattern}' matches no parameter", hint=nearest(pattern, names))
        matches |= some
    return matches


@dataclass(frozen=True)
class Windows:
    """Consecutive windows of one size in one epoch. step, start: of the first one, the step and its place in the
    epoch."""

    step: int
    epoch: int
    start: int
    size: int
    steps: int


class PhasedWindows:
    """Where each step's window lies, for batches in phases: windows follow each other through an epoch, each as large
    as its step's batch. Only an epoch's last window may be short."""

    def __init__(self, num_samples: int, sizes: Phases[int], *, drop_last: bool) -> None:
        self.num_samples, self.sizes, self.drop_last = num_samples, sizes, drop_last
        self.firsts, self.epochs = (
            [0],
            list[list[Windows]](),
        )  # the first step of each epoch, and its windows
        while len(self.epochs) < 1 or not sizes.is_last(self.firsts[-2], len(self.epochs) - 1):
            self.epochs.append(list(self._runs(self.firsts[-1], len(self.epochs))))
            self.firsts.append(self.firsts[-1] + sum(run.steps for run in self.epochs[-1]))

    def _runs(self, step: int, epoch: int) -> Iterator[Windows]:
        start = 0
        while left := self.num_samples - start:
            size, change = self.sizes.at(step, epoch), self.sizes.next_step(step)
            steps = left // size if change is None else min(left // size, change - step)
            if not steps:
                if not self.drop_last:
                    yield Windows(step, epoch, start, left, 1)
                return
            yield Windows(step, epoch, start, size, steps)
            step, start = step + steps, start + steps * size

    def first_step(self, epoch: int) -> int:
        """Steps before an epoch."""
        known = len(self.epochs)
        if epoch <= known:
            return self.firsts[epoch]
        return self.firsts[known] + (epoch - known) * (self.firsts[known] - self.firsts[known - 1])

    def epoch(self, step: int) -> int:
        """The epoch that a step lies in."""
        known = len(self.epochs)
        if step >= self.firsts[known]:
            return known + (step - self.firsts[known]) // (
                self.firsts[known] - self.firsts[known - 1]
            )
        return next(epoch for epoch in count() if step < self.firsts[epoch + 1])

    def window(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, where its window starts there, and how many samples it has."""
        epoch = self.epoch(step)
        last = min(
            epoch, len(self.epochs) - 1
        )  # later epochs are cut like the last one that is known
        within = step - self.first_step(epoch) + self.firsts[last]
        run = next(run for run in reversed(self.epochs[last]) if run.step <= within)
        return epoch, run.start + (within - run.step) * run.size, run.size

    def fewest(self, steps: int) -> int:
        """Samples of the smallest of so many first windows."""
        return min(run.size for runs in self.epochs for run in runs if run.step < steps)
