"""Consecutive stages of an unmodified model on the ranks of the pipeline axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.capture.graph import Capture, capture
from paceline.capture.price import forward_s
from paceline.errors import PlanError
from paceline.strategies.layout import Batch
from paceline.strategies.pipeline.cut import balance
from paceline.strategies.pipeline.schedule import schedule
from paceline.strategies.stages.layout import Stages, hollow

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.strategies.mesh import Mesh


def is_active(plan: Plan) -> bool:
    return plan.axes.pipeline > 1


def lay_out(model: nn.Module, *, plan: Plan, mesh: Mesh, device: torch.device, example: Batch,
            context: Callable[[], Any]) -> Stages:
    """This rank's stages.

    Args:
        model: Whole, with its initial weights; it is left hollow.
        example: A small batch; where the model is cut does not depend on its values.
        context: The numeric context of a forward.

    Raises:
        JobError: the model can't be captured.
        PlanError: it has fewer pieces than the plan has stages.
    """
    num_ranks, virtual = plan.axes.pipeline, plan.schedule.virtual
    model.train()
    with context():
        found = capture(model, *example.arguments())
    stage_of = _cut(found, num_ranks * virtual)
    orders = schedule(plan.schedule.schedule, num_ranks=num_ranks, num_microbatches=plan.num_microbatches,
                      virtual=virtual)
    tensors = hollow(model)
    return Stages(model, tensors, example=found, stage_of=stage_of,
                  ranks=[stage % num_ranks for stage in range(num_ranks * virtual)], orders=orders, mesh=mesh,
                  axis="pipeline", device=device, context=context)


def _cut(found: Capture, num_stages: int) -> dict[str, int]:
    """The stage of each piece. A cut lies before a piece with parameters, and never between a value and its edit."""
    starts = [0]
    made_at = {name: number for number, piece in enumerate(found.pieces) for name in piece.outputs}
    joined: set[int] = set()
    for number, piece in enumerate(found.pieces):
        for name in piece.mutates:
            if name in made_at:
                joined |= set(range(made_at[name] + 1, number + 1))
    seen = False
    for number, piece in enumerate(found.pieces):
        if piece.parameters and seen and number not in joined:
            starts.append(number)
        seen = seen or bool(piece.parameters)
    if len(starts) < num_stages:
        names = ", ".join(piece.key for piece in found.pieces if piece.parameters)
        raise PlanError(f"the model has {len(starts)} pieces that can be cut apart and the plan needs {num_stages} "
                        f"stages", hint=f"at most {len(starts)} stages; the pieces are {names}")
    ends = [*starts[1:], len(found.pieces)]
    seconds = [sum(forward_s(piece) for piece in found.pieces[start:end])
               for start, end in zip(starts, ends, strict=True)]
    firsts = balance(seconds, [0.0] * len(seconds), speeds=[1.0] * num_stages, memory_bytes=[1.0] * num_stages)
    stage_of: dict[str, int] = {}
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        stage = max(k for k, first in enumerate(firsts) if first <= group)
        stage_of |= {piece.key: stage for piece in found.pieces[start:end]}
    return stage_of
