"""Samples that stand for those of a job with several models, for whoever asks what its step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.job import Job


def step_of(job: Job) -> ShapedSamples | None:
    """Of a job that `priced` gave: the one with a step of its own that it stands for, and what its step does with
    models. None if it was given itself."""
    return job.data if isinstance(job.data, ShapedSamples) else None


class ShapedSamples:
    """Samples of zeros in the shapes that models are run with.

    job: whose step runs them. in_losses, bare: see `recorded.Recorded`.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        samples: int,
        job: Job,
        in_losses: Sequence[str],
        bare: Sequence[str],
    ) -> None:
        self.described, self.samples, self.job = described, samples, job
        self.in_losses, self.bare = in_losses, bare

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {f"for_{name}": _made(entry) for name, entry in self.described.items()}


def _made(entry: Any) -> Any:
    """A sample of what a model is given, as samples can be stacked."""
    if "dtype" in entry:
        return torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    if "items" in entry:
        return {key: _made(item) for key, item in entry["items"].items()}
    return tuple(_made(item) for item in entry["parts"]) if "parts" in entry else 0
