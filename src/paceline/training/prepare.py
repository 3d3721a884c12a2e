"""Turns a job into what one rank runs: it builds and inspects the model, lays it out, and lets the
plan's strategies change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.parameter import is_lazy

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.base.streams import kept_streams, seed_model
from paceline.cluster.devices import Device
from paceline.job import AUTOCAST, Job
from paceline.job.foreign_fields import model_hint
from paceline.model.attributes import in_float64
from paceline.model.casts import autocast
from paceline.model.float8 import in_float8
from paceline.model.forward_effects import (
    NOTHING,
    ForwardEffects,
    choosing,
    followers,
    has_own_code,
    limited_by_norm,
    may_choose,
    may_write,
    sparsely_trained,
    written_by,
)
from paceline.model.graph_check import MAX_BYTES, is_comparable
from paceline.model.graph_limits import module_with_unseen_state
from paceline.model.units import find_units
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.compose import (
    Models,
    Synchroniser,
    lay_out,
    may_be_elsewhere,
    prepare,
)
from paceline.strategies.disk_init import MappedTensors, NoDiskForTensors
from paceline.strategies.layout import CutBasis, Layout, ModelUse
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.attributes import ChangingAttributes
from paceline.training.feed import DataShard, MicroBatch, evaluation_feed, example_batch
from paceline.training.freezing import freeze_throughout
from paceline.training.replicas.inplace_parameters import refuse_updates_in_backward


def build_model(job: Job, device: torch.device) -> torch.nn.Module:
    """Build the job's model with the seed's initial weights, the same on every rank and under every
    plan.

    Raises:
        JobError: it is no module, or has nothing to train.
    """
    seed_model(job.seed)
    model = job.model()
    if not isinstance(model, torch.nn.Module):
        raise JobError(
            f"model returned {type(model).__name__} and not a torch.nn.Module",
            hint=model_hint(model),
        )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise JobError(
                f"the shape of '{name}' is not known before the first forward",
                hint="give lazy modules their sizes, or run the model on one sample where it is built",
            )
    needs_training = getattr(
        job.model, "needs_training", lambda model: True
    )  # not every one of several models needs training
    if needs_training(model) and not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            "the model has no trainable parameter",
            hint="every parameter has requires_grad=False, or the module registers none",
        )
    freeze_throughout(job, model)
    model = model.to(device)
    if job.precision == "fp8":
        return in_float8(model)
    return in_float64(model) if job.precision == "float64" else model


@dataclass(frozen=True)
class Prepared:
    """A job's model, the part that this rank runs, and the synchronisers of its gradients."""

    model: torch.nn.Module
    layout: Layout
    synchronisers: list[Synchroniser]
    attributes: ChangingAttributes  # the model's Python attributes, as the job's function made them


def prepare_job(
    job: Job,
    *,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    devices: Sequence[Device] = (),
    models: Models = "only",
) -> Prepared:
    """Build the job's model and let this rank hold its part of it. Collective.

    If a rank holds a part, at most that part and one more tensor need memory at a time.

    Args:
        devices: The device of each rank; without them nothing counts as too large.
        models: Which of a job's models this is.
    """
    active = ActivePlan(plan)
    dtype = job.input_dtype

    def build() -> tuple[MappedTensors | None, torch.nn.Module]:
        if not active.holds_parts:
            return None, build_model(job, device)
        mapped, model = build_in_files(job, torch.device("cpu"))
        return mapped, model if may_be_elsewhere(plan, model) else model.to(device)

    mapped, model = build()
    observed, unseen_state, is_used = NOTHING, None, False
    if active.runs_again and is_comparable(model):
        unseen_state, is_used = _unseen_state(job, model, mapped, device), True
    elif active.runs_again and has_own_code(model) and mesh.rank == 0:
        logger.warning(
            "the model has more than %d MiB of parameters and was not tried for state that none of its "
            "attributes shows (a count in a closure, say); recompute=full would change such a state twice "
            "a step",
            MAX_BYTES // 1024**2,
        )
    if active.observes:
        run_device = torch.device("cpu") if may_be_elsewhere(plan, model) else device
        observed, is_run = observe(job, active, model, mapped, run_device)
        is_used |= is_run
    if is_used:
        del mapped, model
        mapped, model = build()
    if plan.replicas * plan.num_microbatches > 1 and plan.outer_steps is None:
        refuse_updates_in_backward(model)
    observed = replace(observed, sparse=sparsely_trained(model), unseen_state=unseen_state)
    if "casts" in active.observes and job.precision in AUTOCAST:
        observed = replace(
            observed,
            cast=_cast_parameters(job, device),
            cast_dtype=getattr(torch, AUTOCAST[job.precision]),
        )
    running, attributes = (
        mapped.running if mapped is not None else nullcontext,
        ChangingAttributes(model),
    )
    use = ModelUse(
        lambda samples: example_batch(job, samples).to(device, dtype),
        lambda: autocast(job, device),
        {
            "the loss": job.criterion,
            **{f"metric '{name}'": metric for name, metric in job.metrics.items()},
        },
        partial(_evaluation_batch, job, plan, mesh, device) if job.validation is not None else None,
        running,
    )
    basis = CutBasis(
        -(-job.batch // (plan.replicas * plan.num_microbatches)),
        partial(_state_factor, job, model),
        devices,
        job.precision,
    )
    layout = lay_out(model, use, basis, plan=plan, mesh=mesh, device=device)
    with running():
        synchronisers = prepare(
            layout.module,
            active=active,
            mesh=mesh,
            observed=observed,
            device=device if may_be_elsewhere(plan, model) else None,
            models=models,
        )
        layout.let_go()
        if mapped is not None:
            elsewhere = active.held_elsewhere(layout.module)
            mapped.bring_in(
                [*(p for p in layout.module.parameters() if p not in elsewhere), *model.buffers()]
            )
    attributes.disregard_new()
    return Prepared(model, layout, synchronisers, attributes)


def _state_factor(job: Job, model: torch.nn.Module) -> float:
    from paceline.model.cost.trace import (
        state_factor,
    )  # it takes a moment to load, and few plans need it

    return state_factor(job, model)


def _cast_parameters(job: Job, device: torch.device) -> frozenset[str]:
    from paceline.model.cost.trace import cast_parameters_of_rank

    return cast_parameters_of_rank(job, device)


def _evaluation_batch(job: Job, plan: Plan, mesh: Mesh, device: torch.device) -> MicroBatch:
    """Return the first micro-batch of an evaluation on this rank, if replicas have equal shares."""
    part = DataShard((1,) * plan.replicas, mesh.replica, plan.num_microbatches)
    with kept_streams():
        batch = next(
            evaluation_feed(
                job.validation, batch=job.batch, part=part, seed=job.seed, collate=job.collate
            )
        )
    return batch.to(device, job.input_dtype)


def _unseen_state(
    job: Job, model: torch.nn.Module, mapped: MappedTensors | None, device: torch.device
) -> str | None:
    """Return the path of a module that would change a hidden state if a step ran it twice, or
    None.
    """
    run_device = torch.device("cpu") if mapped is not None else device
    batch = example_batch(job, 2).to(run_device, job.input_dtype)
    running = mapped.running if mapped else nullcontext
    with (
        suppress(Exception),
        autocast(job, run_device),
    ):  # what fails here fails in the first step, too
        return module_with_unseen_state(model.train(), *batch.arguments(), running=running)
    return None


def observe(
    job: Job,
    active: ActivePlan,
    model: torch.nn.Module,
    mapped: MappedTensors | None,
    device: torch.device,
) -> tuple[ForwardEffects, bool]:
    """Find out about the model's forward what a plan must know beforehand, and return whether the
    model was run for that.

    A model that was run is not fit for use.

    Raises:
        PlanRefused: parameters lie on servers, which would not learn of what a worker writes to
            them.
    """
    edited, chooses = limited_by_norm(model), frozenset[str]()
    compares = "choices" in active.observes and may_choose(model, find_units(model))
    is_run = compares or may_write(model)
    if is_run:
        dtype = job.input_dtype
        batches = [
            example_batch(job, 2, first=2 * k).to(device, dtype)
            for k in range(4 if compares else 2)
        ]
        is_elsewhere, running = (
            (mapped.holds, mapped.running) if mapped else (lambda tensor: False, nullcontext)
        )
        with (
            suppress(Exception),
            autocast(job, device),
            running(),
        ):  # what fails here fails in the first step, too
            edited |= written_by(lambda: batches[0].call(model.train()), model, is_elsewhere)
            in_memory = [
                name
                for name, p in model.named_parameters()
                if name in edited and not is_elsewhere(p)
            ]
            if in_memory and "writes to parts" in active.observes:
                edited -= followers(
                    in_memory,
                    model,
                    find_units(model),
                    (partial(batches[0].call, model), partial(batches[1].call, model)),
                )
            if compares:
                chooses = choosing(
                    model, find_units(model), [partial(batch.call, model) for batch in batches]
                )
    if edited and (why := active.refusal("edits")):
        raise PlanRefused(
            f"a forward changes the parameter '{min(edited)}' in place, and {why}",
            hint="use a data=N plan if all replicas change it alike, or one that doesn't cut the batch: "
            "single or tensor=N",
        )
    return ForwardEffects(edited, chooses), is_run


def build_in_files(job: Job, device: torch.device) -> tuple[MappedTensors | None, torch.nn.Module]:
    """Build the model with its weights in files.

    The weights are in memory if files can't be used, or if the weights need no more memory than
    files need anyway.
    """
    try:
        mapped = MappedTensors()
        with mapped.building():
            model = build_model(job, device)
    except JobError:
        raise
    except Exception as error:  # an error of the user's own code comes again below
        first = (str(error).splitlines() or [""])[0]
        logger.warning(
            "every rank takes memory for the whole model to begin with: it could not be built in files (%s)",
            first if isinstance(error, NoDiskForTensors) else f"{type(error).__name__}: {first}",
        )
        return None, build_model(job, device)
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.nbytes for tensor in tensors) <= mapped.resident_bytes:
        mapped.bring_in(tensors)
        return None, model
    if (left_bytes := mapped.in_memory_bytes(model.parameters())) > mapped.resident_bytes:
        logger.warning(
            "every rank takes %.0f MB for the whole model to begin with: that much of it was not made by "
            "torch on the thread that calls model()",
            left_bytes / 1e6,
        )
    return mapped, model
