"""Cuts a model into stages of consecutive pieces, so that the slowest stage is as fast as
possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from paceline.base.errors import PlanError


def balance(
    work: Sequence[float],
    held_bytes: Sequence[float],
    kept_bytes: Sequence[float],
    *,
    speeds: Sequence[float],
    memory_bytes: Sequence[float],
    in_flight: Sequence[int],
) -> list[int]:
    """Cut consecutive pieces into one run per stage, so that the longest stage is as short as
    possible.

    The result is exact, by dynamic programming over (pieces, stages). Among equally fast cuts, the
    function prefers the one with the more even stages.

    Args:
        work: The time of each piece on a device of speed 1, in any unit.
        held_bytes: The memory of each piece that is always in use.
        kept_bytes: The additional memory of each piece for each micro-batch in flight.
        speeds: The speed of each stage's device.
        memory_bytes: The memory of each stage's device.
        in_flight: The number of micro-batches that each stage holds at once.

    Returns:
        The first piece of each stage.

    Raises:
        PlanError: there are fewer pieces than stages, or no cut fits.

    >>> balance([1, 1, 1, 3], [1] * 4, [0] * 4, speeds=[1, 1], memory_bytes=[4, 4], in_flight=[2, 1])
    [0, 3]
    >>> balance([1, 1, 1, 3], [1] * 4, [0] * 4, speeds=[1, 1], memory_bytes=[2, 4], in_flight=[2, 1])
    [0, 2]
    """
    num_pieces, num_stages = len(work), len(speeds)
    if num_pieces < num_stages:
        raise PlanError(
            f"the model has {num_pieces} pieces and {num_stages} stages were asked for",
            hint=f"at most {num_pieces} stages",
        )
    work_to = [0.0, *accumulate(work)]
    bytes_to, kept_to = [0.0, *accumulate(held_bytes)], [0.0, *accumulate(kept_bytes)]

    def stage_time(stage: int, first: int, end: int) -> float:
        """Return the time of a stage with these pieces; infinite if they don't fit."""
        if (
            bytes_to[end] - bytes_to[first] + in_flight[stage] * (kept_to[end] - kept_to[first])
            > memory_bytes[stage]
        ):
            return float("inf")
        return (work_to[end] - work_to[first]) / speeds[stage]

    @cache
    def best(stage: int, first: int) -> tuple[float, float, int]:
        """Return (longest stage, sum of squares, end of this stage) for the stages from this one
        on."""
        if stage == num_stages - 1:
            last_time = stage_time(stage, first, num_pieces)
            return last_time, last_time * last_time, num_pieces
        choices = []
        for end in range(first + 1, num_pieces - (num_stages - stage - 1) + 1):
            first_time, (longest, squares, _) = stage_time(stage, first, end), best(stage + 1, end)
            choices.append((max(first_time, longest), first_time * first_time + squares, end))
        return min(choices)

    if best(0, 0)[0] == float("inf"):
        raise PlanError(
            f"no cut into {num_stages} stages fits the devices' memory: the pieces hold "
            f"{sum(held_bytes) / 2**20:.0f} MiB and the largest {max(held_bytes) / 2**20:.0f} MiB, without "
            "activations",
            hint="more stages, smaller micro-batches, or recompute=full",
        )
    firsts = [0]
    for stage in range(num_stages - 1):
        firsts.append(best(stage, firsts[-1])[2])
    return firsts
