"""Optimizers with `train()` and `eval()` evaluate, save and hand out the weights of `eval()`, and train those of
`train()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.optimizers import (
    BATCH,
    SAMPLES,
    STEPS,
    Named,
    Net,
    furthest,
    optimizer_job,
    train_in_legs,
)
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

import paceline

EXACT = 1e-12


def seeded() -> nn.Module:
    torch.manual_seed(7)
    return Net()


class Averaging(torch.optim.Optimizer):
    """SGD whose weights for evaluations are the mean of all so far. What it is told lies in an attribute, and the other
    weights in a dict beside `state`."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})
        self.others: dict[nn.Parameter, Tensor] = {}
        self.is_training, self.count = False, 0

    def train(self) -> None:
        self._put(True)

    def eval(self) -> None:
        self._put(False)

    @torch.no_grad()
    def _put(self, is_training: bool) -> None:
        if self.is_training is not is_training:
            for p, other in self.others.items():
                other.copy_(p + other - p.copy_(other))
        self.is_training = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.is_training
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                self.others.setdefault(p, torch.zeros_like(p)).lerp_(p, 1 / self.count)


class Wrapping(torch.optim.Optimizer):
    """Hands its steps to another, and does not know of modes."""

    def __init__(self, named: Named) -> None:
        named = list(named)
        super().__init__([p for _, p in named], {})
        self.inner = [schedule_free(named)]
        self.param_groups = self.inner[0].param_groups

    def step(self, closure: Any = None) -> None:
        self.inner[0].step()


def schedule_free(named: Named) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree([p for _, p in named], lr=0.02, warmup_steps=2)


def averaging(named: Named) -> torch.optim.Optimizer:
    return Averaging(named)


def by_hand(job: paceline.Job) -> tuple[dict[str, Tensor], float]:
    """What a plain loop would save and evaluate: the job's order of samples by its own sampler."""
    model = job.model().double()
    optimizer: Any = job.optimizer(list(model.named_parameters()))
    teller = getattr(optimizer, "inner", [optimizer])[0]
    teller.train()
    x, y = (tensor.double() for tensor in job.data.tensors)
    for step in range(STEPS):
        start = step % -(-SAMPLES // BATCH) * BATCH
        optimizer.zero_grad()
        F.mse_loss(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    teller.eval()
    return model.state_dict(), float(F.mse_loss(model(x[:9]), y[:9]).detach())


class Weights(paceline.Callback):
    """Keeps what callbacks are given at the end."""

    given: dict[str, Tensor]

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        self.given = run.state_dict()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("build", "legs"),
    [
        (averaging, [("single", 7)]),
        (schedule_free, [("data=2", 4), ("shard=2", 6), ("single", 7)]),
        (averaging, [("shard=2", 2), ("data=2", 5), ("pipeline=2", 7)]),
        (Wrapping, [("tensor=2", 3), ("data=2", 7)]),
        (Wrapping, [("shard=2", 7)]),
        (schedule_free, [("tensor=2", 7)]),
        (schedule_free, [("pipeline=2", 7)]),
        (schedule_free, [("shard=2 zero=1", 3), ("data=2 microbatches=2", 7)]),
    ],
)
def test_what_is_evaluated_and_saved_is_what_eval_puts_in_place(
    build: Callable[[Named], torch.optim.Optimizer], legs: list[tuple[str, int]], tmp_path: Path
) -> None:
    """And the run goes on with what `train()` does, also after a resume under another plan."""
    callback, data = Weights(), optimizer_job(build).data
    job = optimizer_job(
        build,
        seeded,
        callbacks=[callback],
        sampler=SequentialSampler(data),
        validation=TensorDataset(*(tensor[:9] for tensor in data.tensors)),
    )
    expected, loss = by_hand(job)
    weights = train_in_legs(job, legs, tmp_path)
    result = paceline.open(tmp_path, job=job)

    assert furthest(weights, expected)[0] <= EXACT
    assert furthest(result.model().state_dict(), expected)[0] <= EXACT
    assert furthest(callback.given, expected)[0] <= EXACT
    assert result.metrics["validation_loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("plan", ["servers=1 workers=1", "data=2 local=2"])
def test_it_is_refused_where_ranks_hold_only_what_is_trained(plan: str, tmp_path: Path) -> None:
    with pytest.raises(
        paceline.PacelineError, match=r"has train\(\) and eval\(\), that is, other weights"
    ):
        paceline.train(optimizer_job(averaging), plan, devices="cpu:0-1", run=tmp_path)


@pytest.mark.slow
def test_verify_compares_evaluations_of_it(tmp_path: Path) -> None:
    assert all(
        each.passed
        for each in paceline.verify(optimizer_job(averaging), ["data=2"], steps=2, restore="no")
    )
