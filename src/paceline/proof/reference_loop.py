"""A plain training loop on one device. It shares only the seeds of random streams with the
distributed path.

It can train as a hand-written loop would, or cut every batch as a plan would cut it over replicas
and micro-batches. If the samples of a batch are coupled, the two differ, and the job itself causes
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import torch

from paceline.base.streams import key_to_seed, seed_model, seed_sample, seed_streams
from paceline.job import AUTOCAST, Job
from paceline.job.batches import collated
from paceline.job.metrics import OfAllSamples
from paceline.job.modes import for_training, set_mode
from paceline.job.order import split
from paceline.model.attributes import (
    in_float64,
    is_like_a_buffer,
    plain_attributes,
    tensor_attributes,
)
from paceline.model.copy_on_write import lazy_copy
from paceline.model.float8 import in_float8
from paceline.model.forward_state import ForwardState
from paceline.proof.device import cpu_copy, one_device
from paceline.proof.initial import load_plainly
from paceline.proof.order import CollatedBatch, whole_batches, windows
from paceline.proof.own_step import PlainEvaluation, PlainStep
from paceline.torch_private.pytree import tree_map
from paceline.torch_private.storage import stored_values
from paceline.training.feed import MicroBatch, map_tensors
from paceline.training.freezing import frozen_names
from paceline.training.optimizers.probe import needs_closure
from paceline.training.own_step.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Variation:
    """A difference from the plain run: a change that exact arithmetic would not notice, or a
    cut.
    """

    cuts: int = 1  # micro-batches per batch
    # added to or taken from every gradient by a fixed draw; in units of the largest gradient
    shake: float = 0.0
    permuted: bool = False  # whether the samples of each batch come in another order
    # relative change of every initial weight; Adam's betas are then also rounded to float32
    nudge: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The tensors of one device after a step, by name, on the CPU.

    Gradients are those before clipping; everything else is as after the update.
    """

    loss: float
    gradients: dict[str, torch.Tensor]  # empty for a step that loss scaling skipped
    weights: dict[str, torch.Tensor]
    # buffers, and tensors in attributes that are used like buffers
    buffers: dict[str, torch.Tensor]
    rates: list[float]  # the next step's learning rate of each group of the optimizer
    # the optimizer's tensors as `NAME/KEY`; those on the CPU are not copied
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        return {
            "gradient": self.gradients,
            "weight": self.weights,
            "buffer": self.buffers,
            "state": self.state,
        }[kind]


def build_plain(job: Job) -> torch.nn.Module:
    """Build the job's model in training mode with its initial weights, on the proof's one
    device.
    """
    seed_model(job.seed)
    model = job.model().to(one_device())
    if job.precision == "float64":
        model = in_float64(model)
    if job.precision == "fp8":
        model = in_float8(model)
    throughout = set.intersection(*(set(names) for names in frozen_names(job, model).values))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name not in throughout)
    load_plainly(job, model)
    return model.train()


class PlainRun:
    """The plain loop, step by step. `model` is the model after the steps so far."""

    def __init__(
        self,
        job: Job,
        *,
        variation: Variation = Variation(),
        shares: Sequence[int] = (1,),
        microbatches: int = 1,
    ) -> None:
        self.job, self.variation, self.shares, self.microbatches = (
            job,
            variation,
            shares,
            microbatches,
        )
        self.model = build_plain(job)
        self.draws = torch.Generator().manual_seed(0)
        self.frozen = frozen_names(job, self.model)
        self.epochs = (
            (epoch for epoch, _, _ in windows(job)) if self.frozen.unit == "epoch" else repeat(0)
        )
        self.named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.make_optimizer()
        self.num_steps, self.attributes = 0, ForwardState(self.model).now().attributes
        # Loss scaling as of torch.amp.GradScaler; too few steps for its growth. A loss that is a sum is divided by a
        # power of two near the window's count before: the first time by its samples, then by the count before.
        self.around_updates: Callable[[], AbstractContextManager[None]] = (
            nullcontext  # for a job's own step
        )
        self.scale, self.count = 2.0**16 if job.precision == "fp16" else 1.0, 0.0
        self.is_skipped = False
        if variation.nudge:
            _nudge([p for _, p in self.named], variation.nudge, self.draws)

    def make_optimizer(self) -> None:
        """Make a new optimizer, and its schedule, for the current weights."""
        self.optimizer = for_training(self.job.optimizer, self.named)
        if self.variation.nudge:
            _round_betas(self.optimizer)
        self.needs_closure = needs_closure(self.optimizer, self.job.optimizer, dict(self.named))
        self.schedule = self.job.lr_schedule(self.optimizer) if self.job.lr_schedule else None

    def steps(self, steps: int) -> Iterator[StepRecord]:
        """Take the first steps of the job, and yield the record of each."""
        for batch in whole_batches(self.job, steps):
            yield self.step(batch)

    def step(self, batch: MicroBatch) -> StepRecord:
        """Do forward, backward, clipping, update and schedule for one batch."""
        try:
            return self._step(batch)
        except Exception as error:
            if self.variation.cuts > 1 or len(self.shares) * self.microbatches > 1:
                error.add_note(
                    "one device computed the batch in parts here, as plans do. What a model keeps of the "
                    "batch before, such as a hidden state, has as many samples as that had. In a step of "
                    "one's own, ctx.gather and ctx.places keep it for each sample; plans that don't cut "
                    "the batch (tensor=N, place=auto parts=N) run the model as it is"
                )
            raise

    def _step(self, batch: MicroBatch) -> StepRecord:
        if self.job.models:
            return self._own_step(batch)
        loss = self.backward(batch)
        gradients = gradients_of(self.model)
        shake = self.variation.shake * greatest(gradients.values()) if self.variation.shake else 0.0
        return self.update(loss, gradients, shake=shake)

    def _own_step(self, batch: MicroBatch) -> StepRecord:
        """Run the job's own step. Its random draws belong to places in the batch, so each sample
        keeps its draws.
        """
        self._freeze()
        replicas = (
            [cut_batch(batch, self.variation.cuts)]
            if self.variation.cuts > 1
            else as_planned(batch, self.shares, self.microbatches)
        )

        def before(parameters: list[torch.nn.Parameter]) -> None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            if self.variation.shake and gradients:
                _shake(gradients, self.variation.shake * greatest(gradients), self.draws)

        step = PlainStep(
            self.job,
            self.model,
            self.optimizer,
            self.schedule,
            replicas,
            step=self.num_steps,
            autocast=lambda: autocast(self.job),
            before=before,
        )
        step.around_updates = self.around_updates
        step.scale = self.scale if self.job.precision == "fp16" else None
        step.take()
        self.is_skipped = step.is_skipped or (
            step.scale is not None and not math.isfinite(step.loss)
        )
        self.scale /= 2 if self.is_skipped else 1
        self.num_steps += 1
        return self._record(step.loss, step.gradients)

    def _freeze(self) -> None:
        """Freeze the parameters that are frozen in the next step."""
        if len(set(self.frozen.values)) > 1:
            frozen = self.frozen.at(self.num_steps, next(self.epochs))
            for name, p in self.named:
                p.requires_grad_(name not in frozen)

    def gradients(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return the gradients of a batch before clipping; if the job has its own step, summed over
        its updates.
        """
        if self.job.models:
            return self._own_step(batch).gradients
        self.backward(batch)
        return gradients_of(self.model)

    def backward(self, batch: MicroBatch) -> float:
        """Leave the gradients of a batch in the model, and return its loss."""
        self._freeze()
        if self.variation.permuted:
            batch = permuted(batch, self.draws)
        self.replicas = (
            [cut_batch(batch, self.variation.cuts)]
            if self.variation.cuts > 1
            else as_planned(batch, self.shares, self.microbatches)
        )
        return self._evaluate()

    def _evaluate(self) -> float:
        if self.job.precision != "fp16":
            return backward(self.job, self.model, *self.replicas, step=self.num_steps)
        samples = sum(piece.samples for pieces in self.replicas for piece in pieces)
        counts: list[float] = []
        loss = backward(
            self.job,
            self.model,
            *self.replicas,
            step=self.num_steps,
            scale=self.scale,
            sum_scale=self.scale / 2.0 ** round(math.log2(self.count or samples)),
            counts=counts,
        )
        self.count = sum(counts)
        gradients = [p.grad.to_dense() for p in self.model.parameters() if p.grad is not None]
        self.is_skipped = not (
            math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients)
        )
        if self.is_skipped:
            self.scale /= 2
            self.model.zero_grad()
        return loss

    def update(
        self, loss: float, gradients: dict[str, torch.Tensor], *, shake: float = 0.0
    ) -> StepRecord:
        """Do clipping, update and schedule.

        Args:
            loss, gradients: Go into the record.
            shake: Is first added to, or taken from, each element of the gradients by a fixed draw.
        """

        def adjust_gradients() -> None:
            if shake:
                _shake([p.grad for _, p in self.named if p.grad is not None], shake, self.draws)
            if self.job.clip is not None:
                torch.nn.utils.clip_grad_norm_([_real(p) for _, p in self.named], self.job.clip)

        def evaluate() -> float:
            loss = self._evaluate()
            adjust_gradients()
            return loss

        if not self.is_skipped:
            adjust_gradients()
            update(self.optimizer, evaluate if self.needs_closure else None, loss)
            if self.schedule is not None and not hasattr(
                self.schedule, "num_bad_epochs"
            ):  # evaluations step those
                self.schedule.step()
        self.num_steps += 1
        return self._record(loss, gradients)

    def _record(self, loss: float, gradients: dict[str, torch.Tensor]) -> StepRecord:
        return StepRecord(
            loss,
            gradients,
            {name: cpu_copy(p) for name, p in self.model.named_parameters() if is_weight(p)},
            {
                name: cpu_copy(b)
                for name, b in (*self.model.named_buffers(), *self._attributes_like_buffers())
            },
            rates_of(self.optimizer),
            {
                f"{name}/{key}": value.cpu()
                for name, p in self.named
                for key, value in _state_of(self.optimizer.state.get(p, {})).items()
            },
        )

    def _attributes_like_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        before = self.attributes.values()
        return (
            (name, value)
            for name, value in tensor_attributes(self.model)
            if is_like_a_buffer(before.get(name), value)
        )

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the loss (as "loss") and every metric over all samples of the data, in batches of
        the job's size.
        """
        set_mode(self.optimizer, is_training=False)
        figures = self._evaluation(data)
        set_mode(self.optimizer, is_training=True)
        return figures

    def _evaluation(self, data: Any) -> dict[str, float]:
        job = self.job
        if job.models:
            return self._own_evaluation(data)
        functions = {"loss": job.criterion, **job.metrics}
        wholes = {name: f for name, f in functions.items() if isinstance(f, OfAllSamples)}
        kept: list[Any] = []
        sums, counts = dict.fromkeys(functions, 0.0), dict.fromkeys(functions, 0.0)
        self.model.eval()
        for start in range(0, len(data), job.batch):
            batch = self._evaluation_batch(data, range(start, min(start + job.batch, len(data))))
            with torch.no_grad(), autocast(job):
                output = batch.call(self.model)
                kept += [(output, batch.target)] if wholes else []
                for name, function in functions.items():
                    if name in wholes:
                        continue
                    value = function(output, batch.target)
                    total, count = value if isinstance(value, tuple | list) else (value, 1)
                    factor = 1 if isinstance(value, tuple | list) else batch.samples
                    sums[name] += float(total) * factor
                    counts[name] += float(count) * factor
        for name, function in wholes.items():
            value = function(*tree_map(lambda *parts: torch.cat(parts).cpu(), *kept))
            sums[name], counts[name] = map(
                float, value if isinstance(value, tuple | list) else (value, 1)
            )
        self.model.train()
        return {name: sums[name] / counts[name] for name in functions if counts[name]}

    def _own_evaluation(self, data: Any) -> dict[str, float]:
        """Return the result of the job's `validate` over all samples."""
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        validate = self.job.own_validate
        assert validate is not None
        self.model.eval()
        for start in range(0, len(data), self.job.batch):
            batch = self._evaluation_batch(
                data, range(start, min(start + self.job.batch, len(data)))
            )
            context = PlainEvaluation(self.model, self.job.precision)
            with torch.no_grad(), autocast(self.job), context.makes_on:
                values = validate(context, StepBatch([batch]))
            for name, value in (
                values if isinstance(values, Mapping) else {"loss": values}
            ).items():
                total, count = (
                    value
                    if isinstance(value, tuple | list)
                    else (value * batch.samples, batch.samples)
                )
                sums[name], counts[name] = (
                    sums.get(name, 0.0) + float(total),
                    counts.get(name, 0.0) + float(count),
                )
        self.model.train()
        return {name: total / counts[name] for name, total in sums.items() if counts[name]}

    def _evaluation_batch(self, data: Any, indices: range) -> MicroBatch:
        items = []
        for index in indices:
            seed_sample(key_to_seed(self.job.seed, "evaluation"), index)
            items.append(data[index])
        inputs, targets = collated(items, self.job.evaluation_collate)
        dtype = torch.float64 if self.job.precision == "float64" else None
        return MicroBatch(inputs, targets, len(items)).to(one_device(), dtype)


def update(
    optimizer: torch.optim.Optimizer, evaluate: Callable[[], float] | None, loss: float
) -> None:
    """Take a step of an optimizer; the gradients must exist already.

    Args:
        evaluate: For an optimizer that evaluates the loss itself, any number of times. If it first
            asks for the loss at the current weights and gradients, it gets `loss`.
        loss: The known loss.
    """
    if evaluate is None:
        optimizer.step()
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def values() -> list[torch.Tensor | None]:
        gradients = [None if p.grad is None else p.grad.to_dense() for p in parameters]
        return [*(p.detach() for p in parameters), *gradients]

    known = [None if value is None else value.clone() for value in values()]

    def closure() -> torch.Tensor:
        is_known = bool(known) and all(
            then is now is None if then is None or now is None else torch.equal(then, now)
            for then, now in zip(known, values(), strict=True)
        )
        known.clear()
        with torch.enable_grad():
            return torch.tensor(loss if is_known else evaluate(), dtype=torch.float64)

    optimizer.step(closure)  # type: ignore[arg-type]


def autocast(job: Job) -> torch.autocast:
    """Return the numeric context of the job's forward passes on the proof's one device."""
    name = AUTOCAST.get(job.precision)
    return torch.autocast(
        one_device().type, getattr(torch, name or "bfloat16"), enabled=name is not None
    )


# --- Cutting a batch -----------------------------------------------------------------------------------------------


def cut_batch(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """Cut the batch into consecutive parts along dim 0, as equal as possible; fewer if it has fewer
    samples.
    """
    edges = sorted({batch.samples * i // pieces for i in range(pieces + 1)})
    return [part_of_batch(batch, range(first, last)) for first, last in pairwise(edges)]


def as_planned(
    batch: MicroBatch, shares: Sequence[int], microbatches: int
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every replica that has samples, as a plan with these shares cuts
    a window.
    """
    if len(shares) == 1 and microbatches == 1:
        return [[batch]]
    replicas = []
    for run in split(batch.samples, shares):
        parts = [
            range(run.start + part.start, run.start + part.stop)
            for part in split(len(run), [1] * microbatches)
        ]
        replicas.append([part_of_batch(batch, part) for part in parts if len(part)])
    return [replica for replica in replicas if replica]


def permuted(batch: MicroBatch, draws: torch.Generator) -> MicroBatch:
    """Return the batch with its samples in another order."""
    order = torch.randperm(batch.samples, generator=draws)
    if isinstance(batch, CollatedBatch):
        return batch.picked(order.tolist())
    change = lambda t: t[order.to(t.device)] if t.ndim and t.shape[0] == batch.samples else t  # noqa: E731
    return batch.mapped(change)


def unspoilt(batch: MicroBatch) -> MicroBatch:
    """Return the batch with copies of its tensors, for a model or loss that writes to them and is
    run on it again.
    """
    return batch.mapped(lazy_copy)


def part_of_batch(batch: MicroBatch, part: range) -> MicroBatch:
    """Return some samples of a batch."""
    if isinstance(batch, CollatedBatch):
        return batch.picked(part)
    return MicroBatch(
        rows(batch.input, part, batch.samples), rows(batch.target, part, batch.samples), len(part)
    )


def rows(value: Any, part: range, samples: int) -> Any:
    """Return some samples of the tensors that have all of them along dim 0."""
    return map_tensors(
        lambda t: t[part.start : part.stop] if t.ndim and t.shape[0] == samples else t, value
    )


# --- Backward ------------------------------------------------------------------------------------------------------


def backward(
    job: Job,
    model: torch.nn.Module,
    *replicas: list[MicroBatch],
    step: int = 0,
    scale: float = 1.0,
    sum_scale: float = 1.0,
    counts: list[float] | None = None,
) -> float:
    """Leave the gradients of a batch in the model, and return its loss.

    Each replica starts from the model's current state. Afterwards their buffers, tensors in
    attributes, and weights that a forward changes are joined (docs/verify.md).

    Args:
        step: Keys the random streams that can't be switched off, as in a run.
        scale, sum_scale: The factor of a loss before backward, if it is a mean or a sum. Gradients
            are divided by it.
        counts: A list to which the count of each micro-batch is added.
    """
    model.zero_grad()
    samples = sum(piece.samples for pieces in replicas for piece in pieces)
    together = _Replicas(model) if len(replicas) > 1 else None
    loss, count, factor = 0.0, 0.0, 1.0
    for replica, pieces in enumerate(replicas):
        if together is not None:
            together.begin()
            model.zero_grad()  # hooks see the gradients of one replica
        for number, piece in enumerate(pieces):
            seed_streams(job.seed, "step", step, replica, number)
            with autocast(job):
                value = job.criterion(piece.call(model), piece.target)
            if isinstance(value, tuple | list):
                total = torch.as_tensor(value[0])
                loss, count, factor = loss + total.item(), count + float(value[1]), sum_scale
            else:
                total = value * (piece.samples / samples)
                loss, count, factor = loss + value.item() * piece.samples / samples, 1.0, scale
            if counts is not None:
                counts.append(float(value[1]) if isinstance(value, tuple | list) else piece.samples)
            if total.requires_grad:  # a piece in which nothing counts may have no graph
                ((total.float() if total.dtype == torch.float16 else total) * factor).backward()
        if together is not None:
            together.add(sum(piece.samples for piece in pieces) / samples)
    if together is not None:
        together.finish()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= count * factor
    return loss / count


class _Replicas:
    """Joins the replicas of a model that start with the same state.

    Gradients are summed, and buffers become means. If several replicas change a weight in the
    forward, it changes by the mean of their changes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.before = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.moment = ForwardState(model).now()
        self.gradients: dict[str, torch.Tensor] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.sums: dict[str, torch.Tensor] = {}
        self.changes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.is_first = True

    def _counts(self) -> dict[tuple[str, str], int]:
        """Return the attributes that are whole numbers, by module and name."""
        return {
            (name.rpartition(".")[0], key): value
            for name, _, key, value in plain_attributes(self.model)
            if type(value) is int
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        buffers = dict(self.model.named_buffers())
        return buffers | {
            f"attribute {name}": value for name, value in tensor_attributes(self.model)
        }

    def begin(self) -> None:
        if self.is_first:
            self.is_first = False
            return
        self.moment.restore()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.weights[name])

    def add(self, share: float) -> None:
        """Add the results of a replica that has this share of the samples."""
        self.counts = {
            key: max(count, self.counts.get(key, count)) for key, count in self._counts().items()
        }
        for name, tensor in self._tensors().items():
            if tensor.is_floating_point() or tensor.is_complex():
                self.sums[name] = self.sums.get(name, 0.0) + tensor.detach() * share
            else:
                self.sums[name] = (
                    torch.maximum(self.sums.get(name, tensor), tensor).detach().clone()
                )
        for name, p in self.model.named_parameters():
            change = p.detach() - self.weights[name]
            none = torch.zeros_like(change), torch.zeros(change.shape, device=change.device)
            total, users = self.changes.get(name, none)
            self.changes[name] = total + change, users + (change != 0)
            if p.grad is not None:
                self.gradients[name] = (
                    self.gradients[name] + p.grad if name in self.gradients else p.grad
                )

    def finish(self) -> None:
        for name, p in self.model.named_parameters():
            p.grad = self.gradients.get(name)
        for (path, key), count in self.counts.items():
            setattr(self.model.get_submodule(path), key, count)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                if not torch.equal(self.sums[name], self.before.get(name, self.sums[name])):
                    tensor.copy_(self.sums[name])
            for name, p in self.model.named_parameters():
                total, users = self.changes[name]
                p.copy_(self.weights[name] + total / users.clamp(min=1).to(total.dtype))


def _state_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's state; those in lists are named `KEY.INDEX`."""
    listed = {
        f"{key}.{index}": item
        for key, value in state.items()
        if isinstance(value, list | tuple)
        for index, item in enumerate(value)
    }
    return {
        key: value.detach()
        for key, value in {**state, **listed}.items()
        if isinstance(value, torch.Tensor)
    }


def is_weight(parameter: torch.Tensor) -> bool:
    """Whether a parameter holds real or complex numbers. Keras also keeps the counters of its
    generators in parameters.
    """
    return parameter.is_floating_point() or parameter.is_complex()


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group that has one."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the existing gradients on the CPU, by parameter name."""
    return {
        name: p.grad.to_dense().cpu() if p.grad.is_sparse else cpu_copy(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _real(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which a norm is taken, with its gradient.

    This is a complex parameter as pairs of real numbers, or the values of a sparse gradient, or the
    parameter itself.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        rows = torch.empty_like(parameter.grad.values())
        rows.grad = parameter.grad.values()
        return rows
    if not parameter.is_complex():
        return parameter
    pairs = torch.view_as_real(parameter.detach())
    pairs.grad = None if parameter.grad is None else torch.view_as_real(parameter.grad)
    return pairs


def _shake(gradients: Iterable[torch.Tensor], size: float, draws: torch.Generator) -> None:
    for gradient in gradients:
        values = stored_values(gradient)
        sign = torch.randint(2, values.shape, generator=draws) * 2 - 1
        values += sign.to(values) * size


def _nudge(weights: Iterable[torch.Tensor], relative: float, draws: torch.Generator) -> None:
    with torch.no_grad():
        for weight in weights:
            sign = torch.randint(2, weight.shape, generator=draws) * 2 - 1
            weight += weight * sign.to(weight) * relative


def _round_betas(optimizer: torch.optim.Optimizer) -> None:
    """Round the betas of Adam and similar optimizers to float32, unless all weights are float64."""
    for group in optimizer.param_groups:
        if "betas" in group and any(p.dtype != torch.float64 for p in group["params"]):
            group["betas"] = tuple(
                torch.tensor(float(beta), dtype=torch.float32).item() for beta in group["betas"]
            )


def greatest(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest absolute value of any element; 0.0 without elements."""
    return max(
        (
            float((tensor.int() if tensor.dtype == torch.bool else tensor).abs().max())
            for tensor in tensors
            if tensor.numel()
        ),
        default=0.0,
    )


def distance(actual: torch.Tensor, expected: torch.Tensor | None) -> float:
    """Return the greatest difference of two tensors' elements; a missing tensor counts as zeros."""
    if not actual.numel():
        return 0.0
    if actual.dtype == torch.bool:
        return float(
            (actual.int() if expected is None else actual.int() - expected.int()).abs().max()
        )
    return float((actual if expected is None else actual - expected).abs().max())


def expected_marks(job: Job, batch: MicroBatch) -> list[float | None]:
    """Return `sample_marks` of one device's batch, or None for each sample if the job collates.

    Padding depends on the other samples of a batch, so collated samples have no fixed mark. Wrong
    samples then show in the gradients.
    """
    return [None] * batch.samples if job.collate is not None else list(sample_marks(batch).tolist())


def sample_marks(batch: MicroBatch) -> torch.Tensor:
    """Return a number for each sample of a batch that tells it from the others, whatever its shape.

    The numbers are float64 of shape (samples,), on the CPU.
    """
    marks = torch.zeros(max(batch.samples, 1), dtype=torch.float64)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        has_rows = tensor.ndim and tensor.layout is torch.strided and not tensor.is_nested
        if has_rows and tensor.shape[0] == len(marks):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            flat = real.reshape(len(marks), -1).cpu().double()
            marks.add_(flat @ torch.sin(torch.arange(1, flat.shape[1] + 1, dtype=torch.float64)))
        return tensor

    map_tensors(add, (batch.input, batch.target))
    return marks[: batch.samples]
