"""From a whole model to what one rank runs of it: captured once, split into stages and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.capture.graph import capture_or_learn
from paceline.capture.opaque import OpaqueModules
from paceline.strategies.layout import Batch
from paceline.strategies.stages.assignment import EXAMPLE_SAMPLES, assigned
from paceline.strategies.stages.layout import Stages, first_names, hollow, renamed
from paceline.strategies.tensor.published import published
from paceline.strategies.tensor.run import Split, derive

if TYPE_CHECKING:
    from paceline.cluster import Device
    from paceline.plans import Plan
    from paceline.strategies.mesh import Mesh


def lay_out(model: nn.Module, *, plan: Plan, mesh: Mesh, device: torch.device,
            example: Callable[[int], Batch], context: Callable[[], Any], microbatch_samples: int,
            state_factor: Callable[[], float], devices: Sequence[Device],
            running: Callable[[], AbstractContextManager[None]] = nullcontext) -> Stages:
    """This rank's part of a model that is cut into stages, or whose layers are split, or both. Collective.

    Args:
        model: Whole, with its initial weights; it is left hollow.
        example: Makes a batch of so many samples; where the model is cut does not depend on their values.
        context: The numeric context of a forward.
        microbatch_samples: Most samples of a micro-batch.
        state_factor: Gives bytes of optimizer state a byte of trainable parameters.
        devices: Of each rank.
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
    cut = assigned(model, found, plan, samples=microbatch_samples, state_factor=state_factor(), devices=devices)
    split = Split()
    if plan.axes.tensor > 1:
        buffers = dict(model.named_buffers(remove_duplicate=False))
        with context(), running():
            inputs = found.bind(*example(EXAMPLE_SAMPLES).arguments())
            split = derive(found, dict(model.named_parameters()), buffers, inputs,
                           mesh.devices(device.type)["tensor"], wishes=published(model), sharded=plan.axes.shard > 1)
    with running():
        return Stages(model, hollow(model), example=found, stage_of=cut.stage_of,
                      ranks=cut.ranks, orders=cut.orders, mesh=mesh, axis=mesh.stage_axis, device=device,
                      context=context, split=split, opaque=opaque)
