"""Files of samples (shards) as data: split over ranks without every rank reading every file.

The order depends on no rank, so a run can go on at any step and on other numbers of ranks.

An epoch shuffles the files and deals them into lanes. A step takes equally many consecutive samples
from each lane. A rank takes consecutive samples of the step, and reads only the lanes in which they
lie. The number of lanes is large enough for any number of ranks, and it belongs to the job, not to
the plan.
"""

from __future__ import annotations

import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.base.errors import JobError

LANES = 8


class Shards:
    """A data set in files, each of which is read as a whole by the ranks that need its samples.

    Every sample counts once an epoch over all ranks. The order is fixed by the job's seed, batch
    and `lanes`. Each rank keeps one file of each lane that it reads in memory.

    Args:
        paths: The files, or whatever else `read` is given. Their order is part of the job.
        read: Gives the samples of a file, in the same order each time; by default `read_tar`.
        decode: Makes a sample (see docs/data.md) of what `read` gave, each time that it is used.
        lengths: Samples in each file. By default each file is read once, now, to count them.
        lanes: Files that are read at a time, over all ranks: best a multiple of the ranks, and a
            divisor of the batch.
        shuffle: Whether each epoch is another order of the files and of the samples in them.

    Raises:
        JobError: there are no files, one can't be read, or they hold no samples.
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        *,
        read: Callable[[Any], Iterable[Any]] | None = None,
        decode: Callable[[Any], Any] | None = None,
        lengths: Sequence[int] | None = None,
        lanes: int = LANES,
        shuffle: bool = True,
    ) -> None:
        if isinstance(paths, str | Path):
            raise JobError(
                f"paths must be a list of files, got {str(paths)!r}",
                hint="sorted(Path(FOLDER).glob('*.tar')) lists those of a folder",
            )
        self.paths, self.decode, self.shuffle = list(paths), decode, shuffle
        self.read = read or read_tar
        if not self.paths:
            raise JobError("there are no shards: paths is empty")
        if lanes < 1:
            raise JobError(f"lanes must be at least 1, got {lanes}")
        self.lengths = (
            [self._count(path) for path in self.paths] if lengths is None else list(lengths)
        )
        if len(self.lengths) != len(self.paths):
            raise JobError(
                f"lengths has {len(self.lengths)} numbers, and there are {len(self.paths)} shards"
            )
        if min(self.lengths) < 0 or not sum(self.lengths):
            raise JobError("the shards hold no samples")
        self.lanes = min(lanes, len(self.paths))
        self._ends = list(accumulate(self.lengths))
        self._lane_of: dict[int, int] = {}
        self._open_shards: dict[int, tuple[int, list[Any]]] = {}  # by lane: a shard and its samples

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} samples, and no number {index}")
        shard = bisect_right(self._ends, index)
        sample = self._samples(shard)[index - self._ends[shard] + self.lengths[shard]]
        return sample if self.decode is None else self.decode(sample)

    def reading_order(self, batch: int) -> ShardOrder:
        """Return the sampler that reads all lanes in parallel, for steps of `batch` samples."""
        return ShardOrder(self, batch)

    def dealt(self, lane_of: dict[int, int]) -> None:
        """Note the lanes into which an epoch has dealt the shards."""
        self._lane_of = lane_of

    def _samples(self, shard: int) -> list[Any]:
        lane = self._lane_of.get(shard, shard % self.lanes)
        open_shard, samples = self._open_shards.get(lane, (-1, []))
        if open_shard != shard:
            self._open_shards.pop(
                lane, None
            )  # before the next is read: one file of a lane at a time
            samples = list(self.read(self.paths[shard]))
            if len(samples) != self.lengths[shard]:
                raise JobError(
                    f"the shard {self.paths[shard]} has {len(samples)} samples, and it was said or counted "
                    f"to have {self.lengths[shard]}"
                )
            self._open_shards[lane] = shard, samples
        return samples

    def _count(self, path: Any) -> int:
        if self.read is read_tar:
            try:
                with tarfile.open(path) as file:
                    return sum(1 for _ in _groups(file))
            except tarfile.TarError:
                raise JobError(
                    f"the shard {path} is no tar file", hint="read= reads other formats"
                ) from None
            except OSError as error:
                raise JobError(f"the shard {path} can't be read: {error.strerror}") from None
        return sum(1 for _ in self.read(path))


class ShardOrder:
    """The order in which a job with steps of `batch` samples reads shards; drawn from torch's
    global generator.
    """

    def __init__(self, shards: Shards, batch: int) -> None:
        self.shards, self.batch = shards, batch

    def __len__(self) -> int:
        return len(self.shards)

    def __iter__(self) -> Iterator[int]:
        import torch

        shards, lengths = self.shards, self.shards.lengths

        def ordered(size: int) -> list[int]:
            return torch.randperm(size).tolist() if shards.shuffle else list(range(size))

        lanes: list[list[int]] = [[] for _ in range(shards.lanes)]
        lane_of: dict[int, int] = {}
        for shard in ordered(len(lengths)):
            lane = min(
                range(len(lanes)), key=lambda number: len(lanes[number])
            )  # the one with the fewest samples
            first = shards._ends[shard] - lengths[shard]
            lanes[lane] += [first + offset for offset in ordered(lengths[shard])]
            lane_of[shard] = lane
        shards.dealt(lane_of)
        return _in_steps(lanes, self.batch)


def _in_steps(lanes: list[list[int]], batch: int) -> Iterator[int]:
    """Yield the samples of each step: consecutive samples of one lane after the other.

    If a lane has ended, the other lanes give its part.
    """
    taken = [0] * len(lanes)
    while any(left := [len(lane) - begun for lane, begun in zip(lanes, taken, strict=True)]):
        parts = _parts(left, batch)
        for number, part in enumerate(parts):
            yield from lanes[number][taken[number] : taken[number] + part]
            taken[number] += part


def _parts(left: Sequence[int], batch: int) -> list[int]:
    """Return how many samples of a step come from each lane: equally many, as far as a lane has
    them.

    >>> _parts([9, 9, 1], 6), _parts([1, 0, 9], 6), _parts([1, 1, 1], 6)
    ([3, 2, 1], [1, 0, 5], [1, 1, 1])
    """
    parts = [0] * len(left)
    missing = min(batch, sum(left))
    while missing:
        able = [number for number in range(len(left)) if left[number] > parts[number]]
        each, rest = divmod(missing, len(able))
        for place, number in enumerate(able):
            more = min(each + (place < rest), left[number] - parts[number])
            parts[number] += more
            missing -= more
    return parts


def read_tar(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar file in WebDataset's layout: neighbours whose names agree up to
    the first dot.

    A sample maps the part after the dot, such as "jpg" or "cls", to the file's bytes, and "__key__"
    to the common name.
    """
    with tarfile.open(path) as file:
        for key, members in _groups(file):
            sample: dict[str, Any] = {"__key__": key}
            for suffix, member in members.items():
                content = file.extractfile(member)
                assert content is not None
                sample[suffix] = content.read()
            yield sample


def _groups(file: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    key, members = "", dict[str, tarfile.TarInfo]()
    for member in file:
        if not member.isfile():
            continue
        folder, _, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        if (full := f"{folder}/{stem}" if folder else stem) != key and members:
            yield key, members
            members = {}
        key = full
        members[suffix.lower()] = member
    if members:
        yield key, members
