"""The policy of `place=`: pieces are assigned to parts automatically or by a file, and stages are
the pieces that a part runs without waiting for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.base.errors import PlanError
from paceline.model.graph import Capture, Piece
from paceline.strategies.stages.ledger import PieceMemory
from paceline.strategies.stages.placement_file import Placement
from paceline.strategies.stages.schedule import Action


def place_automatically(
    capture: Capture,
    work: Mapping[str, float],
    needs: Mapping[str, PieceMemory],
    memory_bytes: Sequence[float],
) -> dict[str, int]:
    """Assign every piece to a part, so that parts can work at the same time and share the memory.

    The function takes pieces in the model's order. It assigns each one to the part where it would
    end first, among the parts that still have room (list scheduling: Topcuoglu et al. 2002, without
    their ranking). A part's room is its share of the whole by its memory, or an equal share if
    memories are not known. Each part gets at least one piece.

    Args:
        work: The time of each piece's forward, by key, in any unit.
        memory_bytes: The memory of each part's device.

    Returns:
        The part of each piece, by key.

    Raises:
        PlanError: there are fewer pieces than parts.
    """
    with_parameters = [piece for piece in capture.pieces if piece.parameters]
    if len(with_parameters) < len(memory_bytes):
        raise PlanError(
            f"the model has {len(with_parameters)} pieces with parameters and {len(memory_bytes)} parts "
            "were asked for",
            hint=f"at most {len(with_parameters)} parts",
        )
    whole = sum(need.total for need in needs.values())
    known = 0 < sum(memory_bytes) < float("inf")
    room = [
        whole * (memory / sum(memory_bytes) if known else 1 / len(memory_bytes))
        for memory in memory_bytes
    ]
    maker = capture.maker
    ended: dict[str, float] = {}
    free = [0.0] * len(memory_bytes)
    held_bytes = [0.0] * len(memory_bytes)
    part_of: dict[str, int] = {}
    num_left = len(with_parameters)
    for piece in capture.pieces:
        sources = [maker[name] for name in piece.inputs if name in maker]
        need = needs[piece.key].total

        def cost(
            part: int, sources: list[str] = sources, need: float = need
        ) -> tuple[bool, float, bool, int]:
            ready = max([0.0, *(ended[key] for key in sources)])
            is_apart = any(part_of[key] != part for key in sources)
            # A piece that exceeds the share by up to a half still belongs to this part rather than
            # to the next.
            return held_bytes[part] + need / 2 > room[part], max(ready, free[part]), is_apart, part

        empty = set(range(len(room))) - {part_of.get(other.key) for other in with_parameters}
        choices = empty if piece.parameters and len(empty) >= num_left else range(len(room))
        part = min(choices, key=cost)
        if not piece.parameters and sources:
            part = part_of[sources[-1]]
        start = max([free[part], *(ended[key] for key in sources)])
        ended[piece.key] = free[part] = start + work[piece.key]
        held_bytes[part] += need
        part_of[piece.key] = part
        num_left -= bool(piece.parameters)
    return part_of


def place_by_file(
    capture: Capture,
    placement: Placement,
    known: Sequence[str],
) -> dict[str, int]:
    """Assign every piece to the part that a file says.

    Args:
        known: The names of all modules of the model.

    Returns:
        The part of each piece, by key.

    Raises:
        PlanError: the file leaves a module out, or names a missing one.
    """
    pieces = {piece.key: _module_of(piece) for piece in capture.pieces if piece.parameters}
    parts = placement.part_of(list(dict.fromkeys(pieces.values())), known=known)
    maker = capture.maker
    part_of: dict[str, int] = {}
    for piece in capture.pieces:
        sources = [maker[name] for name in piece.inputs if name in maker]
        part_of[piece.key] = (
            parts[pieces[piece.key]]
            if piece.key in pieces
            else part_of[sources[-1]]
            if sources
            else 0
        )
    return part_of


def _module_of(piece: Piece) -> str:
    """Return the name of the module that a piece's parameters belong to."""
    return piece.path or piece.parameters[0].rpartition(".")[0] or piece.parameters[0]


def stages(capture: Capture, part_of: Mapping[str, int]) -> tuple[dict[str, int], list[int]]:
    """Group pieces into stages that begin where a part needs a value of another, and end where
    another needs one.

    A part therefore sends the values that others wait for before it continues, and does all
    possible work before it waits.

    Returns:
        The stage of each piece, by key; the part of each stage.
    """
    maker = capture.maker
    awaited = {
        piece.key: {
            maker[name]
            for name in piece.inputs
            if name in maker and part_of[maker[name]] != part_of[piece.key]
        }
        for piece in capture.pieces
    }
    crossing = set().union(*awaited.values())
    stage_of: dict[str, int] = {}
    parts: list[int] = []
    before: Piece | None = None
    for piece in capture.pieces:
        if (
            before is None
            or awaited[piece.key]
            or before.key in crossing
            or part_of[before.key] != part_of[piece.key]
        ):
            parts.append(part_of[piece.key])
        stage_of[piece.key] = len(parts) - 1
        before = piece
    return stage_of, parts


def in_turn(parts: Sequence[int], *, num_parts: int, num_microbatches: int) -> list[list[Action]]:
    """Return each part's actions: for each micro-batch, the forwards of all its stages, then the
    backwards."""
    orders: list[list[Action]] = [[] for _ in range(num_parts)]
    for microbatch in range(num_microbatches):
        for stage, part in enumerate(parts):
            orders[part].append(Action("F", stage, microbatch))
        for stage, part in reversed(list(enumerate(parts))):
            orders[part].append(Action("B", stage, microbatch))
    return orders
