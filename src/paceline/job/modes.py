"""Optimizers with `train()` and `eval()`, such as schedule-free ones: they train other weights than are to be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from paceline.job.named_optimizers import NamedOptimizers


def for_training(build: Callable[[Any], Any], named: Any) -> Any:
    """What a job's function builds of (name, parameter) pairs, told that training begins."""
    optimizer = build(named)
    set_mode(optimizer, is_training=True)
    return optimizer


def has_modes(optimizer: Any) -> bool:
    """Whether it, or one that it holds, is to be told of training and evaluation."""
    return any(_with_modes(optimizer))


def set_mode(optimizer: Any, *, is_training: bool) -> None:
    """Put the weights that are trained, or those that are evaluated and saved, in place."""
    for each in _with_modes(optimizer):
        each.train() if is_training else each.eval()


def _with_modes(optimizer: Any) -> Iterator[Any]:
    """The outermost that have both; what wraps others may pass it on to them."""
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
