"""Plans that need more than their devices have, the ledger that says so, and figures of split models by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PlanError
from paceline.cluster.accelerators import CONTEXT_BYTES, Gpu
from paceline.cluster.catalogue import accelerator
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import Link, Network
from paceline.cluster.software import PACELINE
from paceline.model.cost.profile import Product
from paceline.model.cost.trace import profile_job
from paceline.planner import rank_kinds
from paceline.planner.estimate import estimate
from paceline.planner.fit import check_fits, ledger, smallest_change
from paceline.planner.microbatches import ANY_RATES, fewest_microbatches
from paceline.planner.pieces import LazyPieces
from paceline.planner.problem import PlanningProblem
from paceline.planner.rank_kinds import MemoryNeed, accelerator_rates, gpu_rates
from paceline.simulate.allocator import CPU_RUNTIME_BYTES
from paceline.simulate.device import DeviceRates
from paceline.simulate.program import Compute
from paceline.strategies.costs import NCCL_CONNECTION_BYTES, allocator_of
from paceline.strategies.mesh import weakest
from paceline.strategies.plan import Plan
from paceline.strategies.stages.pipeline import balance
from paceline.strategies.stages.price import SplitJob

MIB = 2**20
WIDTH = 512  # a layer without bias has a MiB of weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


def a_job(layers: int = 8, momentum: float = 0.9, batch: int = 8) -> paceline.Job:
    data = TensorDataset(torch.zeros(batch, WIDTH), torch.zeros(batch, WIDTH))
    return paceline.Job(
        model=lambda: nn.Sequential(*(Layer() for _ in range(layers))),
        data=data,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=momentum),
        batch=batch,
        steps=1,
    )


JOB = a_job()
PROFILE = profile_job(JOB)
SPLIT = SplitJob(JOB, PROFILE)
PROBLEM = PlanningProblem(JOB, PROFILE, LazyPieces(JOB, PROFILE))


def cluster(*memory_mib: float, kind: str = "cuda", flops_per_s: tuple[float, ...] = ()) -> Cluster:
    devices = (Device(kind, k, round(mib * MIB)) for k, mib in enumerate(memory_mib))  # type: ignore[arg-type]
    if flops_per_s:
        devices = (
            replace(d, flops_per_s=speed) for d, speed in zip(devices, flops_per_s, strict=True)
        )
    return Cluster(tuple(devices), Link(1e12, 0.0))


def needs(plan: str, devices: Cluster, *, snapshot: bool = False) -> tuple[MemoryNeed, ...]:
    return estimate(
        PROFILE, Plan.parse(plan), devices, batch=8, rates=ANY_RATES, split=SPLIT, snapshot=snapshot
    ).needs


@pytest.mark.parametrize("plan", ["pipeline=4 microbatches=8", "place=4"])
def test_each_stage_holds_its_own_layers(plan: str):
    """Two of eight layers a rank: weights, gradients and one momentum, and no checkpoint unless it is asked for."""
    for need in needs(plan, cluster(*[100] * 4)):
        assert need.ledger["parameters"] == 2 * MIB
        assert 2 * MIB <= need.ledger["gradients"] <= 3 * MIB  # and one that is about to be added
        assert need.ledger["optimizer"] == pytest.approx(
            2 * MIB, abs=2 * MIB
        )  # and what the update needs meanwhile
        assert "checkpoint" not in need.ledger
    assert (
        needs(plan, cluster(*[100] * 4, kind="cpu"), snapshot=True)[0].ledger["checkpoint"]
        == 4 * MIB
    )


def test_a_schedule_decides_how_many_activations_are_held():
    """GPipe holds those of every micro-batch, 1F1B on the first of four stages those of four of eight."""

    def kept(schedule: str) -> float:
        ranks = SPLIT.ranks(
            Plan.parse(f"pipeline=4 microbatches=8 schedule={schedule}"), (), microbatch_samples=64
        )
        from paceline.planner.program import rank_program
        from paceline.simulate.play import play_together

        programs = [
            rank_program(
                rank,
                Plan.parse(f"pipeline=4 microbatches=8 schedule={schedule}"),
                "cuda",
                snapshot=False,
            )
            for rank in ranks
        ]
        batch_bytes = ranks[0].batch_bytes
        return (
            play_together(programs, [ANY_RATES] * 4, Network(Link(1e12, 0.0)))[0].highest[
                "activations"
            ]
            - batch_bytes
        )

    assert kept("gpipe") == pytest.approx(2 * kept("1f1b"), rel=0.2)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_backward_keeps_the_shapes_of_its_products(schedule: str):
    """They say that a product of few rows waits for its weights: in a backward too, and in each half of one."""
    for rank in SPLIT.ranks(
        Plan.parse(f"pipeline=2 microbatches=4 schedule={schedule}"), (), microbatch_samples=2
    ):
        works = [
            segment.backward for segment in rank.profile.segments if segment.backward.flops.fixed
        ]
        assert len(works) == 4
        for work in works:
            assert sum(product.flops for product in work.products) == pytest.approx(
                work.flops.fixed
            )


def test_stages_update_the_model_once():
    """The operators of all ranks' updates are those of the whole one."""
    ranks = SPLIT.ranks(Plan.parse("pipeline=4 microbatches=4"), (), microbatch_samples=2)
    assert sum(rank.profile.update.operators for rank in ranks) == pytest.approx(
        PROFILE.update.operators
    )


class Scale(nn.Module):
    """Moves as many bytes as a layer, and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * self.factor)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("device", "layers"),
    [(Device("cpu", 0, 2**40), 2), (Device("cuda", 0, 2**40, name="NVIDIA H100 80GB HBM3"), 4)],
)
def test_a_cut_is_even_on_the_devices_at_hand(device: Device, layers: int):
    """Four layers that compute, then six that only move bytes: a GPU computes so fast that its time goes into bytes."""
    job = replace(
        JOB,
        model=lambda: nn.Sequential(*(Layer() for _ in range(4)), *(Scale() for _ in range(6))),
        data=TensorDataset(torch.zeros(8, 64, WIDTH), torch.zeros(8, 64, WIDTH)),
        precision="bf16",
    )
    [first, _] = SplitJob(job, profile_job(job)).ranks(
        Plan.parse("pipeline=2 microbatches=2"), (device, device), microbatch_samples=4
    )
    assert (
        sum(name.endswith("linear.weight") for name in (p.name for p in first.profile.parameters))
        == layers
    )


def test_stages_wait_for_each_other():
    """Two parts in a chain take as long as one device; a pipeline of two with many micro-batches little more than
    half of it, and its bubble."""
    single_s = estimate(
        PROFILE, Plan.parse("single"), cluster(100), batch=8, rates=ANY_RATES, split=SPLIT
    ).step_s
    chain = estimate(
        PROFILE,
        Plan.parse("place=2"),
        cluster(100, 100),
        batch=8,
        rates=ANY_RATES,
        split=SPLIT,
    ).step_s
    piped = estimate(
        PROFILE,
        Plan.parse("pipeline=2 microbatches=8"),
        cluster(100, 100),
        batch=8,
        rates=ANY_RATES,
        split=SPLIT,
    )
    forward_and_backward = 1 - PROFILE.update.moved_bytes.fixed / 1e9 / single_s
    assert forward_and_backward * single_s / 2 < chain <= single_s * 1.1
    assert (
        piped.step_s < 16 * single_s
    )  # eight micro-batches read the weights eight times; no more than that
    assert piped.breakdown["communication"] > 0


def test_what_does_not_fit_is_refused_with_plans_that_do():
    """The ledger has a line for each rank; what is suggested fits by the same ledger."""
    devices = cluster(CPU_RUNTIME_BYTES / MIB + 20, kind="cpu")
    with pytest.raises(PlanError, match=r"plan 'single' doesn't fit") as caught:
        check_fits(PROBLEM, Plan.parse("single"), devices, snapshot=False)

    message = str(caught.value)
    assert "too little" in message
    offered = [
        Plan.parse(line.partition("  ")[0].strip())
        for line in (part.strip() for part in message.partition("plans that fit:")[2].splitlines())
        if line
    ]
    assert {"pipeline", "place"} <= {key for plan in offered for key in plan.values()}
    for plan in offered:
        same = Cluster(
            tuple(replace(devices.devices[0], index=k) for k in range(plan.world_size)),
            devices.link,
        )
        check_fits(PROBLEM, plan, same, snapshot=False)


def test_nothing_fits():
    """Without a plan to suggest the way out is another one."""
    with pytest.raises(PlanError, match="none of the plans that were tried fits"):
        check_fits(PROBLEM, Plan.parse("single"), cluster(1, kind="cpu"), snapshot=False)


def test_the_ledger_for_people():
    """A line a rank, in MiB, marked where it is too much."""
    device = Device("cpu", 0, 10 * MIB)
    text = ledger(
        [
            MemoryNeed("stage 0", device, {"parameters": 4 * MIB, "runtime": MIB, "holes": MIB}),
            MemoryNeed("stage 1", device, {"optimizer": 1500 * MIB}),
        ]
    )
    assert [line.split() for line in text.splitlines()] == [
        [
            "MiB",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "communication",
            "other",
            "sum",
            "limit",
        ],
        ["stage", "0", "4.0", "0.0", "0.0", "0.0", "0.0", "2.0", "6.0", "10"],
        [
            "stage",
            "1",
            "0.0",
            "0.0",
            "1,500.0",
            "0.0",
            "0.0",
            "0.0",
            "1,500.0",
            "10",
            "too",
            "little",
        ],
    ]


def on_a_gpu(need_bytes: int, plan: str, **device: Any) -> tuple[MemoryNeed, ...]:
    """What ranks need of GPUs that are here and have so many bytes."""
    count = Plan.parse(plan).world_size
    devices = tuple(
        Device("cuda", k, need_bytes, context_bytes=CONTEXT_BYTES, **device) for k in range(count)
    )
    return needs(plan, Cluster(devices, Link(1e12, 0.0)))


@pytest.mark.parametrize(
    ("plan", "connections"),
    [
        ("single", 0),
        ("data=2", 2),
        ("shard=2", 2),
        ("data=2 shard=2", 6),
        ("pipeline=2 microbatches=2", 3),
        ("pipeline=4 microbatches=4", 4),
        ("pipeline=4 data=2 microbatches=4", 6),
        ("place=2", 3),
    ],
)
def test_a_gpu_gives_away_more_than_tensors(plan: str, connections: int):
    """The context, NCCL's buffers of every connection that a rank receives on, and what the allocator rounds up."""
    for need in on_a_gpu(80 << 30, plan):
        tensors = sum(
            num_bytes
            for name, num_bytes in need.ledger.items()
            if name not in ("context", "NCCL", "reserve")
        )
        assert need.ledger["context"] == CONTEXT_BYTES
        assert need.ledger.get("NCCL", 0) == connections * NCCL_CONNECTION_BYTES
        assert need.ledger["reserve"] == pytest.approx(22 * MIB + 0.02 * tensors, abs=2)


def test_the_last_bytes_of_a_gpu_are_not_there():
    """A plan whose tensors fill a GPU but for a tenth of a GiB does not fit; the refusal says what is set aside."""
    tensors = needs("data=2", cluster(1000, 1000))[0].total_bytes
    devices = Cluster(
        tuple(
            Device("cuda", k, tensors + 100 * MIB, context_bytes=CONTEXT_BYTES) for k in range(2)
        ),
        Link(1e12, 0.0),
    )
    with pytest.raises(PlanError) as caught:
        check_fits(PROBLEM, Plan.parse("data=2"), devices, snapshot=False)
    assert str(caught.value).splitlines()[1].split()[-4:] == ["set", "aside", "sum", "limit"]
    assert (
        "MiB set aside on a GPU: 621 for the driver's context, 441 for NCCL's buffers, 23 for what torch's "
        "allocator rounds up"
    ) in str(caught.value)
    with pytest.raises(PlanError, match=r"context 0\.61 GiB"):
        fewest_microbatches(PROFILE, Plan.parse("data=2"), devices, batch=8)


def test_workspaces_are_a_gpus_tensors():
    """The allocator hands them out: a run measures them, and cuts leave room for them."""
    (bare,) = on_a_gpu(80 << 30, "single")
    (need,) = on_a_gpu(
        80 << 30, "single", workspace_bytes=Gpu("H200", 0, capability=9).workspace_bytes
    )
    assert need.ledger["workspaces"] == 64 * MIB
    assert need.total_bytes - bare.total_bytes == pytest.approx(1.02 * 64 * MIB, abs=2)
    assert Gpu("A100", 0, capability=8).workspace_bytes == 2 * (8 * MIB + (128 << 10))


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA L40S"])
def test_a_listed_gpu_has_the_rates_of_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch):
    """Launching overlaps with computing on it, and on one that is measured."""
    monkeypatch.setattr(
        rank_kinds, "gpus", lambda: [Gpu(name, 80 << 30, capability=8, multiprocessors=142)]
    )
    monkeypatch.setattr(
        rank_kinds, "measure_device", lambda kind: DeviceRates(9e13, 3e14, 8e11, 8e11, 1e-5)
    )
    rates = gpu_rates(Device("cuda", 0, 80 << 30, name=name))
    if name == "NVIDIA H200":
        assert rates is accelerator_rates(accelerator("H200"), PACELINE)
    else:
        assert (rates.flops_per_s["bf16"], rates.multiprocessors, rates.memory_bytes_per_s) == (
            3e14,
            142,
            8e11,
        )
    assert rates.seconds(Compute(operators=100, moved_bytes=8e9), "float32")[1] == pytest.approx(
        1e-3
    )


def test_convolutions_of_a_gpu_use_tf32():
    """As torch does by default in a float32 job; products do not."""
    rates = accelerator_rates(accelerator("H200"), PACELINE)
    products = [Product(2.0**14, 2.0**12, 2.0**14, kind=kind) for kind in ("convolution", "linear")]
    convolution_s, linear_s = (
        rates.seconds(Compute(flops=product.flops, products=(product,)), "float32")[0]
        for product in products
    )
    assert linear_s > 5 * convolution_s


def test_who_holds_a_gpu_is_named():
    """What others hold is no memory for a run."""
    tensors = needs("single", cluster(1000))[0].total_bytes
    device = Device(
        "cuda",
        1,
        tensors,
        total_bytes=80 << 30,
        holders=("process 71 (python3), 79.9 GiB",),
        context_bytes=CONTEXT_BYTES,
    )
    with pytest.raises(
        PlanError,
        match=r"cuda:1 has 0.0 GiB free of 80.0: the rest is held by process 71 \(python3\)",
    ):
        check_fits(PROBLEM, Plan.parse("single"), Cluster((device,)), snapshot=False)
    with pytest.raises(PlanError, match=r"held by process 71"):
        fewest_microbatches(PROFILE, Plan.parse("single"), Cluster((device,)), batch=8)


@pytest.mark.parametrize("plan", ["single", "pipeline=2 microbatches=2", "data=2 shard=2"])
def test_a_gpu_has_room_for_as_many_tensors_as_fit(plan: str):
    """What cuts of a model take for a device's room, and what its needs are held against, agree."""
    device = Device("cuda", 0, 20 << 30, context_bytes=CONTEXT_BYTES)
    allocator = allocator_of(Plan.parse(plan), device)
    tensors = allocator.room(device.memory_bytes)
    assert tensors + sum(allocator.set_aside(tensors).values()) == pytest.approx(
        device.memory_bytes, abs=4
    )


def test_a_small_device_gets_fewer_layers():
    """Cuts weigh the memory of each stage's device: 3 MiB a layer, and its activations."""
    even, uneven = (
        [need.ledger["parameters"] // MIB for need in needs("pipeline=2 microbatches=8", devices)]
        for devices in (cluster(100, 100), cluster(7, 100))
    )
    assert even == [4, 4]
    assert uneven == [2, 6]


def test_a_fast_device_gets_more_layers():
    """Cuts weigh the speed that devices state."""
    devices = cluster(100, 100, flops_per_s=(1e12, 3e12))
    assert [
        need.ledger["parameters"] // MIB for need in needs("pipeline=2 microbatches=8", devices)
    ] == [2, 6]


def test_replicas_are_cut_alike():
    """The smallest device of each stage decides, wherever it is among the replicas."""
    devices = cluster(100, 7, 100, 100).devices
    plan = Plan.parse("pipeline=2 data=2 microbatches=4")
    assert [device.memory_bytes // MIB for device in weakest(plan, devices) if device] == [7, 100]
    assert [
        need.ledger["parameters"] // MIB
        for need in needs(str(plan), Cluster(devices, Link(1e12, 0.0)))
    ] == [2, 6]


def test_activations_in_flight_count_in_a_cut():
    """A first stage holds more micro-batches at once, so it gets fewer pieces where memory is short."""
    firsts = balance(
        [1] * 6, [1] * 6, [1] * 6, speeds=[1, 1], memory_bytes=[9, 12], in_flight=[3, 1]
    )
    assert firsts == [0, 2]


@pytest.mark.parametrize(("momentum", "factor"), [(0.0, 0.0), (0.9, 1.0)])
def test_the_state_is_the_job_s_own_optimizers(momentum: float, factor: float):
    """SGD keeps nothing, and one copy with momentum."""
    job = a_job(layers=2, momentum=momentum)
    assert SplitJob(job, profile_job(job)).state_factor == factor


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 schedule=interleaved microbatches=4",
        "pipeline=2 schedule=zero-bubble microbatches=4",
        "pipeline=2 data=2 microbatches=2",
        "pipeline=2 shard=2 microbatches=2",
        "place=2 microbatches=2",
        "pipeline=2 microbatches=2 recompute=full",
        "data=2 tensor=2",
        "pipeline=2 tensor=2 microbatches=2",
    ],
)
def test_every_split_is_played(plan: str):
    """Messages, rooms and schedules meet in one program a rank; figures are numbers that a file can hold."""
    parsed = Plan.parse(plan)
    prediction = estimate(
        PROFILE, parsed, cluster(*[100] * parsed.world_size), batch=8, rates=ANY_RATES, split=SPLIT
    )
    assert json.loads(
        json.dumps(
            [
                prediction.step_s,
                prediction.peak_memory_bytes,
                dict(prediction.ledger),
                dict(prediction.breakdown),
            ]
        )
    )
    assert prediction.step_s > 0
    assert all(sum(need.ledger.values()) == need.total_bytes > 0 for need in prediction.needs)


def test_split_replicas_share_state():
    """Half of the layers a stage, and half of each a rank."""
    [first, _] = needs("pipeline=2 shard=2 microbatches=2", cluster(*[100] * 4))
    assert 2 * MIB <= first.ledger["parameters"] <= 3 * MIB  # and the layer at hand, whole


def test_targets_that_count():
    """A loss of whole numbers gives figures, not symbols of them."""
    job = replace(
        JOB,
        data=TensorDataset(torch.zeros(8, 4, WIDTH), torch.zeros(8, 4, dtype=torch.int64)),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )
    [_, rank] = SplitJob(job, profile_job(job)).ranks(
        Plan.parse("pipeline=2 microbatches=2"), (), microbatch_samples=4
    )
    last = rank.profile.segments[-1]
    assert all(
        type(figure.fixed) in (int, float)
        for figure in (last.kept_bytes, last.forward.function_bytes)
    )


@pytest.mark.parametrize(
    ("plan", "part"),
    [("pipeline=2 microbatches=2", 1.0), ("pipeline=2 microbatches=2 schedule=zero-bubble", 0.5)],
)
def test_backward_of_a_split_model_keeps_the_shapes_of_its_products(plan: str, part: float):
    """A product of few rows waits for its weights, whichever part of a backward it is in."""
    for rank in SPLIT.ranks(Plan.parse(plan), (), microbatch_samples=4):
        for segment in rank.profile.segments:
            assert (
                sum(product.flops for product in segment.backward.products)
                == segment.backward.flops.fixed
            )
        whole = [segment for segment in rank.profile.segments if segment.forward.products][-1]
        assert whole.backward.flops.fixed == part * 2 * whole.forward.flops.fixed


def test_the_smallest_change_that_needs_less_is_named():
    """Replicas that ran out of memory: smaller micro-batches don't help a model of few activations, shards do."""
    advice = smallest_change(PROBLEM, Plan.parse("data=2"), cluster(40, 40), snapshot=False)

    assert advice.startswith("what each rank of 'data=2' was predicted to need:\nMiB ")
    assert advice.splitlines()[-1].startswith(
        "the smallest change that needs less: --plan 'shard=2', "
    )


def test_no_change_is_promised_where_none_needs_less():
    advice = smallest_change(PROBLEM, Plan.parse("single"), cluster(0.001), snapshot=False)

    assert "no change of plan needs so much less" in advice.splitlines()
