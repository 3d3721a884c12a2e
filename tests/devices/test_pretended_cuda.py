"""Plans on a device that pretends to be CUDA compute what the CPU computes; runs are those of users."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pretended_cuda.client import Trained, Workshop, Workshops
from pretended_cuda.plans import (
    ALIKE,
    CHANCE,
    EXACT,
    FEATURES,
    MORE_ALIKE,
    MORE_EXACT,
    MORE_FEATURES,
)

from paceline.checkpoint.read import open_checkpoint
from paceline.runs import folder
from paceline.strategies.plan import Plan

pytestmark = pytest.mark.timeout(600)  # the first one builds the device


def on(kind: str, plan: str) -> str:
    """Devices for a plan's ranks: servers take no GPU."""
    read = Plan.parse(plan)
    last = read.world_size - 1 - (read.num_cpu_ranks if kind == "cuda" else 0)
    return f"{kind}:0-{last}" if last else f"{kind}:0"


# Biases before a norm over the batch have gradients of rounding alone, zero in exact arithmetic: 2**-53 of sums that
# stay below 1 here. AdamW divides them by its eps of 1e-8: in 4 steps of 1e-2 two runs part by up to twice that.
OF_ROUNDING = {"statistics": ("1.bias", "4.bias")}
ROUNDING_ATOL = 4 * 1e-2 / 1e-8 * 2 * 2**-53

# Transformers' Llama normalises and rotates in float32, also where its weights are float64. How sums of it are rounded
# depends on the CPU: on one without AVX-512, up to 1e-8 was seen.
RTOL = {"padded llama": 1e-7}


def assert_alike(
    actual: Trained, expected: Trained, *, rtol: float = 1e-10, of_rounding: Sequence[str] = ()
) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=rtol)
    assert actual.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        atol = ROUNDING_ATOL if name in of_rounding else rtol
        torch.testing.assert_close(
            actual.weights[name],
            value,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for name, value in expected.summary["metrics"].items():
        assert actual.summary["metrics"][name] == pytest.approx(value, rel=rtol)


def assert_apart(trained: Trained, plan: str) -> None:
    """Each rank but servers uses its own GPU alone, and the process that forks them none."""
    first = Plan.parse(plan).num_cpu_ranks
    assert all(
        rank["devices"] in ([f"cuda:{rank['rank'] - first}"], []) for rank in trained.measured
    )
    assert [rank["rank"] for rank in trained.measured] == list(
        range(first, Plan.parse(plan).world_size)
    )
    assert trained.first_use is None, (
        f"the process that forks ranks began to use CUDA: {trained.first_use}"
    )


def assert_frugal(trained: Trained) -> None:
    """The host waits for the device once in a step at most, and for nothing that it sends there."""
    for rank in trained.measured:
        for step in rank["steps"][1:]:  # the first compares replicas
            assert (
                step["reads"] <= 1 and step["blocking_uploads"] == step["pageable_uploads"] == 0
            ), step


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", [*EXACT, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE_EXACT)]
)
def test_a_plan_on_gpus_is_one_cpu(shop: Workshop, placement: str, plan: str):
    plan = plan.replace("FILE", placement)
    trained = shop.train("blocks", plan, on("cuda", plan))
    assert_alike(trained, shop.train("blocks", "single", "cpu:0"))
    assert_apart(trained, plan)
    assert_frugal(trained)


@pytest.mark.parametrize(
    "plan",
    [
        "servers=1 workers=2",
        pytest.param("servers=2 workers=2 compress=bf16", marks=pytest.mark.slow),
    ],
)
def test_backward_does_not_wait_for_what_servers_are_sent(shop: Workshop, plan: str):
    """Gradients are copied beside it, and weights come in from pinned memory; the host reads the loss alone."""
    trained = shop.train("blocks", plan, on("cuda", plan))
    assert [len(rank["backwards"]) for rank in trained.measured] == [4, 4]
    for backward in (backward for rank in trained.measured for backward in rank["backwards"]):
        assert (
            backward["reads"] == 1
            and backward["blocking_uploads"] == backward["pageable_uploads"] == 0
        ), backward


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", [*ALIKE, *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE_ALIKE)]
)
def test_a_relaxed_plan_on_gpus_is_itself_on_cpus(shop: Workshop, plan: str):
    trained = shop.train("blocks", plan, on("cuda", plan))
    assert_alike(trained, shop.train("blocks", plan, on("cpu", plan)))
    assert_apart(trained, plan)
    assert_frugal(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "shard=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "data=2",
                "data=2 compress=powersgd",
                "data=2 local=2 outer=diloco",
                "data=2 shard=2",
                "tensor=2",
                "pipeline=2",
                "pipeline=2 shard=2",
                "place=2",
            )
        ),
    ],
)
def test_the_host_meets_others_in_first_steps_alone(shop: Workshop, plan: str):
    """Collectives of CPU tensors block it. Ranks compare what they gather next under shard=N in the first three
    forwards, and replicas what they hold in the first step. In later steps replicas with local steps exchange figures
    where they meet, and others nothing."""
    trained = shop.train("blocks", plan, on("cuda", plan), steps=6, notes_collectives=True)
    allowed = {"allreduce_"} if "local" in plan else set()
    for rank in trained.measured:
        names = [set(step["cpu_collectives"]) for step in rank["steps"]]
        assert (
            len(names) == 6
            and all(first <= {"allreduce_", "allgather_"} for first in names[:3])
            and all(later <= allowed for later in names[3:])
        ), names


@pytest.mark.slow
@pytest.mark.parametrize("plan", CHANCE)
def test_a_plan_of_chance_trains_on_gpus(shop: Workshop, plan: str):
    """Workers overtake each other, and weights their worker's own update, so that no two runs are alike."""
    trained = shop.train("blocks", plan, on("cuda", plan))
    assert all(0 < loss < 10 for loss in trained.losses)
    assert_apart(trained, plan)
    assert_frugal(trained)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan"),
    [*FEATURES, *(pytest.param(job, plan, marks=pytest.mark.slow) for job, plan in MORE_FEATURES)],
)
def test_a_feature_on_gpus_is_itself_on_cpus(shop: Workshop, job: str, plan: str):
    reference, trained = (
        plan if job == "statistics" else "single",
        shop.train(job, plan, on("cuda", plan)),
    )
    assert_alike(
        trained,
        shop.train(job, reference, on("cpu", reference)),
        rtol=RTOL.get(job, 1e-10),
        of_rounding=OF_ROUNDING.get(job, ()),
    )
    assert_frugal(trained)
    assert trained.first_use is None, (
        f"the process that forks ranks began to use CUDA: {trained.first_use}"
    )


def test_a_generator_of_the_cpu_draws_beside_a_gpu(shop: Workshop):
    """What is made by it is where it is, as in any script; what is on the GPU is given its numbers."""
    observed = shop.check("generated")
    on_gpu = {
        "in place",
        "a view",
        "initial",
        "normal",
        "bernoulli",
        "multinomial",
        "out",
        "own",
        "NumPy",
    }
    assert observed == {name: ["cuda:1" if name in on_gpu else "cpu", True] for name in observed}


def test_a_generator_in_a_step_is_refused_on_gpus_as_on_cpus(shop: Workshop):
    errors = [
        shop.ask("refused generator", "single", f"{kind}:0")["error"] for kind in ("cuda", "cpu")
    ]
    assert all("the step draws from a generator of its own (randn)" in error for error in errors), (
        errors
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("few blocks", "tensor=2 recompute=full"),
        ("statistics", "data=2 recompute=full"),
        *(
            pytest.param(job, plan, marks=pytest.mark.slow)
            for job, plan in (
                ("blocks", "tensor=2 recompute=full"),
                ("blocks", "data=2 tensor=2 recompute=full"),
                ("blocks", "pipeline=2 tensor=2 recompute=full"),
                ("statistics", "single recompute=full"),
                ("statistics", "data=2 microbatches=2"),
                ("recurrent", "data=2 recompute=full"),
                ("attention", "tensor=2 recompute=full"),
            )
        ),
    ],
)
def test_what_a_forward_writes_to_is_known_without_a_look_at_the_device(
    shop: Workshop, job: str, plan: str
):
    """Blocks that run again begin with the state that they had, and replicas bring running statistics together."""
    reference, trained = (
        plan if job == "statistics" else "single",
        shop.train(job, plan, on("cuda", plan)),
    )
    assert_alike(
        trained,
        shop.train(job, reference, on("cpu", reference)),
        of_rounding=OF_ROUNDING.get(job, ()),
    )
    assert_frugal(trained)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan", "options"),
    [
        ("augmented", "single", {"loader_workers": 2}),
        ("stream", "single", {}),
        pytest.param("augmented", "place=2", {}, marks=pytest.mark.slow),
        pytest.param("stream", "pipeline=2", {}, marks=pytest.mark.slow),
    ],
)
def test_batches_are_made_ahead_and_are_the_same(
    shop: Workshop, job: str, plan: str, options: dict[str, int]
):
    """So are the numbers that an optimizer draws after them."""
    trained = shop.train(job, plan, on("cuda", plan), **options)
    assert_alike(trained, shop.train(job, plan, on("cpu", plan)))
    for rank in trained.measured:
        assert all(
            step["blocking_uploads"] == step["pageable_uploads"] == 0 for step in rank["steps"]
        )


def test_a_sample_that_cannot_be_read_ends_its_own_step(shop: Workshop, tmp_path: Path):
    """It is read while the step before goes on, which still counts."""
    errors = []
    for kind in ("cuda", "cpu"):
        answer = shop.ask("broken sample", "single", f"{kind}:0", run=tmp_path / kind)
        errors.append(answer["error"].split("full log")[0])
        steps = [
            json.loads(line)["step"]
            for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        ]
        assert f"failed in step {steps[-1] + 1} (input)" in answer["error"]
        assert "sample 7 of the data" in answer["error"]
    assert errors[0] == errors[1]


def test_batches_ahead(shop: Workshop):
    observed = shop.check("ahead")
    assert observed["made"] == [0, 1, 2, 2, 3, 3, 4], (
        "at most one window is made before it is asked for"
    )
    assert observed["samples"] == observed["expected"] and observed["devices"] == ["cuda:0"]
    assert observed["draws"] == [True, True, True], "generators are left as they were"


@pytest.mark.slow
def test_ranks_that_leave_out_blocks_go_on(shop: Workshop):
    """They expect the next block by then, and ask each other where it is another one."""
    assert_alike(
        shop.train("changing", "shard=2", "cuda:0-1"), shop.train("changing", "single", "cpu:0")
    )


@pytest.mark.slow
def test_a_rank_that_leaves_out_blocks_alone_says_so(shop: Workshop):
    """After a minute, in which the others wait for it."""
    answer = shop.ask("parting", "shard=2", "cuda:0-1")
    assert answer["exit_code"] == 1
    assert "rank 0" in answer["error"] and "this rank is at the end of forward" in answer["error"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", pytest.param("pipeline=2", marks=pytest.mark.slow)])
def test_layers_that_draw_are_split_as_on_cpus(shop: Workshop, plan: str):
    """CUDA's dropout is another operator than the CPU's, and hides nothing from the split."""
    actual, expected = (shop.train("dropout", plan, on(kind, plan)) for kind in ("cuda", "cpu"))
    assert (actual.run / folder.SPLIT).exists() == (expected.run / folder.SPLIT).exists()
    if (actual.run / folder.SPLIT).exists():
        assert (actual.run / folder.SPLIT).read_text() == (expected.run / folder.SPLIT).read_text()


@pytest.mark.slow
def test_a_region_in_float32_is_none_of_bf16_in_backward(shop: Workshop):
    """Autograd knows in which dtype each operator ran; autocast in backward would choose again."""
    plan = "pipeline=2 microbatches=1"
    assert_alike(
        shop.train("float32 in bf16", plan, "cuda:0-1"),
        shop.train("float32 in bf16", "single", "cuda:0"),
        rtol=1e-5,
    )


def test_ranks_keep_the_generators_of_their_own_gpu_alone(shop: Workshop):
    """torch warns of all GPUs' generators, in every rank, where an evaluation keeps them."""
    trained = shop.train("clip and validation", "data=2", "cuda:0-1")
    logs = {file.name: file.read_text() for file in (trained.run / "logs").iterdir()}
    assert len(logs) == 2 and not [name for name, text in logs.items() if "fork_rng" in text], logs


@pytest.mark.slow
def test_gpus_are_measured_before_ranks_use_them(workshops: Workshops, tmp_path: Path):
    """Beside a rank they are slower, and have less memory for it."""
    with workshops.open(tmp_path, devices=1) as fresh:
        answer = fresh.ask("few blocks", "single", "cuda:0", priced=True)
        assert "error" not in answer
        assert answer["measured"] == 1 and answer["measured_beside"] == 0
        assert answer["first_use"] is None and answer["summary"]["predicted"]["step_s"] > 0


def test_draws_of_gpus_are_switched_off(shop: Workshop):
    observed = shop.check("means")
    assert all(
        kind["off"] < 1e-6 and not kind["left_on"] and kind["draws"] == 1
        for kind in observed.values()
    ), observed
    assert observed["dropout"]["switched_off"] == ["native_dropout"]
    assert observed["attention"]["switched_off"] == ["_scaled_dot_product_efficient_attention"]


def test_copies_for_a_checkpoint_hold_up_nobody(shop: Workshop):
    """The device makes them before its later work; only the thread that writes makes the host wait."""
    observed = shop.check("staging")
    assert all(observed["same"]) and observed["reads"] == [0, 0]
    assert observed["pointers"][0] == observed["pointers"][1], "memory is kept"
    assert observed["told"] == ["save", "copied", "forward", "host waits"] * 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("few blocks", "shard=2"),
        ("gan", "data=2"),
        *(
            pytest.param(job, plan, marks=pytest.mark.slow)
            for job, plan in (
                ("blocks", "shard=2"),
                ("statistics", "data=2"),
                ("blocks", "data=2 compress=topk"),
                ("blocks", "pipeline=2"),
                ("blocks", "data=2 local=2 outer=diloco"),
            )
        ),
    ],
)
def test_a_checkpoint_holds_the_weights_of_its_step(
    shop: Workshop, tmp_path: Path, job: str, plan: str
):
    """Though the run goes on while they are copied; and no step of it waits for that."""
    for kind in ("cuda", "cpu"):
        (tmp_path / kind).mkdir()
    actual, expected = (
        shop.train(job, plan, on(kind, plan), run=tmp_path / kind / "run", save_every=1)
        for kind in ("cuda", "cpu")
    )
    saved = {path.name for path in (expected.run / "checkpoints").glob("step-*")}
    assert (
        saved == {path.name for path in (actual.run / "checkpoints").glob("step-*")}
        and len(saved) > 1
    )
    for step in saved:
        there, other = (
            open_checkpoint(trained.run / "checkpoints" / step) for trained in (actual, expected)
        )
        assert there.tensors.keys() == other.tensors.keys()
        for name in there.tensors:
            torch.testing.assert_close(there.read(name), other.read(name), rtol=1e-9, atol=1e-11)
    assert len(actual.measured) == Plan.parse(plan).world_size
    without = shop.train(job, plan, on("cuda", plan))
    assert _reads(actual) == _reads(without)


@pytest.mark.slow
def test_a_host_without_memory_saves_from_the_gpu_itself(shop: Workshop, tmp_path: Path):
    """While the run waits, and without pinned memory."""
    trained, usual = (
        shop.train(
            "few blocks",
            "shard=2",
            "cuda:0-1",
            run=tmp_path / name / "run",
            save_every=1,
            lacks_memory=lacks,
        )
        for name, lacks in (("without", True), ("with", False))
    )
    for step in usual.run.glob("checkpoints/step-*"):
        there, expected = (
            open_checkpoint(folder / "checkpoints" / step.name)
            for folder in (trained.run, usual.run)
        )
        assert there.tensors.keys() == expected.tensors.keys()
        for name in there.tensors:
            assert torch.equal(there.read(name), expected.read(name)), f"{name} after {step.name}"
    assert "each save blocks the run" in shop.printed()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "shard=2",
                "pipeline=2",
                "tensor=2",
                "data=2 compress=topk",
                "data=2 local=2 outer=diloco",
            )
        ),
    ],
)
def test_a_killed_rank_of_gpus_goes_on_from_copies(shop: Workshop, plan: str):
    """The host reads nothing of the device to make them."""
    trained = shop.train("blocks", plan, on("cuda", plan), killed={"rank": 1, "step": 2})
    assert_alike(trained, shop.train("blocks", plan, on("cpu", plan)))
    launches = [
        line
        for line in map(json.loads, (trained.run / "journal.jsonl").read_text().splitlines())
        if "after" in line
    ]
    assert (
        [line["after"] for line in launches][:1] == [0]
        and len(launches) == 2
        and launches[1]["after"] > 0
    )
    assert len(trained.measured) == Plan.parse(plan).world_size
    for rank in trained.measured:
        assert rank["copies"]
        for counts in rank["copies"]:
            assert (
                counts["reads"] == counts["blocking_uploads"] == counts["pageable_uploads"] == 0
            ), counts


def _reads(trained: Trained) -> list[list[int]]:
    return [[step["reads"] for step in rank["steps"]] for rank in trained.measured]


def test_a_gpu_that_fails_ends_the_run_with_what_to_do(shop: Workshop):
    answer = shop.ask("fails on one GPU", "data=2", "cuda:0-1")
    assert "rank 1" in answer["error"] and "its GPU failed: RuntimeError" in answer["error"]
    assert "--resume --devices NAMES goes on from the last checkpoint" in answer["error"]


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(shop: Workshop, tmp_path: Path):
    shop.train("blocks", "shard=2", "cuda:0-1", run=tmp_path / "run", steps=2)
    trained = shop.train("blocks", "data=2", "cuda:2-3", run=tmp_path / "run", resume=True)
    expected = shop.train("blocks", "single", "cpu:0")
    assert trained.losses[-2:] == pytest.approx(expected.losses[-2:], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("large", "shard=4"),
        *(
            pytest.param("huge", plan, marks=pytest.mark.slow)
            for plan in (
                "tensor=4",
                "pipeline=4",
                "place=4",
                "shard=4 zero=3",
                "pipeline=2 shard=2",
                "data=2 shard=2",
                "shard=2 tensor=2",
                "pipeline=2 tensor=2",
                "data=2 pipeline=2",
                "data=2 tensor=2",
                "pipeline=2 schedule=interleaved data=2",
                "place=2 data=2",
            )
        ),
    ],
)
def test_a_gpu_never_has_more_than_its_part_and_a_block(shop: Workshop, job: str, plan: str):
    """Also while the model is built: it may be larger than any GPU, and is the same model then."""
    trained, axes = shop.train(job, plan, "cuda:0-3"), Plan.parse(plan).axes
    whole = sum(weight.nbytes for weight in trained.weights.values())
    block = sum(
        weight.nbytes for name, weight in trained.weights.items() if name.startswith("blocks.0.")
    )
    part = whole / (4 / axes.data)
    expected_bytes = (
        2 * part if axes.data > 1 else part
    )  # with the buckets that replicas sum gradients in
    more = part if axes.tensor > 1 else 0  # split layers are tried one by one, with their gradients
    assert len(trained.measured) == 4
    for rank in trained.measured:
        assert rank["built_bytes"] < 1.2 * expected_bytes
        assert rank["built_peak_bytes"] < rank["built_bytes"] + 1.01 * block + more
    if job == "huge":  # Adam's first steps make much of rounding
        assert_alike(trained, shop.train(job, "single", "cpu:0"), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "memory_bytes", "plan"),
    [
        ("thick", 13 << 17, "pipeline=4"),
        *(
            pytest.param("huge", 56 << 20, plan, marks=pytest.mark.slow)
            for plan in ("pipeline=4", "tensor=4", "place=4")
        ),
    ],
)
def test_a_model_that_no_gpu_has_room_for(
    workshops: Workshops, tmp_path: Path, job: str, memory_bytes: int, plan: str
):
    """72 MiB on GPUs of 56, and 2 MiB on GPUs of 1.6."""
    with workshops.open(tmp_path, devices=4, memory_bytes=memory_bytes) as small:
        trained = small.train(job, plan, "cuda:0-3", priced=job == "huge", large=True)
        assert sum(weight.nbytes for weight in trained.weights.values()) > memory_bytes
        assert_alike(trained, small.train(job, "single", "cpu:0"), rtol=1e-4)


@pytest.mark.slow
def test_a_model_whose_code_runs_on_gpus_alone(shop: Workshop):
    """It is split there, and needs room there."""
    trained = shop.train("huge on GPUs alone", "pipeline=2", "cuda:0-1")
    assert_alike(trained, shop.train("huge", "single", "cpu:0"), rtol=1e-4)


@pytest.mark.slow
def test_a_gpu_that_is_too_small_is_named(workshops: Workshops, tmp_path: Path):
    """Before the run, as far as its memory is known; else where it ends, with exit code 3."""
    with workshops.open(tmp_path, devices=1, memory_bytes=8 << 20) as small:
        refused, ended = (
            small.ask(job, "single", "cuda:0", priced=True) for job in ("wide", "hungry")
        )
        assert (
            refused["kind"] == "PlanError"
            and refused["exit_code"] == 2
            and "doesn't fit" in refused["error"]
        )
        assert ended["exit_code"] == 3 and "cuda out of memory" in ended["error"].lower(), ended
        assert "ledger" in small.printed() or "MiB" in small.printed()


@pytest.mark.slow
def test_a_gpu_that_others_hold_is_too_small(workshops: Workshops, tmp_path: Path):
    """A run has what is free, and says so where that is too little."""
    with workshops.open(
        tmp_path, devices=1, memory_bytes=2 << 30, taken_bytes=(2 << 30) - (8 << 20)
    ) as small:
        refused = small.ask("wide", "single", "cuda:0", priced=True)
        assert refused["kind"] == "PlanError" and "doesn't fit" in refused["error"]
        assert (
            "cuda:0 has 0.0 GiB free of 2.0: the rest is held by processes the" in refused["error"]
        )
        assert refused["first_use"] is None


def test_the_device_is_cuda_to_torch(shop: Workshop):
    observed = shop.check("device")
    assert (
        observed["count"] == 4
        and observed["accelerator"] == "cuda"
        and observed["is_current"]
        and observed["elapsed"]
    )
    assert observed["allocated"] == [512, 512] and observed["free"] == [(80 << 30) - 512, 80 << 30]
    assert observed["pinned"] == [True, False] and observed["draws"] == [True, False]
    assert (
        observed["mixed"].endswith("found at least two devices, cuda:1 and cpu!")
        and "cuda:0" in observed["two"]
    )
    assert "invalid device ordinal" in observed["index"]
    assert "Expected a 'cuda' device type for generator but found 'cpu'" in observed["generator"]
    assert observed["memory"].startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 4096.00 GiB"
    )
    assert observed["autocast"] == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_memory_is_shared_until_it_is_written_to(shop: Workshop):
    """So that it is known, without a look at the device, what a forward has written to."""
    observed = shop.check("shared")
    assert observed.pop("nothing") == [0, False, 0, True]
    assert len(observed) == 7 and all(write == [0, True, 0, True] for write in observed.values()), (
        observed
    )


def test_reads_and_uploads_are_counted(shop: Workshop):
    observed = shop.check("counts")
    assert all(observed[name] == {"reads": 1} for name in ("item", "list", "if", "mask")), observed
    assert observed["arithmetic"] == {} and observed["wait"] == {"waits": 1}
    assert (
        observed["upload"]
        == observed["numbers"]
        == {"uploads": 1, "blocking_uploads": 1, "pageable_uploads": 1}
    )
    assert observed["upload later"] == {"uploads": 1}


def test_a_task_of_a_pool_has_the_whole_device(shop: Workshop):
    """What the task before left in cycles is freed, and its peak is forgotten: a trial's peak is its own."""
    large, small = shop.check("tasks")
    assert large == {"allocated": 0, "reserved": 0, "peak": 64 << 20}
    assert small == {"allocated": 0, "reserved": 0, "peak": 2 << 20}


def test_a_model_with_kernels_of_its_own_is_profiled_on_its_gpu(shop: Workshop):
    """In another process, and never for real on the CPU."""
    observed = shop.check("profiled")
    assert observed["here"] == [] and not observed["used"]
    assert observed["elsewhere"] == [*[["FakeTensor", "cpu"]] * 2, *[["Tensor", "cuda:1"]] * 2]
    assert observed["flops"][0] == observed["flops"][1] > 0 and observed["parameters"] == 4 * 72
    assert observed["notes"] == ["could not be run on fake tensors (RuntimeError: no such kernel)"]


@pytest.mark.slow
def test_plans_for_gpus_are_compared_beside_this_process(shop: Workshop):
    """Links are measured and named; the process that asks is left so that its forks can use GPUs."""
    observed = shop.check("planned")
    assert {"single", "data=2", "shard=2"} <= {
        row["plan"] for row in observed["plans"]
    } and observed["chosen"]
    assert any(
        "links between GPUs" in note and "measured between 2 GPUs" in note
        for note in observed["notes"]
    )
    assert (observed["used"], observed["fork"]) == (False, 2.0)


@pytest.mark.slow
def test_doctor_looks_at_gpus(shop: Workshop):
    """In forks, with deadlines: this process does not use them, and what hangs is named."""
    observed = shop.check("examined")
    assert observed["GPUs"] == ["ok", "4 x Pretended, 80.0 GiB"] and not observed["used"]
    assert observed["GPU links"][1].startswith("6 pairs by wires unknown, peer access, ")
    assert observed["GPU memory"][1].startswith("cuda:0 80.0 of 80.0 GiB free; cuda:1")
    assert observed["NCCL"][0] == "ok" and "two GPUs all-reduced within" in observed["NCCL"][1]
    assert (
        observed["NCCL that hangs"][0] == "bad"
        and "did not end it in 2 s" in observed["NCCL that hangs"][1]
    )
    assert "NCCL_P2P_DISABLE=1" in observed["NCCL that hangs"][2]
    assert observed["a look that hangs"] == "the process that was asked gave no answer within 0.5 s"


def test_what_a_used_process_leaves_its_forks(shop: Workshop):
    """Neither CUDA nor autograd, though the backward was of the CPU alone."""
    observed = shop.check("poisoned")
    assert "CUDA" in observed["use"] and "fork-based multiprocessing" in observed["backward"]


def test_pieces_that_make_tensors_are_priced_alike(shop: Workshop):
    on_cpu, on_gpu = shop.check("kept")
    assert on_cpu == on_gpu > 0


def test_what_a_workshop_printed_before_it_died_is_told(workshops: Workshops, tmp_path: Path):
    """To each later request."""
    with workshops.open(tmp_path) as shop:
        shop._connection.sendall(b"no request\n")
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"(?s)ended with 1 and printed: .*JSONDecodeError"
            ):
                shop.check("anything")
