"""Optimizers with `train()` and `eval()`, such as schedule-free ones, which train other weights
than users want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from paceline.job.named_optimizers import NamedOptimizers


def for_training(build: Callable[[Any], Any], named: Any) -> Any:
    """Build a job's optimizer from (name, parameter) pairs and put it into training mode."""
    optimizer = build(named)
    set_mode(optimizer, is_training=True)
    return optimizer


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer, or one that it holds, has modes for training and evaluation."""
    return any(_with_modes(optimizer))


def set_mode(optimizer: Any, *, is_training: bool) -> None:
    """Put the weights in place that are trained, or those that are evaluated and saved."""
    for each in _with_modes(optimizer):
        each.train() if is_training else each.eval()


def _with_modes(optimizer: Any) -> Iterator[Any]:
    """Yield the outermost optimizers that have both methods; one that wraps others may pass the
    calls on to them.
    """
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        yield optimizer
        return
    inside = (
        optimizer.members
        if isinstance(optimizer, NamedOptimizers)
        else getattr(optimizer, "__dict__", {})
    )
    for value in inside.values():
        values = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        for each in values:
            if isinstance(each, torch.optim.Optimizer):
                yield from _with_modes(each)
