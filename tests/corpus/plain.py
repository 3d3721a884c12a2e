"""A plain training loop on one device: every plan is compared with it.

It uses only a job's fields, the order of data and the keys of random streams from Paceline, which are contracts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from paceline.base.streams import key_to_seed, seed_model, seed_sample, seed_streams
from paceline.job import Job
from paceline.job.order import Order, split
from paceline.model.randomness import WithoutRandomness
from paceline.training.own_step.step_draws import WindowDraws


@dataclass
class Outcome:
    """What a run leaves.

    state: the trained model's `state_dict()`. losses: of each step.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    validation_loss: float | None = None


@dataclass(frozen=True)
class Cut:
    """How a plan cuts each window: a run for each replica, in proportion to its share, in so many micro-batches."""

    shares: tuple[int, ...] = (1,)
    microbatches: int = 1

    def pieces(self, samples: int) -> list[list[range]]:
        """Of each replica, its micro-batches as places in the window; empty ones are left out."""
        return [
            [
                range(share.start + piece.start, share.start + piece.stop)
                for piece in split(len(share), (1,) * self.microbatches)
                if len(piece)
            ]
            for share in split(samples, self.shares)
        ]


WHOLE = Cut()


def run_plainly(job: Job, cut: Cut = WHOLE, *, random_layers: bool = False) -> Outcome:
    """Train on one device.

    Each replica of `cut` has state of its own, which meets after a step: floating-point buffers and plain attributes as
    the mean weighted by samples, other buffers and whole numbers as the maximum. What a replica's forward writes to
    parameters counts.
    """
    build = job.model if job.compute is None else job.model.build
    with WithoutRandomness() if random_layers else nullcontext() as random:
        if isinstance(random, WithoutRandomness):
            build = random.building(build)
        return _run(job, cut, build)


class ByHand(dict[str, nn.Module]):
    """The models of a step that is written out, and the number of the step, from 0."""

    step = 0


def run_by_hand(job: Job, step: Callable[..., Tensor]) -> Outcome:
    """Train several models on one device with a step that is written out. See `Entry.by_hand`."""
    models = ByHand({name: _begun(build, job, name) for name, build in job.models.items()})
    models |= {
        name: copy.deepcopy(models[follower.source])
        if isinstance(follower.source, str)
        else _begun(follower.source, job, name)
        for name, follower in job.followers.items()
    }
    optimizers = {}
    for name, each in job.optimizers.items():
        build, wanted = (each.build, each.parameters) if hasattr(each, "build") else (each, None)
        wanted = wanted or (name,)
        optimizers[name] = build(
            [
                (f"{model}.{key}", p)
                for model in job.models
                for key, p in models[model].named_parameters()
                if (wanted(f"{model}.{key}", p) if callable(wanted) else model in wanted)
            ]
        )
    outcome = Outcome()
    for number, items in enumerate(islice(_windows(job), job.total_steps)):
        given, target = _batch(job, items)
        models.step = number
        with WindowDraws(
            rows=len(items),
            first=0,
            count=len(items),
            key=(job.seed, "own step", number),
            device=torch.device("cpu"),
            dtype=job.input_dtype,
        ):
            outcome.losses.append(float(step(models, optimizers, given, target)))
    outcome.state = {
        f"{name}.{key}": value.detach().clone()
        for name, model in models.items()
        for key, value in model.state_dict().items()
    }
    return outcome


def _begun(build: Callable[[], nn.Module], job: Job, name: str) -> nn.Module:
    seed_model(key_to_seed(job.seed, "model", name))
    model = build()
    return model.double() if job.precision == "float64" else model


def _run(job: Job, cut: Cut, build: Any) -> Outcome:
    replicas = [_built(job, build) for _ in cut.shares]
    model, outcome = replicas[0], Outcome()
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = job.optimizer(parameters)
    schedule = job.lr_schedule(optimizer) if job.lr_schedule else None
    for step, items in enumerate(islice(_windows(job), job.total_steps), start=1):
        weights = [sum(map(len, pieces)) / len(items) for pieces in cut.pieces(len(items))]
        losses: list[float] = []
        closure = partial(_evaluate, job, replicas, items, cut, weights, losses)
        _tell(optimizer, "train")
        if needs_gradients(optimizer):
            closure()
        optimizer.step(*([closure] if evaluates_itself(optimizer) else []))
        _tell(optimizer, "eval")
        outcome.losses.append(losses[0])
        if schedule is not None:
            schedule.step()
        _meet(replicas, weights)
        if job.validation is not None and (step == job.total_steps or _ends_epoch(job, step)):
            outcome.validation_loss = _validate(job, replicas, cut)
    outcome.state = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    return outcome


def _tell(optimizer: Any, mode: str) -> None:
    """Schedule-free optimizers have other weights in each mode."""
    getattr(optimizer, mode, lambda: None)()


def evaluates_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` is to be given a closure: torch's documentation says so of LBFGS, and SAM's of SAM."""
    return (
        isinstance(optimizer, torch.optim.LBFGS)
        or getattr(optimizer, "step_takes", "") == "closure"
    )


def needs_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients are there before a step. LBFGS computes them first."""
    return not isinstance(optimizer, torch.optim.LBFGS)


@torch.enable_grad()
def _evaluate(
    job: Job,
    replicas: Sequence[nn.Module],
    items: list[Any],
    cut: Cut,
    weights: Sequence[float],
    losses: list[float],
) -> Tensor:
    """Gradients of a window in the first replica, and its loss, also in `losses`."""
    if losses:
        _meet(replicas, weights)  # an optimizer has moved the first one
    parameters = [p for p in replicas[0].parameters() if p.requires_grad]
    before = (
        {name: p.detach().clone() for name, p in replicas[0].named_parameters()}
        if len(replicas) > 1
        else {}
    )
    losses.append(_backward(job, replicas, items, cut))
    _join_edits(replicas, before)
    if job.clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, job.clip)
    return torch.tensor(losses[-1], dtype=torch.float64)


def _built(job: Job, build: Any) -> nn.Module:
    seed_model(job.seed)
    model = build()
    return (model.double() if job.precision == "float64" else model).train()


class Items(list[Any]):
    """Samples of a step, or some of them: first is the place of the first one among count; key: of what collate
    draws."""

    first, count, key = 0, 0, (0,)

    @classmethod
    def of(cls, job: Job, items: Sequence[Any], epoch: int, start: int) -> Items:
        made = cls(items)
        made.count, made.key = len(made), (job.seed, "collate", epoch, start)
        return made

    def __getitem__(self, place: Any) -> Any:
        selected = super().__getitem__(place)
        if isinstance(place, slice):
            selected = Items(selected)
            selected.first, selected.count, selected.key = place.start, self.count, self.key
        return selected


def _windows(job: Job) -> Iterator[list[Any]]:
    """The items of each optimizer step."""
    if isinstance(job.data, IterableDataset) or not hasattr(job.data, "__getitem__"):
        yield from _stream_windows(job)
        return
    order = Order.of(job)
    for step in count():
        window = order.window(step)
        items = []
        for position, index in zip(
            window.positions, order.indices(window.epoch, window.positions), strict=True
        ):
            seed_sample(key_to_seed(job.seed, "sample", window.epoch), position)
            items.append(job.data[index])
        yield Items.of(job, items, window.epoch, window.start)


def _stream_windows(job: Job) -> Iterator[list[Any]]:
    for epoch in count() if job.epochs is None else range(job.epochs):
        if hasattr(job.data, "set_epoch"):
            job.data.set_epoch(epoch)
        seed_streams(job.seed, "stream", epoch, -1)
        items, start = iter(job.data), 0
        while True:
            seed_streams(job.seed, "stream", epoch, start)
            window = list(islice(items, job.batch))
            start += len(window)
            if window and not (job.drop_last and len(window) < job.batch):
                yield Items.of(job, window, epoch, start - len(window))
            if len(window) < job.batch:
                break


def _backward(job: Job, replicas: Sequence[nn.Module], items: list[Any], cut: Cut) -> float:
    """Leave the window's gradients in the first replica and return its loss."""
    total, counted, divides = 0.0, 0.0, False
    for model, pieces in zip(replicas, cut.pieces(len(items)), strict=True):
        model.zero_grad()
        for piece in pieces:
            given, target = _batch(job, items[piece.start : piece.stop])
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
                value = _loss(job, model, given, target)
            if isinstance(value, tuple | list):
                value, number, divides = value[0], float(value[1]), True
                total, counted = total + value.item(), counted + number
            else:
                total, counted = total + value.item() * len(piece), counted + len(piece)
                value = value * (len(piece) / len(items))
            if value.requires_grad:
                value.backward()
    _gather(replicas, 1.0 / counted if divides else 1.0)
    return total / counted


def _gather(replicas: Sequence[nn.Module], factor: float) -> None:
    """Sum the replicas' gradients in the first one."""
    others = [dict(model.named_parameters()) for model in replicas[1:]]
    for name, p in replicas[0].named_parameters():
        gradients = [
            each.grad for each in (p, *(other[name] for other in others)) if each.grad is not None
        ]
        p.grad = sum(gradients[1:], gradients[0]) * factor if gradients else None


@torch.no_grad()
def _join_edits(replicas: Sequence[nn.Module], before: Mapping[str, Tensor]) -> None:
    """Elements of parameters that a replica's forward has written to, in the first one too."""
    for other in replicas[1:]:
        for name, p in other.named_parameters():
            is_edited = p != before[name]
            if is_edited.any():
                replicas[0].get_parameter(name)[is_edited] = p[is_edited]


def _meet(replicas: Sequence[nn.Module], weights: Sequence[float]) -> None:
    """Bring the replicas together after an update of the first one."""
    if len(replicas) == 1:
        return
    with torch.no_grad():
        for name, p in replicas[0].named_parameters():
            for other in replicas[1:]:
                other.get_parameter(name).copy_(p)
        for name, buffer in replicas[0].named_buffers():
            each = [model.get_buffer(name) for model in replicas]
            met = (
                sum(b * w for b, w in zip(each, weights, strict=True))
                if buffer.is_floating_point()
                else torch.stack(each).amax(0)
                if not buffer.is_complex()
                else buffer
            )
            for b in each:
                b.copy_(met)
    for modules in zip(*(model.modules() for model in replicas), strict=True):
        for key, value in vars(modules[0]).items():
            each = [vars(module)[key] for module in modules]
            if type(value) is int:
                for module in modules:
                    setattr(module, key, max(each))
            is_state = isinstance(value, float) or (
                isinstance(value, Tensor) and value.is_floating_point()
            )
            if is_state and any(
                bool((item != value).any() if isinstance(value, Tensor) else item != value)
                for item in each
            ):
                met = sum(item * w for item, w in zip(each, weights, strict=True))
                for module in modules:
                    setattr(module, key, met)


def _ends_epoch(job: Job, step: int) -> bool:
    """Whether an epoch is over after so many steps."""
    if isinstance(job.data, IterableDataset) or not hasattr(job.data, "__getitem__"):
        return False  # no job of the corpus evaluates in a stream's course
    order = Order.of(job)
    return order.window(step).epoch != order.window(step - 1).epoch


@torch.no_grad()
def _validate(job: Job, replicas: Sequence[nn.Module], cut: Cut) -> float:
    """The loss over the validation data; what forwards change of the model is brought together after it."""
    before = (
        {name: p.detach().clone() for name, p in replicas[0].named_parameters()}
        if len(replicas) > 1
        else {}
    )
    samples = len(job.validation)
    total, counted, replica_counts = 0.0, 0.0, [0] * len(replicas)
    for first in range(0, samples, job.batch):
        cuts = cut.pieces(min(job.batch, samples - first))
        for number, (model, pieces) in enumerate(zip(replicas, cuts, strict=True)):
            model.eval()
            for piece in pieces:
                items = []
                for index in range(first + piece.start, first + piece.stop):
                    seed_sample(key_to_seed(job.seed, "evaluation"), index)
                    items.append(job.validation[index])
                whole = Items.of(job, range(min(job.batch, samples - first)), -1, first)
                part = whole[piece.start : piece.stop]
                part[:] = items
                given, target = _batch(job, part)
                with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
                    value = _loss(job, model, given, target)
                part = (
                    value if isinstance(value, tuple | list) else (value * len(items), len(items))
                )
                total, counted = total + float(part[0]), counted + float(part[1])
                replica_counts[number] += len(items)
            model.train()
    _join_edits(replicas, before)
    _meet(replicas, [count / samples for count in replica_counts])
    return total / counted


def _batch(job: Job, items: Sequence[Any]) -> tuple[Any, Any]:
    if job.collate is not None and isinstance(items, Items):
        with WindowDraws(
            rows=len(items),
            first=items.first,
            count=items.count,
            key=items.key,
            device=torch.device("cpu"),
            is_step=False,
        ):
            batch = job.collate(list(items))
    elif job.collate is not None:
        batch = job.collate(list(items))
    elif isinstance(items[0], tuple | list):
        batch = default_collate([tuple(item) for item in items])
    else:
        batch = default_collate([vars(item) if is_dataclass(item) else item for item in items])
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    given, target = batch if is_pair else (batch, batch)
    if isinstance(given, tuple | list) and len(given) == 1:
        given = given[0]
        target = target if is_pair else given
    return (_double(given), _double(target)) if job.precision == "float64" else (given, target)


def _double(value: Any) -> Any:
    """The value with every floating-point tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _double(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_double, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{each.name: _double(getattr(value, each.name)) for each in dataclasses.fields(value)},
        )
    return type(value)(map(_double, value)) if isinstance(value, tuple | list) else value


def _loss(job: Job, model: nn.Module, given: Any, target: Any) -> Any:
    if job.compute is None:
        return job.criterion(call(model, given), target)
    value = (job.compute if model.training else job.validation_step or job.compute)(model, given)
    if isinstance(value, dict):
        return value["loss"]
    has_figures = isinstance(value, tuple) and isinstance(value[1], dict)
    return value[0] if has_figures else value


def call(model: nn.Module, given: Any) -> Any:
    """The model's output for a batch's input."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, tuple | list) else model(given)
