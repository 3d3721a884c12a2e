"""A plain training loop on one device. It shares only the seeds of random streams with the
distributed path.

It can train as a hand-written loop would, or cut every batch as a plan would cut it over replicas
and micro-batches. If the samples of a batch are coupled, the two differ, and the job itself causes
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.nested import map_tensors
from paceline.base.streams import key_to_seed, seed_model, seed_sample
from paceline.job import Job
from paceline.job.batches import collated, of_stacked
from paceline.job.metrics import OfAllSamples
from paceline.job.modes import for_training, set_mode
from paceline.job.named_optimizers import NamedOptimizers
from paceline.job.order import split
from paceline.model.attributes import in_float64, is_like_a_buffer, tensor_attributes
from paceline.model.copy_on_write import lazy_copy
from paceline.model.float8 import in_float8
from paceline.model.forward_state import ForwardState
from paceline.model.losses import RepeatableLoss
from paceline.proof.device import Dtypes, autocast, cpu_copy, one_device
from paceline.proof.initial import load_plainly
from paceline.proof.order import CollatedBatch, whole_batches, windows
from paceline.proof.own_step import PlainEvaluation, PlainOwnStep
from paceline.proof.replicas import summed
from paceline.proof.step import PlainStep
from paceline.torch_private.pytree import tree_map
from paceline.torch_private.storage import stored_values
from paceline.training.feed import MicroBatch
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

    Args:
        is_examined: Whether a first step is examined: its loss, and how far its update moves if
            its gradients are shaken.
    """

    def __init__(
        self, job: Job, variation: Variation = Variation(), *, is_examined: bool = False
    ) -> None:
        self.has_own_step = job.own_step is not None
        self.is_examined = is_examined and not self.has_own_step
        if self.is_examined and job.compute is None:
            job = replace(job, loss=RepeatableLoss(job.criterion))
        self.job, self.variation, self.model = job, variation, build_plain(job)
        # The known loss and weights with gradients, before the only update of the examined step.
        self.before_update: tuple[tuple[Any, ...], list[Any]] | None = None
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
        if self.variation.permuted and not self.has_own_step:
            batch = permuted(batch, self.draws)
        kind: Any = (
            partial(PlainOwnStep, optimizer=self.optimizer) if self.has_own_step else PlainStep
        )
        try:
            self._freeze()
            taken = kind(
                self.job,
                self.model,
                as_planned(batch, self.variation.cut),
                number=self.num_steps,
                scale=self.scale,
                count=self.count,
                dtypes=self.dtypes,
                update=self._update,
            )
            taken.take()
        except Exception as error:
            if not self.variation.cut.is_whole:
                error.add_note(
                    "one device computed the batch in parts here, as plans do. What a model keeps of the "
                    "batch before, such as a hidden state, has as many samples as that had. In a step of "
                    "one's own, ctx.gather and ctx.places keep it for each sample; plans that don't cut "
                    "the batch (tensor=N, place=N) run the model as it is"
                )
            raise
        self.is_skipped, self.count = taken.is_skipped, taken.count
        self.scale /= 2 if self.is_skipped else 1
        self.num_steps += 1
        return self._record(taken.loss, taken.gradients)

    def shaken(self, size: float) -> StepRecord:
        """Return the record of the examined step if each element of its gradients had been changed.

        If the step made one update, no second forward is run, but the update is repeated.

        Args:
            size: In units of the largest gradient.
        """
        if self.before_update is None:
            run = PlainRun(self.job, Variation(shake=size))
            run._round_betas_of_gpus()
            return next(run.steps(1))
        evaluated, before = self.before_update
        with torch.no_grad():
            for p, (weight, gradient) in zip(self.model.parameters(), before, strict=True):
                p.copy_(weight)
                p.grad = None if gradient is None else gradient.to(p.device)
        self.variation = replace(self.variation, shake=size)
        self._make_optimizer()
        self._round_betas_of_gpus()
        self.draws.manual_seed(0)
        self._update("", list(self.model.parameters()), *evaluated)
        return self._record(evaluated[0], {})

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

    def _update(self, name: str, parameters: list[torch.nn.Parameter], *evaluated: Any) -> None:
        """Clip, update and step the schedule; see `PlainStep`."""
        optimizer: Any = self.optimizer
        clip, schedule = self.job.clip, self.schedule
        if isinstance(optimizer, NamedOptimizers):
            optimizer, clip = optimizer.members[name], optimizer.clips[name]
            schedule = schedule and schedule.of(name)
        elif self.is_examined and self.before_update is None:
            self.before_update = (
                evaluated,
                [(cpu_copy(p), None if p.grad is None else cpu_copy(p.grad)) for p in parameters],
            )
        gradients = [p.grad for p in parameters if p.grad is not None]
        shake = self.variation.shake and (
            self.variation.shake * greatest(gradient.to_dense() for gradient in gradients)
        )

        def adjust_gradients() -> None:
            if shake:
                _shake([p.grad for p in parameters if p.grad is not None], shake, self.draws)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([_real(p) for p in parameters], clip)

        adjust_gradients()
        if self.needs_closure:
            loss, evaluate = evaluated
            _step_with_closure(optimizer, loss, evaluate, adjust_gradients)
        else:
            optimizer.step()
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

    def loss_keeps_state(self) -> bool:
        """Whether the loss of the examined step gives another value if it is called again."""
        with autocast(self.job):
            loss = self.job.criterion
            return isinstance(loss, RepeatableLoss) and loss.keeps_state()

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the loss (as "loss") and every metric over all samples of the data, in batches of
        the job's size; of a job's own step, what `validation_step` returns.
        """
        job = self.job
        set_mode(self.optimizer, is_training=False)
        self.model.eval()
        wholes = {
            name: metric for name, metric in job.metrics.items() if isinstance(metric, OfAllSamples)
        }
        kept: list[Any] = []  # outputs and targets of all samples
        sums: dict[str, tuple[float, float]] = {}
        for start in range(0, len(data), job.batch):
            batch = self._evaluation_batch(data, range(start, min(start + job.batch, len(data))))
            with torch.no_grad(), autocast(job):
                values = self._values(batch, wholes, kept)
            for name, value in values.items():
                both, before = summed(value, batch.samples, len(data)), sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + both[0], before[1] + both[1]
        for name, metric in wholes.items():
            value = metric(*tree_map(lambda *parts: torch.cat(parts).cpu(), *kept))
            sums[name] = summed(value, 1, 1)
        self.model.train()
        set_mode(self.optimizer, is_training=True)
        return {name: total / count for name, (total, count) in sums.items() if count}

    def _values(
        self, batch: MicroBatch, wholes: Mapping[str, Any], kept: list[Any]
    ) -> Mapping[str, Any]:
        if self.job.own_validate is not None:
            context = PlainEvaluation(self.model, self.job.input_dtype)
            with context.makes_on:
                values = self.job.own_validate(context, StepBatch([batch]))
            return values if isinstance(values, Mapping) else {"loss": values}
        output = batch.call(self.model)
        kept += [(output, batch.target)] if wholes else []
        return {
            name: function(output, batch.target)
            for name, function in {"loss": self.job.criterion, **self.job.metrics}.items()
            if name not in wholes
        }

    def _evaluation_batch(self, data: Any, indices: range) -> MicroBatch:
        items = []
        for index in indices:
            seed_sample(key_to_seed(self.job.seed, "evaluation"), index)
            items.append(data[index])
        inputs, targets = collated(items, self.job.evaluation_collate)
        dtype = torch.float64 if self.job.precision == "float64" else None
        return MicroBatch(inputs, targets, len(items)).to(one_device(), dtype)


def _step_with_closure(
    optimizer: torch.optim.Optimizer,
    loss: float,
    evaluate: Callable[[], float],
    adjust_gradients: Callable[[], None],
) -> None:
    """Take a step of an optimizer that evaluates the loss itself, any number of times.

    The gradients must exist already. If it first asks for the loss at the current weights and
    gradients, it gets `loss`.
    """
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
        if is_known:
            return torch.tensor(loss, dtype=torch.float64)
        with torch.enable_grad():
            value = evaluate()
            adjust_gradients()
        return torch.tensor(value, dtype=torch.float64)

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
    if expected is not None and actual.numel():
        actual = actual.int() - expected.int() if actual.dtype == torch.bool else actual - expected
    return greatest([actual])


def expected_marks(job: Job, batch: MicroBatch) -> list[float | None]:
    """Return `sample_marks` of one device's batch, or None for each sample if the job collates.

    Padding depends on the other samples of a batch, so collated samples have no fixed mark. Wrong
    samples then show in the gradients.
    """
    if of_stacked(job.collate) is None:
        return [None] * batch.samples
    return list(sample_marks(batch).tolist())


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
