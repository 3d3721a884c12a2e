"""One device: a plain training loop that shares nothing with the distributed path but the order of data.

It is also run cut into 2 and 4 micro-batches; how far that mere reordering moves each tensor is the yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.errors import TrainingError
from paceline.job import Job
from paceline.runtime.feed import MicroBatch, Part, is_stream, map_tensors, training_feed
from paceline.runtime.order import Order
from paceline.runtime.streams import seed_streams

CUTS = (2, 4)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one device has after the gradients and after the update of a step, by parameter name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def whole_batches(job: Job, steps: int) -> Iterator[MicroBatch]:
    """The first windows of the job, each as one batch."""
    order = None if is_stream(job.data) else Order(len(job.data), job.batch, job.seed, job.drop_last)
    for _, batches in training_feed(job.data, order=order, batch=job.batch, seed=job.seed, drop_last=job.drop_last,
                                    part=Part((1,), 0, 1), steps=range(steps), epochs=None, loader_workers=0):
        yield batches[0].to(torch.device("cpu"), torch.float64 if job.precision == "float64" else None)


def cut_batch(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """The batch in consecutive pieces along dim 0, as equal as can be; fewer if it has fewer samples."""
    edges = sorted({batch.samples * i // pieces for i in range(pieces + 1)})
    return [MicroBatch(_rows(batch.input, range(a, b), batch.samples), _rows(batch.target, range(a, b), batch.samples),
                       b - a) for a, b in pairwise(edges)]


def plain_steps(job: Job, *, steps: int, cuts: int = 1) -> Iterator[StepRecord]:
    """Train on one device as one would by hand, each batch in `cuts` pieces."""
    seed_streams(job.seed, "model")
    model = job.model()
    if job.precision == "float64":
        model = model.double()
    model.train()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = job.optimizer(named)
    schedule = job.lr_schedule(optimizer) if job.lr_schedule else None
    for batch in whole_batches(job, steps):
        optimizer.zero_grad()
        loss, count = 0.0, 0.0
        for piece in cut_batch(batch, cuts):
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
                value = job.loss(piece.call(model), piece.target)
            if isinstance(value, tuple | list):
                value[0].backward()
                loss, count = loss + value[0].item(), count + float(value[1])
            else:
                (value * (piece.samples / batch.samples)).backward()
                loss, count = loss + value.item() * piece.samples / batch.samples, 1.0
        for _, p in named:
            if p.grad is not None:
                p.grad /= count
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], job.clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield StepRecord(loss / count, gradients, {name: p.detach().clone() for name, p in named})


def write_reference(job: Job, folder: Path, *, steps: int) -> dict[str, Any]:
    """Run the plain loop whole and cut; keep its tensors in `folder` and give back what they may differ by.

    Returns:
        losses: of each step. loss_spread: of each step. gradient_spread, weight_spread: of each step, by name,
        the greatest change of any element; and the largest element as "..._size".
    """
    runs = [plain_steps(job, steps=steps, cuts=cuts) for cuts in (1, *CUTS)]
    figures: dict[str, Any] = {key: [] for key in (
        "losses", "loss_spread", "gradient_spread", "gradient_size", "weight_spread", "weight_size")}
    for step, (whole, *cut) in enumerate(zip(*runs, strict=True)):
        figures["losses"].append(whole.loss)
        figures["loss_spread"].append(max(abs(other.loss - whole.loss) for other in cut))
        for kind in ("gradient", "weight"):
            mine = getattr(whole, f"{kind}s")
            theirs = [getattr(other, f"{kind}s") for other in cut]
            figures[f"{kind}_spread"].append(
                {name: max(_distance(tensor, other.get(name)) for other in theirs) for name, tensor in mine.items()})
            figures[f"{kind}_size"].append({name: float(tensor.abs().max()) if tensor.numel() else 0.0
                                            for name, tensor in mine.items()})
            whole_tensors = {name: tensor.contiguous() for name, tensor in mine.items()}
            save_file(whole_tensors, folder / f"{kind}-{step}.safetensors")
    return figures


def _distance(mine: torch.Tensor, theirs: torch.Tensor | None) -> float:
    if theirs is None:
        return float(mine.abs().max())
    return float((mine - theirs).abs().max()) if mine.numel() else 0.0


def sample_marks(batch: MicroBatch) -> torch.Tensor:
    """A number for each sample of a batch that tells it from the others, whatever its shape; float64 (samples,)."""
    marks = torch.zeros(max(batch.samples, 1), dtype=torch.float64)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape[0] == len(marks):
            rows = tensor.reshape(len(marks), -1).double()
            marks.add_(rows @ torch.sin(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)))
        return tensor

    map_tensors(add, (batch.input, batch.target))
    return marks[: batch.samples]


def loss_problem(job: Job, *, steps: int) -> str | None:
    """Whether a scalar loss is no mean over its samples: computed whole and in two uneven parts of one output."""
    job = replace(job, precision="float64")
    seed_streams(job.seed, "model")
    model = job.model().double()
    with torch.no_grad():
        for batch in whole_batches(job, steps):
            value = job.loss(output := batch.call(model), batch.target)
            if isinstance(value, tuple | list) or batch.samples < 2:
                continue
            first = max(1, batch.samples // 3)
            try:
                mixed = sum(len(part) / batch.samples * float(job.loss(_rows(output, part, batch.samples),
                                                                       _rows(batch.target, part, batch.samples)))
                            for part in (range(first), range(first, batch.samples)))
            except (RuntimeError, ValueError, TypeError, IndexError, TrainingError):
                return None  # an output that can't be cut by samples says nothing about the loss
            if abs(mixed - float(value)) > 1e-7 * max(1.0, abs(float(value))):
                return (f"the loss is a scalar and not the mean over its samples: {float(value):.6g} of "
                        f"{batch.samples} samples at once, {mixed:.6g} as the mean of its parts. Ignored targets or "
                        "weights do this, and so does a loss that compares samples. Return (sum, count) instead of "
                        "a scalar: the loss's sum, and the number or weight of what it counts")
    return None


def _rows(value: Any, part: range, samples: int) -> Any:
    return map_tensors(lambda t: t[part.start:part.stop] if t.ndim and t.shape[0] == samples else t, value)
