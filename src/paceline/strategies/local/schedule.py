"""Schedules outer steps: which parameters take theirs after which local step.

Used by `cost.py` and `run.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

# Local steps that a fragment's transfer may take before training waits for it.
LONGEST_DELAY_STEPS = 5


def assign(sizes_bytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Divide consecutive parameters into groups of about equal bytes. No group is empty.

    Raises:
        ValueError: there are fewer parameters than fragments.

    >>> assign([10, 10, 10, 30], 2)
    [[0, 1, 2], [3]]
    """
    count = len(sizes_bytes)
    if count < fragments:
        raise ValueError(f"{count} parameters can't be {fragments} fragments")
    ends, total_bytes = list(accumulate(sizes_bytes)), sum(sizes_bytes)
    edges = [0]
    for number in range(1, fragments):
        fair = next(
            index for index, end in enumerate(ends, 1) if end * fragments >= total_bytes * number
        )
        edges.append(min(max(fair, edges[-1] + 1), count - (fragments - number)))
    edges.append(count)
    return [list(range(first, last)) for first, last in pairwise(edges)]


def fragment_after(step: int, *, local: int, fragments: int) -> int | None:
    """Return the fragment whose outer step begins after a step (counted from 1), or None.

    The outer step of the last fragment ends the round.

    >>> [fragment_after(step, local=6, fragments=2) for step in range(1, 8)]
    [None, None, 0, None, None, 1, None]
    """
    place = step % local or local
    return next(
        (number for number in range(fragments) if (number + 1) * local // fragments == place), None
    )


def delay_steps(*, local: int, fragments: int) -> int:
    """Return the number of local steps during which a fragment is transferred.

    The transfer ends before the next fragment is sent. For whole models the number is 0.
    """
    return 0 if fragments == 1 else max(1, min(LONGEST_DELAY_STEPS, local // fragments - 1))
