"""One device's execution of a job's own step: plain models, plain losses, plain updates.

It can cut the batch of a step as a plan would cut it over replicas and micro-batches. Each replica
then has its own buffers, which are joined at the step's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.base.streams import seed_streams
from paceline.job import Job
from paceline.proof.device import cpu_copy
from paceline.torch_private.modules import own_buffers
from paceline.training.feed import MicroBatch, map_tensors
from paceline.training.own_step.step_batch import StepBatch
from paceline.training.own_step.step_draws import MakesOn, WindowDraws

Pieces = Sequence[Sequence[MicroBatch]]


class PlainStep:
    """A step's context on one device; see `StepContext`.

    Attributes:
        loss: The sum of the values of the losses.
        gradients: Before clipping, summed over the updates.
        scale: The factor of losses; None without loss scaling.
        is_skipped: Whether an update was skipped because gradients overflowed.

    Args:
        replicas: The step's batch, as each replica takes it in micro-batches.
        before: Called with the parameters of an optimizer before an update clips their gradients.
    """

    def __init__(
        self,
        job: Job,
        models: Any,
        optimizers: Any,
        schedules: Any,
        replicas: Pieces,
        *,
        step: int,
        autocast: Callable[[], Any],
        before: Callable[[list[nn.Parameter]], None],
    ) -> None:
        self.job, self.models, self.optimizers, self.schedules = job, models, optimizers, schedules
        self.step, self.autocast, self.before = step, autocast, before
        self.scale: float | None = None
        self.is_skipped = False
        self.replicas = replicas
        self.around_updates: Callable[[], Any] = nullcontext
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
        self._buffers = _BuffersOfReplicas(
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
            for _, _, model_inputs in self._pieces(self.batch.cut(inputs, "inputs")):
                with self.autocast():
                    outputs.append(MicroBatch(model_inputs[0], None, 1).call(module))
        return _joined(outputs)

    def _run_alike(self, module: nn.Module, inputs: Any) -> Any:
        """Run a model on all of the inputs in the state of every replica."""
        with self.draws.paused(), torch.no_grad():
            self.number += 1
            for replica in range(len(self.replicas)):
                seed_streams(self.job.seed, "step", self.step, "alike", self.number)
                with self._buffers.of(replica), self.autocast():
                    output = MicroBatch(inputs, None, self.samples).call(module)
            return output

    def _pieces(
        self, *cut: Sequence[Any]
    ) -> Iterator[tuple[MicroBatch, tuple[int, int], tuple[Any, ...]]]:
        """Yield every micro-batch in the state of its replica, with the values that were cut in the
        same way.
        """
        rows = iter(zip(*cut, strict=True))
        for replica, pieces in enumerate(self.replicas):
            with self._buffers.of(replica):
                for number, piece in enumerate(pieces):
                    seed_streams(self.job.seed, "step", self.step, replica, number, self.number)
                    yield piece, (replica, number), next(rows)

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
        trained = [
            p
            for name in names
            for p in self.models.get_submodule(name).parameters()
            if p.requires_grad
        ]
        earlier, total, count, is_sum = [p.grad for p in trained], 0.0, 0.0, False
        for p in trained:
            p.grad = None
        cut = [self.batch.cut(each, "inputs") for each in (inputs, *more)]
        # Sums are divided by this before backward, so that they overflow less.
        expected = 2.0 ** round(math.log2(self.samples))
        with self.draws.paused():
            self.number += 1
            for samples, value in self._losses(module, cut, loss, more, gather=gather):
                if isinstance(value, tuple | list):
                    is_sum, weight = True, float(value[1])
                    scaled = torch.as_tensor(value[0]) * (self.scale or 1.0) / expected
                    total, count = total + torch.as_tensor(value[0]).item(), count + weight
                else:
                    scaled = value * (samples / self.samples * (self.scale or 1.0))
                    total, count = total + value.item() * samples, count + samples
                if (
                    scaled.requires_grad and trained
                ):  # a piece in which nothing counts may have no graph
                    scaled.backward(inputs=trained)
        for p, gradient in zip(trained, earlier, strict=True):
            if p.grad is not None and is_sum:
                p.grad = p.grad * (expected / count)
            p.grad = (
                gradient if p.grad is None else p.grad if gradient is None else p.grad + gradient
            )
        self.loss += total / count

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
        for piece, _, (model_inputs, *others) in self._pieces(*cut):
            with self.autocast():
                outputs.append(MicroBatch(model_inputs, None, 1).call(module))
                if not gather:
                    yield (
                        piece.samples,
                        self._loss_of(loss, outputs.pop(), StepBatch([piece]), others),
                    )
        if gather:
            with self.autocast():
                everyone = [each.input if isinstance(each, StepBatch) else each for each in more]
                yield self.samples, self._loss_of(loss, _joined(outputs), self.batch, everyone)

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
            if self._overflows(parameters):
                self.is_skipped = True
                return
            for p in parameters:
                if p.grad is not None:
                    name = names[id(p)]
                    gradient = cpu_copy(p.grad.to_dense())
                    self.gradients[name] = (
                        self.gradients[name] + gradient if name in self.gradients else gradient
                    )
            self.before(parameters)
            greatest = self.optimizers.clips[optimizer]
            if greatest is not None:
                torch.nn.utils.clip_grad_norm_(parameters, greatest)
            with self.around_updates():
                member.step()
            schedule = (
                self.schedules.schedules.get(optimizer) if self.schedules is not None else None
            )
            if schedule is not None and not hasattr(
                schedule, "num_bad_epochs"
            ):  # evaluations step those
                schedule.step()
            for p in parameters:
                p.grad = None

    def _overflows(self, parameters: list[nn.Parameter]) -> bool:
        """Divide gradients by the loss scale. Return whether some are infinite or NaN; they are
        then removed.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.scale is None:
            return False
        for gradient in gradients:
            gradient.div_(self.scale)
        overflows = not all(bool(gradient.to_dense().isfinite().all()) for gradient in gradients)
        for p in parameters if overflows else ():
            p.grad = None
        return overflows

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


class _BuffersOfReplicas:
    """The buffers of replicas that begin a step with the same state.

    At the end of the step, floats become the mean weighted by samples, and whole numbers the
    greatest. Each replica has its own tensors, because copying values into the models' buffers
    would change what a backward still needs from earlier forwards.
    """

    def __init__(self, models: nn.Module, shares: Sequence[float]) -> None:
        self.models, self.shares = models, shares
        self.originals = self._current_buffers()
        self.values = [self._copies() for _ in shares] if len(shares) > 1 else []

    def _current_buffers(self) -> dict[str, torch.Tensor]:
        """Return the models' buffers; a buffer that modules share has several names."""
        return dict(self.models.named_buffers(remove_duplicate=False))

    def _copies(self) -> dict[str, torch.Tensor]:
        copies = {id(buffer): buffer.detach().clone() for buffer in self.originals.values()}
        return {name: copies[id(buffer)] for name, buffer in self.originals.items()}

    def _put(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            own_buffers(self.models.get_submodule(path))[key] = buffer

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Give the models this replica's buffers inside the context."""
        if not self.values:
            yield
            return
        self._put(self.values[replica])
        yield
        self.values[replica] = self._current_buffers()
        self._put(self.originals)

    @torch.no_grad()
    def meet(self) -> None:
        """Join the buffers of the replicas at the end of the step."""
        if not self.values:
            return
        for name, value in self.originals.items():
            met = [values[name] for values in self.values]
            value.copy_(
                sum(
                    (each * share for each, share in zip(met, self.shares, strict=True)),
                    torch.zeros_like(value),
                )
                if value.is_floating_point()
                else torch.stack(met).amax(0)
            )


def _joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of micro-batches along dim 0."""
    parts: list[list[torch.Tensor]] = []
    for output in outputs:
        tensors: list[torch.Tensor] = []
        map_tensors(lambda t, tensors=tensors: tensors.append(t), output)
        parts.append(tensors)
    whole = iter([torch.cat(column) for column in zip(*parts, strict=True)])
    return map_tensors(lambda t: next(whole), outputs[0])
