"""From a whole model to what one rank runs of it: captured once, split into stages and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.capture.graph import Capture, capture_or_learn
from paceline.capture.opaque import OpaqueModules
from paceline.capture.price import forward_s, kept_bytes
from paceline.errors import PlanError
from paceline.strategies.layout import Batch
from paceline.strategies.pipeline.assign import assign
from paceline.strategies.pipeline.schedule import schedule
from paceline.strategies.place.assign import in_turn, place_automatically, place_by_file, stages
from paceline.strategies.place.file import read_placement
from paceline.strategies.place.ledger import Need
from paceline.strategies.stages.layout import Stages, first_names, hollow, renamed
from paceline.strategies.tensor.run import Split, derive

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.strategies.mesh import Mesh

EXAMPLE_SAMPLES = 2  # of the small batch that a model is captured with

def lay_out(model: nn.Module, *, plan: Plan, mesh: Mesh, device: torch.device,
            example: Callable[[int], Batch], context: Callable[[], Any], microbatch_samples: int, state_factor: float,
            memory_bytes: Sequence[float],
            running: Callable[[], AbstractContextManager[None]] = nullcontext) -> Stages:
    """This rank's part of a model that is cut into stages, or whose layers are split, or both. Collective.

    Args:
        model: Whole, with its initial weights; it is left hollow.
        example: Makes a batch of so many samples; where the model is cut does not depend on their values.
        context: The numeric context of a forward.
        microbatch_samples: Most samples of a micro-batch.
        state_factor: Bytes of optimizer state a byte of trainable parameters.
        memory_bytes: Of each rank's device.
        running: Entered where the whole model's weights are used.

    Raises:
        JobError: the model can't be captured.
        PlanError: it has fewer pieces than the plan has stages, or what it is cut into doesn't fit.
    """
    model.train()
    opaque = OpaqueModules()
    with context():
        found = capture_or_learn(model, lambda samples: example(samples).arguments(), opaque, running)
    found = renamed(found, first_names(model))
    if plan.axes.parts > 1:
        stage_of, ranks, orders = _placed(model, found, plan, mesh, microbatch_samples=microbatch_samples,
                                          state_factor=state_factor, memory_bytes=memory_bytes)
    else:
        num_ranks, virtual = plan.axes.pipeline, plan.schedule.virtual
        stage_of = assign(found, num_ranks * virtual)
        ranks = [stage % num_ranks for stage in range(num_ranks * virtual)]
        orders = schedule(plan.schedule.schedule, num_ranks=num_ranks, num_microbatches=plan.num_microbatches,
                          virtual=virtual)
    split = Split()
    if plan.axes.tensor > 1:
        buffers = dict(model.named_buffers(remove_duplicate=False))
        with context(), running():
            inputs = found.bind(*example(EXAMPLE_SAMPLES).arguments())
            split = derive(found, dict(model.named_parameters()), buffers, inputs,
                           mesh.devices(device.type)["tensor"], sharded=plan.axes.shard > 1)
    with running():
        return Stages(model, hollow(model), example=found, stage_of=stage_of,
                      ranks=ranks, orders=orders, mesh=mesh, axis=mesh.stage_axis, device=device, context=context,
                      split=split, opaque=opaque)


def _placed(model: nn.Module, found: Capture, plan: Plan, mesh: Mesh, *, microbatch_samples: int,
            state_factor: float, memory_bytes: Sequence[float]) -> tuple[dict[str, int], list[int], Any]:
    """Stages, the part of each, and the parts' orders of work."""
    own_row = mesh.ranks_along("parts")
    memory = [memory_bytes[rank] if rank < len(memory_bytes) else float("inf") for rank in own_row]
    names = [f"rank {rank}" for rank in own_row]
    needs = piece_needs(model, found, samples=microbatch_samples, state_factor=state_factor)
    if plan.schedule.place == "auto":
        seconds = {piece.key: forward_s(piece) for piece in found.pieces}
        part_of = place_automatically(found, seconds, needs, memory, names)
    else:
        placement = read_placement(Path(plan.schedule.place))
        if placement.num_parts != plan.axes.parts:
            raise PlanError(f"{placement.path} has {placement.num_parts} parts and the plan {plan.axes.parts}",
                            hint=f"parts={placement.num_parts}")
        part_of = place_by_file(found, placement, [name for name, _ in model.named_modules() if name], needs, memory,
                                names)
    stage_of, parts = stages(found, part_of)
    return stage_of, parts, in_turn(parts, num_parts=plan.axes.parts, num_microbatches=plan.num_microbatches)


def piece_needs(model: nn.Module, found: Capture, *, samples: int, state_factor: float) -> dict[str, Need]:
    """What each piece has to hold in training, by key. A tied parameter counts in each piece that uses it.

    samples: whose activations are in flight.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    needs = {}
    for piece in found.pieces:
        weights = sum(parameters[name].nbytes for name in dict.fromkeys(piece.parameters))
        trained = sum(parameters[name].nbytes for name in dict.fromkeys(piece.parameters)
                      if parameters[name].requires_grad)
        kept = kept_bytes(piece, found.values, parameters, buffers) / EXAMPLE_SAMPLES * samples
        needs[piece.key] = Need(weights, trained, state_factor * trained, kept)
    return needs
