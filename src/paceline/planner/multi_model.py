"""Turn a job with several models into one whose cost can be traced: each model runs once, on inputs
like the step's.

This leaves out that the step may run a model several times, the losses themselves, and second
backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.nested import map_tensors, tensors_in
from paceline.job import Job
from paceline.job.named_models import NamedModels
from paceline.model.cost.shaped_samples import ShapedSamples
from paceline.training.feed import MicroBatch

if TYPE_CHECKING:
    from paceline.training.own_step.recorded import Recorded

SAMPLES, TIMEOUT_S = 4, 60.0


def priced(job: Job) -> Job:
    """Return the job in a form whose cost can be traced; a job with one model is returned as it is.

    The step is tried on a few samples in a fork of this process, to find the shapes of the models'
    inputs.

    Raises:
        PacelineError: the step fails.
    """
    if job.own_step is None or isinstance(job.data, ShapedSamples):
        return job

    from paceline.training.own_step.recorded import recorded_apart

    seen = recorded_apart(job, SAMPLES, timeout_s=TIMEOUT_S)
    samples = job.num_samples or job.batch
    return Job(
        model=lambda: _Together(job, seen),
        data=ShapedSamples(seen, samples, job),
        loss=_of_every_output,
        optimizer=job.optimizer,
        batch=job.batch,
        steps=job.total_steps or 1,
        precision=job.precision,
        seed=job.seed,
    )


class _Together(nn.Module):
    """All models and followers, under their names, each of which runs on its own inputs."""

    def __init__(self, job: Job, seen: Recorded) -> None:
        super().__init__()
        self.inputs, self.uncut = seen.inputs, seen.uncut
        models: NamedModels = job.model()
        self.names, self.frozen = models.names, set(job.followers)
        for name in self.names:
            self.add_module(name, models.get_submodule(name))

    def forward(self, **inputs: Any) -> list[Any]:
        outputs = []
        for name in self.names:
            arguments = self._arguments(name, inputs[f"for_{name}"])
            with torch.set_grad_enabled(name not in self.frozen):
                outputs.append(MicroBatch(arguments, None, 1).call(self.get_submodule(name)))
        return outputs

    def _arguments(self, name: str, stacked: Sequence[Any]) -> Any:
        """Return a model's input, made of its tensors in stacked samples."""
        tensors = iter(stacked)
        return map_tensors(
            lambda _: next(tensors)[0] if name in self.uncut else next(tensors), self.inputs[name]
        )


def _of_every_output(outputs: Any, target: Any) -> torch.Tensor:
    means = [
        tensor.mean()
        for tensor in tensors_in(outputs)
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    return sum(means[1:], means[0])
