"""The fields of a job with named models: what is wrong with them, and what follows from them.

A `Job` calls these functions when it is made, so they take it as a value of any type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.base.errors import nearest
from paceline.job.own_step import FollowerModel, Optimizer, StepContext, spec
from paceline.job.pretrained import Weights


def default_step(job: Any) -> Callable[[Any, Any], None]:
    """Return the step of a job with a loss and several optimizers of one model: one backward, then
    every update.
    """

    def step(ctx: StepContext, batch: Any) -> None:
        ctx.backward(
            next(iter(job.models)), batch, lambda output, batch: job.criterion(output, batch.target)
        )
        for name in job.optimizers:
            ctx.update(name)

    return step


def default_validate(job: Any) -> Callable[[Any, Any], Any]:
    """Return the validation function of a job with a loss: it computes the loss of the first
    model.
    """
    return lambda ctx, batch: job.criterion(ctx.run(next(iter(job.models)), batch), batch.target)


def init_of(job: Any, name: str) -> Weights | None:
    """Return the weights with which a model or a follower begins in place of the seed's; None if
    there are none.

    They are its own, or those of the model that it follows. The only model of a job is "".
    """
    if not name:
        return Weights.of(job.init) if job.init is not None else None
    init, follower = job.init or {}, job.followers.get(name)
    if name not in init and follower is not None and isinstance(follower.source, str):
        name = follower.source
    return Weights.of(init[name]) if name in init else None


class _OfNamed:
    """A job's named models or optimizers, for code that knows one model and one optimizer."""

    def __init__(self, job: Any) -> None:
        self.models, self.followers, self.seed = job.models, job.followers, job.seed
        self.optimizers = {name: spec(each) for name, each in job.optimizers.items()}


class _BuildModels(_OfNamed):
    def __call__(self) -> Any:
        from paceline.job.named_models import NamedModels

        return NamedModels.of(self.models, self.followers, self.seed)


class _BuildOptimizers(_OfNamed):
    def __call__(self, named: Any) -> Any:
        from paceline.job.named_optimizers import NamedOptimizers

        return NamedOptimizers.of(self.optimizers, list(named), self.models)


class _BuildSchedules(_OfNamed):
    def __call__(self, optimizers: Any) -> Any:
        return optimizers.schedules(
            {name: each.lr_schedule for name, each in self.optimizers.items()}
        )


def derived(job: Any) -> dict[str, Any]:
    """Return the fields of a job that follow from others: one model and one optimizer that stand
    for all.

    A wrapper around the model's builder stays.
    """
    fields: dict[str, Any] = {"optimizer": _BuildOptimizers(job)}
    if job.model is None or isinstance(job.model, _OfNamed):
        fields["model"] = _BuildModels(job)
    if any(spec(each).lr_schedule for each in job.optimizers.values()):
        fields["lr_schedule"] = _BuildSchedules(job)
    return fields


def with_builders(
    job: Any, change: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> dict[str, Any]:
    """Return the fields of a job that build modules, with `change` applied to every function that
    does.
    """
    if not job.models:
        return {"model": change(job.model)}
    return {
        "model": None,
        "models": {name: change(build) for name, build in job.models.items()},
        "followers": {
            name: replace(follower, source=change(follower.source))
            if callable(follower.source)
            else follower
            for name, follower in job.followers.items()
        },
    }


def problems(job: Any) -> Iterator[str]:
    """Yield a message for everything that is wrong with the fields of a job with named models."""
    if (
        not isinstance(job.models, Mapping)
        or not isinstance(job.optimizers, Mapping)
        or not isinstance(job.followers, Mapping)
    ):
        yield "models, optimizers and followers map names to functions, optimizers and followers"
        return
    if not job.models:
        stated = [
            name
            for name in ("optimizers", "followers", "training_step", "validation_step")
            if getattr(job, name) and not (name == "validation_step" and job.compute is not None)
        ]
        if stated:
            more = "; with model=, compute= takes (model, batch)" * ("training_step" in stated)
            yield f"{' and '.join(stated)} need{'s' * (len(stated) == 1)} models= by name, in the place of model={more}"
        return
    yield from _field_problems(job)
    yield from _name_problems(job)
    for name, each in job.optimizers.items():
        yield from _optimizer_problems(job, name, spec(each))
    for name, follower in job.followers.items():
        yield from _follower_problems(job, name, follower)


def _field_problems(job: Any) -> Iterator[str]:
    if job.model is not None and not isinstance(
        getattr(job.model, "__wrapped__", job.model), _OfNamed
    ):
        yield "give either model or models, got both"
    for name in ("optimizer", "lr_schedule"):
        if getattr(job, name) is not None and not isinstance(getattr(job, name), _OfNamed):
            yield f"{name} is for one model; give optimizers= by name, each a function or pl.Optimizer(build, ...)"
    if not job.optimizers:
        yield 'models need optimizers= by name: {"generator": lambda named: torch.optim.Adam(named)}'
    if job.clip is not None:
        yield "clip belongs to an optimizer here: pl.Optimizer(build, clip=...)"
    if job.training_step is None and (job.loss is None or len(job.models) > 1):
        yield "several models need training_step=, and one needs training_step= or loss="
    yield from _init_problems(job)
    if job.metrics:
        yield 'metrics are for one model; validation_step= returns a mapping with "loss" and metrics'
    if job.validation is not None and job.validation_step is None and job.loss is None:
        yield "validation data needs validation_step=(ctx, batch), which returns what is measured of a batch"
    if job.validation is None and job.validation_step is not None:
        yield "validation_step= measures validation data, and there is none: give validation="
    if job.precision == "fp8":
        yield (
            "precision 'fp8' and models= don't compose: torchao's float8 layers have no second derivatives, which a "
            'loss of a step may take; take "bf16", "fp16" or "float32"'
        )


def _init_problems(job: Any) -> Iterator[str]:
    if job.init is None:
        return
    if not isinstance(job.init, Mapping):
        yield (
            'init gives weights by the names of models: init={"generator": "generator.safetensors"}, got '
            f"{type(job.init).__name__}"
        )
        return
    names = [*job.models, *job.followers]
    for name, weights in job.init.items():
        if name not in names:
            yield f"init has weights for {name!r}: {nearest(str(name), names)}"
        yield from (f"{name}: {problem}" for problem in Weights.of(weights).problems())


def _name_problems(job: Any) -> Iterator[str]:
    for name, value in {**job.models, **job.followers}.items():
        if not isinstance(name, str) or not name.isidentifier():
            yield f"a model's name is a Python name, got {name!r}"
        elif name in job.models and not callable(value):
            yield f"models[{name!r}] must be a function that builds the module, got {type(value).__name__}"
    if both := sorted(set(job.models) & set(job.followers)):
        yield f"'{both[0]}' is among models and among followers"


def _optimizer_problems(job: Any, name: str, each: Optimizer) -> Iterator[str]:
    if not callable(each.build):
        yield f"optimizers[{name!r}] must be a function of (name, parameter) pairs or a pl.Optimizer"
    if each.parameters is None and name not in job.models:
        yield (
            f"the optimizer '{name}' is named after no model ({nearest(name, job.models)}): say what it updates, "
            "pl.Optimizer(build, parameters=...)"
        )
    names = (each.parameters,) if isinstance(each.parameters, str) else each.parameters
    for model in names if isinstance(names, tuple) else ():
        if model not in job.models:
            yield f"the optimizer '{name}' updates the model {model!r}: {nearest(str(model), job.models)}"
    yield from clip_problems(f"clip of the optimizer '{name}'", each.clip)


def clip_problems(noun: str, clip: Any) -> Iterator[str]:
    """Yield a message if this is no greatest norm of gradients."""
    if clip is not None and (
        isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf
    ):
        yield f"{noun} must be a positive number, got {clip!r}"


def _follower_problems(job: Any, name: str, follower: Any) -> Iterator[str]:
    if not isinstance(follower, FollowerModel):
        yield f"followers[{name!r}] must be pl.ema, pl.copy_every or pl.frozen, got {type(follower).__name__}"
        return
    if isinstance(follower.source, str) and follower.source not in job.models:
        yield f"the follower '{name}' follows {follower.source!r}: {nearest(follower.source, job.models)}"
    if not callable(follower.momentum) and not (
        isinstance(follower.momentum, int | float) and 0 <= follower.momentum <= 1
    ):
        yield (
            f"the momentum of the follower '{name}' must be from 0 to 1 or a function of the step, got "
            f"{follower.momentum!r}"
        )
    if not isinstance(follower.every, int) or follower.every < 1:
        yield f"the follower '{name}' must be copied every 1 step or more, got {follower.every!r}"
