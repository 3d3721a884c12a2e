"""Assigns the pieces of a captured model to ranks, with the order in which they run.

The planner and the ranks of a run compute the same assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from paceline.base.errors import PlanError
from paceline.cluster.devices import CPU_FLOPS_PER_BYTE, Device
from paceline.job import Precision
from paceline.model.graph import Capture
from paceline.model.graph_cost import forward_flops, kept_bytes
from paceline.strategies.costs import allocator_of
from paceline.strategies.mesh import weakest
from paceline.strategies.plan import Plan
from paceline.strategies.stages.ledger import PieceMemory, refuse_overfull
from paceline.strategies.stages.pipeline import assign
from paceline.strategies.stages.place import in_turn, place_automatically, place_by_file, stages
from paceline.strategies.stages.placement_file import read_placement
from paceline.strategies.stages.schedule import Action, in_flight, schedule

EXAMPLE_SAMPLES = 2  # samples of the small batch with which a model is captured


@dataclass(frozen=True)
class Assignment:
    """The stages of a model and their ranks."""

    stage_of: Mapping[str, int]  # the stage of each piece, by key
    ranks: Sequence[int]  # the place of each stage along the axis of stages
    orders: Sequence[Sequence[Action]]  # the order of actions at each of those places


def assigned(
    model: nn.Module,
    capture: Capture,
    plan: Plan,
    *,
    needs: Mapping[str, PieceMemory],
    samples: int,
    devices: Sequence[Device],
    precision: Precision,
) -> Assignment:
    """Cut a captured model as a plan says.

    Args:
        capture: The capture with EXAMPLE_SAMPLES samples.
        needs: What each piece needs for one sample; see `piece_needs`.
        samples: The samples of the largest micro-batch.
        devices: The device of each rank. Without devices, all ranks count as ordinary, equally fast
            CPUs with unlimited memory.
        precision: The precision of the job. It changes how fast a device computes, and not how fast
            it moves bytes.

    Raises:
        PlanError: the model has fewer pieces than the plan has stages, or a part doesn't fit into
            its device.
    """
    needs = {
        key: replace(need, activations=need.activations * samples) for key, need in needs.items()
    }
    places = weakest(plan, devices)
    holders = plan.axes.tensor * plan.axes.shard  # ranks that together hold a stage's weights
    memory_bytes = [
        float("inf")
        if device is None
        else allocator_of(plan, device).room(device.memory_bytes) * holders
        for device in places
    ]
    flops_per_byte = (
        places[0].flops_per_byte(precision) if places[0] is not None else CPU_FLOPS_PER_BYTE
    )
    work = {
        piece.key: forward_flops(piece, flops_per_byte=flops_per_byte) for piece in capture.pieces
    }
    if plan.axes.parts > 1:
        part_of = _part_of(model, capture, plan, work, needs, memory_bytes)
        refuse_overfull(needs, part_of, memory_bytes)
        stage_of, ranks = stages(capture, part_of)
        _check_edits(capture, stage_of)
        return Assignment(
            stage_of,
            ranks,
            in_turn(ranks, num_parts=plan.axes.parts, num_microbatches=plan.num_microbatches),
        )
    num_ranks, virtual = plan.axes.pipeline, plan.schedule.virtual
    orders = schedule(
        plan.schedule.schedule,
        num_ranks=num_ranks,
        num_microbatches=plan.num_microbatches,
        virtual=virtual,
    )
    stage_of = assign(
        capture,
        needs,
        work=work,
        speeds=_speeds(places) * virtual,
        memory_bytes=[num_bytes / virtual for num_bytes in memory_bytes] * virtual,
        in_flight=[-(-in_flight(list(order)) // virtual) for order in orders] * virtual,
    )
    return Assignment(stage_of, [stage % num_ranks for stage in range(num_ranks * virtual)], orders)


def _check_edits(capture: Capture, stage_of: Mapping[str, int]) -> None:
    """Refuse a cut between a value and an edit of it in place, which other stages would not see.

    `pipeline=N` makes no such cut.
    """
    maker = capture.maker
    for piece in capture.pieces:
        for name in piece.mutates:
            if name in maker and stage_of[maker[name]] != stage_of[piece.key]:
                edits, made = (
                    key.rstrip("+") or "the model's own forward" for key in (piece.key, maker[name])
                )
                raise PlanError(
                    f"{edits} edits in place what {made} made, and place= runs them apart",
                    hint="x = x + y in place of x += y, a file that has both and all between them on one "
                    "part, or a data=N or pipeline=N plan",
                )


def _speeds(places: Sequence[Device | None]) -> list[float]:
    """Return the relative speeds of devices.

    They count as equally fast unless all state their speed.
    """
    stated = [device.flops_per_s for device in places if device is not None and device.flops_per_s]
    return (
        [speed / max(stated) for speed in stated]
        if len(stated) == len(places)
        else [1.0] * len(places)
    )


def _part_of(
    model: nn.Module,
    capture: Capture,
    plan: Plan,
    work: Mapping[str, float],
    needs: Mapping[str, PieceMemory],
    memory_bytes: Sequence[float],
) -> dict[str, int]:
    if plan.schedule.place == "auto":
        return place_automatically(capture, work, needs, memory_bytes)
    placement = read_placement(Path(plan.schedule.place))
    if placement.num_parts != plan.axes.parts:
        raise PlanError(
            f"{placement.path} has {placement.num_parts} parts and the plan {plan.axes.parts}",
            hint=f"parts={placement.num_parts}",
        )
    known = [name for name, _ in model.named_modules() if name]
    return place_by_file(capture, placement, known)


def piece_needs(
    model: nn.Module, capture: Capture, *, state_factor: float
) -> dict[str, PieceMemory]:
    """Return the memory that each piece needs in training with one sample in flight, by key.

    A tied parameter counts in each piece that uses it. Each piece runs on fake tensors.

    Args:
        capture: The capture with EXAMPLE_SAMPLES samples.
        state_factor: Bytes of optimizer state per byte of trainable parameters.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    needs = {}
    for piece in capture.pieces:
        used = [parameters[name] for name in dict.fromkeys(piece.parameters)]
        weight_bytes = sum(p.nbytes for p in used)
        trained_bytes = sum(p.nbytes for p in used if p.requires_grad)
        activation_bytes = kept_bytes(piece, capture.values, parameters, buffers) / EXAMPLE_SAMPLES
        needs[piece.key] = PieceMemory(
            weight_bytes, trained_bytes, state_factor * trained_bytes, activation_bytes
        )
    return needs
