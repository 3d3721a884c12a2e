"""Collectives and messages of every kind of plan obey NCCL's rules, which gloo doesn't ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import (
    NCCL_DTYPES,
    Entry,
    Recording,
    is_cyclic,
    of_a_schedule,
    stuck,
    unlike_sequences,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.local.ranks import run_local
from paceline.launch.process import rank_process
from paceline.model.graph import Capture, capture
from paceline.planner.resolve import resolve
from paceline.strategies.compose import load
from paceline.strategies.compress import run as compress_run
from paceline.strategies.data.run import GradientBuckets
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.stages.schedule import Action, schedule
from paceline.training.loop import train_rank
from paceline.training.prepare import prepare_job
from paceline.training.settings import Settings

PLANS = (
    "data=2",
    "data=2 microbatches=2 recompute=full",
    "data=2 compress=int8",
    "data=2 shard=2 compress=int8",
    "data=2 compress=topk",
    "data=2 compress=powersgd",
    "shard=2 zero=1",
    "shard=2 microbatches=2",
    "data=2 shard=2",
    "tensor=2",
    "data=2 local=2 outer=diloco",
    "place=2",
    "pipeline=2 data=2",
    "pipeline=2 schedule=gpipe",
    "pipeline=3",
    "pipeline=2 schedule=interleaved",
    "pipeline=2 schedule=zero-bubble",
    "pipeline=2 microbatches=1",
    "pipeline=2 shard=2",
)
MORE = (
    "data=3",
    "data=2 recompute=full microbatches=3",
    "data=2 compress=bf16",
    "data=2 local=2 outer=average",
    "data=2 local=2 outer=diloco fragments=2",
    "shard=3",
    "shard=2 zero=2",
    "shard=2 recompute=full",
    "data=2 shard=2 zero=2",
    "data=2 tensor=2",
    "shard=2 tensor=2",
    "place=4",
    "place=2 data=2",
    "place=2 recompute=full",
    "pipeline=4",
    "pipeline=4 schedule=gpipe microbatches=3",
    "pipeline=4 schedule=interleaved",
    "pipeline=4 schedule=zero-bubble microbatches=5",
    "pipeline=2 schedule=interleaved virtual=3 microbatches=4",
    "pipeline=2 microbatches=3 recompute=full",
    "pipeline=2 data=2 schedule=zero-bubble",
    "pipeline=2 data=2 compress=int8",
    "pipeline=2 shard=2 zero=1",
    "pipeline=2 tensor=2",
    "pipeline=2 data=2 tensor=2",
    "pipeline=2 shard=2 tensor=2",
    "data=2 shard=2 tensor=2",
    "pipeline=2 data=2 shard=2",
    "pipeline=4 data=2 schedule=interleaved",
    "pipeline=4 shard=2",
    "pipeline=8",
    "pipeline=8 schedule=gpipe",
    "pipeline=8 schedule=zero-bubble",
    "data=8",
    "shard=8",
    "data=4 shard=2",
)
EVERY = [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE)]


class Net(nn.Module):
    """Blocks, a skip over all of them, and a running statistic."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)]
        )
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + skip)


def job() -> paceline.Job:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return paceline.Job(
        model=Net,
        data=TensorDataset(x, x[:, :4].clone()),
        loss=nn.functional.mse_loss,
        batch=32,
        steps=3,
        clip=1.0,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )


def deep_job() -> paceline.Job:
    return replace(job(), model=lambda: Net(6))


class Scaled(nn.Module):
    """A parameter without dimensions beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(())), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * x)


def scalar_job() -> paceline.Job:
    return replace(job(), model=Scaled)


class Table(nn.Module):
    """Blocks over a table with sparse gradients, which the last layer uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rare = nn.Embedding(32, 8, sparse=True), nn.Embedding(32, 8, sparse=True)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).mean(1) + self.rare(x[:, :1]).mean(1)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.linear(h, self.words.weight)


def table_job() -> paceline.Job:
    words = torch.randint(
        0, 32, (42, 3), generator=torch.Generator().manual_seed(0)
    )  # the last window is short
    return paceline.Job(
        model=Table,
        data=TensorDataset(words, torch.ones(42, 32)),
        loss=nn.functional.mse_loss,
        batch=20,
        steps=3,
        clip=1.0,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    )


def two_models_job(*, in_losses: bool = True) -> paceline.Job:
    """A step of its own: a run, two backwards, two updates, an average. in_losses: a loss runs the other model, and
    takes second derivatives of its own."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        )

    def penalty(output: Tensor, batch: Any, given: Tensor) -> tuple[Tensor, int]:
        given = given.detach().requires_grad_()
        (slope,) = torch.autograd.grad(run("second", given).sum(), given, create_graph=True)
        return (output - batch.input).square().sum() + slope.square().sum(), len(given)

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        nonlocal run
        run, x = ctx.run, batch.input
        first = ctx.run("first", x)
        ctx.backward(
            "second",
            first,
            penalty if in_losses else lambda output, batch, given: output.square().mean(),
            first,
        )
        ctx.update("second")
        ctx.backward(
            "first",
            x + torch.rand(len(x), 8),
            lambda output, batch: (run("second", output) if in_losses else output).square().mean(),
        )
        ctx.update("first")

    run: Any = None
    adam = paceline.Optimizer(lambda named: torch.optim.AdamW(named, lr=1e-2))
    return paceline.Job(
        models={"first": build, "second": build},
        training_step=step,
        data=job().data,
        batch=32,
        steps=3,
        optimizers={"first": replace(adam, clip=1.0), "second": adam},
        followers={"average": paceline.ema("first", 0.9)},
    )


def two_models_apart_job() -> paceline.Job:
    return two_models_job(in_losses=False)


class AtOnce:
    """Runs a sum when it is started, as a stream launches it."""

    def __init__(self) -> None:
        self.sent_bytes = 0.0

    def start(self, sum_: Callable[[], float]) -> None:
        self.sent_bytes += sum_()

    def finish(self) -> float:
        sent_bytes, self.sent_bytes = self.sent_bytes, 0.0
        return sent_bytes


@pytest.fixture(autouse=True)
def sums_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed sums are launched as on GPUs, and buckets go over the network, as they do there."""
    monkeypatch.setattr(compress_run, "beside", lambda device: AtOnce())
    monkeypatch.setattr(rank_process, "register", lambda: "gloo")


@cache
def recorded(plan: str, job: Callable[[], paceline.Job] = job) -> list[list[Entry]]:
    """What each rank of the plan asks for in three steps."""
    resolved = resolve(job(), plan, devices=f"cpu:0-{Plan.parse(plan).world_size - 1}")
    load(resolved.plan)

    def body(context: object) -> list[Entry]:
        with Recording() as recording:
            train_rank(context, job(), resolved.plan, Settings(None, resolved.shares))
        return recording.entries

    entries_by_rank = run_local(
        lambda context: [entry.to_list() for entry in body(context)], resolved.cluster.devices
    )
    return [[Entry.of_list(entry) for entry in entries] for entries in entries_by_rank]


def of_net(plan: str) -> list[list[Entry]]:
    return recorded(plan, deep_job if plan in MORE else job)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", EVERY)
def test_the_ranks_of_a_group_ask_for_the_same(plan: str):
    """Collectives, shapes and dtypes, in one order that all groups agree on; from one thread."""
    ranks = of_net(plan)
    assert any(ranks) and not unlike_sequences(ranks)
    assert not is_cyclic(ranks)
    for entries in ranks:
        threads: dict[object, set[int]] = {}
        for entry in entries:
            threads.setdefault(entry.group, set()).add(entry.thread)
        assert all(len(of_group) == 1 for group, of_group in threads.items() if group[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("data=2 shard=2 compress=int8", "alltoall"),
        *(
            pytest.param(plan, kind, marks=pytest.mark.slow)
            for plan, kind in (
                ("data=2 shard=2 compress=topk", "allgather"),
                ("data=2 compress=powersgd", "allreduce"),
            )
        ),
    ],
)
def test_compressed_sums_are_launched_by_the_rank_itself(plan: str, kind: str):
    """A thread beside the step would launch them between the collectives of other groups."""
    ranks = recorded(plan)
    assert not unlike_sequences(ranks) and not is_cyclic(ranks)
    for rank, entries in enumerate(ranks):
        along = tuple(Mesh(Plan.parse(plan).axes.sizes(), rank).ranks_along("data"))
        sums = [entry for entry in entries if kind in entry.kind and entry.group[0] == along]
        assert len(sums) >= 3 and len({entry.thread for entry in entries}) == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", EVERY)
def test_messages_arrive(plan: str):
    """No rank waits for what another one will send after it has received."""
    assert not stuck(of_net(plan))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("plan", EVERY)
def test_dtypes_are_those_of_nccl(plan: str):
    assert {entry.dtype for entry in chain(*of_net(plan)) if entry.dtype} <= NCCL_DTYPES


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=3",
        "shard=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("data=2 shard=2", "pipeline=2 data=2")
        ),
    ],
)
def test_sparse_gradients_travel_by_the_same_rules(plan: str):
    """Ranks with other numbers of rows, and none, send messages of one length."""
    ranks = recorded(plan, table_job)
    assert not unlike_sequences(ranks) and not is_cyclic(ranks) and not stuck(ranks)
    assert {entry.dtype for entry in chain(*ranks) if entry.dtype} <= NCCL_DTYPES
    assert any("allgather" in entry.kind for entry in chain(*ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "job"),
    [
        ("shard=2", two_models_job),
        *(
            pytest.param(plan, job, marks=pytest.mark.slow)
            for plan, job in (
                ("data=2", two_models_job),
                ("pipeline=2", two_models_apart_job),
                ("data=2 shard=2", two_models_job),
                ("shard=2 zero=2", two_models_job),
                ("data=2 microbatches=2", two_models_job),
                ("tensor=2", two_models_apart_job),
                ("pipeline=2 data=2", two_models_apart_job),
                ("place=2", two_models_apart_job),
            )
        ),
    ],
)
def test_a_step_of_ones_own_keeps_the_rules(plan: str, job: Callable[[], paceline.Job]):
    """Its models have groups in common, and take turns with them."""
    ranks = recorded(plan, job)
    assert all(ranks) and not unlike_sequences(ranks) and not is_cyclic(ranks) and not stuck(ranks)
    assert {entry.dtype for entry in chain(*ranks) if entry.dtype} <= NCCL_DTYPES
    for entries in ranks:
        assert (
            len({entry.thread for entry in entries if entry.kind != "wait" and entry.peer < 0}) == 1
        )


class Deep(nn.Module):
    """Blocks for many stages. skip: from the first to the last of them, and between others."""

    def __init__(self, depth: int, *, skip: bool) -> None:
        super().__init__()
        self.blocks, self.skip = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)]), skip

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            kept.append(x)
            if self.skip and number % 3 == 2:
                x = x + kept[number // 2] + kept[0]
        return x


@cache
def deep(depth: int, *, skip: bool) -> tuple[nn.Module, Capture, Tensor]:
    """The model, and what it computes of an example."""
    model, example = Deep(depth, skip=skip), torch.ones(2, 4)
    return model, capture(model, (example,), {}), example


@pytest.mark.sweep(8)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_no_schedule_stops(name: Any, num_ranks: int, skip: bool):
    """Any number of micro-batches; what ranks ask for comes from the engine itself, without processes."""
    virtual = 2 if name == "interleaved" else 1
    stages = num_ranks * virtual
    for num_microbatches in (1, num_ranks - 1, num_ranks + 3):
        ranks = of_a_schedule(
            *deep(stages, skip=skip),
            lambda place, count: place * stages // count,
            [stage % num_ranks for stage in range(stages)],
            schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual=virtual),
        )
        assert all(ranks) and not stuck(ranks), num_microbatches


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_schedule_with_one_group_for_both_directions_stops(name: Any):
    """The test above can fail."""
    virtual = 2 if name == "interleaved" else 1
    ranks = of_a_schedule(
        *deep(8, skip=True),
        lambda place, count: place * 4 * virtual // count,
        [stage % 4 for stage in range(4 * virtual)],
        schedule(name, num_ranks=4, num_microbatches=8, virtual=virtual),
        one_group=True,
    )
    assert stuck(ranks)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_no_placement_stops(data: st.DataObject):
    """Pieces on any ranks, in any mixture, as branches and skips make them."""
    num_ranks, stages = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 10))
    homes = data.draw(st.lists(st.integers(0, num_ranks - 1), min_size=stages, max_size=stages))
    microbatches = range(data.draw(st.integers(1, 4)))
    orders = [
        [
            Action("F", stage, m)
            for m in microbatches
            for stage in range(stages)
            if homes[stage] == rank
        ]
        + [
            Action("B", stage, m)
            for m in microbatches
            for stage in reversed(range(stages))
            if homes[stage] == rank
        ]
        for rank in range(num_ranks)
    ]
    assert not stuck(
        of_a_schedule(
            *deep(stages, skip=True), lambda place, count: place * stages // count, homes, orders
        )
    )


def test_a_bucket_holds_gradients_of_one_stream(run_ranks: Callable[..., list[Any]]):
    """Shards come on the stream that reduces them, whole gradients on backward's; FSDP leaves scalars whole."""
    resolved = resolve(scalar_job(), "data=2 shard=2", devices="cpu:0-3")
    load(resolved.plan)

    def kinds(context: Any) -> list[list[bool]]:
        mesh = Mesh(resolved.plan.axes.sizes(), context.rank)
        mesh.connect()
        prepared = prepare_job(scalar_job(), plan=resolved.plan, mesh=mesh, device=context.device)
        (buckets,) = (each for each in prepared.synchronisers if isinstance(each, GradientBuckets))
        return [[isinstance(p, DTensor) for p in bucket] for bucket in buckets.buckets]

    buckets = run_ranks(kinds, 4)[0]
    assert {is_sharded for bucket in buckets for is_sharded in bucket} == {True, False}
    assert all(len(set(bucket)) == 1 for bucket in buckets), [set(bucket) for bucket in buckets]


def test_what_nccl_would_hang_on_is_seen():
    """Two ranks that receive before they send: with one group they wait for ever, with one a direction they don't."""

    def ranks(groups: tuple[str, str]) -> list[list[Entry]]:
        return [
            [
                Entry("recv", ((0, 1), groups[1 - rank]), 1 - rank),
                Entry("send", ((0, 1), groups[rank]), 1 - rank),
            ]
            for rank in (0, 1)
        ]

    assert stuck(ranks(("both", "both"))) and not stuck(ranks(("ahead", "back")))


def test_ranks_that_disagree_are_seen():
    first, second = Entry("allreduce_", ((0, 1), "a")), Entry("allreduce_", ((0, 1), "b"))
    assert is_cyclic([[first, second], [second, first]]) and not is_cyclic(
        [[first, second], [first, second]]
    )
    assert unlike_sequences([[first], []]) and not unlike_sequences([[first], [first]])
