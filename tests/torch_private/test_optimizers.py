"""`torch_private/optimizers.py`: hooks, kernels, and what schedules look at."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR, StepLR

from paceline.torch_private.optimizers import (
    LAST_RATES,
    STEP_HOOKS,
    STEPPED,
    has_both_kernels,
    has_step_hooks,
    mark_stepped,
    schedules_in,
)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_are_found(optimizer: Any, register: str):
    assert not has_step_hooks(optimizer)
    handle = getattr(optimizer, register)(lambda *args: None)
    assert has_step_hooks(optimizer)
    assert sum(len(getattr(optimizer, hooks)) for hooks in STEP_HOOKS) == 1
    handle.remove()
    assert not has_step_hooks(optimizer)


def test_schedules_look_whether_a_step_was_taken(optimizer: Any):
    schedule = StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = StepLR(optimizer, 1)
    mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
    assert STEPPED in vars(optimizer)


def test_kernels_are_for_cpus_and_gpus():
    assert has_both_kernels("cuda") and not has_both_kernels("meta")


def test_the_last_rates_are_in_a_schedules_state(optimizer: Any):
    assert StepLR(optimizer, 1).state_dict()[LAST_RATES] == [1.0]


@pytest.mark.parametrize(
    "made",
    [
        lambda parts: SequentialLR(parts[0].optimizer, parts, milestones=[2]),
        lambda parts: ChainedScheduler(parts),
    ],
)
def test_schedules_of_schedules_have_their_parts(optimizer: Any, made: Callable[[list[Any]], Any]):
    parts = [ConstantLR(optimizer), StepLR(optimizer, 1)]
    assert [*schedules_in(made(parts))] == parts and not schedules_in(parts[0])
