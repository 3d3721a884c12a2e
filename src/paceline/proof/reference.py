"""One device: a plain training loop that shares nothing with the distributed path but the order of data.

It also measures the yardstick, how far mere rounding moves each tensor: the same loop with every batch cut into 2 and
4 micro-batches, and with its gradients shaken by a unit in the last place. The shaking shows what the optimizer makes
of rounding: Adam turns the noise of a gradient that is zero in exact arithmetic into steps of the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.job import Job
from paceline.runtime.feed import MicroBatch, Part, is_stream, map_tensors, training_feed
from paceline.runtime.order import Order
from paceline.runtime.streams import seed_streams

ALLOWED = 10.0  # times the yardstick; see DESIGN: how equal is equal
# (micro-batches a batch, roundings added to its gradients)
VARIANTS: tuple[tuple[int, float], ...] = ((2, 0.0), (4, 0.0), (1, 1.0), (1, -1.0))
KINDS = ("gradient", "weight")
# How far a job that is exact may move when it is cut, relative to its size. Losses and layers may compute in float32
# whatever they are given.
EXACT = {"bf16": 0.1, "float32": 1e-3, "float64": 1e-5}
EPSILON = {"bf16": torch.finfo(torch.bfloat16).eps, "float32": torch.finfo(torch.float32).eps,
           "float64": torch.finfo(torch.float64).eps}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one device has after the gradients and after the update of a step, by parameter name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        return self.gradients if kind == "gradient" else self.weights


def build_plain(job: Job) -> torch.nn.Module:
    """The job's model in training mode with the seed's initial weights, on the CPU."""
    seed_streams(job.seed, "model")
    model = job.model()
    if job.precision == "float64":
        model = model.double()
    return model.train()


def whole_batches(job: Job, steps: int) -> Iterator[MicroBatch]:
    """The first windows of the job, each as one batch."""
    order = None if is_stream(job.data) else Order(len(job.data), job.batch, job.seed, job.drop_last)
    for _, batches in training_feed(job.data, order=order, batch=job.batch, seed=job.seed, drop_last=job.drop_last,
                                    part=Part((1,), 0, 1), steps=range(steps), epochs=None, loader_workers=0):
        yield batches[0].to(torch.device("cpu"), torch.float64 if job.precision == "float64" else None)


def cut_batch(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """The batch in consecutive pieces along dim 0, as equal as can be; fewer if it has fewer samples."""
    edges = sorted({batch.samples * i // pieces for i in range(pieces + 1)})
    return [MicroBatch(rows(batch.input, range(a, b), batch.samples), rows(batch.target, range(a, b), batch.samples),
                       b - a) for a, b in pairwise(edges)]


def plain_steps(job: Job, *, steps: int, cuts: int = 1, shake: float = 0.0) -> Iterator[StepRecord]:
    """Train on one device as one would by hand, each batch in `cuts` pieces.

    shake: added to or taken from every gradient, by a fixed draw, in units of the largest gradient.
    """
    model = build_plain(job)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = job.optimizer(named)
    schedule = job.lr_schedule(optimizer) if job.lr_schedule else None
    signs = torch.Generator().manual_seed(0)
    for batch in whole_batches(job, steps):
        loss = backward(job, model, cut_batch(batch, cuts))
        gradients = gradients_of(model)
        if shake:
            largest = greatest(gradients.values())
            _shake([p.grad for _, p in named if p.grad is not None], shake * largest, signs)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], job.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield StepRecord(loss, gradients, {name: p.detach().clone() for name, p in named})


def backward(job: Job, model: torch.nn.Module, pieces: list[MicroBatch]) -> float:
    """Leave the gradients of a batch, given in pieces, in the model, and return its loss."""
    model.zero_grad()
    samples = sum(piece.samples for piece in pieces)
    loss, count = 0.0, 0.0
    for piece in pieces:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
            value = job.loss(piece.call(model), piece.target)
        if isinstance(value, tuple | list):
            value[0].backward()
            loss, count = loss + value[0].item(), count + float(value[1])
        else:
            (value * (piece.samples / samples)).backward()
            loss, count = loss + value.item() * piece.samples / samples, 1.0
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= count
    return loss / count


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients that are there, by parameter name."""
    return {name: p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()
            for name, p in model.named_parameters() if p.grad is not None}


def _shake(gradients: Iterable[torch.Tensor], size: float, signs: torch.Generator) -> None:
    for gradient in gradients:
        if not gradient.is_sparse:
            sign = torch.randint(2, gradient.shape, generator=signs) * 2 - 1
            gradient += sign.to(gradient.dtype) * size


def write_reference(job: Job, folder: Path, *, steps: int) -> dict[str, Any]:
    """Run the plain loop, then its variants. Its tensors go to files in `folder`, named by kind and step.

    Returns:
        losses: of each step. loss_limit: what they may differ by. gradient_limit and weight_limit: of each step, what
        any element of a parameter may differ by, by name. yardstick: of losses, gradients and weights, the largest
        spread over the variants, what plans may differ by there, the parameter, and the step from 1.
    """
    _save(folder, "initial", 0, {name: p.detach() for name, p in build_plain(job).named_parameters()})
    epsilon = coarsest(job)
    losses, floors = [], []
    for step, record in enumerate(plain_steps(job, steps=steps)):
        losses.append(record.loss)
        for kind in KINDS:
            _save(folder, kind, step, record.tensors(kind))
        # A gradient's own size says nothing about its rounding: terms that cancel leave noise of the terms' size.
        largest = greatest(record.gradients.values())
        floors.append({
            "loss": {"": epsilon * max(map(abs, losses))},
            "gradient": dict.fromkeys(record.gradients, epsilon * largest),
            "weight": {name: torch.finfo(w.dtype).eps * greatest([w]) for name, w in record.weights.items()}})
    spreads: list[dict[str, dict[str, float]]] = [
        {kind: dict.fromkeys(names, 0.0) for kind, names in floor.items()} for floor in floors]
    for cuts, shake in VARIANTS:
        for step, record in enumerate(plain_steps(job, steps=steps, cuts=cuts, shake=shake * epsilon)):
            _widen(spreads[step]["loss"], {"": abs(record.loss - losses[step])})
            for kind in KINDS:
                whole = load_file(folder / f"{kind}-{step}.safetensors")
                _widen(spreads[step][kind], {name: distance(tensor, record.tensors(kind).get(name))
                                             for name, tensor in whole.items()})
    limits = [{kind: {name: ALLOWED * max(spread[kind][name], least) for name, least in named.items()}
               for kind, named in floor.items()} for spread, floor in zip(spreads, floors, strict=True)]
    return {"losses": losses, "loss_limit": [limit["loss"][""] for limit in limits],
            **{f"{kind}_limit": [limit[kind] for limit in limits] for kind in KINDS},
            "yardstick": {kind: _widest(spreads, limits, kind) for kind in ("loss", *KINDS)}}


def _widest(spreads: list[dict[str, dict[str, float]]], limits: list[dict[str, dict[str, float]]],
            kind: str) -> dict[str, Any]:
    """Where rounding moves one device's own figures furthest, and what plans may differ by there."""
    spread, step, name = max((spread, -step, name) for step, found in enumerate(spreads)
                             for name, spread in found[kind].items())
    return {"spread": spread, "tolerance": limits[-step][kind][name], "name": name or None, "step": 1 - step}


def _widen(spread: dict[str, float], distances: dict[str, float]) -> None:
    for name, distance in distances.items():
        spread[name] = max(spread[name], distance)


def _save(folder: Path, kind: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{kind}-{step}.safetensors")


def coarsest(job: Job) -> float:
    """The rounding of the coarsest numbers that a forward computes with, whatever the job's precision says.

    Layers may compute in float32 whatever they are given; some norms and Keras's layers do.
    """
    model = build_plain(job)
    seen = _Dtypes({p.dtype for p in model.parameters() if p.requires_grad})
    for batch in whole_batches(job, 1):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"), seen:
            job.loss(batch.call(model), batch.target)
    return max(EPSILON[job.precision], *(torch.finfo(dtype).eps for dtype in seen.found))


class _Dtypes(TorchDispatchMode):
    """Notes the floating-point types that operators return."""

    def __init__(self, found: set[torch.dtype]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {leaf.dtype for leaf in tree_leaves(result)
                       if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim}
        return result


def greatest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute value of any element; 0.0 without elements."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def distance(mine: torch.Tensor, theirs: torch.Tensor | None) -> float:
    """How far two tensors are apart at most; a missing one counts as zeros."""
    if not mine.numel():
        return 0.0
    return float((mine if theirs is None else mine - theirs).abs().max())


def sample_marks(batch: MicroBatch) -> torch.Tensor:
    """A number for each sample of a batch that tells it from the others, whatever its shape; float64 (samples,)."""
    marks = torch.zeros(max(batch.samples, 1), dtype=torch.float64)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape[0] == len(marks):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            rows = real.reshape(len(marks), -1).double()
            marks.add_(rows @ torch.sin(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)))
        return tensor

    map_tensors(add, (batch.input, batch.target))
    return marks[: batch.samples]


def rows(value: Any, part: range, samples: int) -> Any:
    """Some samples of tensors that have all of them along dim 0."""
    return map_tensors(lambda t: t[part.start:part.stop] if t.ndim and t.shape[0] == samples else t, value)
