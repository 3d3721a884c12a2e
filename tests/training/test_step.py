"""One step: when ranks agree about it, and what a refused step leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, TensorDataset

import paceline as pl
from paceline.job.order import Order
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.step_sync import StepFigures, SyncEveryStep
from paceline.training.feed import DataShard, training_feed
from paceline.training.parts.spikes import Spike, Spikes
from paceline.training.stepper import Stepper

BATCH, BAD_STEP = 4, 2


def data(*, is_bad: bool) -> TensorDataset:
    """Four windows of samples, of which the third may have a NaN."""
    x = torch.randn(4 * BATCH, 3, generator=torch.Generator().manual_seed(0))
    if is_bad:
        x[BAD_STEP * BATCH] = torch.nan
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> torch.nn.Module:
    return torch.nn.Linear(3, 1)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.1)


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, batch.target)


def one_backward(ctx: Any, batch: Any) -> None:
    ctx.backward("net", batch, loss)
    ctx.update("net")


def looks_after(ctx: Any, batch: Any) -> None:
    one_backward(ctx, batch)
    ctx.run("net", batch)


def asks_before(ctx: Any, batch: Any) -> None:
    out = ctx.backward("net", batch, loss)
    assert out.loss >= 0 or not out.loss.isfinite()
    ctx.update("net")


def logs(ctx: Any, batch: Any) -> None:
    def logged(output: torch.Tensor, batch: Any) -> torch.Tensor:
        ctx.log("size" if ctx.step < 2 else "length", output.norm())
        return loss(output, batch)

    ctx.backward("net", batch, logged)
    ctx.update("net")


def two_backwards(ctx: Any, batch: Any) -> None:
    one_backward(ctx, batch)
    one_backward(ctx, batch)


def job(
    step: Callable[[Any, Any], None] | None,
    *,
    is_bad: bool = False,
    clip: float | None = None,
    precision: Any = "float32",
) -> pl.Job:
    samples = data(is_bad=is_bad)
    options: Any = {
        "data": samples,
        "precision": precision,
        "sampler": SequentialSampler(samples),
        "batch": BATCH,
        "epochs": 1,
    }
    if step is None:
        mse = torch.nn.MSELoss()
        return pl.Job(model=net, loss=mse, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)
    optimizers = {"net": pl.Optimizer(sgd, clip=clip)}
    return pl.Job(models={"net": net}, optimizers=optimizers, training_step=step, **options)


def taken(job: pl.Job, tell: Callable[[Stepper], None]) -> Stepper:
    """Take a job's steps in this process; `tell` hears before each."""
    plan = Plan.parse("single")
    stepper = Stepper(job, plan, Mesh.of(plan, 0), torch.device("cpu"))
    windows = training_feed(
        job, order=Order.of(job), part=DataShard((1,), 0, 1), steps=range(4), loader_workers=0
    )
    for step, (window, batches) in enumerate(windows):
        tell(stepper)
        stepper.step(window, batches, step=step)
    return stepper


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("step", "messages", "precision"),
    [
        (None, [1, 1, 1, 1], "float32"),
        (one_backward, [1, 1, 1, 1], "float32"),
        (one_backward, [1, 1, 1, 1], "fp16"),
        (asks_before, [1, 1, 1, 1], "float32"),
        (looks_after, [2, 2, 2, 2], "float32"),
        (two_backwards, [3, 3, 3, 3], "float32"),
        (logs, [2, 1, 2, 1], "float32"),
    ],
)
def test_ranks_agree_in_as_few_messages_as_can_be(
    step: Any, messages: list[int], precision: str, monkeypatch: pytest.MonkeyPatch
):
    """One for a step with one backward; else one for each, and one at the end. One more for the sum of a new name."""
    sent: list[int] = []
    summed = SyncEveryStep.all_reduce_figures

    def counted(self: SyncEveryStep, figures: torch.Tensor) -> torch.Tensor:
        sent[-1] += 1
        return summed(self, figures)

    monkeypatch.setattr(SyncEveryStep, "all_reduce_figures", counted)
    taken(job(step, precision=precision), lambda stepper: sent.append(0))
    assert sent == messages


@pytest.mark.parametrize("step", [None, one_backward, looks_after, asks_before])
def test_a_refused_step_changes_no_weight(step: Any):
    weights: list[torch.Tensor] = []
    steppers: list[Stepper] = []

    def tell(stepper: Stepper) -> None:
        steppers.append(stepper)
        weights.append(torch.cat([p.detach().flatten() for p in stepper.parameters.values()]))

    with pytest.raises(Spike, match=r"NaN.* in step 3; the weights of the step before are kept"):
        taken(job(step, is_bad=True), tell)
    tell(steppers[-1])
    assert len(weights) == BAD_STEP + 2
    assert not torch.equal(weights[-3], weights[-2])
    assert torch.equal(weights[-2], weights[-1])


def test_a_step_with_several_backwards_says_that_it_updated():
    with pytest.raises(Spike, match="in step 3; nothing of this step is saved"):
        taken(job(two_backwards, is_bad=True), lambda stepper: None)


@pytest.mark.parametrize("precision", ["float32", "fp16"])
@pytest.mark.parametrize("step", [one_backward, asks_before, looks_after])
def test_a_step_of_ones_own_is_judged_before_its_update(step: Any, precision: str):
    """By its loss, and by the norm of its gradients if its optimizer clips them. A spike moves no weight."""
    weights: list[torch.Tensor] = []

    def watched(stepper: Stepper) -> None:
        if stepper.spikes is None:
            stepper.watch(Spikes("skip"))
        weights.append(stepper.parameters["net.weight"].detach().clone())

    stepper = taken(job(step, is_bad=True, clip=1.0, precision=precision), watched)
    watched(stepper)
    spikes, scaling = stepper.spikes, stepper.scaling
    # Loss scaling leaves out an overflow, which is no spike.
    left_out = 1 if scaling is None else scaling.skipped_steps
    assert spikes is not None and len(spikes.losses) == len(spikes.norms) == 4 - left_out
    assert spikes.num_spikes == (scaling is None)
    moved = [bool((a != b).any()) for a, b in pairwise(weights)]
    assert sum(moved) == 4 - left_out and not moved[BAD_STEP]


def test_a_step_of_ones_own_is_the_usual_one():
    """The same weights to the bit."""

    @torch.no_grad()
    def begin(stepper: Stepper) -> None:
        if not stepper.has_begun:
            for p in stepper.parameters.values():
                p.fill_(0.5)

    usual, own = (taken(job(step), begin).parameters.values() for step in (None, one_backward))
    assert all(map(torch.equal, usual, own))


def test_a_model_of_which_a_loss_uses_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    """Also where another model of the same loss is used; models that no loss names are not looked at."""
    looked: list[set[str]] = []
    monkeypatch.setattr(
        "paceline.training.rank_state.check_used",
        lambda users, step: looked.append({name for name, count in users.items() if not count}),
    )

    def step(ctx: Any, batch: Any) -> None:
        ctx.backward(("net", "other"), batch, loss)
        ctx.update("net")
        ctx.update("other")
        ctx.backward("later", batch, loss)
        ctx.update("later")

    names = ("net", "other", "later", "never")
    taken(
        replace(job(step), models=dict.fromkeys(names, net), optimizers=dict.fromkeys(names, sgd)),
        lambda stepper: None,
    )
    assert looked == [{"other.weight", "other.bias"}]


def test_figures_are_what_they_were_sent_as():
    figures = StepFigures(1.5, 4.0, digest=2.0**52 + 1, users=(1.0, 0.0, 2.0))
    assert StepFigures.read(figures.values) == figures
    assert StepFigures.read(StepFigures().values) == StepFigures()
