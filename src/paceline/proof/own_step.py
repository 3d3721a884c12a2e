"""One device's execution of a job's own step: plain models, plain losses, plain updates.

It can cut the batch of a step as a plan would cut it over replicas and micro-batches. Each replica
then has its own buffers, which are joined at the step's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from paceline.base.streams import seed_streams
from paceline.job import Job
from paceline.proof.device import autocast, cpu_copy
from paceline.proof.replicas import BuffersOfReplicas, run_backward
from paceline.training.feed import MicroBatch, map_tensors
from paceline.training.own_step.step_batch import StepBatch, joined
from paceline.training.own_step.step_draws import MakesOn, WindowDraws

Pieces = Sequence[Sequence[MicroBatch]]


class PlainStep:
    """A step's context on one device; see `StepContext`.

    Attributes:
        loss: The sum of the values of the losses.
        gradients: Before clipping, summed over the updates.
        is_skipped: Whether an update was skipped because gradients overflowed.

    Args:
        replicas: The step's batch, as each replica takes it in micro-batches.
        scale: The factor of losses; 1.0 without loss scaling.
        update: Clips and updates; called with the name of an optimizer and its parameters.
    """

    def __init__(
        self,
        job: Job,
        models: Any,
        optimizers: Any,
        replicas: Pieces,
        *,
        step: int,
        scale: float,
        update: Callable[[str, list[nn.Parameter]], None],
    ) -> None:
        self.job, self.models, self.optimizers, self.replicas = job, models, optimizers, replicas
        self.step, self.scale, self._update = step, scale, update
        self.has_scale, self.is_skipped = job.precision == "fp16", False
        pieces = [piece for replica in replicas for piece in replica]
        self.batch = StepBatch(pieces)
        self.samples = sum(piece.samples for piece in pieces)
        device = next(models.parameters()).device
        self.draws = WindowDraws(
            rows=self.samples,
            first=0,
            count=self.samples,
            key=(job.seed, "own step", step),
            device=device,
            precision=job.precision,
        )
        self.number, self.in_loss, self.loss = 0, False, 0.0
        self.gradients: dict[str, torch.Tensor] = {}
        self._buffers = BuffersOfReplicas(
            models, [sum(p.samples for p in replica) / self.samples for replica in replicas]
        )

    def take(self) -> None:
        """Run the step, and then update the followers."""
        assert self.job.own_step is not None
        with self.draws:
            self.job.own_step(self, self.batch)
        self._buffers.meet()
        self._follow()

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.samples, device=next(self.models.parameters()).device)

    def alike(self) -> AbstractContextManager[None]:
        return self.draws.alike()

    def gather(self, value: Any) -> Any:
        return map_tensors(
            lambda t: t.detach().clone(), value.input if isinstance(value, StepBatch) else value
        )

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        module = self.models.get_submodule(model)
        if not cut and not self.in_loss:
            return self._run_alike(module, inputs)
        if self.in_loss:
            model_inputs = inputs.input if isinstance(inputs, StepBatch) else inputs
            with torch.set_grad_enabled(grad is not False), self.draws.makes_on.paused():
                return MicroBatch(model_inputs, None, 1).call(module)
        outputs = []
        with self.draws.paused(), torch.no_grad():
            self.number += 1
            for _, model_inputs in self._pieces(self.batch.cut(inputs, "inputs")):
                with autocast(self.job):
                    outputs.append(MicroBatch(model_inputs[0], None, 1).call(module))
        return joined(outputs, self.batch.rows)

    def _run_alike(self, module: nn.Module, inputs: Any) -> Any:
        """Run a model on all of the inputs in the state of every replica."""
        with self.draws.paused(), torch.no_grad():
            self.number += 1
            for replica in range(len(self.replicas)):
                seed_streams(self.job.seed, "step", self.step, "alike", self.number)
                with self._buffers.of(replica), autocast(self.job):
                    output = MicroBatch(inputs, None, self.samples).call(module)
            return output

    def _pieces(self, *cut: Sequence[Any]) -> Iterator[tuple[MicroBatch, tuple[Any, ...]]]:
        """Yield every micro-batch in the state of its replica, with the values that were cut in the
        same way.
        """
        rows = iter(zip(*cut, strict=True))
        for replica, pieces in enumerate(self.replicas):
            with self._buffers.of(replica):
                for number, piece in enumerate(pieces):
                    seed_streams(self.job.seed, "step", self.step, replica, number, self.number)
                    yield piece, next(rows)

    def backward(
        self,
        model: str | tuple[str, ...],
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> None:
        names = (model,) if isinstance(model, str) else model
        module = self.models.get_submodule(names[0])
        models = (self.models.get_submodule(name) for name in names)
        trained = list(
            dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad)
        )
        earlier = [p.grad for p in trained]
        for p in trained:
            p.grad = None
        cut = [self.batch.cut(each, "inputs") for each in (inputs, *more)]
        # Sums are divided by a power of two before backward, so that they overflow less.
        sum_scale = self.scale / 2.0 ** round(math.log2(self.samples))
        with self.draws.paused():
            self.number += 1
            losses = self._losses(module, cut, loss, more, gather=gather)
            value, divisor, _ = run_backward(
                losses, self.samples, scale=self.scale, sum_scale=sum_scale, inputs=trained
            )
        for p, gradient in zip(trained, earlier, strict=True):
            if p.grad is not None:
                p.grad /= divisor
            p.grad = (
                gradient if p.grad is None else p.grad if gradient is None else p.grad + gradient
            )
        self.loss += value

    def _losses(
        self,
        module: nn.Module,
        cut: Sequence[Sequence[Any]],
        loss: Callable[..., Any],
        more: Sequence[Any],
        *,
        gather: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the loss of each micro-batch with its number of samples, or one loss of all outputs
        together.
        """
        outputs = []
        for piece, (model_inputs, *others) in self._pieces(*cut):
            with autocast(self.job):
                outputs.append(MicroBatch(model_inputs, None, 1).call(module))
                if not gather:
                    yield (
                        piece.samples,
                        self._loss_of(loss, outputs.pop(), StepBatch([piece]), others),
                    )
        if gather:
            with autocast(self.job):
                everyone = [each.input if isinstance(each, StepBatch) else each for each in more]
                yield (
                    self.samples,
                    self._loss_of(loss, joined(outputs, self.batch.rows), self.batch, everyone),
                )

    def _loss_of(
        self, loss: Callable[..., Any], output: Any, batch: StepBatch, more: Sequence[Any]
    ) -> Any:
        self.in_loss = True
        with self.draws.makes_on:
            value = loss(output, batch, *more)
        self.in_loss = False
        return value

    def update(self, optimizer: str) -> None:
        member = self.optimizers.members[optimizer]
        names = {id(p): name for name, p in self.models.named_parameters()}
        parameters = [p for group in member.param_groups for p in group["params"]]
        with self.draws.paused():
            gradients = [p.grad.to_dense() for p in parameters if p.grad is not None]
            if self.has_scale and not all(bool(g.isfinite().all()) for g in gradients):
                self.is_skipped = True
                for p in parameters:
                    p.grad = None
                return
            for p in parameters:
                if p.grad is not None:
                    name = names[id(p)]
                    gradient = cpu_copy(p.grad.to_dense())
                    self.gradients[name] = (
                        self.gradients[name] + gradient if name in self.gradients else gradient
                    )
            self._update(optimizer, parameters)
            for p in parameters:
                p.grad = None

    @torch.no_grad()
    def _follow(self) -> None:
        for name, follower in self.job.followers.items():
            momentum = follower.momentum_after(self.step)
            if momentum == 1.0:
                continue
            followed = self.models.get_submodule(follower.source)
            follower_model = self.models.get_submodule(name)
            for p, source in zip(follower_model.parameters(), followed.parameters(), strict=True):
                p.copy_(momentum * p + (1 - momentum) * source)
            for buffer, source in zip(follower_model.buffers(), followed.buffers(), strict=True):
                buffer.copy_(source)


class PlainEvaluation:
    """The context of `validate` on one device, in which models run and nothing is trained."""

    def __init__(self, models: nn.Module, precision: str) -> None:
        self.models, self.makes_on = models, MakesOn(next(models.parameters()).device, precision)

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        model_inputs = inputs.input if isinstance(inputs, StepBatch) else inputs
        with self.makes_on.paused():
            return MicroBatch(model_inputs, None, 1).call(self.models.get_submodule(model))
