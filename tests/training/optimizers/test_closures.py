"""Optimizers that evaluate the loss several times a step end where the loop of torch's documentation ends."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.optimizers import Extragradient, Net, Sam, furthest, optimizer_job, train, train_in_legs
from torch import Tensor, nn

import paceline
from paceline.base.errors import JobError
from paceline.base.streams import seed_model, seed_streams
from paceline.job.order import Order
from paceline.launch.process.failure import RankFailed
from paceline.proof.reference_loop import BatchCut, PlainRun, Variation
from paceline.training.optimizers.closure import Closure
from paceline.training.optimizers.probe import Reach, needs_closure, observe

EXACT = 1e-10  # several evaluations a step lead from one rounding to the next


def lbfgs(named: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in named], lr=0.1, max_iter=6)


def wolfe(named: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        [p for _, p in named], lr=1.0, max_iter=5, history_size=4, line_search_fn="strong_wolfe"
    )


class Noisy(Net):
    """Draws a mask in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


class Normed(Net):
    """Counts forwards and moves running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target > 0
    return ((output - target).square() * kept).sum(), kept.sum()


JOBS: dict[str, Any] = {
    "lbfgs": lambda: optimizer_job(lbfgs),
    "wolfe": lambda: optimizer_job(wolfe),
    "sam": lambda: optimizer_job(Sam),
    "extragradient": lambda: optimizer_job(Extragradient),
    "clipped": lambda: optimizer_job(Sam, clip=0.05),
    "counted": lambda: optimizer_job(wolfe, loss=counted),
    "noisy": lambda: optimizer_job(wolfe, Noisy),
    "normed": lambda: optimizer_job(wolfe, Normed, drop_last=True),
    "normed-sam": lambda: optimizer_job(Sam, Normed, drop_last=True),
    "scheduled": lambda: optimizer_job(
        lbfgs,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    ),
}


@cache
def by_hand(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """The state of the model after a plain loop, and each step's loss."""
    job = JOBS[name]()
    seed_model(job.seed)
    model = job.model().double()
    optimizer, losses = job.optimizer(list(model.named_parameters())), []
    schedule = job.lr_schedule(optimizer) if job.lr_schedule else None
    order = Order(len(job.data), job.batch, job.seed, job.drop_last)
    for step in range(job.steps):
        window = order.window(step)
        items = [job.data[index] for index in order.indices(window.epoch, window.positions)]
        x, target = (torch.stack(part).double() for part in zip(*items, strict=True))
        evaluated: list[float] = []

        def closure(
            step: int = step,
            x: Tensor = x,
            target: Tensor = target,
            evaluated: list[float] = evaluated,
        ) -> Tensor:
            optimizer.zero_grad()
            seed_streams(job.seed, "step", step, 0, 0)
            loss = job.loss(model(x), target)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            with torch.enable_grad():
                loss.backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            evaluated.append(loss.item())
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(torch.enable_grad()(closure))
        losses.append(evaluated[0])
        if schedule is not None:
            schedule.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, losses


class Backtracking(torch.optim.Optimizer):
    """Goes far, and back by halves until the loss is lower; or stays far with `stays`."""

    def __init__(self, named: Any, *, stays: bool = False) -> None:
        super().__init__([p for _, p in named], {})
        self.stays = stays

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        first = closure()
        trained = self.param_groups[0]["params"]
        before, gradients = [p.clone() for p in trained], [p.grad for p in trained]
        rate = 1e200
        while True:
            for p, weight, gradient in zip(trained, before, gradients, strict=True):
                p.copy_(weight - rate * gradient)
            if closure() < first:
                return
            if self.stays:
                for p in trained:
                    p.div_(0.0)
                return
            rate = 0.1 if rate > 1 else rate / 2


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", list(JOBS))
def test_one_device_runs_the_documented_loop(name: str, tmp_path: Path) -> None:
    """Weights, buffers and the loss of each step's first evaluation are those of a plain loop, to the last bits."""
    weights, losses = by_hand(name)

    assert furthest(train(JOBS[name](), "single", tmp_path / "run"), weights) < (1e-13, "")
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=1e-13)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("lbfgs", "data=2"),
        ("wolfe", "data=3 shares=3:1:2"),
        ("sam", "data=2"),
        ("extragradient", "data=2"),
        ("clipped", "data=2 microbatches=2"),
        ("counted", "data=2"),
        ("scheduled", "single microbatches=4"),
        ("noisy", "single recompute=full"),
        ("normed", "single recompute=full"),
        ("lbfgs", "pipeline=2"),
        ("sam", "place=2"),
        ("normed", "pipeline=2 microbatches=1"),
        ("lbfgs", "shard=2"),
        ("wolfe", "tensor=2"),
        ("sam", "shard=2 zero=1"),
        ("extragradient", "shard=2"),
        *(
            pytest.param(name, plan, marks=pytest.mark.slow)
            for name in ("lbfgs", "wolfe", "sam", "clipped", "counted")
            for plan in (
                "data=2 recompute=full microbatches=2",
                "shard=3 zero=2",
                "data=2 shard=2",
                "shard=2 tensor=2",
                "pipeline=2 shard=2",
                "data=2 pipeline=2",
            )
        ),
    ],
)
def test_plans_end_where_one_device_ends(name: str, plan: str, tmp_path: Path) -> None:
    """All ranks evaluate together and take the same decisions."""
    weights, losses = by_hand(name)

    assert furthest(train(JOBS[name](), plan, tmp_path / "run"), weights) < (EXACT, "")
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "legs"),
    [
        ("extragradient", [("data=2", 3), ("shard=2", 7)]),
        *(
            pytest.param(
                name,
                [("data=2", 1), ("single", 3), ("shard=2", 4), ("pipeline=2", 5), ("data=3", 7)],
                marks=pytest.mark.slow,
            )
            for name in ("extragradient", "lbfgs", "wolfe", "sam")
        ),
    ],
)
def test_it_goes_on_under_other_plans(
    name: str, legs: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Lists of tensors, floats and counters of evaluations are in a checkpoint, whoever reads it."""
    weights = train_in_legs(JOBS[name](), legs, tmp_path / "run")

    assert furthest(weights, by_hand(name)[0]) < (EXACT, "")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "servers=1 workers=2 staleness=1 colocate=yes",
        "data=2 local=2",
        pytest.param("servers=1 workers=2", marks=pytest.mark.slow),
    ],
)
def test_plans_without_a_common_evaluation_are_refused(plan: str, tmp_path: Path) -> None:
    """Before the first step, with the optimizer and plans that work."""
    with pytest.raises((RankFailed, JobError)) as failed:
        train(JOBS["sam"](), plan, tmp_path / "run")

    assert "Sam" in str(failed.value) and "closure" in str(failed.value)
    assert "hint: use a data=N, shard=N or tensor=N plan" in str(failed.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.checked_runs
def test_a_line_search_may_step_back_from_an_infinite_loss(tmp_path: Path) -> None:
    """What a later evaluation gives is the optimizer's affair, as in a plain loop. A check has no random numbers, and
    an optimizer is tried with some all the same: from weights of zero a search would look for a lower loss for ever."""
    train(optimizer_job(Backtracking), "data=2", tmp_path / "run")
    losses = losses_of(tmp_path / "run")

    assert len(losses) == 7 and losses[-1] < losses[0]


@pytest.mark.parametrize("plan", ["shard=2", pytest.param("data=2", marks=pytest.mark.slow)])
def test_weights_that_are_not_finite_end_the_run(plan: str, tmp_path: Path) -> None:
    """On all ranks, with the evaluation that they come from."""
    with pytest.raises(
        RankFailed, match="evaluation 2 of step 1, and Backtracking makes weights of it"
    ):
        train(optimizer_job(lambda named: Backtracking(named, stays=True)), plan, tmp_path / "run")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "plan", "shares", "microbatches"),
    [("normed", "data=2", (1,), 1), ("normed-sam", "data=2 microbatches=2", (1, 1), 2)],
)
def test_buffers_meet_after_every_evaluation(
    name: str, plan: str, shares: tuple[int, ...], microbatches: int, tmp_path: Path
) -> None:
    """Where samples are coupled, a plan equals one device that cuts each batch alike, in every evaluation. Replicas
    with one micro-batch join their statistics, and equal one device that cuts nothing."""
    run = PlainRun(JOBS[name](), Variation(cut=BatchCut(shares, microbatches)))
    *_, last = run.steps(7)
    trained = train(JOBS[name](), plan, tmp_path / "run")

    assert furthest({**last.weights, **last.buffers}, trained) < (EXACT, "")
    assert int(trained["norm.num_batches_tracked"]) > 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plans", "steps"),
    [
        ("wolfe", ["shard=2"], 2),
        *(
            pytest.param(name, ["data=2", "shard=2"], 4, marks=pytest.mark.slow)
            for name in ("wolfe", "sam")
        ),
    ],
)
def test_such_jobs_are_verified(name: str, plans: list[str], steps: int, tmp_path: Path) -> None:
    """Gradients of the first evaluation, weights, the history in the optimizer's state, and a resume."""
    certificates = paceline.verify(JOBS[name](), plans, steps=steps, run=tmp_path / "run")

    assert {certificate.verdict for certificate in certificates} == {"passed"}
    assert all(certificate.resumed_from for certificate in certificates)


def test_which_optimizers_need_a_closure() -> None:
    """Those whose step requires one, by its signature or by failing; not those that take one if they get it."""
    parameters = dict(Net().named_parameters())
    for build, expected in (
        (lbfgs, True),
        (Sam, True),
        (Extragradient, True),
        (torch.optim.AdamW, False),
        (lambda named: type("Mine", (torch.optim.SGD,), {})(named, lr=0.1), False),
    ):
        assert needs_closure(build(list(parameters.items())), build, parameters) is expected
        assert observe(build, parameters).needs_closure is expected
    assert set(observe(Sam, parameters).reach.values()) == {Reach.PARAMETERS}


def test_the_first_call_is_answered_if_nothing_was_touched() -> None:
    """A write to a weight or gradient, also past version counters, or a second call, evaluates."""
    evaluated: list[int] = []

    def evaluate() -> float:
        evaluated.append(1)
        return 2.0

    def closure() -> tuple[nn.Parameter, Closure]:
        evaluated.clear()
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        return p, Closure(1.0, evaluate, [p])

    p, call = closure()
    assert call().item() == 1.0 and not evaluated and call().item() == 2.0 and evaluated
    for touch in (
        lambda p: p.data.add_(1),
        lambda p: p.grad.data.zero_(),
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p, "data", torch.zeros(3)),
    ):
        p, call = closure()
        touch(p)
        assert call().item() == 2.0 and len(evaluated) == 1
