"""Samples that stand for those of a job with several models, for whoever asks what its step costs."""

from __future__ import annotations

from typing import Any

import torch

from paceline.base.nested import tensors_in
from paceline.job import Job


def step_of(job: Job) -> ShapedSamples | None:
    """Of a job that `priced` gave: the one with a step of its own that it stands for, and what its step does with
    models. None if it was given itself."""
    return job.data if isinstance(job.data, ShapedSamples) else None


class ShapedSamples:
    """Samples of zeros in the shapes that models are run with.

    seen: what the step of the job does with models, a `Recorded`.
    """

    def __init__(self, seen: Any, samples: int, job: Job) -> None:
        self.seen, self.samples, self.job = seen, samples, job

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, list[torch.Tensor]]:
        return {
            f"for_{name}": [
                torch.zeros_like(
                    tensor if name in self.seen.uncut or not tensor.ndim else tensor[0]
                )
                for tensor in tensors_in(inputs)
            ]
            for name, inputs in self.seen.inputs.items()
        }
