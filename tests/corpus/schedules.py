"""Learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

import paceline

from .registry import STEPS, add, entry, make_job

_SCHEDULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "step": (lambda opt: lr_scheduler.StepLR(opt, 2, 0.5), "that is halved every two steps"),
    "multi_step": (
        lambda opt: lr_scheduler.MultiStepLR(opt, [1, 4], 0.3),
        "that is cut at two steps",
    ),
    "cosine": (lambda opt: lr_scheduler.CosineAnnealingLR(opt, STEPS), "that follows a cosine"),
    "warm_restarts": (
        lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
        "that follows cosines with restarts",
    ),
    "one_cycle": (
        lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=STEPS + 1),
        "and a momentum that go through one cycle",
    ),
    "exponential": (lambda opt: lr_scheduler.ExponentialLR(opt, 0.8), "with an exponential decay"),
    "linear_then_step": (
        lambda opt: lr_scheduler.SequentialLR(
            opt,
            [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.StepLR(opt, 1, 0.7)],
            [2],
        ),
        "with a warm-up, then another schedule",
    ),
    "chained": (
        lambda opt: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)]
        ),
        "with two schedules at once",
    ),
    "lambda": (
        lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
        "that is a function of the step",
    ),
    "cyclic": (
        lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.2, step_size_up=2),
        "that goes up and down, with momentum",
    ),
    "polynomial": (
        lambda opt: lr_scheduler.PolynomialLR(opt, STEPS, 2.0),
        "that follows a polynomial",
    ),
}


def _make(schedule: Callable[[Any], Any]) -> Callable[[], paceline.Job]:
    return lambda: make_job(
        lr_schedule=schedule, optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.8)
    )


for _name, (_schedule, _idea) in _SCHEDULES.items():
    add(f"schedule_{_name}", "schedules", f"a learning rate {_idea}", _make(_schedule))


@entry("a schedule over parameter groups with rates of their own")
def schedule_of_groups() -> paceline.Job:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        return torch.optim.SGD(
            [{"params": pairs[:2], "lr": 0.2}, {"params": pairs[2:], "lr": 0.05}]
        )

    return make_job(
        optimizer=optimizer,
        lr_schedule=lambda opt: lr_scheduler.LambdaLR(
            opt, [lambda step: 0.5**step, lambda step: 1.0]
        ),
    )
