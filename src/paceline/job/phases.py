"""Fields of a job that change during a run: values by the step or the epoch from which each
holds.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from paceline.base.errors import JobError, nearest

T = TypeVar("T")
VALIDATION_LOSS = (
    "validation_loss"  # what an evaluation calls the loss, beside the metrics' own names
)
# Names of figures of every run in summaries, objectives and loggers. A metric must not have such a
# name, because the metric or the figure would replace the other.
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
    """Values in the order in which they hold."""

    unit: Literal["step", "epoch"]
    starts: tuple[int, ...]  # the first step or epoch of each value; the first one is 0
    values: tuple[T, ...]

    def at(self, step: int, epoch: int) -> T:
        """Return the value in an optimizer step, which lies in this epoch; both count from 0."""
        here = step if self.unit == "step" else epoch
        return [
            value for start, value in zip(self.starts, self.values, strict=True) if start <= here
        ][-1]

    def next_step(self, step: int) -> int | None:
        """Return the first step after this one with another value; None if only a new epoch can
        change the value.
        """
        return (
            min((start for start in self.starts if start > step), default=None)
            if self.unit == "step"
            else None
        )

    def is_last(self, step: int, epoch: int) -> bool:
        """Whether the value does not change any more from this step or epoch on."""
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
    """Return a field's values by the optimizer step, counted from 0, from which each holds.

    The fields `batch`, `collate` and `freeze` can have such values. The declared type is that of
    the values, because the result takes the place of a field's value.

    Raises:
        JobError: a key is no step, or step 0 has no value.
    """
    return cast("T", _phases("step", values))


def by_epoch(values: Mapping[int, T]) -> T:
    """Return a field's values by the epoch, counted from 0, from which each holds; see `by_step`.

    Raises:
        JobError: a key is no epoch, or epoch 0 has no value.
    """
    return cast("T", _phases("epoch", values))


class StepWindows(Protocol):
    """The windows of a job's steps, which may have different sizes."""

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""

    def window(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch, and the start and the size of its window in it, in samples."""

    def fewest(self, steps: int) -> int:
        """Return the size of the smallest of the first `steps` windows, in samples."""


class ChangingBatch(int, metaclass=ABCMeta):
    """A job's batch if its size changes from step to step.

    As a number it is the size by which memory is planned.
    """

    @abstractmethod
    def windows(self, num_samples: int, *, drop_last: bool) -> StepWindows:
        """Return the windows in data of `num_samples` samples."""

    def __format__(self, spec: str) -> str:
        return format(str(self) if not spec else int(self), spec)


class BatchSizes(ChangingBatch):
    """The sizes of a job's batch in phases.

    As a number it is the greatest size, which memory and ranks must suit.
    """

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


def windows_of(batch: int, num_samples: int, *, drop_last: bool) -> StepWindows:
    """Return the windows of a job's steps in data of `num_samples` samples."""
    sizes = (
        batch if isinstance(batch, ChangingBatch) else BatchSizes(Phases("step", (0,), (batch,)))
    )
    return sizes.windows(num_samples, drop_last=drop_last)


@dataclass(frozen=True)
class Collates:
    """The collate functions of a job in phases. A call uses the last one, as evaluations do."""

    phases: Phases[Callable[[list[Any]], Any]]

    def __call__(self, samples: list[Any]) -> Any:
        return self.phases.values[-1](samples)


@dataclass(frozen=True)
class Monitored:
    """A learning-rate schedule that is stepped with one figure of each epoch's evaluation; see
    `monitored`.
    """

    metric: str
    build: Callable[[Any], Any]

    def __call__(self, optimizer: Any) -> Any:
        return self.build(optimizer)


def monitored(metric: str, lr_schedule: Callable[[Any], Any]) -> Monitored:
    """Return an `lr_schedule` whose ReduceLROnPlateau follows this metric of the job.

    Without `monitored`, a ReduceLROnPlateau follows "validation_loss".
    """
    return Monitored(metric, lr_schedule)


def value_at(field: Any, step: int, epoch: int) -> Any:
    """Return the value of a field in a step, which is the field itself if it has no phases."""
    phases = field if isinstance(field, Phases) else getattr(field, "phases", None)
    return phases.at(step, epoch) if isinstance(phases, Phases) else field


def patterns(freeze: Any) -> Phases[tuple[str, ...]]:
    """Return a job's `freeze` as tuples of patterns in phases."""
    phases = freeze if isinstance(freeze, Phases) else Phases("step", (0,), (freeze,))
    return Phases(
        phases.unit,
        phases.starts,
        tuple((value,) if isinstance(value, str) else tuple(value) for value in phases.values),
    )


def matching_pattern(pattern: str, names: Iterable[str]) -> set[str]:
    """Return the names that one pattern stands for."""
    return {
        name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    }


def matching(wanted: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the names that the patterns stand for.

    A pattern stands for the name itself, for all names below it, and for those that its wildcards
    match.

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
    """Consecutive windows of one size in one epoch."""

    step: int  # the step of the first window
    epoch: int
    start: int  # the position of the first window in the epoch, in samples
    size: int  # samples of a window
    steps: int  # the number of windows


class PhasedWindows:
    """The windows of a job whose batch may have phases.

    Windows follow each other through an epoch, each as large as its step's batch. Only an epoch's
    last window may be short.
    """

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
        """Return the number of steps before an epoch."""
        known = len(self.epochs)
        if epoch <= known:
            return self.firsts[epoch]
        return self.firsts[known] + (epoch - known) * (self.firsts[known] - self.firsts[known - 1])

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        known = len(self.epochs)
        if step >= self.firsts[known]:
            return known + (step - self.firsts[known]) // (
                self.firsts[known] - self.firsts[known - 1]
            )
        return bisect_right(self.firsts, step) - 1

    def window(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch, and the start and the size of its window in it, in samples."""
        epoch = self.epoch(step)
        last = min(
            epoch, len(self.epochs) - 1
        )  # later epochs are cut like the last one that is known
        within = step - self.first_step(epoch) + self.firsts[last]
        run = next(run for run in reversed(self.epochs[last]) if run.step <= within)
        return epoch, run.start + (within - run.step) * run.size, run.size

    def fewest(self, steps: int) -> int:
        """Return the size of the smallest of the first `steps` windows, in samples."""
        return min(run.size for runs in self.epochs for run in runs if run.step < steps)
