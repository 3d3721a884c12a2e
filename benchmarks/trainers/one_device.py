"""The yardstick: a plain loop in one process, over the samples in the order in which a trainer takes them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.data import default_collate

from benchmarks.trainers.jobs import BATCH, TrainerJob

Order = Callable[[int, int], list[int]]  # (samples, epoch) -> their indices


def in_sequence(samples: int, epoch: int) -> list[int]:
    return list(range(samples))


def train(job: TrainerJob, model: nn.Module, order: Order = in_sequence) -> list[float]:
    """Train the model in place; the loss of every step. The last batch of an epoch may be short."""
    optimizer = job.optimizer(
        parameter for parameter in model.parameters() if parameter.requires_grad
    )
    losses = []
    for epoch in range(job.epochs):
        indices = order(len(job.data), epoch)
        for start in range(0, len(indices), BATCH):
            input, target = default_collate(
                [job.data[index] for index in indices[start : start + BATCH]]
            )
            optimizer.zero_grad()
            loss = job.loss(model, input, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
