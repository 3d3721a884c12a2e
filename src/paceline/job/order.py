"""The order of data: which rank uses which sample when. The seed and a global cursor alone
determine it.

An epoch is a permutation of the samples, or the draws of the job's sampler. An optimizer step uses
a window of consecutive positions of the epoch. Each replica takes consecutive positions of the
window, and each micro-batch takes consecutive positions of those. Only the last two cuts depend on
the ranks, so every position is used exactly once an epoch on any number of ranks, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.base.streams import key_to_seed
from paceline.job import Job
from paceline.job.phases import StepWindows, windows_of
from paceline.job.sampling import DrawnEpochs

_ROUNDS = 8  # four already hide the structure of a Feistel network from a learner
# Positions that go through the network at once. Its NumPy calls take 70 to 440 us for 32 positions,
# and 1 ms for these.
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Permutation:
    """A seeded shuffle of range(size) that answers any position in O(1) time and memory.

    A Feistel network permutes the range up to the next power of four. A value outside of
    range(size) goes through the network again (cycle walking), so the result is a bijection of
    range(size).

    Source: Black and Rogaway 2002, Ciphers with arbitrary finite domains, method 3.
    """

    size: int
    seed: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at these positions, each in range(size)."""
        half_bits = max(1, -(-(max(self.size, 2) - 1).bit_length() // 2))
        values = self._network(positions.astype(np.uint64), half_bits)
        while (outside := values >= self.size).any():
            values[outside] = self._network(values[outside], half_bits)
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
        shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for key in _round_keys(self.seed):
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << shift) | right


@lru_cache
def _round_keys(seed: int) -> tuple[int, ...]:
    return tuple(key_to_seed(seed, turn) for turn in range(_ROUNDS))


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Mix the bits of values with a key, by splitmix64's finaliser (Steele et al. 2014).

    NumPy lets arrays overflow without a warning.
    """
    z = values + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=16)
def _shuffled(size: int, seed: int, block: int) -> list[int]:
    """Return the indices at the positions of a block."""
    first = block * _BLOCK
    positions = np.arange(first, min(first + _BLOCK, size), dtype=np.int64)
    indices: list[int] = Permutation(size, seed)(positions).tolist()
    return indices


_DIGEST_BITS = 24  # bits for a sample, so that float64 adds those of 2**29 samples exactly


@lru_cache
def _digest_key(epoch: int) -> int:
    return key_to_seed("digest", epoch)


def digest(epoch: int, positions: range, indices: Sequence[int]) -> int:
    """Return a digest of the samples that were fetched: the sum of a hash of (epoch, position,
    index) of each.

    Ranks' digests add up to the window's digest, however the window was cut. If a sample is lost,
    repeated or replaced by another one, the sum changes, except in one case in 2**24.
    """
    if not len(indices):
        return 0
    places = np.arange(positions.start, positions.stop, dtype=np.uint64)
    samples = np.asarray(indices, dtype=np.int64).view(np.uint64)
    mixed = _mix(places * np.uint64(0x9E3779B97F4A7C15) + samples, _digest_key(epoch))
    return int((mixed >> np.uint64(64 - _DIGEST_BITS)).sum())


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one optimizer step: `count` positions of `epoch` from `start` on."""

    epoch: int
    start: int
    count: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.count)


@dataclass(frozen=True)
class Order:
    """The windows and indices of a data set of known size."""

    num_samples: int
    batch: int
    seed: int
    drop_last: bool = False
    drawn: DrawnEpochs | None = None  # by the job's sampler, in place of the seed's shuffle

    @classmethod
    def of(cls, job: Job) -> Order:
        """Return the order of a job whose data has a length."""
        assert job.num_samples is not None
        drawn = (
            DrawnEpochs(job.sampler, job.seed, len(job.data)) if job.sampler is not None else None
        )
        return cls(job.num_samples, job.batch, job.seed, job.drop_last, drawn)

    @cached_property
    def windows(self) -> StepWindows:
        return windows_of(self.batch, self.num_samples, drop_last=self.drop_last)

    def epoch_end(self, step: int) -> int:
        """Return the first step after the epoch of a step."""
        return self.windows.first_step(self.windows.epoch(step) + 1)

    def ends_epoch(self, steps: int) -> bool:
        """Whether the first `steps` steps end with an epoch."""
        return steps > 0 and self.epoch_end(steps - 1) == steps

    def fewest(self, steps: int) -> int:
        """Return the size of the smallest of the first `steps` windows, in samples."""
        return self.windows.fewest(steps)

    def window(self, step: int) -> Window:
        """Return the window of optimizer step `step`, counted from 0 over all epochs."""
        return Window(*self.windows.window(step))

    def indices(self, epoch: int, positions: range) -> list[int]:
        """Return the sample indices at these consecutive positions of the epoch.

        Raises:
            JobError: the sampler's draws are not usable; see `DrawnEpochs.indices`.
        """
        first, end = positions.start, positions.stop
        if self.drawn is not None:
            return self.drawn.indices(epoch)[first:end]
        seed, indices = key_to_seed(self.seed, "order", epoch), list[int]()
        for block in range(first // _BLOCK, -(-end // _BLOCK)):
            shuffled, before = _shuffled(self.num_samples, seed, block), block * _BLOCK
            indices += shuffled[max(first - before, 0) : end - before]
        return indices


def split(count: int, weights: Sequence[int]) -> list[range]:
    """Cut range(count) into consecutive runs in proportion to the weights, as evenly as whole
    numbers allow.

    >>> split(10, (1, 1, 1))
    [range(0, 4), range(4, 7), range(7, 10)]
    >>> split(9, (2, 1))
    [range(0, 6), range(6, 9)]
    """
    total = sum(weights)
    sizes = [count * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(count * weights[i] % total), i))
    for index in by_remainder[: count - sum(sizes)]:
        sizes[index] += 1
    return [range(first, last) for first, last in pairwise([0, *accumulate(sizes)])]
