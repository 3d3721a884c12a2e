"""Computes losses and metrics over a data set. Every sample counts once; sums and counts are
reduced, and divided at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from paceline.base.errors import JobError, PacelineError, TrainingError, UsageError, nearest
from paceline.base.streams import kept_streams
from paceline.job import Job
from paceline.job.metrics import OfAllSamples
from paceline.job.phases import FIGURES
from paceline.model.forward_state import ForwardState, function_kept
from paceline.strategies.layout import Layout
from paceline.strategies.mesh import Mesh
from paceline.training.feed import DataShard, MicroBatch, evaluation_feed
from paceline.training.loss import read_tally
from paceline.training.metrics import AllSamples, copied, no_mean
from paceline.training.own_step.named_parts import ModelPart
from paceline.training.own_step.stage_outputs import from_last_stage
from paceline.training.own_step.step_batch import StepBatch
from paceline.training.own_step.step_draws import MakesOn
from paceline.training.prepare import autocast

_FEW = 4  # the fewest samples on which a metric is checked before the first step


def evaluate_step(
    models: torch.nn.Module,
    parts: Mapping[str, ModelPart],
    job: Job,
    data: Any,
    *,
    part: DataShard,
    mesh: Mesh,
    device: torch.device,
    beat: Callable[[str], None] = lambda phase: None,
) -> dict[str, float]:
    """Evaluate a job with models by name on the data, by its `validate`. Returns the loss (as
    "loss") and others by name.

    Collective over all ranks.
    """
    sums = step_sums(models, parts, job, data, part=part, mesh=mesh, device=device, beat=beat)
    together = torch.stack(list(sums.values()))
    if mesh.world_size > 1:
        dist.all_reduce(together)
    return quotients(sums, together)


def step_sums(
    models: torch.nn.Module,
    parts: Mapping[str, ModelPart],
    job: Job,
    data: Any,
    *,
    part: DataShard,
    mesh: Mesh,
    device: torch.device,
    beat: Callable[[str], None] = lambda phase: None,
) -> dict[str, torch.Tensor]:
    """Return sum and count of each figure of `validate` over this rank's part of the data, float64.

    Collective if the plan's forwards are.
    """
    sums: dict[str, torch.Tensor] = {}
    was_training = models.training
    models.eval()
    counts_here = mesh.is_first_of_same_loss and not mesh.coordinates[mesh.stage_axis]
    with kept_streams(), torch.no_grad():
        for batch in evaluation_feed(
            data, batch=job.batch, part=part, seed=job.seed, collate=job.evaluation_collate
        ):
            beat("evaluate")
            moved = batch.to(device, torch.float64 if job.precision == "float64" else None)
            with autocast(job, device):
                values = _validated(
                    job, _Validation(parts, mesh, device, batch.samples, job.precision), moved
                )
            for name, value in values.items():
                row = sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=device))
                if batch.samples and counts_here:
                    tally = read_tally(value, samples=batch.samples, name=f"'{name}' of validate")
                    row += torch.stack(
                        [
                            torch.as_tensor(figure, dtype=torch.float64, device=device)
                            for figure in (tally.total, tally.count)
                        ]
                    )
    models.train(was_training)
    return sums


def _validated(job: Job, context: _Validation, batch: MicroBatch) -> Mapping[str, Any]:
    """Return losses and metrics of a batch by name, "loss" first."""
    assert job.own_validate is not None
    with context.makes_on:
        values = job.own_validate(context, StepBatch([batch]))
    values = values if isinstance(values, Mapping) else {"loss": values}
    if "loss" not in values:
        raise TrainingError(f'validate returned {", ".join(values)} and no "loss"')
    if taken := FIGURES.intersection(values) - {"loss"}:
        raise TrainingError(
            f"validate returned {', '.join(sorted(taken))}: every run has a figure of that name",
            hint="give the metric another name",
        )
    return {"loss": values["loss"], **values}


class _Validation:
    """The context of `validate` on a rank: models run, and nothing is trained; see `StepContext`."""

    def __init__(
        self,
        parts: Mapping[str, ModelPart],
        mesh: Mesh,
        device: torch.device,
        samples: int,
        precision: str,
    ) -> None:
        self.parts, self.mesh, self.device, self.samples = parts, mesh, device, samples
        self.makes_on = MakesOn(device, precision)

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        """Return a model's output. Inputs are never cut, whatever `cut` says. Collective if the
        plan's forwards are.
        """
        if model not in self.parts:
            raise TrainingError(f"no model '{model}': {nearest(model, self.parts)}")
        model_inputs = inputs.input if isinstance(inputs, StepBatch) else inputs
        with self.makes_on.paused():
            output = self.parts[model].layout.forward(MicroBatch(model_inputs, None, self.samples))
            if self.mesh.sizes[self.mesh.stage_axis] == 1:
                return output
            return from_last_stage([output], self.mesh, self.device)[0]


def evaluate(
    model: torch.nn.Module,
    layout: Layout,
    job: Job,
    data: Any,
    *,
    part: DataShard,
    mesh: Mesh,
    device: torch.device,
    beat: Callable[[str], None] = lambda phase: None,
) -> tuple[dict[str, float], JobError | None]:
    """Return the loss (as "loss") and every metric of the job on the data, and why this rank
    refuses a metric, if it does.

    The caller raises the refusal when no rank waits for this one. Collective over all ranks.

    model: the model that the layout runs. It is in evaluation mode during the call.
    """
    sums, refused = evaluation_sums(
        model, layout, job, data, part=part, mesh=mesh, device=device, beat=beat
    )
    if mesh.world_size > 1:
        dist.all_reduce(sums)
    return quotients(["loss", *job.metrics], sums), refused


def refuse_before_training(
    model: torch.nn.Module,
    layout: Layout,
    job: Job,
    *,
    part: DataShard,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Evaluate a few samples, the same in all replicas, to refuse a metric before the first step.
    Collective.

    The states of the model, the loss and the metrics are restored. Their own errors are left to the
    run's evaluation.

    Raises:
        JobError: a metric is no mean over samples.
        TrainingError: it gives no number.
    """
    metrics = {
        name: copied(f) for name, f in job.metrics.items() if not isinstance(f, OfAllSamples)
    }
    few = min(
        len(job.validation),
        job.batch,
        max(_FEW, job.batch // (len(part.shares) * part.num_microbatches)),
    )
    refused = None
    with ExitStack() as kept:
        kept.callback(ForwardState(model).now().restore)
        for function in (job.criterion, *metrics.values()):
            kept.enter_context(function_kept(function, model))
        try:
            _, refused = evaluation_sums(
                model,
                layout,
                replace(job, metrics=metrics),
                Subset(job.validation, range(few)),
                part=DataShard((1,), 0, 1),
                mesh=mesh,
                device=device,
            )
        except Exception as error:  # the model or a metric may read what only training makes
            if isinstance(error, PacelineError) or not layout.has_output:  # later stages would wait
                raise
    if refused is not None:
        raise refused


def quotients(names: Iterable[str], sums: torch.Tensor) -> dict[str, float]:
    """Divide the sums by the counts of all ranks, by name."""
    return dict(zip(names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def evaluation_sums(
    model: torch.nn.Module,
    layout: Layout,
    job: Job,
    data: Any,
    *,
    part: DataShard,
    mesh: Mesh,
    device: torch.device,
    beat: Callable[[str], None] = lambda phase: None,
) -> tuple[torch.Tensor, JobError | None]:
    """Return sums and counts over this rank's part of the data, and why a metric is refused, if one
    is.

    The sums and counts are those of the loss and of every metric, float64 (functions, 2).
    """
    functions = {
        "the loss": job.criterion,
        **{f"metric '{name}'": f for name, f in job.metrics.items()},
    }
    wholes = {row: f for row, f in enumerate(functions.values()) if isinstance(f, OfAllSamples)}
    every, number, refused = AllSamples(part, mesh, device), 0, None
    sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with kept_streams(), torch.no_grad():
        for batch in evaluation_feed(
            data, batch=job.batch, part=part, seed=job.seed, collate=job.evaluation_collate
        ):
            beat("evaluate")
            if not batch.samples and not layout.meets_in_forward and not wholes:
                continue
            moved = batch.to(device, torch.float64 if job.precision == "float64" else None)
            with autocast(job, device):
                output = layout.forward(moved)
                if not layout.has_output or not mesh.is_first_of_same_loss:
                    continue
                if wholes:
                    every.add(output, moved)
                number += 1
                for row, (name, function) in enumerate(functions.items()):
                    if row in wholes:
                        continue
                    if (
                        row and batch.samples > 1 and not number & (number - 1)
                    ):  # after 1, 2, 4, 8, ... micro-batches
                        refused = refused or no_mean(
                            name, function, output, moved.target, batch.samples, model
                        )
                    tally = read_tally(
                        function(output, moved.target), samples=batch.samples or 1, name=name
                    )
                    if batch.samples:
                        sums[row] += torch.stack(
                            [
                                torch.as_tensor(figure, dtype=torch.float64, device=device)
                                for figure in (tally.total, tally.count)
                            ]
                        )
        if wholes and layout.has_output and mesh.is_first_of_same_loss:
            together = every.together()
            for row, function in wholes.items():
                tally = read_tally(function(*together), samples=1, name=list(functions)[row])
                if not part.index:
                    sums[row] = torch.tensor(
                        [float(tally.total), float(tally.count)], dtype=torch.float64
                    )
    model.train(was_training)
    return sums, refused


def outputs(
    model: torch.nn.Module,
    layout: Layout,
    job: Job,
    data: Any,
    *,
    part: DataShard,
    device: torch.device,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of the model's outputs by name, (samples, ...) each, on the CPU.

    They are those of this rank's part of the data, micro-batch by micro-batch. Floats are float64
    in a float64 job, otherwise float32. Collective; yields nothing if another rank has the model's
    output.

    Raises:
        UsageError: an output has no row for each sample.
    """
    dtype = torch.float64 if job.precision == "float64" else torch.float32

    def rows(batch: MicroBatch, samples: int) -> dict[str, torch.Tensor]:
        with autocast(job, device):
            output = layout.forward(batch.to(device))
        if not layout.has_output:
            return {}
        if not (tensors := _named(output)):
            raise UsageError(f"the model's output is {type(output).__name__} and holds no tensors")
        for name, tensor in tensors.items():
            if not tensor.dim() or len(tensor) != samples:
                raise UsageError(
                    f"{name} is {list(tensor.shape)} for {samples} samples: it has no row for each",
                    hint="in evaluation mode, return outputs with the samples along dim 0 alone",
                )
        return {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor)[: batch.samples]
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }

    model.eval()
    with torch.no_grad():
        for number, batch in enumerate(
            evaluation_feed(data, batch=job.batch, part=part, seed=job.seed)
        ):
            samples = max(batch.samples, 1)
            if (
                not number
            ):  # a tensor that isn't per sample may have that many rows by chance, but not twice
                few = 3 if samples == 2 else 2
                rows(
                    batch.mapped(lambda tensor, few=few: tensor[:1].repeat_interleave(few, 0)), few
                )
            made = rows(batch, samples)
            if layout.has_output:
                yield made


def _named(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Return tensors of an output by name. Tuples and mappings are flattened with dots."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items: Iterable[tuple[Any, Any]] = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, tuple | list)
        else vars(value).items()
        if is_dataclass(value)
        else ()
    )
    return {
        key: tensor
        for index, item in items
        for key, tensor in _named(item, f"{name}.{index}").items()
    }
