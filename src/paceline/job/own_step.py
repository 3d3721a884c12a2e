"""The values that a job with its own step function uses: named optimizers, followers, and checks of
both.

Named models become one module, `named_models.NamedModels`, and named optimizers become one
optimizer. So checkpoints, proofs and messages all name a parameter as `MODEL.NAME`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from paceline.base.errors import TrainingError, nearest
from paceline.job.pretrained import Weights

if TYPE_CHECKING:
    import torch

    from paceline.job import Job

ModelNames = str | tuple[str, ...]


@dataclass(frozen=True)
class Optimizer:
    """One of a job's named optimizers, if it needs more than a function that builds it.

    Args:
        build: Builds the optimizer from (name, parameter) pairs; names are `MODEL.NAME`.
        parameters: The parameters that it updates: a model's name, several names, or a function
            (name, parameter) -> whether it updates this one. By default these are all parameters of
            the model that has the optimizer's name. Each trainable parameter has one optimizer.
        lr_schedule: Builds a learning-rate scheduler from the optimizer; it is stepped after each
            of its updates.
        clip: Greatest norm of the gradients of an update.
    """

    build: Callable[[Any], Any]
    parameters: ModelNames | Callable[[str, Any], bool] | None = None
    lr_schedule: Callable[[Any], Any] | None = None
    clip: float | None = None


@dataclass(frozen=True)
class FollowerModel:
    """A model whose weights are a function of another's; made by `ema`, `copy_every` and `frozen`.

    It begins as its source, runs in evaluation mode, and no loss trains it. After each step in
    which it moves, it takes over the source's buffers as they are.
    """

    source: str | Callable[[], Any]  # name of a model, or a function that builds a frozen one
    # The part of its own weights that a move keeps, or a function that gives it for a step, from 0.
    # A follower of 1.0 never moves.
    momentum: float | Callable[[int], float]
    every: int = 1  # steps between moves

    @property
    def is_moving(self) -> bool:
        """Whether the follower moves after some step."""
        return callable(self.momentum) or self.momentum != 1.0

    def momentum_after(self, step: int) -> float:
        """Return the part of its own weights that it keeps after a step, counted from 0; 1.0 if it
        does not move.

        Raises:
            TrainingError: the job's function returns no number from 0 to 1.
        """
        if (step + 1) % self.every:
            return 1.0
        if not callable(self.momentum):
            return self.momentum
        momentum = self.momentum(step)
        if not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
            raise TrainingError(
                f"the momentum of a follower of {self.source!r} must be a number from 0 to 1, and its "
                f"function returned {momentum!r} for step {step}"
            )
        return float(momentum)


def ema(source: str, momentum: float | Callable[[int], float]) -> FollowerModel:
    """Return the exponential moving average of a model's weights as a follower.

    After each step it becomes `momentum * itself + (1 - momentum) * source`.

    Args:
        momentum: A number from 0 to 1, or a function of the number of the step, from 0, that
            returns it: `lambda step: step / (step + 1)` gives the mean of the weights after every
            step. Every rank calls it, so it must depend on the step alone.
    """
    return FollowerModel(source, momentum)


def copy_every(source: str, steps: int) -> FollowerModel:
    """Return a copy of a model's weights that is renewed every `steps` steps, such as a target
    network.
    """
    return FollowerModel(source, 0.0, steps)


def frozen(source: str | Callable[[], Any]) -> FollowerModel:
    """Return a model that never changes: a teacher that `source` builds, or a named model with its
    initial weights.
    """
    return FollowerModel(source, 1.0)


class StepContext(Protocol):
    """The operations of a job's own step function.

    Tensors that are given and returned have this process's samples along dim 0. On one device these
    are all samples of the step, otherwise a part of them; a step function need not know which.
    """

    step: int  # number of the step, from 0

    @property
    def places(self) -> torch.Tensor:
        """The positions of this process's samples among all of the step: whole numbers of shape
        (samples,).

        On one device they are 0, 1, 2, ... They are the rows of `gather`'s result that belong to
        this process.
        """

    def alike(self) -> AbstractContextManager[None]:
        """Return a context in which every rank draws the same random numbers, whatever the shape:
        `with ctx.alike():`.

        It is for random numbers that do not belong to samples. Outside of it, a tensor with as many
        rows as this process has samples counts as one of samples.
        """

    def gather(self, value: Any) -> Any:
        """Return tensors with the rows of all samples of the step, equal on every rank and without
        gradients.

        The tensors that are given have a row for each sample of this process. Collective. It can't
        be used inside a loss.
        """

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        """Return a model's output for inputs: a tensor, a tuple for *args, a mapping for **kwargs,
        or the batch itself.

        In a loss, a gradient flows through the model to its inputs; only the models that `backward`
        names get gradients of their own. Elsewhere the model runs without gradients, and
        `grad=True` is refused.

        Args:
            cut: Whether inputs are cut into micro-batches. With False the inputs are of the whole
                step, as `gather` returns them, or of no sample, and every rank runs the model on
                them once. So buffers that the forward writes stay equal.
        """

    def backward(
        self,
        model: ModelNames,
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> None:
        """Add the gradients of a loss to a model's. Collective.

        The engine cuts inputs and `more` into micro-batches, runs the model on each, and calls
        `loss(output, batch, *more)` once for each, where batch is the micro-batch of the step's
        batch. The loss returns a scalar, the mean over its samples, or (sum, count).

        Args:
            model: The model that runs and is trained. Of several names, the first one runs and all
                are trained.
            gather: Whether the loss is called once, with the outputs of all samples of the step,
                their batch and their part of `more`. Gradients then go to all outputs. This is for
                losses that compare samples. If other ranks have some of the samples, the model runs
                twice, with the same random numbers. Only one model can be named, and such a loss
                runs no model.
        """

    def update(self, optimizer: str) -> None:
        """Clip the gradients of an optimizer's parameters, step it and its schedule, and drop the
        gradients. Collective.
        """


def default_step(job: Job) -> Callable[[Any, Any], None]:
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


def default_validate(job: Job) -> Callable[[Any, Any], Any]:
    """Return the validation function of a job with a loss: it computes the loss of the first
    model.
    """
    return lambda ctx, batch: job.criterion(ctx.run(next(iter(job.models)), batch), batch.target)


def init_of(job: Job, name: str) -> Weights | None:
    """Return the weights with which a model or a follower begins in place of the seed's; None if
    there are none.

    They are its own, or those of the model that it follows.
    """
    init, follower = job.init or {}, job.followers.get(name)
    if name not in init and follower is not None and isinstance(follower.source, str):
        name = follower.source
    return Weights.of(init[name]) if name in init else None


def spec(optimizer: Any) -> Optimizer:
    """Return a job's named optimizer as an `Optimizer`, even if a function was given."""
    return optimizer if isinstance(optimizer, Optimizer) else Optimizer(optimizer)


class _OfNamed:
    """A job's named models or optimizers, for code that knows one model and one optimizer."""

    def __init__(self, job: Job) -> None:
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


def derived(job: Job) -> dict[str, Any]:
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
    job: Job, change: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> dict[str, Any]:
    """Return the models and followers of a job, with `change` applied to every function that builds
    a module.
    """
    return {
        "models": {name: change(build) for name, build in job.models.items()},
        "followers": {
            name: replace(follower, source=change(follower.source))
            if callable(follower.source)
            else follower
            for name, follower in job.followers.items()
        },
    }


def problems(job: Job) -> Iterator[str]:
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
            name for name in ("optimizers", "followers", "step", "validate") if getattr(job, name)
        ]
        if stated:
            yield f"{' and '.join(stated)} need{'s' * (len(stated) == 1)} models= by name, in the place of model="
        return
    yield from _field_problems(job)
    yield from _name_problems(job)
    for name, each in job.optimizers.items():
        yield from _optimizer_problems(job, name, spec(each))
    for name, follower in job.followers.items():
        yield from _follower_problems(job, name, follower)


def _field_problems(job: Job) -> Iterator[str]:
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
    if job.step is None and (job.loss is None or len(job.models) > 1):
        yield "several models need step=, and one needs step= or loss="
    yield from _init_problems(job)
    if job.metrics:
        yield 'metrics are for one model; validate= returns a mapping with "loss" and metrics'
    if job.validation is not None and job.validate is None and job.loss is None:
        yield "validation data needs validate=: validate(ctx, batch) returns what is measured of a batch"
    if job.validation is None and job.validate is not None:
        yield "validate= measures validation data, and there is none: give validation="
    if job.precision == "fp8":
        yield (
            "precision 'fp8' and models= don't compose: torchao's float8 layers have no second derivatives, which a "
            'loss of a step may take; take "bf16", "fp16" or "float32"'
        )


def _init_problems(job: Job) -> Iterator[str]:
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


def _name_problems(job: Job) -> Iterator[str]:
    for name, value in {**job.models, **job.followers}.items():
        if not isinstance(name, str) or not name.isidentifier():
            yield f"a model's name is a Python name, got {name!r}"
        elif name in job.models and not callable(value):
            yield f"models[{name!r}] must be a function that builds the module, got {type(value).__name__}"
    if both := sorted(set(job.models) & set(job.followers)):
        yield f"'{both[0]}' is among models and among followers"


def _optimizer_problems(job: Job, name: str, each: Optimizer) -> Iterator[str]:
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
    if each.clip is not None and (
        isinstance(each.clip, bool)
        or not isinstance(each.clip, int | float)
        or not 0 < each.clip < math.inf
    ):
        yield f"clip of the optimizer '{name}' must be a positive number, got {each.clip!r}"


def _follower_problems(job: Job, name: str, follower: Any) -> Iterator[str]:
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
