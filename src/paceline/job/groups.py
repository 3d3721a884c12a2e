"""Steps that are the groups of a batch sampler, of one size or of several: known from the seed and the epoch alone."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from statistics import median_high
from typing import Any

from paceline.base.errors import JobError
from paceline.job.phases import ChangingBatch


class DrawnGroups:
    """What a batch sampler draws, as a sampler of its samples: groups one after the other.

    generator: that groups are drawn from, of the batch sampler or of the sampler in it; None if it has none.

    Raises:
        JobError: it draws for one rank of several, or what it draws is no group.
    """

    def __init__(self, groups: Any) -> None:
        if getattr(groups, "num_replicas", None) not in (None, 1):
            raise JobError(
                f"the batch sampler {self._name_of(groups)} draws one rank's part",
                hint="let it draw for all devices together (num_replicas=1, rank=0): each rank takes its "
                "own part of each group",
            )
        self.groups = groups
        self.generator = getattr(groups, "generator", None) or getattr(
            getattr(groups, "sampler", None), "generator", None
        )
        self.windows: GroupedWindows | None = None

    @staticmethod
    def _name_of(groups: Any) -> str:
        return type(groups).__name__

    def set_epoch(self, epoch: int) -> None:
        for drawing in (self.groups, getattr(self.groups, "sampler", None)):
            if (tell := getattr(drawing, "set_epoch", None)) is not None:
                tell(epoch)

    def windows_of(self, seed: int) -> GroupedWindows:
        """Where the groups lie that this seed draws."""
        if self.windows is None or self.windows.seed != seed:
            self.windows = GroupedWindows(self, seed)
        return self.windows

    def __len__(self) -> int:
        """Samples of the first epoch; others may have more or fewer."""
        return self.windows.samples(0) if self.windows is not None else 0

    def __iter__(self) -> Iterator[int]:
        for group in self.drawn():
            yield from group

    def drawn(self) -> Iterator[list[int]]:
        """The groups of an epoch, by the generators as they are."""
        for number, group in enumerate(self.groups):
            if not isinstance(group, list | tuple) or not group:
                raise JobError(
                    f"the batch sampler {self._name_of(self.groups)} drew {group!r} as group {number}",
                    hint="each group must be a list of one index or more",
                )
            yield list(group)


class GroupedWindows:
    """Where each step's window lies, for steps that are groups. An epoch is drawn when it is first asked for; the
    sizes of its groups are kept."""

    def __init__(self, groups: DrawnGroups, seed: int) -> None:
        self.groups, self.seed = groups, seed
        self.firsts = array("q", [0])  # the first step of each epoch, and of the next
        self.ends: list[array[int]] = []  # of each group of an epoch, in samples

    def _know(self, epoch: int) -> None:
        from paceline.base.streams import seeded_for_epoch

        while len(self.ends) <= epoch:
            with seeded_for_epoch(self.groups, self.seed, len(self.ends)):
                sizes = array("q", map(len, self.groups.drawn()))
            if not sizes:
                raise JobError(
                    f"the batch sampler {type(self.groups.groups).__name__} drew no group in epoch "
                    f"{len(self.ends)}"
                )
            self.ends.append(array("q", accumulate(sizes)))
            self.firsts.append(self.firsts[-1] + len(sizes))

    def samples(self, epoch: int) -> int:
        """Of an epoch."""
        self._know(epoch)
        return self.ends[epoch][-1]

    def sizes(self, epoch: int) -> list[int]:
        """Samples of each group of an epoch."""
        self._know(epoch)
        ends = self.ends[epoch]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def first_step(self, epoch: int) -> int:
        """Steps before an epoch."""
        self._know(epoch - 1)
        return self.firsts[epoch]

    def epoch(self, step: int) -> int:
        """The epoch that a step lies in."""
        while self.firsts[-1] <= step:
            self._know(len(self.ends))
        return bisect_right(self.firsts, step) - 1

    def window(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, where its window starts there, and how many samples it has."""
        epoch = self.epoch(step)
        within, ends = step - self.firsts[epoch], self.ends[epoch]
        start = ends[within - 1] if within else 0
        return epoch, start, ends[within] - start

    def fewest(self, steps: int) -> int:
        """Samples of the smallest of so many first windows, as far as epochs are known."""
        known = (
            size
            for epoch in range(max(1, len(self.ends)))
            if self.first_step(epoch) < steps
            for size in self.sizes(epoch)[: steps - self.first_step(epoch)]
        )
        return min(known)


class GroupSizes(ChangingBatch):
    """The batch of a job whose steps are groups; as a number the middle size of the first epoch's groups, by which
    plans are priced and data is evaluated."""

    groups: DrawnGroups
    seed: int

    def __new__(cls, groups: DrawnGroups, seed: int) -> GroupSizes:
        made = super().__new__(cls, median_high(groups.windows_of(seed).sizes(0)))
        made.groups, made.seed = groups, seed
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.groups, self.seed

    def windows(self, num_samples: int, *, drop_last: bool) -> GroupedWindows:
        return self.groups.windows_of(self.seed)

    def __str__(self) -> str:
        sizes = self.groups.windows_of(self.seed).sizes(0)
        return f"{len(sizes)} groups of {min(sizes)} to {max(sizes)} samples an epoch"
