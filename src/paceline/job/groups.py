"""Steps that are the groups of a batch sampler, of one size or several.

Seed and epoch alone determine them.
"""

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
    """A sampler that gives the samples of a batch sampler, one group after the other.

    Raises:
        JobError: the batch sampler draws for one rank of several, or draws something else than
            groups.
    """

    def __init__(self, groups: Any) -> None:
        if getattr(groups, "num_replicas", None) not in (None, 1):
            raise JobError(
                f"the batch sampler {type(groups).__name__} draws one rank's part",
                hint="let it draw for all devices together (num_replicas=1, rank=0): each rank takes its "
                "own part of each group",
            )
        self.groups = groups
        # The generator from which groups are drawn, of the batch sampler or of the sampler in it;
        # None if it has none.
        self.generator = getattr(groups, "generator", None) or getattr(
            getattr(groups, "sampler", None), "generator", None
        )
        self.windows: GroupedWindows | None = None

    def set_epoch(self, epoch: int) -> None:
        for drawing in (self.groups, getattr(self.groups, "sampler", None)):
            if (tell := getattr(drawing, "set_epoch", None)) is not None:
                tell(epoch)

    def windows_of(self, seed: int) -> GroupedWindows:
        """Return the windows of the groups that this seed draws."""
        if self.windows is None or self.windows.seed != seed:
            self.windows = GroupedWindows(self, seed)
        return self.windows

    def __len__(self) -> int:
        """Return the number of samples of the first epoch; other epochs may have more or fewer."""
        return self.windows.samples(0) if self.windows is not None else 0

    def __iter__(self) -> Iterator[int]:
        for group in self.drawn():
            yield from group

    def drawn(self) -> Iterator[list[int]]:
        """Draw the groups of an epoch with the generators in their current state."""
        for number, group in enumerate(self.groups):
            if not isinstance(group, list | tuple) or not group:
                raise JobError(
                    f"the batch sampler {type(self.groups).__name__} drew {group!r} as group {number}",
                    hint="each group must be a list of one index or more",
                )
            yield list(group)


class GroupedWindows:
    """The windows of steps that are groups.

    An epoch is drawn when it is first asked for, and the sizes of its groups are kept.
    """

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
        """Return the number of samples of an epoch."""
        self._know(epoch)
        return self.ends[epoch][-1]

    def sizes(self, epoch: int) -> list[int]:
        """Return the number of samples of each group of an epoch."""
        self._know(epoch)
        ends = self.ends[epoch]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        self._know(epoch - 1)
        return self.firsts[epoch]

    def epoch(self, step: int) -> int:
        """Return the epoch of a step."""
        while self.firsts[-1] <= step:
            self._know(len(self.ends))
        return bisect_right(self.firsts, step) - 1

    def window(self, step: int) -> tuple[int, int, int]:
        """Return a step's epoch, and the start and the size of its window in it, in samples."""
        epoch = self.epoch(step)
        within, ends = step - self.firsts[epoch], self.ends[epoch]
        start = ends[within - 1] if within else 0
        return epoch, start, ends[within] - start

    def fewest(self, steps: int) -> int:
        """Return the size of the smallest of the first `steps` windows, as far as epochs are
        known.
        """
        known = (
            size
            for epoch in range(max(1, len(self.ends)))
            if self.first_step(epoch) < steps
            for size in self.sizes(epoch)[: steps - self.first_step(epoch)]
        )
        return min(known)


class GroupSizes(ChangingBatch):
    """The batch of a job whose steps are groups.

    As a number it is the middle size of the first epoch's groups. Plans are priced and data is
    evaluated with this number.
    """

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
