"""Records with which inputs a job's own step calls each model, by trying the step on a few samples.
It trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.codec import decode, encode
from paceline.base.errors import (
    JobError,
    PacelineError,
    PlanRefused,
    TrainingError,
    in_words,
    nearest,
)
from paceline.base.fork import in_a_fork
from paceline.base.nested import map_tensors
from paceline.base.streams import kept_streams
from paceline.base.user_code import user_frames
from paceline.job import Job
from paceline.job.named_models import NamedModels
from paceline.job.own_step import BackwardResult
from paceline.strategies.plan import Plan
from paceline.training.feed import MicroBatch, example_batch
from paceline.training.loss import read_tally, refuse_name, without_total
from paceline.training.own_step.step_batch import StepBatch, input_of
from paceline.training.own_step.step_draws import MakesOn

# The steps to try, together with the last one, if the job's step depends on its number.
_TRIED_STEPS = (*range(10), 99, 999)
# And until each model was run, those in which a later phase of it may be: 9, 10, 19, 20, 49, 50, 99 and so on.
_LATER_STEPS = tuple(
    10**digits * first + offset
    for digits in range(1, 7)
    for first in (1, 2, 5)
    for offset in (-1, 0)
)


@dataclass(frozen=True)
class Recorded:
    """The calls of models that a step was seen to make."""

    # Inputs of the first call of each model and follower, with samples along dim 0 if some call has
    # them.
    inputs: dict[str, Any]
    in_losses: set[str]  # models and followers that a loss runs
    bare: set[str]  # models without parameters
    uncut: set[str]  # models and followers whose inputs are not per sample (`cut=False`)
    backwards: int  # the most of one step


def recorded_apart(job: Job, samples: int, *, timeout_s: float | None = None) -> Recorded:
    """Record a step as `recorded` does, in a fork that then ends. So the step does not change the
    job's objects in this process.

    Raises:
        JobError: a model's input holds something else than tensors, numbers and text, too.
    """

    def told() -> bytes:
        seen = recorded(job, samples)
        try:
            return encode(seen)
        except TypeError as error:
            raise JobError(
                f"the step was tried in a process of its own, and of what it runs a model with {error}",
                hint="ctx.run and ctx.backward of tensors, numbers and text",
            ) from error

    seen: Recorded = decode(in_a_fork(told, timeout_s=timeout_s))
    return seen


def recorded(job: Job, samples: int) -> Recorded:
    """Record what a step does with so many samples, or with a whole batch if it can't run with so
    many. It runs on the CPU.

    Raises:
        JobError: a step never calls one of the models.
        TrainingError: the step failed.
    """
    try:
        return _tried(job, samples)
    except TrainingError:
        if samples == job.batch or not isinstance(job.batch, int):
            raise
        return _tried(job, job.batch)  # the step may depend on the size of a whole batch


def _tried(job: Job, samples: int) -> Recorded:
    assert job.own_step is not None
    dtype = job.input_dtype
    with kept_streams():
        models = NamedModels.of(job.models, job.followers, job.seed)
        batch = example_batch(job, samples).to(torch.device("cpu"), dtype)
        recorder = _Recorder(models.to(dtype) if dtype else models, StepBatch([batch]), dtype)
        last = job.total_steps - 1 if job.total_steps else _TRIED_STEPS[-1]
        first = sorted({*_TRIED_STEPS, last})
        for place, step in enumerate([*first, *_LATER_STEPS]):
            recorder.number = step
            # A check takes one step, a trial a few, and a model's turn may come later.
            is_later = step > last or place >= len(first)
            with suppress(PacelineError) if is_later else nullcontext():
                _take(job, recorder)
            if not recorder.asks_for_step or (
                (is_later or step == last) and job.models.keys() <= recorder.inputs.keys()
            ):
                break  # all steps do the same, or each model was run
    for (
        name,
        follower,
    ) in job.followers.items():  # a follower that the step never runs gets its source's inputs
        if isinstance(follower.source, str) and follower.source in recorder.inputs:
            recorder.inputs.setdefault(name, recorder.inputs[follower.source])
            recorder.uncut |= {name} if follower.source in recorder.uncut else set()
    if never := [name for name in models.names if name not in recorder.inputs]:
        raise JobError(f"the step never runs '{never[0]}'", hint="leave the model out, or run it")
    bare = {
        name for name in job.models if next(models.get_submodule(name).parameters(), None) is None
    }
    return Recorded(
        recorder.inputs, recorder.in_losses, bare, recorder.uncut, recorder.most_backwards
    )


def _take(job: Job, recorder: _Recorder) -> None:
    assert job.own_step is not None
    recorder.backwards = 0
    try:
        with recorder.makes_on:
            job.own_step(recorder, recorder.batch)
    except PacelineError:
        raise
    except Exception as error:
        where, _ = user_frames(error)
        raise TrainingError(
            f"the job's step was tried on {len(recorder.batch)} samples, to see what it runs, and "
            f"failed{f' at {where}' if where else ''}: {in_words(error)}"
        ) from error


def refuse_to_split(job: Job, plan: Plan, seen: Recorded) -> None:
    """Refuse a plan that splits models over ranks if the job's step can't run under it.

    Args:
        plan: A plan that splits models over ranks.
        seen: What the step does.

    Raises:
        PlanRefused: a loss runs a model, or one has no parameters, and the plan splits each by
            itself.
    """
    for name in sorted(seen.bare):
        raise PlanRefused(
            f"'{name}' has no parameters, and under '{plan}' each model is split over ranks by itself",
            hint="data=N and shard=N plans run such a step",
        )
    for name in sorted(seen.in_losses):
        if name in job.models or plan.has_schedule:
            raise PlanRefused(
                f"a loss runs '{name}', and under '{plan}' each model is split over ranks by itself: a loss can't go "
                "through a second split model, nor through one twice, as one over all samples does",
                hint="data=N and shard=N plans run such a step. What needs no gradient can be run before: "
                f"y = ctx.run('{name}', ...) and ctx.backward(..., loss, y); several terms of one model can be "
                "backwards of their own, whose gradients add up",
            )


class _Recorder:
    """A step's context in which models run and nothing is trained; see `StepContext`."""

    def __init__(self, models: NamedModels, batch: StepBatch, dtype: torch.dtype | None) -> None:
        self.models, self.batch, self.inputs, self.uncut = (
            models,
            batch,
            dict[str, Any](),
            set[str](),
        )
        self.makes_on = MakesOn(torch.device("cpu"), dtype)
        self.in_losses, self.is_in_loss, self.is_over_all = set[str](), False, False
        # number: of the step. asks_for_step: whether the job's step looked at it.
        self.number, self.asks_for_step = 0, False
        self.backwards = self.most_backwards = 0  # of this step, and of all that were tried

    @property
    def step(self) -> int:
        self.asks_for_step = True
        return self.number

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(len(self.batch))

    def alike(self) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: Any) -> Any:
        """Return the value, because all samples are here."""
        return _without_graph(input_of(value))

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        if model not in self.models.names:
            raise JobError(
                f"the step runs no model of the job, '{model}': {nearest(model, self.models.names)}"
            )
        if self.is_over_all:
            raise TrainingError(
                f"a loss over all samples (gather=True) runs '{model}'",
                hint="run it before, y = ctx.run(...) and ctx.backward(..., loss, y, gather=True), or "
                "in the forward of the model that is trained",
            )
        if self.is_in_loss:
            self.in_losses.add(model)
        whole = input_of(inputs)
        if model not in self.inputs or (cut and model in self.uncut):
            self.inputs[model] = _without_graph(whole)
            self.uncut = self.uncut - {model} if cut else self.uncut | {model}
        with self.makes_on.paused():
            return MicroBatch(whole, None, len(self.batch)).call(self.models.get_submodule(model))

    def backward(
        self,
        model: str | tuple[str, ...],
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> BackwardResult:
        name, *others = (model,) if isinstance(model, str) else model
        self.backwards += 1
        self.most_backwards = max(self.most_backwards, self.backwards)
        if gather and others:
            raise TrainingError(
                f"ctx.backward({(name, *others)}, ..., gather=True): a loss over all samples trains "
                "one model",
                hint="build what it trains as one module, whose forward returns all outputs",
            )
        output = self.run(name, inputs)
        if gather:
            self.in_losses.add(name)  # such a loss runs the model a second time
        self.is_in_loss, self.is_over_all = True, gather
        value = loss(
            output,
            self.batch,
            *map(input_of, more),
        )
        self.is_in_loss = self.is_over_all = False
        samples = len(self.batch)

        def mean() -> torch.Tensor:
            tally = read_tally(
                without_total(value, samples=samples, whole=samples), samples=samples
            )
            return tally.total / tally.count

        return BackwardResult(mean, lambda: _without_graph(output))

    def log(self, name: str, value: Any) -> None:
        """Log nothing, because nothing is trained."""
        refuse_name(name, f"ctx.log({name!r})")

    def update(self, optimizer: str) -> None:
        """Do nothing, because nothing is trained."""


def _without_graph(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), value)
