"""One device's execution of a job's own step: plain models, plain losses, plain updates.

It can cut the batch of a step as a plan would cut it over replicas and micro-batches. Each replica
then has its own buffers, which are joined at the step's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.base.nested import map_tensors
from paceline.base.streams import seed_streams
from paceline.job.own_step import BackwardResult
from paceline.proof.device import autocast, cpu_copy
from paceline.proof.replicas import BuffersOfReplicas
from paceline.proof.step import PlainStep, are_finite
from paceline.training.feed import MicroBatch
from paceline.training.own_step.step_batch import StepBatch, input_of, joined
from paceline.training.own_step.step_draws import MakesOn, WindowDraws


class PlainOwnStep(PlainStep):
    """A step that the job brings, and its context on one device; see `StepContext`."""

    def __init__(self, *args: Any, optimizer: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.optimizer, self.step = optimizer, self.number
        self.batch = StepBatch([piece for replica in self.replicas for piece in replica])
        self.device = next(self.model.parameters()).device
        self.draws = WindowDraws(
            rows=self.samples,
            first=0,
            count=self.samples,
            key=(self.job.seed, "own step", self.step),
            device=self.device,
            dtype=self.job.input_dtype,
        )
        self.num_verbs, self.in_loss = 0, False
        self._buffers = BuffersOfReplicas(self.model, self.shares)

    def take(self) -> None:
        """Run the step, and then update the followers."""
        assert self.job.own_step is not None
        with self.dtypes or nullcontext():
            with self.draws:
                self.job.own_step(self, self.batch)
            self._buffers.meet()
            self._follow()
        self.is_skipped |= self.has_scale and not math.isfinite(self.loss)

    @property
    def places(self) -> torch.Tensor:
        return torch.arange(self.samples, device=self.device)

    def alike(self) -> AbstractContextManager[None]:
        return self.draws.alike()

    def gather(self, value: Any) -> Any:
        return map_tensors(lambda t: t.detach().clone(), input_of(value))

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        module = self.model.get_submodule(model)
        if not cut and not self.in_loss:
            return self._run_alike(module, inputs)
        if self.in_loss:
            with torch.set_grad_enabled(grad is not False), self.draws.makes_on.paused():
                return MicroBatch(input_of(inputs), None, 1).call(module)
        outputs = []
        with self.draws.paused(), torch.no_grad():
            self.num_verbs += 1
            for _, model_inputs in self._pieces(self.batch.cut(inputs, "inputs")):
                with autocast(self.job):
                    outputs.append(MicroBatch(model_inputs[0], None, 1).call(module))
        return joined(outputs, self.batch.rows)

    def _run_alike(self, module: nn.Module, inputs: Any) -> Any:
        """Run a model on all of the inputs in the state of every replica."""
        with self.draws.paused(), torch.no_grad():
            self.num_verbs += 1
            for replica in range(len(self.replicas)):
                seed_streams(self.job.seed, "step", self.step, "alike", self.num_verbs)
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
                    seed_streams(self.job.seed, "step", self.step, replica, number, self.num_verbs)
                    yield piece, next(rows)

    def backward(
        self,
        model: str | tuple[str, ...],
        inputs: Any,
        loss: Callable[..., Any],
        *more: Any,
        gather: bool = False,
    ) -> BackwardResult:
        names = (model,) if isinstance(model, str) else model
        module = self.model.get_submodule(names[0])
        models = (self.model.get_submodule(name) for name in names)
        trained = list(
            dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad)
        )
        earlier = [p.grad for p in trained]
        for p in trained:
            p.grad = None
        cut = [self.batch.cut(each, "inputs") for each in (inputs, *more)]
        outputs: list[Any] = []
        with self.draws.paused():
            self.num_verbs += 1
            losses = self._losses_of(module, cut, loss, more, outputs, gather=gather)
            value, divisor, _ = self._go_back(losses, self.samples, trained)
        for p, gradient in zip(trained, earlier, strict=True):
            if p.grad is not None:
                p.grad /= divisor
            p.grad = (
                gradient if p.grad is None else p.grad if gradient is None else p.grad + gradient
            )
        self.loss += value
        return BackwardResult(
            lambda: torch.tensor(value, dtype=torch.float64),
            lambda: map_tensors(torch.Tensor.detach, joined(outputs, self.batch.rows)),
        )

    def _losses_of(
        self,
        module: nn.Module,
        cut: Sequence[Sequence[Any]],
        loss: Callable[..., Any],
        more: Sequence[Any],
        outputs: list[Any],
        *,
        gather: bool,
    ) -> Iterator[tuple[int, Any]]:
        """Yield the loss of each micro-batch with its number of samples, or one loss of all outputs
        together. The outputs are appended to `outputs`.
        """
        for piece, (model_inputs, *others) in self._pieces(*cut):
            with autocast(self.job):
                outputs.append(MicroBatch(model_inputs, None, 1).call(module))
                if not gather:
                    value = self._loss_of(loss, outputs[-1], StepBatch([piece]), others)
                    outputs[-1] = map_tensors(torch.Tensor.detach, outputs[-1])
                    yield piece.samples, value
        if gather:
            with autocast(self.job):
                everyone = [*map(input_of, more)]
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

    def log(self, name: str, value: Any) -> None:
        """Log nothing: what is logged changes no weight."""

    def update(self, optimizer: str) -> None:
        member = self.optimizer.members[optimizer]
        names = {id(p): name for name, p in self.model.named_parameters()}
        parameters = [p for group in member.param_groups for p in group["params"]]
        with self.draws.paused(), self.dtypes.paused() if self.dtypes else nullcontext():
            gradients = {names[id(p)]: p.grad.to_dense() for p in parameters if p.grad is not None}
            if self.has_scale and not are_finite(list(gradients.values())):
                self.is_skipped = True
            else:
                for name, gradient in gradients.items():
                    earlier = self.gradients.get(name, 0)
                    self.gradients[name] = earlier + cpu_copy(gradient)
                self._update(optimizer, parameters)
            for p in parameters:
                p.grad = None

    @torch.no_grad()
    def _follow(self) -> None:
        for name, follower in self.job.followers.items():
            momentum = follower.momentum_after(self.step)
            if momentum == 1.0:
                continue
            followed = self.model.get_submodule(follower.source)
            follower_model = self.model.get_submodule(name)
            for p, source in zip(follower_model.parameters(), followed.parameters(), strict=True):
                p.copy_(momentum * p + (1 - momentum) * source)
            for buffer, source in zip(follower_model.buffers(), followed.buffers(), strict=True):
                buffer.copy_(source)


class PlainEvaluation:
    """The context of `validation_step` on one device, in which models run and nothing is trained."""

    def __init__(self, models: nn.Module, dtype: torch.dtype | None) -> None:
        self.models, self.makes_on = models, MakesOn(next(models.parameters()).device, dtype)

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        with self.makes_on.paused():
            return MicroBatch(input_of(inputs), None, 1).call(self.models.get_submodule(model))
