"""One run in which all that lets a run survive is on for some steps and off for as many, by turns.

    python -m benchmarks.contenders.overhead.run FILE PLAN WARM_UP BLOCK PAIRS

Prints the seconds of each pair of blocks, with it and without it. Paceline has
no switch for most of this. Off: no copies, no notes of the state in memory, no journal, no comparison of replicas, no
signs of life, and nobody who looks at them. The first steps have it on: until copies and notes have found their place.

A step is counted from the end of the one before, where it is switched, to its own end.
"""

from __future__ import annotations

import itertools
import json
import mmap
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.launch.process.context import RankContext
from paceline.launch.process.outside_watch import OutsideWatch
from paceline.runs.journal import Journal
from paceline.training.loop import Loop
from paceline.training.parts import drift
from paceline.training.parts.copies import Copies

ON = [True]  # of this process
RANK_0_ON = mmap.mmap(-1, 1)  # for the process that watches the ranks


def orders(pairs: int) -> list[bool]:
    """Whether the first block of each pair has it on."""
    return [bool(order) for order in random.Random(0).choices((0, 1), k=pairs)]


def is_on(step: int, *, warm_up: int, block: int, on_first: list[bool]) -> bool:
    number = (step - warm_up - 1) // block
    return number < 0 or number // 2 >= len(on_first) or on_first[number // 2] is (number % 2 == 0)


def switch(owner: Any, name: str, on: Any = ON) -> None:
    """Let a function do nothing while it is off."""
    whole = getattr(owner, name)

    @wraps(whole)
    def switched(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs) if on[0] else None

    setattr(owner, name, switched)


def take_turns(ends_s: memoryview, **blocks: Any) -> None:
    """For this process and its forks. ends_s: is filled by rank 0."""
    count: Callable[..., None] = Loop._count
    RANK_0_ON[0] = 1

    def switching(self: Loop, *args: Any, **kwargs: Any) -> None:
        run, copier = self.run, self.copies.copier
        ON[0] = is_on(run.step + 2, **blocks)  # this step has been taken, and is counted below
        if run.context.rank == 0:
            ends_s[run.step], RANK_0_ON[0] = time.perf_counter(), ON[0]
        if not ON[0] and copier is not None:
            copier.next_step += 1  # copies stay as many steps apart, of those with it on
        count(self, *args, **kwargs)

    Loop._count = switching  # type: ignore[method-assign]
    for owner, names in (
        (Copies, ("settled",)),
        (drift, ("check_replicas",)),
        (RankContext, ("beat",)),
        (Journal, ("note", "settle")),
    ):
        for name in names:
            switch(owner, name)
    switch(OutsideWatch, "look", RANK_0_ON)


def main(file: str, plan: str, warm_up: int, block: int, pairs: int) -> None:
    on_first, steps = orders(pairs), warm_up + 2 * block * pairs
    ends_s = memoryview(mmap.mmap(-1, 8 * steps)).cast("d")
    take_turns(ends_s, warm_up=warm_up, block=block, on_first=on_first)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        pl.train(
            pl.load(file), plan, steps=steps, run=Path(folder) / "run", check=False, table=False
        )
    edges_s = list(ends_s)[warm_up - 1 :: block]
    blocks_s = [end - begin for begin, end in itertools.pairwise(edges_s)]
    with_s = [blocks_s[2 * pair + (not on_first[pair])] for pair in range(pairs)]
    without_s = [blocks_s[2 * pair + on_first[pair]] for pair in range(pairs)]
    print(json.dumps({"with_s": with_s, "without_s": without_s}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
