"""Assigns the pieces of a captured model to pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.base.errors import PlanError
from paceline.model.graph import Capture
from paceline.model.graph_cost import forward_flops
from paceline.strategies.pipeline.cut import balance
from paceline.strategies.place.ledger import PieceMemory


def assign(
    capture: Capture,
    needs: Mapping[str, PieceMemory],
    *,
    flops_per_byte: float,
    speeds: Sequence[float],
    memory_bytes: Sequence[float],
    in_flight: Sequence[int],
) -> dict[str, int]:
    """Assign consecutive pieces to stages, balanced by the cost of their forwards.

    A cut comes before a piece with parameters, and never between a value and an edit of it in
    place.

    Args:
        needs: The memory of each piece, by key. Activations are those of one micro-batch in flight.
        flops_per_byte: The figure of the devices; see `Device.flops_per_byte`.
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
    ends = [*starts[1:], len(capture.pieces)]
    flops = [
        sum(
            forward_flops(piece, flops_per_byte=flops_per_byte)
            for piece in capture.pieces[start:end]
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    groups = [
        sum((needs[piece.key] for piece in capture.pieces[start:end]), PieceMemory())
        for start, end in zip(starts, ends, strict=True)
    ]
    firsts = balance(
        flops,
        [need.total - need.activations for need in groups],
        [need.activations for need in groups],
        speeds=speeds,
        memory_bytes=memory_bytes,
        in_flight=in_flight,
    )
    stage_of: dict[str, int] = {}
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        stage = max(k for k, first in enumerate(firsts) if first <= group)
        stage_of |= {piece.key: stage for piece in capture.pieces[start:end]}
    return stage_of
