"""One run in which all that lets a run survive is on for some steps and off for as many, by turns.

    python -m benchmarks.contenders.overhead.run FILE PLAN WARM_UP BLOCK PAIRS

Prints the seconds of each pair of blocks, with it and without it. Paceline has
no switch for most of this. Off: no copies, no notes of the state in memory, no journal, no comparison of replicas, no
signs of life, and nobody who looks at them. The first steps have it on: until copies and notes have found their place.
"""

from __future__ import annotations

import itertools
import json
import mmap
import random
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.launch.context import RankContext
from paceline.launch.outside_watch import OutsideWatch
from paceline.runtime import drift, loop
from paceline.runtime.journal import Journal

ON = mmap.mmap(-1, 1)  # shared by the ranks and by the process that watches them


def orders(pairs: int) -> list[bool]:
    """Whether the first block of each pair has it on."""
    return [bool(order) for order in random.Random(0).choices((0, 1), k=pairs)]


def is_on(step: int, *, warm_up: int, block: int, on_first: list[bool]) -> bool:
    number = (step - warm_up - 1) // block
    return number < 0 or number // 2 >= len(on_first) or on_first[number // 2] is (number % 2 == 0)


def switch(owner: Any, name: str) -> None:
    """Let a function do nothing while it is off."""
    whole = getattr(owner, name)

    @wraps(whole)
    def switched(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs) if ON[0] else None

    setattr(owner, name, switched)


def take_turns(**blocks: Any) -> None:
    """For this process and its forks."""
    after_step: Callable[..., None] = loop._after_step
    ON[0] = 1

    def switching(run: Any, *args: Any, **kwargs: Any) -> None:
        ON[0] = is_on(run.step + 1, **blocks)
        if not ON[0] and run.copier is not None:
            run.copier.next_step += 1  # copies stay as many steps apart, of those with it on
        after_step(run, *args, **kwargs)

    loop._after_step = switching
    for owner, names in ((loop, ("_copy", "_keep_live")), (drift, ("check_replicas",)), (RankContext, ("beat",)),
                         (OutsideWatch, ("look",)), (Journal, ("note", "settle"))):
        for name in names:
            switch(owner, name)


def main(file: str, plan: str, warm_up: int, block: int, pairs: int) -> None:
    on_first = orders(pairs)
    take_turns(warm_up=warm_up, block=block, on_first=on_first)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        pl.train(pl.load(file), plan, steps=warm_up + 2 * block * pairs, run=Path(folder) / "run", check=False,
                 table=False)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        ends_s = [line["time"] for line in lines if "step_s" in line]
    edges_s = ends_s[warm_up - 1::block]
    blocks_s = [end - begin for begin, end in itertools.pairwise(edges_s)]
    with_s = [blocks_s[2 * pair + (not on_first[pair])] for pair in range(pairs)]
    without_s = [blocks_s[2 * pair + on_first[pair]] for pair in range(pairs)]
    print(json.dumps({"with_s": with_s, "without_s": without_s}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
