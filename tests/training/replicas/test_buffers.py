"""Buffers that training changes are equal on all replicas after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from paceline.job import Job
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.loop import train_rank
from paceline.training.replicas.buffers import ChangingBuffers
from paceline.training.settings import Settings


class Counting(nn.Module):
    """Buffers of all kinds: changed in place, replaced by a new tensor, whole numbers, a constant, none at all."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("in_place", "replaced", "constant"):
            self.register_buffer(name, torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)

    def see(self, value: float) -> None:
        self.in_place.mul_(value)
        self.replaced = self.replaced * value
        self.count += int(value)


def test_the_mean_is_weighted_by_samples(run_ranks: Callable[..., Any]):
    """Floats become the mean by samples, whole numbers the maximum, and what no step changes is let alone."""

    def body(context: Any) -> list[Any]:
        model = Counting()
        model.constant += context.rank  # differs, but training doesn't change it
        buffers = ChangingBuffers(model)
        seen = []
        for _ in range(2):
            model.see(2.0 + context.rank)
            buffers.meet((0.75, 0.25)[context.rank], dist.group.WORLD)
            seen += [model.in_place.tolist(), model.replaced.tolist(), model.count.item()]
        return [*seen, model.constant.tolist(), buffers.names]

    first = 0.75 * 2 + 0.25 * 3
    expected = [[first] * 2, [first] * 2, 3, [first * first] * 2, [first * first] * 2, 6]
    for rank, (*seen, constant, names) in enumerate(run_ranks(body, 2)):
        assert seen == expected
        assert constant == [1.0 + rank] * 2
        assert names == ["in_place", "replaced", "count"]


def test_many_buffers_meet_together(run_ranks: Callable[..., Any]):
    """One collective for all floats and one for all whole numbers, whatever the number of layers."""

    def body(context: Any) -> int:
        model = nn.Sequential(*(Counting() for _ in range(5)))
        buffers = ChangingBuffers(model)
        counts = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: (counts.append(1), reduce(*args, **kwargs))[1]
        for has_unsynced in (True, False):  # the stepper's own all-reduce tells
            for module in model:
                module.see(2.0 + context.rank)
            counts.clear()
            buffers.meet(0.5, dist.group.WORLD, has_unsynced=has_unsynced)
        return len(counts)

    assert run_ranks(body, 2) == [2, 2]


def test_what_one_rank_changes_all_ranks_meet(run_ranks: Callable[..., Any]):
    """A buffer that changed on one rank only is met by all, so that none waits alone."""

    def body(context: Any) -> list[float]:
        model = Counting()
        buffers = ChangingBuffers(model)
        if context.rank == 1:
            model.see(3.0)
        buffers.meet(0.5, dist.group.WORLD)
        return model.in_place.tolist()

    assert run_ranks(body, 2) == [[2.0, 2.0]] * 2


def test_a_model_without_buffers_meets_nobody():
    """No collective is entered, so none needs a group."""
    ChangingBuffers(nn.Linear(2, 2)).meet(1.0, None)


class Watching:
    """Notes the running statistics after every step, and whether the last ones stay as they are."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def initial(self, stepper: Any) -> None: ...

    def samples(self, step: int, batches: Any) -> None: ...

    def gradients(self, step: int, stepper: Any) -> None: ...

    def weights(self, step: int, stepper: Any, loss: float) -> None:
        norm = stepper.model[1]
        self.seen.append(
            [
                *norm.running_mean.tolist(),
                *norm.running_var.tolist(),
                norm.num_batches_tracked.item(),
            ]
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ("data=2 microbatches=2", (1, 1)),
        ("shard=2", (1, 1)),
        pytest.param("data=3", (2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_running_statistics_of_a_batch_norm(
    run_ranks: Callable[..., Any], plan: str, shares: tuple[int, ...]
):
    """BatchNorm's running statistics are equal on all ranks after every step, a short last batch too."""
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        data=TensorDataset(x, (x.sum(1) > 0).long()),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=15,
        steps=3,
    )

    def body(context: Any) -> list[list[float]]:
        watching = Watching()
        train_rank(context, job, Plan.parse(plan), Settings(None, shares, observer=watching))
        return watching.seen

    load(Plan.parse(plan))
    ranks = run_ranks(body, len(shares))
    assert len(ranks[0]) == 3
    assert len({tuple(map(tuple, seen)) for seen in ranks}) == 1
    assert ranks[0][0] != ranks[0][1]  # they do change


class Late(nn.Module):
    """State that first changes in the third step: buffers, a tensor and a number beside them, a counter, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps, self.level, self.cache = nn.Linear(4, 2), 0, 0.0, None
        self.center = torch.zeros(2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("phase", torch.zeros(4, dtype=torch.complex128))
        self.register_buffer("constant", torch.full((4,), -torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (
            self.linear(x) * (1 + self.level)
            - self.center
            + self.mean.sum()
            + self.phase.abs().sum()
        )
        self.seen += 1
        self.steps += 1
        self.cache = y  # a part of a graph, which is nobody's state
        if int(self.seen) > 2:
            self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))  # which no version counter tells of
            self.phase = self.phase * 0.9 + torch.complex(x.mean(0), -x.mean(0))
            self.center = self.center * 0.9 + 0.1 * y.detach().mean(0)
            self.level = self.level * 0.9 + 0.1 * float(x.mean())
        return y


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ("data=3", (2, 1, 1)),
        ("shard=2", (1, 1)),
        pytest.param("data=2", (1, 1), marks=pytest.mark.slow),
    ],
)
def test_state_that_changes_late_is_one_devices(
    run_ranks: Callable[..., Any], plan: str, shares: tuple[int, ...]
):
    """In whatever step a buffer or an attribute first changes, replicas hold what one device does from then on."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=Late,
        data=TensorDataset(x, x[:, :2].clone()),
        loss=F.mse_loss,
        precision="float64",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=8,
        steps=6,
    )

    def body(context: Any) -> list[Any]:
        seen: list[Any] = []

        class Noting(Watching):
            def weights(self, step: int, stepper: Any, loss: float) -> None:
                model = stepper.model
                seen.append(
                    [
                        float(model.seen),
                        model.steps,
                        model.level,
                        *model.mean.tolist(),
                        *model.center.tolist(),
                        *torch.view_as_real(model.phase).flatten().tolist(),
                    ]
                )

        mine = Plan.parse("single") if context.world_size == 1 else Plan.parse(plan)
        train_rank(
            context,
            job,
            mine,
            Settings(None, shares if context.world_size > 1 else (1,), observer=Noting()),
        )
        return seen

    load(Plan.parse(plan))
    (expected,) = run_ranks(body, 1)
    for seen in run_ranks(body, len(shares)):
        torch.testing.assert_close(
            torch.tensor(seen, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-12,
            atol=1e-13,
        )
        assert [row[:2] for row in seen] == [row[:2] for row in expected]  # counters to the bit


def test_attributes_that_differ_are_named_once(run_ranks: Callable[..., Any], caplog: Any):
    """A whole number becomes the greatest, text stays as it is; each is told once by its name, and the run goes on."""

    def body(context: Any) -> list[str]:
        warnings: list[str] = []
        model = nn.Linear(2, 2)
        model.tokens, model.last = 0, ""
        buffers = ChangingBuffers(model)
        from paceline.base.logs import logger

        logger.warning = lambda text, *args: warnings.append(text % args)  # type: ignore[method-assign]
        for _ in range(2):
            model.tokens += 5 + context.rank
            model.last = f"of {context.rank}"
            buffers.meet(0.5, dist.group.WORLD, has_unsynced=bool(buffers.unsynced()))
        return [str(model.tokens), model.last, *warnings]

    for rank, (tokens, last, *warnings) in enumerate(run_ranks(body, 2)):
        assert (tokens, last) == ("12", f"of {rank}")
        assert len(warnings) == 2
        assert (
            "attribute 'tokens', which forwards change: all go on with the greatest" in warnings[0]
        )
        assert "attribute 'last', which forwards change: each goes on with its own" in warnings[1]


def test_a_cache_that_grows_with_its_inputs_is_left_alone(run_ranks: Callable[..., Any]):
    """Its shape differs over the ranks; once it is the same everywhere it is met again."""

    def body(context: Any) -> list[Any]:
        model, seen = Counting(), []
        buffers = ChangingBuffers(model)
        for lengths in ((2, 3), (3, 3)):
            model.see(2.0 + context.rank)
            model.replaced = torch.full((lengths[context.rank],), float(context.rank))
            buffers.meet(0.5, dist.group.WORLD, has_unsynced=True)
            seen += [model.in_place.tolist(), model.replaced.tolist()]
        return seen

    assert run_ranks(body, 2) == [
        [[2.5] * 2, [0.0] * 2, [6.25] * 2, [0.5] * 3],
        [[2.5] * 2, [1.0] * 3, [6.25] * 2, [0.5] * 3],
    ]
