"""What each room adds to a step, on a model small enough to count by hand: two units of 100 bytes, a root of 40."""

from dataclasses import replace
from typing import get_args

import pytest

from paceline.base.errors import PlanError
from paceline.cluster.devices import DeviceKind
from paceline.cluster.software import PACELINE, Software
from paceline.launch.process.malloc import KEPT_BLOCK_BYTES
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, Work
from paceline.planner.program import rank_program
from paceline.simulate.allocator import HOLES_ADDED
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute
from paceline.strategies.plan import Plan
from paceline.strategies.recompute.cost import KEPT_TENSOR_S, RECOMPUTED_S
from paceline.strategies.registry import BUILT_IN
from paceline.strategies.server.cost import MESSAGE_S
from paceline.strategies.stages.cost import whole_rank

UNIT, ROOT = 100, 40


def segment(unit: str, *gradients: str, flops: float = 10.0) -> Segment:
    return Segment(
        unit,
        Work(flops=Affine(0, flops), operators=4),
        Work(flops=Affine(0, 2 * flops)),
        kept_bytes=Affine(0, 30),
        output_bytes=Affine(0, 10),
        forward_peak_bytes=Affine(0, 35),
        backward_peak_bytes=Affine(0, 5),
        gradients=gradients,
        kept_tensors=4,
    )


PROFILE = Profile(
    parameters=(
        Parameter("a", "first", UNIT, rows=10, state_bytes=2 * UNIT),
        Parameter("b", "second", UNIT, rows=10, state_bytes=2 * UNIT),
        Parameter("head", "", ROOT, rows=4, state_bytes=2 * ROOT),
    ),
    segments=(segment("first", "a"), segment("second", "b"), segment("", "head")),
    update=Work(moved_bytes=Affine(1000), operators=3),
)


def step_program(
    profile: Profile, plan: Plan, kind: DeviceKind, samples: tuple[float, ...], **more
):
    """Of a rank with the whole model."""
    return rank_program(whole_rank(profile, samples), plan, kind, **more)


def program(text: str, *samples: float, kind="cpu"):
    return step_program(PROFILE, Plan.parse(text), kind, samples or (1.0,))


def collectives(
    text: str, *samples: float, kind="cpu", stream: str | None = None
) -> list[tuple[str, float, int]]:
    return [
        (e.kind, e.num_bytes, e.group)
        for e in program(text, *samples, kind=kind)
        if isinstance(e, Collective)
        and e.name not in ("meet", "roll")
        and stream in (None, e.stream)
    ]


def highest(text: str, *samples: float) -> dict[str, float]:
    bytes_by_ledger: dict[str, float] = {}
    most: dict[str, float] = {}
    for event in program(text, *samples):
        if isinstance(event, Allocate):
            bytes_by_ledger[event.ledger] = bytes_by_ledger.get(event.ledger, 0) + event.num_bytes
            most[event.ledger] = max(most.get(event.ledger, 0), bytes_by_ledger[event.ledger])
            assert bytes_by_ledger[event.ledger] >= 0, (text, event)
    return most


def flops(text: str, *samples: float) -> float:
    return sum(event.flops for event in program(text, *samples) if isinstance(event, Compute))


PLANS = [
    "single",
    "data=2",
    "shard=2",
    "shard=2 zero=2",
    "shard=2 zero=1",
    "data=2 shard=2",
    "data=2 shard=2 zero=1",
]


@pytest.mark.parametrize("recompute", ["", " recompute=full"])
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("samples", [(2.0,), (2.0, 1.0), (2.0, 2.0, 1.0)])
def test_what_is_taken_is_given_back(text, recompute, samples):
    """After a step a rank holds parameters, gradients, state; buckets, where gradients live elsewhere; and buffers."""
    bytes_by_ledger: dict[str, float] = {}
    for event in program(text + recompute, *samples):
        if isinstance(event, Allocate):
            bytes_by_ledger[event.ledger] = bytes_by_ledger.get(event.ledger, 0) + event.num_bytes
            assert bytes_by_ledger[event.ledger] > -1e-9, event
    ranks = Plan.parse(text).axes.shard
    whole = 2 * UNIT + ROOT

    assert bytes_by_ledger["activations"] == pytest.approx(0)
    buckets = (whole / ranks if "data=2 shard" in text else 0) + (
        2 * UNIT * (1 + (ranks - 1) / ranks) if "shard" in text else 0  # with a part of the other's
    )
    assert bytes_by_ledger.get("communication", 0) == buckets + (
        whole / ranks / 2 if "data=2" in text else 0
    )
    assert (
        bytes_by_ledger["parameters"],
        bytes_by_ledger["gradients"],
        bytes_by_ledger["optimizer"],
    ) == (whole / ranks, whole / ranks, 2 * whole / ranks)


def test_one_device_keeps_all_activations_at_the_turn():
    """Three segments of 30 bytes a sample, and the last one's workspace."""
    assert highest("single", 2.0)["activations"] == 2 * (3 * 30 + 5)


def test_a_later_microbatch_adds_one_gradient_at_a_time():
    """On top of the whole gradients there is the largest one that is being added."""
    assert highest("single", 1.0)["gradients"] == 2 * UNIT + ROOT
    assert highest("single", 1.0, 1.0)["gradients"] == 2 * UNIT + ROOT + UNIT


def test_work_is_that_of_the_samples():
    """Cutting into micro-batches changes no FLOP; recomputing the two units adds their forward."""
    assert flops("single", 4.0) == flops("single", 2.0, 2.0) == 4 * 3 * 30
    assert flops("single recompute=full", 4.0) == 4 * (3 * 30 + 2 * 10)


@pytest.mark.parametrize(("software", "again"), [(PACELINE, 4), (Software(), 10)])
def test_a_second_forward_ends_with_what_backward_needs(software: Software, again: float):
    """In programs that stop there. Of the two units, six of ten operations come after it; of one that is frozen nothing
    is done again."""
    first, second, root = (
        replace(each, again=Work(flops=Affine(0, 4))) for each in PROFILE.segments
    )

    def total(*segments: Segment) -> float:
        changed = replace(PROFILE, segments=segments)
        return sum(
            event.flops
            for event in step_program(changed, plan, "cpu", (1.0,), software=software)
            if isinstance(event, Compute)
        )

    plan = Plan.parse("single recompute=full")
    assert total(first, second, root) == 3 * 30 + 2 * again
    assert total(replace(first, backward=Work()), second, root) == 2 * 30 + 10 + again


def test_recompute_keeps_outputs_alone():
    """Two units' outputs, then one unit again with its workspace; the root keeps all."""
    assert highest("single recompute=full", 1.0)["activations"] == 10 + 10 + max(35, 30 + 5)


def test_a_cpu_keeps_holes_of_what_recompute_lets_go():
    """Half of the 20 bytes of each unit, once, however many micro-batches there are; a GPU's allocator keeps none."""
    assert highest("single recompute=full", 1.0, 1.0)["holes"] == 2 * 20 / 2
    gpu = program("single recompute=full", kind="cuda")
    assert not any(isinstance(event, Allocate) and event.ledger == "holes" for event in gpu)


def test_data_reduces_every_gradient_once_beside_backward():
    """However many micro-batches there are; small gradients share a bucket."""
    expected = [("all_reduce", 2 * UNIT + ROOT, 2)]

    for samples in ((1.0,), (1.0, 1.0)):
        assert collectives("data=2", *samples, kind="cuda", stream=NETWORK) == expected


def test_cpu_ranks_sum_gradients_in_shared_memory_after_backward():
    """Two meetings of no size. Between them each of two ranks adds and copies half of all gradients: five of those are
    read or written."""
    events = program("data=2", 1.0, 1.0)
    first, second = (
        i for i, e in enumerate(events) if isinstance(e, Collective) and e.num_bytes == 4
    )
    last_backward = max(i for i, e in enumerate(events) if isinstance(e, Compute) and e.flops)

    assert last_backward < first and second == first + 2
    assert events[first + 1] == Compute(moved_bytes=5 * (2 * UNIT + ROOT) / 2)
    assert not collectives("data=2", stream=NETWORK)


def test_buckets_on_cpus_are_zeros_before_the_first_backward():
    """Once a step, however many micro-batches there are; on GPUs a single backward leaves new gradients."""

    def zeroed(kind) -> int:
        events = program("data=2", 1.0, 1.0, kind=kind)
        first = next(i for i, e in enumerate(events) if isinstance(e, Compute) and e.flops)
        return events[:first].count(Compute(moved_bytes=2 * UNIT + ROOT))

    assert zeroed("cpu") == 1 and zeroed("cuda") == 0


def test_gradients_of_replicas_live_in_the_buckets():
    """They are held once, and from step to step; each backward's own result is added to them."""
    events = program("data=2", 1.0)
    first = next(i for i, event in enumerate(events) if isinstance(event, Compute))
    taken = [
        e.num_bytes for e in events[:first] if isinstance(e, Allocate) and e.ledger == "gradients"
    ]

    assert taken == [2 * UNIT + ROOT]
    assert highest("data=2", 1.0)["gradients"] == 2 * UNIT + ROOT + UNIT
    assert (
        highest("data=2", 1.0)["communication"] == (2 * UNIT + ROOT) / 2
    )  # what it sums of the other's


def test_buckets_leave_while_backward_goes_on(monkeypatch):
    """With buckets of one gradient each, two of the three all-reduces are issued before the last backward."""
    from paceline.strategies.data import buckets

    monkeypatch.setattr(buckets, "LARGEST_BUCKET_BYTES", 1)
    order = [
        "compute" if isinstance(e, Compute) and e.flops else e.num_bytes
        for e in program("data=2", kind="cuda")
        if (isinstance(e, Compute) and e.flops) or (isinstance(e, Collective) and e.name != "meet")
    ]

    assert order == ["compute"] * 4 + [ROOT, "compute", UNIT, "compute", UNIT]


def test_a_complete_bucket_waits_for_those_before_it(monkeypatch):
    """The last parameter's gradient comes last (a tied weight, say): nothing leaves before."""
    from paceline.strategies.data import buckets

    monkeypatch.setattr(buckets, "LARGEST_BUCKET_BYTES", 1)
    late = replace(
        PROFILE, segments=(segment("first", "a", "head"), segment("second", "b"), segment(""))
    )
    events = step_program(late, Plan.parse("data=2"), "cuda", (1.0,))
    order = [
        type(e) for e in events if isinstance(e, Collective) or (isinstance(e, Compute) and e.flops)
    ]

    assert order[:-1] == [Compute] * 6 + [Collective] * 3  # the very last is the loss's


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_compressed_gradients_go_over_the_network(kind):
    """As long as an all-reduce that sends as many bytes: 60 elements of 4 bytes are padded to a block a rank."""
    sent = {
        form: collectives(f"data=2 compress={form}", kind=kind, stream=NETWORK)
        for form in ("bf16", "int8", "topk")
    }

    assert sent == {
        "bf16": [("all_reduce", 2 * 2 * 256, 2)],
        "int8": [("all_reduce", 2 * (256 + 4), 2)],
        "topk": [("all_reduce", 8, 2)],
    }
    assert (
        highest("data=2 compress=topk", 1.0)["communication"] == 2 * UNIT + ROOT
    )  # what is left out


def test_an_outer_step_is_spread_over_its_local_steps():
    """Every gradient's bytes, once in 10 steps; nothing else but the figures, which are not met in between."""
    blocking = [e for e in program("data=2 local=10") if isinstance(e, Collective)]
    staggered = [
        e for e in program("data=2 local=10 outer=diloco fragments=2") if isinstance(e, Collective)
    ]

    assert [(e.name, e.num_bytes, e.times, e.stream) for e in blocking] == [
        ("meet", 8 * (2 * 10 + 3 + 3), 0.1, COMPUTE),
        ("outer", 2 * UNIT + ROOT, 0.1, COMPUTE),
    ]
    assert [(e.name, e.times, e.stream) for e in staggered] == [
        ("meet", 0.2, COMPUTE),
        ("outer", 0.1, NETWORK),
        ("outer", 0.1, NETWORK),
    ]
    assert sum(e.num_bytes for e in staggered[1:]) == 2 * UNIT + ROOT
    assert highest("data=2 local=10", 1.0)["communication"] == 2 * (2 * UNIT + ROOT)
    assert highest("data=2 local=10 outer=diloco", 1.0)["communication"] == 3 * (2 * UNIT + ROOT)


def test_a_unit_is_gathered_before_it_is_recomputed():
    """Its forward can't run again on a part of its weights."""
    events = program("shard=2 recompute=full")
    turn = max(i for i, e in enumerate(events) if isinstance(e, Collective) and e.name == "gather ")
    after = [
        e
        for e in events[turn:]
        if (isinstance(e, Compute) and e.flops)
        or (isinstance(e, Collective) and e.kind == "all_gather")
    ]

    assert [getattr(e, "name", None) or e.flops for e in after] == [
        "gather ",
        20,
        "gather second",
        10,
        20,
        "gather first",
        10,
        20,
    ]


@pytest.mark.parametrize(
    ("text", "microbatches", "gathers", "reductions"),
    [
        ("shard=2", 1, 2, 1),
        ("shard=2", 3, 6, 3),  # forward and backward of each micro-batch
        ("shard=2 zero=2", 1, 1, 1),
        ("shard=2 zero=2", 3, 1, 3),
        ("shard=2 zero=1", 1, 1, 1),
        ("shard=2 zero=1", 3, 1, 1),
    ],
)
def test_stages_gather_and_reduce_as_often_as_they_say(text, microbatches, gathers, reductions):
    """Each unit and the root, so many times a step."""
    messages = collectives(text, *[1.0] * microbatches)

    for size, owners in ((UNIT, 2), (ROOT, 1)):
        assert messages.count(("all_gather", size, 2)) == gathers * owners
        assert messages.count(("reduce_scatter", size, 2)) == reductions * owners
    assert "all_reduce" not in {
        kind for kind, size, _ in collectives(text, kind="cuda") if size in (UNIT, ROOT)
    }


def test_cpu_ranks_keep_a_buffer_for_gatherings_and_one_for_reductions():
    """Each as large as the largest unit, with the half that it reads of the other rank's; what is left of a reduction
    is half a unit more."""
    first = next(
        e for e in program("shard=2") if isinstance(e, Allocate) and e.ledger == "communication"
    )
    assert first.num_bytes == 2 * UNIT * 1.5
    assert highest("shard=2", 1.0)["communication"] == 2 * UNIT * 1.5 + UNIT / 2


def test_large_parameters_that_are_gathered_leave_holes():
    """Twice their bytes; not small ones, nor those that have pages of their own. And twice the largest shard's gradient
    is left by the update."""
    sizes = {"a": 2**20, "b": 8 * 2**20, "head": 40 * 2**20}
    profile = replace(
        PROFILE, parameters=tuple(replace(p, num_bytes=sizes[p.name]) for p in PROFILE.parameters)
    )
    program = step_program(profile, Plan.parse("shard=2"), "cpu", (1.0,))
    assert sum(
        e.num_bytes for e in program if isinstance(e, Allocate) and e.ledger == HOLES_ADDED
    ) == (2 * sizes["b"] + 2 * sizes["head"] / 2)


def test_stages_hold_less_from_one_to_three():
    """Stage 3 never has more than the root and one unit whole, stage 1 has whole gradients between micro-batches."""
    whole = 2 * UNIT + ROOT
    peak_bytes = {zero: highest(f"shard=2 zero={zero}", 1.0, 1.0) for zero in (1, 2, 3)}

    assert peak_bytes[3]["parameters"] == whole / 2 + ROOT + UNIT
    assert peak_bytes[2]["parameters"] == peak_bytes[1]["parameters"] == whole / 2 + whole
    assert peak_bytes[1]["gradients"] == whole + UNIT
    assert peak_bytes[2]["gradients"] == peak_bytes[3]["gradients"] < whole


def test_an_uneven_cut_is_rounded_up():
    """The first of three ranks holds 4 of 10 rows."""
    start = next(
        e for e in program("shard=3") if isinstance(e, Allocate) and e.ledger == "parameters"
    )

    assert start.num_bytes == pytest.approx(2 * UNIT * 4 / 10 + ROOT * 2 / 4)


@pytest.mark.parametrize("text", ["shard=2", "shard=2 zero=2", "shard=2 zero=1"])
@pytest.mark.parametrize("samples", [(2.0,), (2.0, 2.0)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_parameter_with_a_sparse_gradient_stays_whole(text, samples, kind):
    """It is not gathered, and its gradient is summed at the end, at most as a dense one."""
    profile = replace(
        PROFILE, parameters=tuple(replace(p, is_sparse=p.name == "a") for p in PROFILE.parameters)
    )
    events = step_program(profile, Plan.parse(text), kind, samples)
    messages = [
        (e.kind if e.name else "sparse", e.num_bytes)
        for e in events
        if isinstance(e, Collective) and e.name not in ("meet", "roll")
    ]
    bytes_by_ledger: dict[str, float] = {}
    for event in events:
        if isinstance(event, Allocate):
            bytes_by_ledger[event.ledger] = bytes_by_ledger.get(event.ledger, 0) + event.num_bytes

    assert messages.count(("sparse", UNIT)) == 1
    assert (
        sum(name == "all_gather" and size == UNIT for name, size in messages)
        == sum(name == "all_gather" and size == ROOT for name, size in messages)
        > 0
    )  # of the other unit alone
    assert (bytes_by_ledger["parameters"], bytes_by_ledger["gradients"]) == (
        UNIT + (UNIT + ROOT) / 2,
    ) * 2


def test_sharding_stops_a_cpu_and_runs_beside_a_gpu():
    """FSDP2's collectives end before a CPU rank goes on."""
    assert collectives("shard=2", stream=NETWORK) == []
    assert collectives("shard=2", kind="cuda", stream=COMPUTE) == []


def test_ranks_call_the_roll_before_each_unit_and_at_the_end_of_forward():
    """Every micro-batch, at every stage."""
    for zero in (1, 2, 3):
        calls = [
            e for e in program(f"shard=2 zero={zero}", 1.0, 1.0) if getattr(e, "name", "") == "roll"
        ]
        assert len(calls) == 2 * (2 + 1)


def test_hybrid_reduces_local_shards_over_the_replicas():
    """Each rank's half of the gradients, over the data axis alone."""
    messages = collectives("data=3 shard=2", kind="cuda")

    assert [c for c in messages if c[0] == "all_reduce"] == [
        ("all_reduce", (2 * UNIT + ROOT) / 2, 3)
    ]
    assert {c[2] for c in messages if c[0] != "all_reduce"} == {2}


def test_rooms_hook_into_moments_that_exist():
    """A misspelt moment would never come."""
    from paceline.strategies.costs import Footprint, MomentName, Step

    footprint = Footprint(*({p.name: p.num_bytes for p in PROFILE.parameters} for _ in range(3)))
    plans = [
        Plan.parse(text)
        for text in (
            "data=2 shard=2 recompute=full compile=blocks",
            "data=2 local=4",
            "tensor=2",
            "servers=1 workers=2",
        )
    ]

    for strategy in BUILT_IN:
        if strategy.cost is not None:
            plan = next(plan for plan in plans if strategy.is_active(plan))
            step = Step(PROFILE, plan, "cpu", (1.0,), footprint)
            assert set(strategy.cost.enter(step)) <= set(get_args(MomentName))


def test_gradients_that_are_added_leave_holes_in_a_heap_that_is_kept():
    """As much for every later micro-batch."""
    alone, twice, thrice = (
        highest("single", *[1.0] * count).get(HOLES_ADDED, 0) for count in (1, 2, 3)
    )

    assert twice > alone and thrice - alone == pytest.approx(2 * (twice - alone))


@pytest.mark.parametrize(("text", "gradients"), [("single", 2), ("data=2", 1)])
def test_an_update_leaves_holes_in_a_heap_that_is_kept(text: str, gradients: int):
    """Of gradients that are let go of or stay, and of what it makes; none where gradients have pages of their own."""
    small = replace(PROFILE, update_peak_bytes=7)
    large = replace(
        small, parameters=tuple(replace(p, num_bytes=KEPT_BLOCK_BYTES) for p in small.parameters)
    )

    def left(profile: Profile, kind: str = "cpu") -> float:
        """Before the first forward, so that they are there at the peak."""
        events = step_program(profile, Plan.parse(text), kind, (1.0,))
        forward = next(k for k, event in enumerate(events) if isinstance(event, Compute))
        return sum(
            event.num_bytes
            for event in events[:forward]
            if isinstance(event, Allocate) and event.ledger == HOLES_ADDED
        )

    assert left(small) == pytest.approx(gradients * UNIT + 7)
    assert left(large) == left(small, "cuda") == 0
    one_large = replace(
        small,
        update_peak_bytes=KEPT_BLOCK_BYTES,
        parameters=(large.parameters[0], *small.parameters[1:]),
    )
    assert left(one_large) == pytest.approx((gradients + 1) * UNIT)  # of the largest of the others


@pytest.mark.parametrize(
    ("num_bytes", "leaves"), [(KEPT_BLOCK_BYTES - 4, True), (KEPT_BLOCK_BYTES, False)]
)
def test_a_large_gradient_that_is_added_has_pages_of_its_own(num_bytes: int, leaves: bool):
    """They go back to the system with it."""
    large = tuple(replace(parameter, num_bytes=num_bytes) for parameter in PROFILE.parameters)

    once, twice = (
        step_program(
            replace(PROFILE, parameters=large), Plan.parse("single"), "cpu", (1.0,) * count
        )
        for count in (1, 2)
    )
    left = [
        sum(
            event.num_bytes
            for event in events
            if isinstance(event, Allocate) and event.ledger == HOLES_ADDED
        )
        for events in (once, twice)
    ]

    assert (left[1] > left[0]) is leaves


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("single recompute=full", "cpu", 2),
        ("single recompute=full", "cuda", 0),
        ("single recompute=selective", "cpu", 0),
        ("single", "cpu", 0),
    ],
)
def test_python_around_a_unit_that_is_recomputed_takes_time_on_a_cpu(
    text: str, kind: str, count: int
):
    """Of two units that four tensors are kept of; the root is none."""
    waits = [
        event.fixed_s
        for event in program(text, kind=kind)
        if isinstance(event, Compute) and event.fixed_s
    ]
    without = [
        event.fixed_s
        for event in program("single", kind=kind)
        if isinstance(event, Compute) and event.fixed_s
    ]

    assert sum(waits) - sum(without) == pytest.approx(count * (RECOMPUTED_S + 4 * KEPT_TENSOR_S))


@pytest.mark.parametrize(
    ("text", "kind", "messages"),
    [
        ("servers=2 workers=2 colocate=yes", "cpu", 8),
        ("servers=1 workers=2 colocate=yes", "cpu", 4),
        ("servers=1 workers=2", "cpu", 2),
        ("servers=2 workers=2 colocate=yes", "cuda", 0),
    ],
)
def test_messages_of_servers_take_time_of_the_cores_that_compute(
    text: str, kind: str, messages: int
):
    """Each server has one chunk. A worker sends it to each server and takes it back, and so does a server in its
    process with each worker; where workers have GPUs, cores have nothing else to do."""
    waits = [
        event.fixed_s
        for event in program(text, kind=kind)
        if isinstance(event, Compute) and event.fixed_s
    ]
    without = [
        event.fixed_s
        for event in program("single", kind=kind)
        if isinstance(event, Compute) and event.fixed_s
    ]

    assert sum(waits) - sum(without) == pytest.approx(messages * MESSAGE_S)


def test_a_model_with_running_statistics_can_not_be_served():
    """Servers keep trained parameters alone."""
    with pytest.raises(PlanError, match=r"(?s)running statistics.*a data=N plan"):
        list(
            step_program(
                replace(PROFILE, statistics_bytes=8),
                Plan.parse("servers=1 workers=2"),
                "cpu",
                (1.0,),
            )
        )
