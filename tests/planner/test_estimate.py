"""Estimates, micro-batches that fit, and shares: figures that follow from the profile by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conditions import calls_of
from torch import nn

from paceline import Job
from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import Link
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, Work
from paceline.model.cost.trace import profile_job
from paceline.planner.estimate import estimate
from paceline.planner.microbatches import fewest_microbatches
from paceline.planner.program import MICROBATCH_S
from paceline.planner.rank_kinds import split_shares
from paceline.simulate.allocator import CPU_HOLES, CPU_HOLES_UPDATED, CPU_RUNTIME_BYTES
from paceline.simulate.device import DeviceRates
from paceline.strategies.plan import Plan

MIB = 2**20
RATES = DeviceRates(1e9, 2e9, 1e15, 1e15, 0.0)
# 10 blocks of 10 MiB of parameters; a sample takes 10 MFLOP forward and keeps 4 MiB in each.
PROFILE = Profile(
    parameters=tuple(
        Parameter(f"{i}.w", str(i), 10 * MIB, rows=64, state_bytes=20 * MIB) for i in range(10)
    ),
    segments=tuple(
        Segment(
            str(i),
            Work(flops=Affine(0, 1e7)),
            Work(flops=Affine(0, 2e7)),
            kept_bytes=Affine(0, 4 * MIB),
            output_bytes=Affine(0, MIB),
            gradients=(f"{i}.w",),
        )
        for i in range(10)
    ),
)


def cluster(*memory_mib: float, kind="cuda", flops_per_s=None) -> Cluster:
    speeds = flops_per_s or [None] * len(memory_mib)
    return Cluster(
        tuple(
            Device(kind, i, round(mib * MIB), flops_per_s=speed)
            for i, (mib, speed) in enumerate(zip(memory_mib, speeds, strict=True))
        ),
        Link(1e12, 0.0),
    )


def guess(text: str, devices: Cluster, batch: int = 8, **more):
    return estimate(PROFILE, Plan.parse(text), devices, batch=batch, rates=RATES, **more)


def test_one_device_by_hand():
    """8 samples of 300 MFLOP at 1 GFLOP/s; the turn holds states, the last gradient and all activations."""
    prediction = guess("single", cluster(10_000))

    assert prediction.step_s == pytest.approx(8 * 0.3 + MICROBATCH_S)
    assert prediction.peak_memory_bytes == (100 + 200 + 10 + 8 * 40) * MIB
    assert sum(prediction.breakdown.values()) == pytest.approx(prediction.step_s)
    assert sum(prediction.ledger.values()) == prediction.peak_memory_bytes


@pytest.mark.parametrize(("text", "collectives"), [("single", 0), ("data=2", 2), ("shard=2", 2)])
def test_running_statistics_of_replicas_meet_twice(text, collectives):
    """For 10 ms each, whatever they send."""
    devices = replace(cluster(10_000, 10_000), link=Link(1e15, 5e-3))
    with_statistics, without = (
        estimate(
            replace(PROFILE, statistics_bytes=num_bytes),
            Plan.parse(text),
            devices,
            batch=8,
            rates=RATES,
        ).step_s
        for num_bytes in (4096, 0)
    )

    assert with_statistics - without == pytest.approx(collectives * 2 * 5e-3, abs=1e-6)


def test_replicas_on_cpus_meet_three_times_a_step():
    """Before and after they sum gradients, and over figures of the step: two hops of 5 ms each where nothing is known
    of memory, and 2 ms each where they take that."""
    step_s = [
        guess("data=2", replace(cluster(10_000, 10_000, kind="cpu"), link=link)).step_s
        for link in (
            Link(1e15, 0.0),
            Link(1e15, 5e-3),
            Link(1e15, 5e-3, memory_wait_s=2e-3, memory_bytes_per_s=1e15),
        )
    ]

    assert step_s[1] - step_s[0] == pytest.approx(3 * 2 * 5e-3)
    assert step_s[2] - step_s[0] == pytest.approx(3 * 2e-3)


def test_statistics_are_those_of_batch_norms():
    """A mean, a variance and a count of batches; other buffers, and those of a norm that keeps none, don't count."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8, 2),
        nn.BatchNorm1d(2, track_running_stats=False),
    )
    model.register_buffer("positions", torch.zeros(100))
    job = Job(
        model=lambda: model,
        data=[(torch.randn(3, 3, 3), torch.tensor(0))] * 8,
        loss=nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=1,
    )

    assert profile_job(job).statistics_bytes == 2 * 8 * 4 + 8


class Frozen(nn.Sequential):
    """Its own `train` leaves a layer in evaluation."""

    def train(self, mode: bool = True):
        super().train(mode)
        self[1].eval()
        return self


def profile_of_norms(kind: type[nn.Sequential]):
    job = Job(
        model=lambda: kind(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
        data=[(torch.randn(16), torch.tensor(0))] * 8,
        loss=nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=1,
    )
    return profile_job(job)


def test_statistics_that_the_model_itself_freezes_do_not_count():
    """A forward writes nothing."""
    assert profile_of_norms(Frozen).statistics_bytes == 0


@pytest.mark.parametrize(
    ("text", "meetings"), [("single", 0), ("data=2", 2), ("data=2 microbatches=2", 0)]
)
def test_batch_norms_of_replicas_meet_in_forward_and_in_backward(text, meetings):
    """For 10 ms each. Micro-batches have statistics of their own, and a frozen layer has none of a batch."""
    devices = replace(cluster(10_000, 10_000), link=Link(1e15, 5e-3))
    trained, frozen = (
        estimate(
            replace(profile_of_norms(kind), statistics_bytes=0),
            Plan.parse(text),
            devices,
            batch=8,
            rates=RATES,
        ).step_s
        for kind in (nn.Sequential, Frozen)
    )

    assert trained - frozen == pytest.approx(meetings * 2 * 5e-3, abs=1e-4)


def test_a_cpu_rank_also_holds_libraries_and_holes():
    """Its resident size is more than its tensors. A gradient has 10 MiB."""
    bare, resident = (
        guess("single", cluster(10_000, kind=kind), batch=16) for kind in ("cuda", "cpu")
    )
    holes = round(CPU_HOLES * 16 * 40 * MIB + CPU_HOLES_UPDATED * 10 * MIB)

    assert dict(resident.ledger) == {**bare.ledger, "runtime": CPU_RUNTIME_BYTES, "holes": holes}
    assert resident.peak_memory_bytes == bare.peak_memory_bytes + CPU_RUNTIME_BYTES + holes


def test_a_cpu_rank_holds_a_checkpoint_beside_its_states():
    """With few samples that is its peak: parameters and optimizer twice, and the last step's gradients."""
    ledger = guess("single", cluster(10_000, kind="cpu"), batch=1).ledger

    assert ledger["checkpoint"] == ledger["parameters"] + ledger["optimizer"] == 300 * MIB
    assert ledger["gradients"] == 100 * MIB


def test_two_replicas_take_half_the_time():
    """The link is so fast that nothing of it shows."""
    both = guess("data=2", cluster(10_000, 10_000))

    assert both.step_s == pytest.approx(4 * 0.3 + MICROBATCH_S, rel=1e-3)


def test_a_slow_device_sets_the_pace_until_it_gets_less():
    """Equal shares wait for the slow half; shares by speed don't."""
    devices = cluster(10_000, 10_000, flops_per_s=[3e9, 1e9])
    equal, by_speed = guess("data=2", devices), guess("data=2 shares=speed", devices)

    assert equal.step_s == pytest.approx(4 * 0.3 + MICROBATCH_S, rel=1e-3)
    assert by_speed.step_s == pytest.approx(2 * 0.3 + MICROBATCH_S, rel=1e-3)


def test_many_equal_microbatches_are_played_once():
    """Time and memory are those of playing all, for which each would take dozens of calls."""
    predictions = []
    few, many = (
        calls_of(
            lambda count=count: predictions.append(
                guess(f"single microbatches={count}", cluster(10_000), batch=count)
            )
        )
        for count in (100, 100_000)
    )
    prediction = predictions[-1]

    assert many < few + 5 * 100_000
    assert prediction.step_s == pytest.approx(100_000 * (0.3 + MICROBATCH_S))
    assert (
        prediction.peak_memory_bytes
        == guess("single microbatches=3", cluster(10_000), batch=3).peak_memory_bytes
    )


def test_the_second_microbatch_meets_the_gradients_of_the_first():
    """It has 2 of 5 samples and still needs more than the first one's 3."""
    prediction = guess("single microbatches=2", cluster(10_000), batch=5)

    assert prediction.peak_memory_bytes == (300 + 100 + 10 + 2 * 40) * MIB
    assert prediction.peak_memory_bytes > (300 + 10 + 3 * 40) * MIB


@pytest.mark.parametrize(
    ("memory_mib", "expected"), [(10_000, 1), (630, 1), (629, 2), (570, 2), (569, 3), (450, 7)]
)
def test_fewest_microbatches_just_fit(memory_mib, expected):
    """8 samples: 300 MiB of states, gradients, and 40 MiB of activations a sample."""
    num_microbatches = fewest_microbatches(
        PROFILE, Plan.parse("single"), cluster(memory_mib), batch=8
    )

    assert num_microbatches == expected
    assert (
        guess(f"single microbatches={num_microbatches}", cluster(memory_mib)).peak_memory_bytes
        <= memory_mib * MIB
    )
    if num_microbatches > 1:
        assert (
            guess(
                f"single microbatches={num_microbatches - 1}", cluster(memory_mib)
            ).peak_memory_bytes
            > memory_mib * MIB
        )


def test_one_microbatch_may_fit_where_two_do_not():
    """A single one has no gradients of an earlier one beside its activations."""
    tight = cluster(420)

    assert fewest_microbatches(PROFILE, Plan.parse("single"), tight, batch=2) == 1
    assert guess("single microbatches=2", tight, batch=2).peak_memory_bytes > 420 * MIB


def test_each_rank_has_to_fit_its_own_device():
    """The smaller device decides, unless it gets fewer samples."""
    devices = cluster(10_000, 520)

    assert fewest_microbatches(PROFILE, Plan.parse("data=2"), devices, batch=16) > 1
    assert fewest_microbatches(PROFILE, Plan.parse("data=2 shares=7:1"), devices, batch=16) == 1


def test_auto_is_resolved_in_an_estimate():
    """The estimate is that of the fewest micro-batches."""
    devices = cluster(600)

    assert guess("single microbatches=auto", devices) == guess("single microbatches=2", devices)


def test_what_never_fits_says_how_much_is_missing_and_what_fits():
    """The gap in bytes, the ledger, and a plan on the same devices that would do."""
    with pytest.raises(PlanError) as caught:
        fewest_microbatches(PROFILE, Plan.parse("data=4"), cluster(*[300] * 4), batch=8)

    message = str(caught.value)
    assert "parameters 0.10 GiB" in message
    assert "optimizer 0.20 GiB" in message
    needed = int(message.split("(")[1].split(" bytes")[0]) + 300 * MIB
    fits = fewest_microbatches(PROFILE, Plan.parse("data=4"), cluster(*[needed / MIB] * 4), batch=8)
    assert fits >= 1
    assert "'shard=4 microbatches=auto' fits" in message


def test_nothing_fits_a_device_that_is_far_too_small():
    """No plan is promised then."""
    with pytest.raises(PlanError, match="more devices"):
        fewest_microbatches(PROFILE, Plan.parse("data=2"), cluster(10, 10), batch=8)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [("equal", (1, 1)), ("speed", (3, 1)), ("memory", (1, 2)), ("5:2", (5, 2))],
)
def test_shares_become_weights(shares, expected):
    """By what the devices state, or as given."""
    devices = cluster(1000, 2000, flops_per_s=[3e9, 1e9])

    assert split_shares(Plan.parse(f"data=2 shares={shares}"), devices) == expected


def test_devices_that_state_no_speed_are_equally_fast():
    """Half a statement is none."""
    assert split_shares(
        Plan.parse("data=2 shares=speed"), cluster(1, 1, flops_per_s=[3e9, None])
    ) == (1, 1)


def test_one_hosts_devices_stand_for_all_hosts():
    """Four ranks on two hosts of two; three can't be spread over them."""
    assert split_shares(Plan.parse("data=4 shares=memory"), cluster(1000, 2000)) == (1, 2, 1, 2)
    with pytest.raises(PlanError, match="3 devices"):
        guess("data=3", cluster(1000, 2000))


def test_notes_of_the_profile_come_along():
    """An estimate says when it is rough."""
    rough = replace(PROFILE, notes=("rough",))

    assert estimate(rough, Plan.parse("single"), cluster(1000), batch=1, rates=RATES).notes == (
        "rough",
    )


def test_planning_loads_no_torch():
    """Estimates of a profile that is at hand need no torch."""
    script = "import sys, paceline.planner.estimate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
