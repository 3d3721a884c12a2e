"""The policy of pipelines: stages are consecutive pieces, and the slowest stage is as fast as
possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.base.errors import PlanError
from paceline.strategies.stages.ledger import PieceMemory

if TYPE_CHECKING:
    from paceline.model.graph import Capture


def assign(
    capture: Capture,
    needs: Mapping[str, PieceMemory],
    *,
    work: Mapping[str, float],
    speeds: Sequence[float],
    memory_bytes: Sequence[float],
    in_flight: Sequence[int],
) -> dict[str, int]:
    """Assign consecutive pieces to stages, balanced by the cost of their forwards.

    A cut comes before a piece with parameters, and never between a value and an edit of it in
    place.

    Args:
        needs: The memory of each piece, by key. Activations are those of one micro-batch in flight.
        work: The time of each piece's forward, by key, in any unit.
        speeds: The speed of each stage's device.
        memory_bytes: The memory of each stage's device.
        in_flight: The number of micro-batches that each stage holds at once.

    Returns:
        The stage of each piece, by key.

    Raises:
        PlanError: there are fewer places to cut than stages, or no cut fits the memory.
    """
    num_stages = len(speeds)
    starts = [0]
    made_at = {
        name: number for number, piece in enumerate(capture.pieces) for name in piece.outputs
    }
    joined: set[int] = set()
    for number, piece in enumerate(capture.pieces):
        for name in piece.mutates:
            if name in made_at:
                joined |= set(range(made_at[name] + 1, number + 1))
    seen = False
    for number, piece in enumerate(capture.pieces):
        if piece.parameters and seen and number not in joined:
            starts.append(number)
        seen = seen or bool(piece.parameters)
    if len(starts) < num_stages:
        names = ", ".join(piece.key for piece in capture.pieces if piece.parameters)
        raise PlanError(
            f"the model has {len(starts)} pieces that can be cut apart and the plan needs {num_stages} "
            f"stages",
            hint=f"at most {len(starts)} stages; the pieces are {names}",
        )
    runs = [
        capture.pieces[start:end]
        for start, end in zip(starts, [*starts[1:], len(capture.pieces)], strict=True)
    ]
    groups = [sum((needs[piece.key] for piece in run), PieceMemory()) for run in runs]
    firsts = balance(
        [sum(work[piece.key] for piece in run) for run in runs],
        [need.total - need.activations for need in groups],
        [need.activations for need in groups],
        speeds=speeds,
        memory_bytes=memory_bytes,
        in_flight=in_flight,
    )
    return {
        piece.key: bisect_right(firsts, number) - 1
        for number, run in enumerate(runs)
        for piece in run
    }


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
