"""Computes losses and metrics over a data set. Every sample counts once; sums and counts are
reduced, and divided at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from paceline.base.errors import JobError, PacelineError, TrainingError, UsageError, nearest
from paceline.base.nested import items_of
from paceline.base.streams import kept_streams
from paceline.job import Job
from paceline.job.metrics import OfAllSamples
from paceline.job.phases import FIGURES
from paceline.launch.collectives.values import names_of_all
from paceline.model.casts import autocast
from paceline.model.forward_state import ForwardState, function_kept
from paceline.strategies.layout import Layout
from paceline.strategies.mesh import Mesh
from paceline.training.feed import DataShard, MicroBatch, evaluation_feed, is_stream
from paceline.training.logged import summed
from paceline.training.loss import read_tally, without_total
from paceline.training.metrics import AllSamples, copied, no_mean
from paceline.training.own_step.named_parts import ModelPart
from paceline.training.own_step.stage_outputs import from_last_stage
from paceline.training.own_step.step_batch import StepBatch, input_of
from paceline.training.own_step.step_draws import MakesOn

_FEW = 4  # the fewest samples on which a metric is checked before the first step


@dataclass(frozen=True)
class Evaluator:
    """Computes a job's loss and other figures over data, on the ranks of a plan.

    The figures are those of the job's `validation_step`, or the loss and the metrics.
    """

    model: torch.nn.Module  # all models; in evaluation mode during an evaluation
    parts: Mapping[str, ModelPart]
    job: Job
    part: DataShard  # of the data on this rank
    mesh: Mesh
    device: torch.device
    beat: Callable[[str], None] = lambda phase: None

    def figures(self, data: Any) -> tuple[dict[str, float], JobError | None]:
        """Return each figure by name, the loss as "loss", and why this rank refuses a metric, if it does.

        The caller raises the refusal when no rank waits for this one. Collective over all ranks.
        """
        sums, refused = self.sums(data)
        names = self.names_of_all(list(sums))
        return quotients(sums_of_all(sums, names, self.mesh, self.device)), refused

    def names_of_all(self, names: list[str]) -> list[str]:
        """Return the names of the figures that any rank has; this one has some. Collective."""
        is_known = self.job.own_validate is None
        return names if is_known else names_of_mesh(names, self.mesh, self.device)

    def sums(self, data: Any) -> tuple[dict[str, torch.Tensor], JobError | None]:
        """Return sum and count of each figure over this rank's part of the data, float64, and why a
        metric is refused, if one is.

        Collective if the plan's forwards are.
        """
        was_training = self.model.training
        self.model.eval()
        with kept_streams(), torch.no_grad():
            summed = (
                (self._sums_of_validate(data), None)
                if self.job.own_validate is not None
                else self._sums_of_metrics(data)
            )
        self.model.train(was_training)
        return summed

    def look(self) -> list[str]:
        """Return the names of an evaluation's figures. What is wrong with them is known before the first
        step, by a few samples. The phase stays that of building. Collective.
        """
        data, quiet = self.job.validation, replace(self, beat=lambda phase: None)
        if self.job.own_validate is not None:
            function = self.job.validation_step or self.job.compute or self.job.criterion
            with ExitStack() as kept:
                kept.callback(ForwardState(self.model).now().restore)
                kept.enter_context(function_kept(function, self.model))
                return list(quiet.sums(Subset(data, range(min(len(data), self.job.batch))))[0])
        if self.job.metrics:
            quiet._refuse_before_training()
        return ["loss", *self.job.metrics]

    def _batches(self, data: Any) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank, on its device."""
        job = self.job
        for batch in evaluation_feed(
            data, batch=job.batch, part=self.part, seed=job.seed, collate=job.evaluation_collate
        ):
            self.beat("evaluate")
            yield batch.to(self.device, job.input_dtype)

    def _sums_of_validate(self, data: Any) -> dict[str, torch.Tensor]:
        mesh, device = self.mesh, self.device
        sums: dict[str, torch.Tensor] = {}
        counts_here = mesh.is_first_of_same_loss and not mesh.coordinates[mesh.stage_axis]
        for batch in self._batches(data):
            context = _Validation(self, batch.samples)
            with autocast(self.job, device):
                values = _validated(self.job, context, batch)
            for name, given in values.items():
                value = without_total(given, samples=batch.samples or 1, whole=_length(data))
                row = sums.setdefault(name, torch.zeros(2, dtype=torch.float64, device=device))
                if batch.samples and counts_here:
                    named = f"'{name}' of validation_step"
                    row += summed([read_tally(value, samples=batch.samples, name=named)], device)
        return sums

    def _sums_of_metrics(self, data: Any) -> tuple[dict[str, torch.Tensor], JobError | None]:
        job, mesh = self.job, self.mesh
        (layout,) = (part.layout for part in self.parts.values())
        functions = {"loss": job.criterion, **job.metrics}
        named = {"loss": "the loss", **{name: f"metric '{name}'" for name in job.metrics}}
        wholes = {name: f for name, f in functions.items() if isinstance(f, OfAllSamples)}
        every, number, refused = AllSamples(self.part, mesh, self.device), 0, None
        sums = {name: torch.zeros(2, dtype=torch.float64, device=self.device) for name in functions}
        for batch in self._batches(data):
            if not batch.samples and not layout.meets_in_forward and not wholes:
                continue
            with autocast(job, self.device):
                output = layout.forward(batch)
                if not layout.has_output or not mesh.is_first_of_same_loss:
                    continue
                if wholes:
                    every.add(output, batch)
                number += 1
                is_looked_at = batch.samples > 1 and not number & (number - 1)  # 1, 2, 4, 8, ...
                for name, function in functions.items():
                    if name in wholes:
                        continue
                    if name in job.metrics and is_looked_at:
                        refused = refused or no_mean(
                            named[name], function, output, batch.target, batch.samples, self.model
                        )
                    value = without_total(
                        function(output, batch.target),
                        samples=batch.samples or 1,
                        whole=_length(data),
                    )
                    tally = read_tally(value, samples=batch.samples or 1, name=named[name])
                    if batch.samples:
                        sums[name] += summed([tally], self.device)
        if wholes and layout.has_output and mesh.is_first_of_same_loss:
            together = every.together()
            for name, function in wholes.items():
                tally = read_tally(function(*together), samples=1, name=named[name])
                if not self.part.index:
                    sums[name] = summed([tally], self.device)
        return sums, refused

    def _refuse_before_training(self) -> None:
        """Evaluate a few samples, the same in all replicas, to refuse a metric before the first step.

        The states of the model, the loss and the metrics are restored. Their own errors are left to the
        run's evaluation. Collective.

        Raises:
            JobError: a metric is no mean over samples.
            TrainingError: it gives no number.
        """
        job = self.job
        metrics = {
            name: copied(f) for name, f in job.metrics.items() if not isinstance(f, OfAllSamples)
        }
        cuts = len(self.part.shares) * self.part.num_microbatches
        few = min(len(job.validation), job.batch, max(_FEW, job.batch // cuts))
        looking = replace(self, job=replace(job, metrics=metrics), part=DataShard((1,), 0, 1))
        refused = None
        with ExitStack() as kept:
            kept.callback(ForwardState(self.model).now().restore)
            for function in (job.criterion, *metrics.values()):
                kept.enter_context(function_kept(function, self.model))
            try:
                _, refused = looking.sums(Subset(job.validation, range(few)))
            except Exception as error:  # the model or a metric may read what only training makes
                is_alone = all(part.layout.has_output for part in self.parts.values())
                if isinstance(error, PacelineError) or not is_alone:  # later stages would wait
                    raise
        if refused is not None:
            raise refused


def _validated(job: Job, context: _Validation, batch: MicroBatch) -> Mapping[str, Any]:
    """Return losses and metrics of a batch by name, "loss" first."""
    assert job.own_validate is not None
    with context.makes_on:
        values = job.own_validate(context, StepBatch([batch]))
    values = values if isinstance(values, Mapping) else {"loss": values}
    if "loss" not in values:
        raise TrainingError(f'validation_step returned {", ".join(values)} and no "loss"')
    if taken := FIGURES.intersection(values) - {"loss"}:
        raise TrainingError(
            f"validation_step returned {', '.join(sorted(taken))}: every run has a figure of that name",
            hint="give the metric another name",
        )
    return {"loss": values["loss"], **values}


class _Validation:
    """The context of `validation_step` on a rank: models run, and nothing is trained; see `StepContext`."""

    def __init__(self, evaluator: Evaluator, samples: int) -> None:
        self.evaluator, self.samples = evaluator, samples
        self.makes_on = MakesOn(evaluator.device, evaluator.job.input_dtype)

    def run(self, model: str, inputs: Any, *, grad: bool | None = None, cut: bool = True) -> Any:
        """Return a model's output. Inputs are never cut, whatever `cut` says. Collective if the
        plan's forwards are.
        """
        evaluator = self.evaluator
        if model not in evaluator.parts:
            raise TrainingError(f"no model '{model}': {nearest(model, evaluator.parts)}")
        with self.makes_on.paused():
            layout = evaluator.parts[model].layout
            outputs = [layout.forward(MicroBatch(input_of(inputs), None, self.samples))]
            place, mesh = layout.output_place, evaluator.mesh
            return from_last_stage(outputs, place, mesh, evaluator.device)[0]


def _length(data: Any) -> int:
    """Return the number of samples; 0 for a stream."""
    return 0 if is_stream(data) else len(data)


def names_of_mesh(names: list[str], mesh: Mesh, device: torch.device) -> list[str]:
    """Return the names that any rank of a mesh has, in one order. Collective."""
    return names_of_all(names, device=device) if mesh.world_size > 1 else names


def sums_of_all(
    sums: Mapping[str, torch.Tensor], names: Sequence[str], mesh: Mesh, device: torch.device
) -> dict[str, list[float]]:
    """Return the sum and the count of each name over all ranks. Collective.

    names: the same on all ranks; a rank need not have sums of all of them.
    """
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    together = torch.stack([nothing, *(sums.get(name, nothing) for name in names)])
    return dict(zip(names, _reduced(together, mesh).tolist()[1:], strict=True))


def _reduced(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    if mesh.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def quotients(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Divide the sums by the counts of all ranks, by name.

    A figure that nothing counts in is left out; such a loss is no number.
    """
    return {
        name: total / count if count else math.nan
        for name, (total, count) in sums.items()
        if count or name == "loss"
    }


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
    """Return tensors of an output by name. Containers are flattened with dots."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    return {
        key: tensor
        for index, item in items_of(value) or ()
        for key, tensor in _named(item, f"{name}.{index}").items()
    }
