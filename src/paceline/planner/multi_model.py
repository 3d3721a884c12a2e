"""Turn a job with several models into one whose cost can be traced: each model runs once, on inputs
like the step's.

This leaves out that the step may run a model several times, the losses themselves, and second
backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.base.errors import JobError
from paceline.base.fork import in_a_fork
from paceline.job import Job
from paceline.job.named_models import NamedModels
from paceline.model.cost.shaped_samples import ShapedSamples
from paceline.model.tensors import tensors_in
from paceline.training.feed import MicroBatch

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

    def shapes() -> Any:
        from paceline.training.own_step.recorded import recorded

        seen = recorded(job, SAMPLES)
        return (
            {
                name: _described(value, is_cut=name not in seen.uncut)
                for name, value in seen.inputs.items()
            },
            sorted(seen.in_losses),
            sorted(seen.bare),
        )

    described, in_losses, bare = in_a_fork(shapes, timeout_s=TIMEOUT_S)
    samples = job.num_samples or job.batch
    return Job(
        model=lambda: _Together(job, described),
        data=ShapedSamples(described, samples, job, in_losses, bare),
        loss=_of_every_output,
        optimizer=job.optimizer,
        batch=job.batch,
        steps=job.total_steps or 1,
        precision=job.precision,
        seed=job.seed,
    )


class _Together(nn.Module):
    """All models and followers, under their names, each of which runs on its own inputs."""

    def __init__(self, job: Job, described: Mapping[str, Any]) -> None:
        super().__init__()
        self.described = described
        models: NamedModels = job.model()
        self.names, self.frozen = models.names, set(job.followers)
        for name in self.names:
            self.add_module(name, models.get_submodule(name))

    def forward(self, **inputs: Any) -> list[Any]:
        outputs = []
        for name in self.names:
            arguments = _given(self.described[name], inputs[f"for_{name}"])
            with torch.set_grad_enabled(name not in self.frozen):
                outputs.append(MicroBatch(arguments, None, 1).call(self.get_submodule(name)))
        return outputs


def _described(value: Any, *, is_cut: bool) -> Any:
    """Describe a model's input so that JSON can hold it.

    If tensors are cut, their shape is that of one sample.

    Raises:
        JobError: the input holds something else than tensors, numbers and text.
    """
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape[is_cut:]),
            "cut": is_cut,
        }
    if isinstance(value, Mapping):
        return {"items": {key: _described(item, is_cut=is_cut) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"parts": [_described(item, is_cut=is_cut) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise JobError(
        f"the step runs a model with a {type(value).__name__}, of which no plan can be priced",
        hint="name the plan: --plan data=2; or give the model tensors, numbers and text",
    )


def _given(entry: Any, stacked: Any) -> Any:
    """Return a model's input, made of stacked samples."""
    if "dtype" in entry:
        return stacked if entry["cut"] else stacked[0]
    if "items" in entry:
        return {key: _given(item, stacked[key]) for key, item in entry["items"].items()}
    if "parts" in entry:
        return tuple(_given(*pair) for pair in zip(entry["parts"], stacked, strict=True))
    return entry["value"]


def _of_every_output(outputs: Any, target: Any) -> torch.Tensor:
    means = [
        tensor.mean()
        for tensor in tensors_in(outputs)
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    return sum(means[1:], means[0])
