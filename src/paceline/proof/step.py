"""One step of one device: plain losses, and plain updates.

It can cut the batch of a step as a plan would cut it over replicas and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from paceline.base.streams import seed_streams
from paceline.job import Job
from paceline.proof.device import Dtypes, autocast, cpu_copy
from paceline.proof.replicas import Replicas, run_backward
from paceline.training.feed import MicroBatch


class PlainStep:
    """The step of a job with one loss: one backward, and one update.

    Attributes:
        loss: The value of the loss; the sum of those of all backwards.
        count: What the loss counts.
        gradients: Before clipping, by name, on the CPU; summed over the updates.
        is_skipped: Whether an update was skipped because gradients overflowed.

    Args:
        model: The model, or all of a job's models.
        replicas: The step's batch, as each replica takes it in micro-batches.
        number: Of the step, from 0.
        scale: The factor of losses; 1.0 without loss scaling.
        count: What the loss of the step before counted; 0.0 in the first one.
        dtypes: Watches forwards and backwards; None if nothing does.
        update: Clips and updates. It is called with the name of an optimizer and its parameters; if
            the optimizer may evaluate the loss itself, also with its known value, and a function
            that computes it and the gradients again.
    """

    def __init__(
        self,
        job: Job,
        model: Any,
        replicas: Sequence[Sequence[MicroBatch]],
        *,
        number: int,
        scale: float,
        count: float,
        dtypes: Dtypes | None,
        update: Callable[..., None],
    ) -> None:
        self.job, self.model, self.replicas = job, model, replicas
        self.number, self.scale, self.count = number, scale, count
        self.dtypes, self._update = dtypes, update
        self.has_scale, self.is_skipped = job.precision == "fp16", False
        self.samples = sum(piece.samples for replica in replicas for piece in replica)
        self.shares = [sum(p.samples for p in pieces) / self.samples for pieces in replicas]
        self.loss, self.gradients = 0.0, dict[str, torch.Tensor]()

    def take(self) -> None:
        """Compute the loss and its gradients, and update."""
        self.loss = self._evaluate()
        self.gradients = gradients_of(self.model)
        if not self.is_skipped:
            self._update("", list(self.model.parameters()), self.loss, self._evaluate)

    def _evaluate(self) -> float:
        """Leave the gradients of the batch in the model, and return its loss.

        Each replica starts from the model's current state; then they are joined (docs/verify.md).
        """
        model = self.model
        model.zero_grad()
        # A loss that is a sum is divided by a power of two near the window's count before it goes back.
        expected = (self.count or self.samples) if self.has_scale else 1.0
        with self.dtypes or nullcontext():
            loss, divisor, self.count = self._go_back(self._losses(), expected)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= divisor
        self.is_skipped = self.has_scale and not (math.isfinite(loss) and are_finite(gradients))
        if self.is_skipped:
            model.zero_grad()
        return loss

    def _go_back(
        self,
        losses: Iterator[tuple[int, Any]],
        expected: float,
        inputs: list[nn.Parameter] | None = None,
    ) -> tuple[float, float, float]:
        """Run backward for the losses of micro-batches; see `run_backward`.

        expected: by a power of two near it, losses that are sums are divided before, so that they overflow less.
        """
        sum_scale = self.scale / 2.0 ** round(math.log2(expected))
        return run_backward(
            losses, self.samples, scale=self.scale, sum_scale=sum_scale, inputs=inputs
        )

    def _losses(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of samples and the loss of each micro-batch."""
        together = Replicas(self.model, self.shares) if len(self.shares) > 1 else None
        for replica, pieces in enumerate(self.replicas):
            if together is not None:
                together.begin()
            for number, piece in enumerate(pieces):
                seed_streams(self.job.seed, "step", self.number, replica, number)
                with autocast(self.job):
                    value = self.job.criterion(piece.call(self.model), piece.target)
                yield piece.samples, value
            if together is not None:
                together.add()
        if together is not None:
            together.finish()


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of the gradients are finite."""
    return all(bool(gradient.to_dense().isfinite().all()) for gradient in gradients)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the existing gradients on the CPU, by parameter name."""
    return {
        name: cpu_copy(p.grad.to_dense())
        for name, p in model.named_parameters()
        if p.grad is not None
    }
