"""A plain training loop on one device. It shares only the seeds of random streams with the
distributed path.

It can train as a hand-written loop would, or cut every batch as a plan would cut it over replicas
and micro-batches. If the samples of a batch are coupled, the two differ, and the job itself causes
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.streams import key_to_seed, seed_model, seed_sample, seed_streams
from paceline.job import Job
from paceline.job.batches import collated
from paceline.job.metrics import OfAllSamples
from paceline.job.modes import for_training, set_mode
from paceline.job.order import split
from paceline.model.attributes import in_float64, is_like_a_buffer, tensor_attributes
from paceline.model.copy_on_write import lazy_copy
from paceline.model.float8 import in_float8
from paceline.model.forward_state import ForwardState
from paceline.model.losses import RepeatableLoss
from paceline.proof.device import Dtypes, autocast, cpu_copy, one_device
from paceline.proof.initial import load_plainly
from paceline.proof.order import CollatedBatch, whole_batches, windows
from paceline.proof.own_step import PlainEvaluation, PlainStep
from paceline.proof.replicas import Replicas, run_backward
from paceline.torch_private.pytree import tree_map
from paceline.torch_private.storage import stored_values
from paceline.training.feed import MicroBatch, map_tensors
from paceline.training.freezing import frozen_names
from paceline.training.optimizers.probe import needs_closure
from paceline.training.own_step.step_batch import StepBatch

if TYPE_CHECKING:
    from paceline.planner.resolve import Resolved


@dataclass(frozen=True, slots=True)
class BatchCut:
    """How a plan cuts each batch: over replicas, and the part of each one into micro-batches."""

    shares: tuple[int, ...] = (1,)  # weight of each replica
    microbatches: int = 1  # of each replica

    @classmethod
    def of(cls, resolved: Resolved) -> BatchCut:
        return cls(resolved.shares, resolved.plan.num_microbatches)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return len(self.shares) == self.microbatches == 1


WHOLE = BatchCut()  # the plain loop's own batches


@dataclass(frozen=True, slots=True)
class Variation:
    """A difference from the plain run: a change that exact arithmetic would not notice, or a
    cut.
    """

    cut: BatchCut = WHOLE
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
    """The plain loop, step by step. `model` is the model after the steps so far.

    Attributes:
        dtypes: Watches forwards and backwards of the next steps; None if nothing does.
        loss_keeps_state: Whether the loss of the examined step gives another value if it is called
            again.

    Args:
        is_examined: Whether a first step is examined: its loss, and how far its update moves if
            its gradients are shaken.
    """

    def __init__(
        self, job: Job, variation: Variation = Variation(), *, is_examined: bool = False
    ) -> None:
        self.job, self.variation, self.model = job, variation, build_plain(job)
        self.criterion = RepeatableLoss(job.criterion) if is_examined else job.criterion
        self.loss_keeps_state = False
        self.draws = torch.Generator().manual_seed(0)
        self.frozen = frozen_names(job, self.model)
        self.epochs = (
            (epoch for epoch, _, _ in windows(job)) if self.frozen.unit == "epoch" else repeat(0)
        )
        self.named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self._make_optimizer()
        self.num_steps, self.attributes = 0, ForwardState(self.model).now().attributes
        # Loss scaling as of torch.amp.GradScaler; too few steps for its growth. A loss that is a sum is divided by a
        # power of two near the window's count before: the first time by its samples, then by the count before.
        self.scale, self.count = 2.0**16 if job.precision == "fp16" else 1.0, 0.0
        self.is_skipped = False
        self.dtypes: Dtypes | None = None
        if variation.nudge:
            _nudge([p for _, p in self.named], variation.nudge, self.draws)

    def _make_optimizer(self) -> None:
        """Make a new optimizer, and its schedule, for the current weights."""
        self.optimizer: Any = for_training(self.job.optimizer, self.named)
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
            self._freeze()
            loss, gradients = (self._own_step if self.job.models else self._usual_step)(batch)
        except Exception as error:
            if not self.variation.cut.is_whole:
                error.add_note(
                    "one device computed the batch in parts here, as plans do. What a model keeps of the "
                    "batch before, such as a hidden state, has as many samples as that had. In a step of "
                    "one's own, ctx.gather and ctx.places keep it for each sample; plans that don't cut "
                    "the batch (tensor=N, place=auto parts=N) run the model as it is"
                )
            raise
        self.scale /= 2 if self.is_skipped else 1
        self.num_steps += 1
        return self._record(loss, gradients)

    def _usual_step(self, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss, and the gradients before clipping."""
        if self.variation.permuted:
            batch = permuted(batch, self.draws)
        self.replicas = as_planned(batch, self.variation.cut)
        loss = self._evaluate()
        gradients = gradients_of(self.model)
        if isinstance(self.criterion, RepeatableLoss):
            self.before_update = (
                loss,
                [
                    (cpu_copy(p), None if p.grad is None else cpu_copy(p.grad))
                    for p in self.model.parameters()
                ],
            )
            with autocast(self.job):
                self.loss_keeps_state = self.criterion.keeps_state()
        if not self.is_skipped:
            self._update_all(loss)
        return loss, gradients

    def _own_step(self, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
        """Run the job's own step. Its random draws belong to places in the batch, so each sample
        keeps its draws.
        """
        step = PlainStep(
            self.job,
            self.model,
            self.optimizer,
            as_planned(batch, self.variation.cut),
            step=self.num_steps,
            scale=self.scale,
            update=self._update_some,
        )
        with self.dtypes or nullcontext():
            step.take()
        self.is_skipped = step.is_skipped or (step.has_scale and not math.isfinite(step.loss))
        return step.loss, step.gradients

    def shaken(self, size: float) -> StepRecord:
        """Return the record of the examined step if each element of its gradients had been changed.

        A job with one model runs no second forward, but repeats the update.

        Args:
            size: In units of the largest gradient.
        """
        if self.job.models:
            run = PlainRun(self.job, Variation(shake=size))
            run._round_betas_of_gpus()
            return next(run.steps(1))
        loss, before = self.before_update
        with torch.no_grad():
            for p, (weight, gradient) in zip(self.model.parameters(), before, strict=True):
                p.copy_(weight)
                p.grad = None if gradient is None else gradient.to(p.device)
        self.variation = replace(self.variation, shake=size)
        self._make_optimizer()
        self._round_betas_of_gpus()
        self.draws.manual_seed(0)
        self.num_steps = 0
        if not self.is_skipped:
            self._update_all(loss)
        return self._record(loss, {})

    def _round_betas_of_gpus(self) -> None:
        """Round Adam's betas as ranks on GPUs do, which update with torch's fused Adam."""
        if one_device().type != "cpu":
            _round_betas(self.optimizer)

    def _freeze(self) -> None:
        """Freeze the parameters that are frozen in the next step."""
        if len(set(self.frozen.values)) > 1:
            frozen = self.frozen.at(self.num_steps, next(self.epochs))
            for name, p in self.named:
                p.requires_grad_(name not in frozen)

    def _evaluate(self) -> float:
        """Leave the gradients of a batch in the model, and return its loss.

        Each replica starts from the model's current state; then they are joined (docs/verify.md).
        """
        model = self.model
        samples = sum(piece.samples for pieces in self.replicas for piece in pieces)
        has_scale = self.job.precision == "fp16"
        sum_scale = (
            self.scale / 2.0 ** round(math.log2(self.count or samples)) if has_scale else 1.0
        )
        model.zero_grad()
        with self.dtypes or nullcontext():
            loss, divisor, self.count = run_backward(
                self._losses(samples), samples, scale=self.scale, sum_scale=sum_scale
            )
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= divisor
        self.is_skipped = has_scale and not (
            math.isfinite(loss) and all(bool(g.to_dense().isfinite().all()) for g in gradients)
        )
        if self.is_skipped:
            model.zero_grad()
        return loss

    def _losses(self, samples: int) -> Iterator[tuple[int, Any]]:
        """Yield the number of samples and the loss of each micro-batch."""
        shares = [sum(piece.samples for piece in pieces) / samples for pieces in self.replicas]
        together = Replicas(self.model, shares) if len(shares) > 1 else None
        for replica, pieces in enumerate(self.replicas):
            if together is not None:
                together.begin()
            for number, piece in enumerate(pieces):
                seed_streams(self.job.seed, "step", self.num_steps, replica, number)
                with autocast(self.job):
                    value = self.criterion(piece.call(self.model), piece.target)
                yield piece.samples, value
            if together is not None:
                together.add()
        if together is not None:
            together.finish()

    def _update_all(self, loss: float) -> None:
        """Clip, update and step the schedule of a job with one model, whose loss is known."""
        self._update(self.optimizer, [p for _, p in self.named], self.job.clip, self.schedule, loss)

    def _update_some(self, name: str, parameters: list[torch.nn.Parameter]) -> None:
        """Do the same for one of the job's named optimizers, which has these parameters."""
        member, clip = self.optimizer.members[name], self.optimizer.clips[name]
        with self.dtypes.paused() if self.dtypes is not None else nullcontext():
            self._update(member, parameters, clip, self.schedule and self.schedule.of(name), 0.0)

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.nn.Parameter],
        clip: float | None,
        schedule: Any,
        loss: float,
    ) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        shake = self.variation.shake and (
            self.variation.shake * greatest(gradient.to_dense() for gradient in gradients)
        )

        def adjust_gradients() -> None:
            if shake:
                _shake([p.grad for p in parameters if p.grad is not None], shake, self.draws)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([_real(p) for p in parameters], clip)

        def evaluate() -> float:
            loss = self._evaluate()
            adjust_gradients()
            return loss

        adjust_gradients()
        _step_optimizer(optimizer, evaluate if self.needs_closure else None, loss)
        if schedule is not None and not hasattr(
            schedule, "num_bad_epochs"
        ):  # evaluations step those
            schedule.step()

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
        the job's size; of a job's own step, what `validate` returns.
        """
        job = self.job
        set_mode(self.optimizer, is_training=False)
        self.model.eval()
        wholes = {
            name: metric for name, metric in job.metrics.items() if isinstance(metric, OfAllSamples)
        }
        kept: list[Any] = []  # outputs and targets of all samples
        sums: dict[str, list[float]] = {}
        for start in range(0, len(data), job.batch):
            batch = self._evaluation_batch(data, range(start, min(start + job.batch, len(data))))
            with torch.no_grad(), autocast(job):
                values = (self._own_values if job.models else self._values)(batch, wholes, kept)
            for name, value in values.items():
                total, count = value if isinstance(value, tuple | list) else (value, 1)
                factor = 1 if isinstance(value, tuple | list) else batch.samples
                before = sums.get(name, (0.0, 0.0))
                sums[name] = [before[0] + float(total) * factor, before[1] + float(count) * factor]
        for name, metric in wholes.items():
            value = metric(*tree_map(lambda *parts: torch.cat(parts).cpu(), *kept))
            sums[name] = list(map(float, value if isinstance(value, tuple | list) else (value, 1)))
        self.model.train()
        set_mode(self.optimizer, is_training=True)
        return {name: total / count for name, (total, count) in sums.items() if count}

    def _values(
        self, batch: MicroBatch, wholes: Mapping[str, Any], kept: list[Any]
    ) -> dict[str, Any]:
        output = batch.call(self.model)
        kept += [(output, batch.target)] if wholes else []
        return {
            name: function(output, batch.target)
            for name, function in {"loss": self.job.criterion, **self.job.metrics}.items()
            if name not in wholes
        }

    def _own_values(self, batch: MicroBatch, *_: Any) -> Mapping[str, Any]:
        assert self.job.own_validate is not None
        context = PlainEvaluation(self.model, self.job.precision)
        with context.makes_on:
            values = self.job.own_validate(context, StepBatch([batch]))
        return values if isinstance(values, Mapping) else {"loss": values}

    def _evaluation_batch(self, data: Any, indices: range) -> MicroBatch:
        items = []
        for index in indices:
            seed_sample(key_to_seed(self.job.seed, "evaluation"), index)
            items.append(data[index])
        inputs, targets = collated(items, self.job.evaluation_collate)
        dtype = torch.float64 if self.job.precision == "float64" else None
        return MicroBatch(inputs, targets, len(items)).to(one_device(), dtype)


def _step_optimizer(
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


# --- Cutting a batch -----------------------------------------------------------------------------------------------


def cut_batch(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """BatchCut the batch into consecutive parts along dim 0, as equal as possible; fewer if it has fewer
    samples.
    """
    return as_planned(batch, BatchCut(microbatches=pieces))[0]


def as_planned(batch: MicroBatch, cut: BatchCut) -> list[list[MicroBatch]]:
    """Return the micro-batches of every replica that has samples, as a plan cuts a window."""
    if cut.is_whole:
        return [[batch]]
    replicas = [
        [
            part_of_batch(batch, range(run.start + part.start, run.start + part.stop))
            for part in split(len(run), [1] * cut.microbatches)
            if len(part)
        ]
        for run in split(batch.samples, cut.shares)
    ]
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


# --- Records and marks -------------------------------------------------------------------------------------------


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
