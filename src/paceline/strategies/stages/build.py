"""Builds one rank's part of a model: captures the whole model once, and splits it into stages and
over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import PacelineError, PlanRefused
from paceline.base.fork import in_a_fork
from paceline.base.logs import logger
from paceline.model.forward_state import state_kept
from paceline.model.graph import Capture, CaptureFailed, capture, capture_or_learn, take_whole
from paceline.model.graph_check import MAX_BYTES, first_difference, is_comparable
from paceline.model.graph_limits import WHOLE_MODEL_PLANS, Findings, examine
from paceline.model.losses import refuse_readers
from paceline.model.opaque import OpaqueModules
from paceline.model.units import refuse_scripted
from paceline.strategies.compile.run import refuse_compiled
from paceline.strategies.layout import Batch, CutBasis, ModelUse
from paceline.strategies.stages.assignment import EXAMPLE_SAMPLES, assigned, piece_needs
from paceline.strategies.stages.layout import (
    CapturedModel,
    Stages,
    first_names,
    hollow,
    renamed,
)
from paceline.strategies.tensor.run import TensorSplit, derive
from paceline.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from paceline.strategies.mesh import Mesh
    from paceline.strategies.plan import Plan


def lay_out(
    model: nn.Module,
    use: ModelUse,
    basis: CutBasis,
    *,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
) -> Stages:
    """Build this rank's part of a model that is cut into stages, or whose layers are split, or
    both. Collective.

    Args:
        model: The whole model with its initial weights. Afterwards it is hollow. It need not be on
            the device.

    Raises:
        PlanRefused: the model can't be captured, or its capture would compute something else, or
            these stages can't evaluate it, or a function uses more of the model than its output.
        PlanError: the model has fewer pieces than the plan has stages, or a part doesn't fit into
            its device.
    """
    model.train()
    refuse_scripted(model, "a plan that splits the model")
    refuse_compiled(model, "a plan that splits the model")
    captured, here = _captured(model, use, device, is_staged=mesh.sizes[mesh.stage_axis] > 1)
    assignment = assigned(
        model,
        captured.example,
        plan,
        needs=piece_needs(model, captured.example, state_factor=basis.state_factor()),
        samples=basis.microbatch_samples,
        devices=basis.devices,
        precision=basis.precision,
    )
    if here != device:
        captured = replace(
            captured,
            example=_captured_on(device, model, use, captured.opaque),
            batch=use.example(EXAMPLE_SAMPLES),
        )
    split = TensorSplit()
    if plan.axes.tensor > 1:
        with use.context(), use.running(), state_kept(model):
            inputs = captured.example.bind(*use.example(EXAMPLE_SAMPLES).arguments())
            split = derive(
                model,
                captured.example,
                inputs,
                mesh.devices(device.type)["tensor"],
                batches=basis.microbatch_samples / EXAMPLE_SAMPLES,
                sharded=plan.axes.shard > 1,
            )
    with use.running():
        stages = Stages(
            model,
            hollow(model, device),
            captured,
            assignment,
            mesh=mesh,
            device=device,
            use=use,
            split=split,
        )
    if use.evaluated is not None:
        stages.prepare_evaluation(use.evaluated())
    return stages


def _captured(
    model: nn.Module, use: ModelUse, device: torch.device, *, is_staged: bool
) -> tuple[CapturedModel, torch.device]:
    """Capture the model's forward, on the device of its weights if its own code runs there.

    Args:
        is_staged: Whether there are several stages, of which the last one runs the loss and
            metrics.

    Returns:
        The captured model, and the device on which it was captured.

    Raises:
        PlanRefused: the model can't be captured, or a function uses more of the model than its
            output, or a function sets a value that other stages read.
    """
    opaque, here = OpaqueModules(), next(model.parameters()).device
    with use.context():
        try:
            example, findings = faithful_capture(
                model, _nearby(use.example, here), opaque, use.running
            )
        except Exception as error:
            if here == device or isinstance(error, PacelineError):
                raise
            logger.info(
                "the model's own code does not run on %s (%s: %s): all of it is brought to %s",
                here,
                type(error).__name__,
                (str(error).splitlines() or [""])[0],
                device,
            )
            model.to(device)
            opaque, here = OpaqueModules(), device
            example, findings = faithful_capture(model, use.example, opaque, use.running)
        notes = (
            ()
            if is_comparable(model)
            else (
                "not compared with the model itself before the first step: it has more than "
                f"{MAX_BYTES / 2**20:.0f} MiB",
            )
        )
        batch = _nearby(use.example, here)(EXAMPLE_SAMPLES)
        look = partial(
            refuse_readers,
            model,
            *batch.arguments(),
            {
                name: partial(_of_output, function, batch.target)
                for name, function in use.functions.items()
            },
            use.running,
            altered=example.reads.changed if is_staged else list,
        )
        if here.type == "cpu":  # in a fork, so that the functions don't change objects of the job
            with suppress(RuntimeError):  # an error there also occurs in the first step
                in_a_fork(look)
        else:
            look()
    return CapturedModel(example, batch, opaque, findings.changing, notes), here


def _captured_on(
    device: torch.device, model: nn.Module, use: ModelUse, opaque: OpaqueModules
) -> Capture:
    """Capture a model as it runs on a device other than that of its weights. Its buffers are moved
    there.

    Raises:
        PlanRefused: the model runs there in a way that can't be captured.
    """
    originals = [(module, dict(own_parameters(module))) for module in model.modules()]
    tensors = hollow(model, device)
    try:
        with use.context():
            example = capture(
                model, *use.example(EXAMPLE_SAMPLES).arguments(), opaque=opaque, tensors=tensors
            )
            return renamed(example, first_names(model))
    except CaptureFailed as failed:
        raise PlanRefused(failed.args[0], hint=failed.hint) from failed
    finally:
        for module, parameters in originals:
            own_parameters(module).update(parameters)


def _nearby(example: Callable[[int], Batch], device: torch.device) -> Callable[[int], Batch]:
    """Return a function that makes the same batches on the device."""
    return lambda samples: example(samples).to(device)


def _of_output(function: Callable[[Any, Any], Any], target: Any, output: Any) -> Any:
    return function(output, target)


def faithful_capture(
    model: nn.Module,
    example: Callable[[int], Batch],
    opaque: OpaqueModules,
    running: Callable[[], AbstractContextManager[None]],
) -> tuple[Capture, Findings]:
    """Capture a model so that the capture computes the same as the model.

    Modules with effects that a graph would lose are taken whole.

    Raises:
        PlanRefused: the model's own forward has effects that no graph can represent.
    """

    def arguments(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return example(samples).arguments()

    batch = arguments(EXAMPLE_SAMPLES)
    findings = examine(model, *batch, running=running)
    reasons = dict(findings.opaque)
    try:
        if reasons:
            _take_whole(model, reasons, arguments, opaque, running)
        while True:
            captured = renamed(
                capture_or_learn(model, arguments, opaque, running), first_names(model)
            )
            difference = (
                first_difference(model, captured, *batch, running=running)
                if is_comparable(model)
                else None
            )
            if difference is None:
                break
            if not difference.path or _is_inside(difference.path, opaque):
                where = f"'{difference.path}'" if difference.path else type(model).__name__
                raise PlanRefused(
                    f"{where} runs otherwise where the model is split: {difference.description}",
                    hint=WHOLE_MODEL_PLANS,
                )
            reasons[difference.path] = difference.description
            _take_whole(
                model, {difference.path: difference.description}, arguments, opaque, running
            )
    except CaptureFailed as failed:
        raise PlanRefused(failed.args[0], hint=failed.hint) from failed
    for path, why in reasons.items():
        logger.info("'%s' is not looked into and runs whole: it %s", path, why)
    return captured, findings


def _take_whole(
    model: nn.Module,
    reasons: Mapping[str, str],
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]],
    opaque: OpaqueModules,
    running: Callable[[], AbstractContextManager[None]],
) -> None:
    take_whole(model, list(reasons), arguments, opaque, running)
    for path, why in reasons.items():
        if not _is_inside(path, opaque):
            raise PlanRefused(
                f"'{path}' {why}, and a rank that runs a part of the model would lose that: it is never "
                "called itself, so that it can't be taken whole",
                hint=WHOLE_MODEL_PLANS,
            )


def _is_inside(path: str, opaque: OpaqueModules) -> bool:
    return any(path == outer or path.startswith(f"{outer}.") for outer in opaque.outputs)
