"""Find what is wrong with a job before its run has a folder and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.base.errors import JobError, PacelineError
from paceline.job import Job
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from paceline.job.pretrained import Weights
    from paceline.training.parts.spikes import SpikeAction


def refuse_early(job: Job, plan: Plan, on_spike: SpikeAction | None = None) -> bool:
    """Refuse what a rank would refuse after it has built the model.

    This runs in a fork, because it runs the job's own code. Whatever can't be known there is left
    to the ranks.

    Returns:
        Whether there was anything to look at: `freeze`, `init`, `lr_schedule`, or a step of the
            job's own whose models the plan splits or that is watched for spikes.

    Raises:
        JobError: a pattern of `freeze` that matches nothing, initial weights that are missing or
            not the model's, a schedule that waits for an evaluation that the job does not have, or
            a step that can't be watched for spikes.
        PlanRefused: a loss runs a model that the plan splits by itself.
    """
    from paceline.base.fork import in_a_fork

    if not (
        job.freeze
        or job.init is not None
        or job.lr_schedule is not None
        or (job.own_step is not None and (plan.splits_model or on_spike is not None))
    ):
        return False
    with suppress(RuntimeError):
        in_a_fork(lambda: _look(job, plan, on_spike))
    return True


def refuse_few_pieces(job: Job, plan: Plan) -> None:
    """Refuse a plan with more stages than the model has pieces, in a fork.

    A model with as many layers as the plan has stages is left to the ranks, which can cut it in any
    case.

    Raises:
        PlanError: with the pieces.
    """
    from paceline.base.fork import in_a_fork

    if plan.splits_model and job.own_step is None:
        with suppress(RuntimeError):
            in_a_fork(lambda: _cut(job, plan))


def _cut(job: Job, plan: Plan) -> None:
    from paceline.base.logs import redirect
    from paceline.model.cost.trace import fake_model, profile_job
    from paceline.strategies.stages.assignment import EXAMPLE_SAMPLES, assigned, piece_needs
    from paceline.strategies.stages.price import SplitJob

    redirect(None)
    try:
        built = fake_model(job)
        num_layers = sum(
            any(True for _ in module.parameters(recurse=False)) for module in built.model.modules()
        )
        if (
            num_layers >= math.prod(plan.model_cut) * plan.schedule.virtual
        ):  # as many as stages, or more
            return
        split = SplitJob(job, profile_job(job, built=built), built=built)
    except (
        Exception
    ):  # of the job's own code, or of a model that can't be captured: ranks say which
        return
    assigned(
        split.model,
        split.example,
        plan,
        needs=piece_needs(split.model, split.example, state_factor=0.0),
        samples=EXAMPLE_SAMPLES,
        devices=(),
        precision=job.precision,
    )


def _look(job: Job, plan: Plan, on_spike: SpikeAction | None) -> None:
    from paceline.base.logs import redirect

    redirect(None)  # hide what the job's own code prints; it prints all of it again in the run
    for check in (_schedule, _weights, lambda job: _step(job, plan, on_spike)):
        try:
            check(job)
        except PacelineError:
            raise
        except Exception:  # an error of the job's own code, which a rank reports with its lines
            continue


def _schedule(job: Job) -> None:
    """Refuse a learning-rate schedule that waits for an evaluation that the job does not have.

    Each schedule is built for an optimizer of one weight, because its kind does not depend on the
    optimizer.
    """
    import torch

    from paceline.job.own_step import spec
    from paceline.training.optimizers.schedule import refuse_waiting

    named = [spec(each).lr_schedule for each in job.optimizers.values()]
    for build in named or [job.lr_schedule]:
        if build is not None:
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            refuse_waiting(job, [(build(optimizer), build)])


def _weights(job: Job) -> None:
    from paceline.model.cost.fakes import convertible
    from paceline.model.cost.trace import build
    from paceline.torch_private.fake_tensors import FakeTensorMode
    from paceline.training.freezing import frozen_names
    from paceline.training.initial import matched, source_of

    sources = [(name, weights, source_of(weights).shapes) for name, weights in _initial(job)]
    if not sources and not job.freeze:
        return
    with FakeTensorMode(allow_non_fake_inputs=True), convertible():
        model: nn.Module = build(job)
    if job.freeze:
        frozen_names(job, model)
    for name, weights, shapes in sources:
        try:
            matched(weights, shapes, model.get_submodule(name))
        except JobError as error:
            raise JobError(
                f"'{name}': {error.args[0]}" if name else error.args[0], hint=error.hint
            ) from error


def _initial(job: Job) -> Iterator[tuple[str, Weights]]:
    """Yield the initial weights of each model with the model's name; weights from a function are
    left to the ranks.
    """
    from paceline.job.named_fields import init_of

    for name in job.model_names:
        weights = init_of(job, name)
        if weights is not None and not callable(weights.source):
            yield name, weights


def _step(job: Job, plan: Plan, on_spike: SpikeAction | None) -> None:
    from paceline.training.own_step.named_parts import TRIED_SAMPLES
    from paceline.training.own_step.recorded import recorded, refuse_to_split
    from paceline.training.parts.spikes import refuse_backwards

    if job.own_step is None or not (plan.splits_model or on_spike is not None):
        return
    record = recorded(job, TRIED_SAMPLES)
    if plan.splits_model:
        refuse_to_split(job, plan, record)
    if on_spike is not None:
        refuse_backwards(on_spike, record.backwards)
