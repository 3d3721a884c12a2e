"""Fused and stacked weights are cut so that what follows stays cut, and layers that hold parts draw for themselves."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from jobs.split_layers import Fused, Mlp, Points, Stack, StackedExperts, laid_out, points_job
from jobs.stateful import assert_alike, by_one_device
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.cluster.cluster import Cluster
from paceline.launch.local.ranks import run_local
from paceline.model.cost.trace import profile_job
from paceline.strategies.mesh import local_part
from paceline.strategies.stages import layout as stages_layout
from paceline.strategies.stages.price import SplitJob
from paceline.strategies.tensor import run as tensor_run
from paceline.strategies.tensor.cut import Cut, cut_of_placement
from paceline.strategies.tensor.draws import apart
from paceline.training.feed import example_batch

LOOKS: dict[str, Callable[[Any], Any]] = {}


def look(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Something that each of two ranks sees, for `seen`."""
    LOOKS[take.__name__] = take
    return take


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """What all looks give, on each rank. They are taken in one launch, as the first capture of a process is slow."""

    def body(context: Any) -> dict[str, Any]:
        return {name: _taken(take, context) for name, take in LOOKS.items()}

    looks_by_rank = run_local(body, Cluster.local("cpu:0-1").devices)
    return {name: [of_rank[name] for of_rank in looks_by_rank] for name in LOOKS}


def _taken(take: Callable[[Any], Any], context: Any) -> Any:
    try:
        return take(context)
    except Exception:
        return traceback.format_exc()


def split(
    context: Any,
    model: Callable[[], nn.Module],
    *,
    sequence_bytes: int | None = None,
    **options: Any,
) -> Any:
    """The stepper of a rank of tensor=2. sequence_bytes: from which on values are cut along their sequence, too."""
    least = tensor_run.SEQUENCE_BYTES if sequence_bytes is None else sequence_bytes
    with patch.object(tensor_run, "SEQUENCE_BYTES", least):
        return laid_out(points_job(model, **options), "tensor=2", context)


@pytest.fixture
def small_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of few bytes are cut along their sequence, too."""
    monkeypatch.setattr(tensor_run, "SEQUENCE_BYTES", 0)


def cuts(stepper: Any) -> dict[str, tuple[int, int]]:
    """Dim and blocks of every weight of the blocks that is cut."""
    cut_by_name = {
        name: cut_of_placement(p.placements[0])
        for name, p in stepper.local_parameters.items()
        if name.startswith("blocks.0") and p.ndim > 1 and hasattr(p, "placements")
    }
    return {
        name.removeprefix("blocks.0."): (cut.dim, cut.blocks)
        for name, cut in cut_by_name.items()
        if cut
    }


@look
def cuts_of_blocks(context: Any) -> dict[str, Any]:
    return {
        "view": cuts(split(context, lambda: Stack(Fused(view=True)))),
        "experts": cuts(split(context, lambda: Stack(StackedExperts()))),
        "autocast": cuts(split(context, lambda: Stack(Fused()), precision="bf16")),
    }


FUSED = {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2], "down.weight": [1, 1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"), [("view", FUSED), ("experts", {"up": [2, 2], "down": [2, 1]})]
)
def test_fused_and_stacked_weights(
    model: str, expected: dict[str, list[int]], seen: dict[str, Any]
) -> None:
    """q, k and v of one product, gates, and experts in one tensor: columns block by block, then rows."""
    assert seen["cuts_of_blocks"][0][model] == expected


def test_autocast_splits_what_float32_splits(seen: dict[str, Any]) -> None:
    """A split differs from the whole by the rounding of the dtype that products are computed in."""
    assert seen["cuts_of_blocks"][0]["autocast"] == FUSED
    assert seen["of_a_block"][0]["whole"]["cuts"] == FUSED


@pytest.mark.slow
def test_fp16_splits_what_float32_splits(run_ranks: Callable[..., Any]) -> None:
    cuts_by_rank = run_ranks(
        lambda context: cuts(split(context, lambda: Stack(Fused()), precision="fp16")), 2
    )
    assert cuts_by_rank[0] == FUSED


def ends_alike(model: Callable[[], nn.Module], plan: str, folder: Path) -> None:
    """Three steps in float64 end with one device's weights. Micro-batches of two samples are captured once."""
    assert_alike(
        points_job(model, clip=0.5, precision="float64", batch=2 if plan == "tensor=2" else 8),
        plan,
        folder,
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", "shard=2 tensor=2"])
@pytest.mark.parametrize(
    "model",
    [lambda: Stack(StackedExperts()), lambda: Stack(Fused()), lambda: Stack(Fused(view=True))],
)
def test_they_compute_what_one_device_computes(
    model: Callable[[], nn.Module], plan: str, tmp_path: Path, small_sequences: None
) -> None:
    """Alone and in shards, on parts of the sequence."""
    ends_alike(model, plan, tmp_path)


@pytest.mark.slow  # as the models of tests/proof/test_split.py, whose values are small
@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2"])
def test_they_compute_the_same_on_whole_sequences(plan: str, tmp_path: Path) -> None:
    """Values of few bytes are not cut along their sequence."""
    ends_alike(lambda: Stack(Fused()), plan, tmp_path)


class Gated(nn.Module):
    """Gate and input of an MLP in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.down = nn.Linear(12, 16), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.gated(x).chunk(2, -1)
        return x + self.down(torch.sigmoid(gate) * value)


@pytest.mark.slow
@pytest.mark.parametrize("block", [Gated, pytest.param(Fused, marks=pytest.mark.slow)])
def test_a_run_with_blocks_goes_on_elsewhere(
    block: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Weights and moments that are cut block by block are saved under their places in the whole."""

    def job(steps: int) -> paceline.Job:
        return points_job(lambda: Stack(block()), steps=steps, precision="float64")

    paceline.train(job(1), "single", devices="cpu:0", run=tmp_path)
    paceline.train(job(3), "tensor=2", devices="cpu:0,cpu:1", run=tmp_path, resume=True)
    paceline.train(job(4), "single", devices="cpu:0", run=tmp_path, resume=True)

    from safetensors.torch import load_file

    expected = by_one_device(job(4))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def test_a_rank_has_its_part_of_every_block() -> None:
    """The first of two ranks has the first half of each."""

    whole = torch.arange(12)

    assert Cut(0, 3).local_slice(whole, 1, 2).tolist() == [2, 3, 6, 7, 10, 11]
    assert Cut(0).local_slice(whole, 1, 2).tolist() == [6, 7, 8, 9, 10, 11]


def test_draws_apart_and_together() -> None:
    """Ranks differ inside, agree outside, and repeat themselves."""

    def drawn(rank: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(5)
        with apart(rank, torch.device("cpu")):
            inside = torch.rand(3)
        return inside.tolist(), torch.rand(3).tolist()

    assert drawn(0)[0] != drawn(1)[0]
    assert drawn(0)[1] == drawn(1)[1]
    assert drawn(1) == drawn(1)


class Dropped(nn.Module):
    """Dropout on the hidden features, which are cut, and on the result, which is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks[0](x)
        return output


class _Masks(TorchFunctionMode):
    """Notes what each dropout of a rank's own program drops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.dropout.default:
            self.seen.append((result == 0).int().tolist())
        return result


@look
def dropped(context: Any) -> dict[str, Any]:
    stepper = laid_out(
        points_job(Dropped, loss=lambda output, target: output.square().mean()), "tensor=2", context
    )
    batch, counts = example_batch(stepper.job, 2), captures_after(stepper, (2, 3))
    torch.manual_seed(1)
    with _Masks() as masks:
        stepper.layout.forward(batch)
    return {"masks": masks.seen, "captures": counts}


def captures_after(stepper: Any, samples: Sequence[int]) -> list[int]:
    """How many captures there are before a forward, and after forwards of so many samples."""
    counts = [len(stepper.layout.captures)]
    for count in samples:
        stepper.layout.forward(example_batch(stepper.job, count))
        counts.append(len(stepper.layout.captures))
    return counts


@look
def of_many_shapes(context: Any) -> list[int]:
    stepper = laid_out(points_job(Mlp), "tensor=2", context)
    with patch.object(stages_layout, "MOST_CAPTURES", 3):
        return captures_after(stepper, (3, 4, 5, 3, 6, 3))


def test_few_captures_are_kept(seen: dict[str, Any]) -> None:
    """Of all shapes; the one that was used last stays."""
    assert seen["of_many_shapes"] == [[1, 2, 3, 3, 3, 3, 3]] * 2


def test_dropout_masks(seen: dict[str, Any]) -> None:
    """Ranks drop other ones of the features that they share out, and the same ones of what each of them has."""
    first, second = (of_rank["masks"] for of_rank in seen["dropped"])
    assert len(first) == 2
    assert first[0] != second[0]
    assert first[1] == second[1]


def kept_bytes(stepper: Any) -> int:
    """What a rank keeps between forward and backward of two samples, without weights."""
    weights = {
        local_part(p).untyped_storage().data_ptr() for p in stepper.local_parameters.values()
    }
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = local_part(tensor.detach()).untyped_storage()
        seen[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        kept.append(tensor)
        return tensor

    batch = example_batch(stepper.job, 2)
    stepper.layout.forward(batch)  # records
    kept: list[torch.Tensor] = []  # alive, so that no two have one address
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stepper.layout.forward(batch)
    return sum(seen.values())


def parts_of(stepper: Any, samples: int = 2) -> list[tuple[str, tuple[int, ...]]]:
    """Values between pieces of which a rank has a part, each with the shape of that."""
    captured = stepper.layout._staged(example_batch(stepper.job, samples)).capture
    names = {name for piece in captured.pieces for name in piece.parts}
    return [(name, captured.values[name].shape) for name in captured.values if name in names]


class _Counted(TorchDispatchMode):
    """Counts this thread's collectives and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges, self.copies = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.exchanges += func.namespace in ("c10d", "c10d_shared")  # or over gloo: all-to-all
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def exchanged(stepper: Any) -> tuple[_Counted, _Counted]:
    """In forward and in backward of two samples."""
    batch = example_batch(stepper.job, 2)
    stepper.layout.forward(batch)  # records
    with _Counted() as forward:
        output = stepper.layout.forward(batch)
    with torch.autograd.set_multithreading_enabled(False), _Counted() as backward:
        output.square().mean().backward()
    return forward, backward


@look
def of_a_block(context: Any) -> dict[str, dict[str, Any]]:
    """Where the sequence is cut, where it is not, and of a model without the block."""

    def described(blocks: int, sequence_bytes: int | None) -> dict[str, Any]:
        stepper = split(
            context,
            lambda: Stack(*(Fused(width=24) for _ in range(blocks)), width=24),
            sequence_bytes=sequence_bytes,
        )
        forward, backward = exchanged(stepper)
        return {
            "sequence": stepper.layout.report.document["sequence"],
            "cuts": cuts(stepper),
            "kept": kept_bytes(stepper),
            "copies": forward.copies + backward.copies,
            "exchanges": [forward.exchanges, backward.exchanges],
        }

    return {"cut": described(1, 0), "whole": described(1, None), "none": described(0, None)}


class Constant(nn.Module):
    """Adds a tensor of its forward's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x) + torch.tensor([1.0, 2.0, 3.0])
        return output


@look
def with_a_constant(context: Any) -> list[int]:
    return captures_after(laid_out(points_job(Constant), "tensor=2", context), (2, 2))


def test_two_samples_are_captured_once(seen: dict[str, Any]) -> None:
    """The example that a model is split by has two. What the model's first runs may have changed is made anew."""
    assert seen["dropped"][0]["captures"] == [1, 1, 2]
    assert seen["with_a_constant"][0] == [0, 1, 1]


def test_what_lies_between_is_cut_along_the_sequence(seen: dict[str, Any]) -> None:
    """A norm and residual sums of a part of the sequence are kept."""
    with_parts, without = (seen["of_a_block"][0][name] for name in ("cut", "whole"))

    assert with_parts["sequence"] == ["blocks.0"] and without["sequence"] == []
    # Of the norm half of its input of 2 x 6 x 24 and of the mean and deviation of 2 x 6, in float32.
    assert without["kept"] - with_parts["kept"] == 4 * (2 * 6 * 24 + 2 * 2 * 6) // 2


def test_a_block_exchanges_four_times(seen: dict[str, Any]) -> None:
    """Two sums after rows in forward, two before columns in backward, as in Megatron-LM, where no sequence is cut. They
    take the memory of the products that they sum."""
    none, whole = (seen["of_a_block"][0][name] for name in ("none", "whole"))

    assert [
        after - before for before, after in zip(none["exchanges"], whole["exchanges"], strict=True)
    ] == [2, 2]
    assert whole["copies"] == none["copies"]


class UpAndDown(nn.Module):
    """Two plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class InPlace(UpAndDown):
    """A block that changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def of_two(second: type[UpAndDown] = UpAndDown) -> nn.Module:
    return Stack(UpAndDown(), second(), width=24)


def exchanges_of(stepper: Any) -> list[float]:
    return [counted.exchanges for counted in exchanged(stepper)]


@look
def at_a_border(context: Any) -> dict[str, Any]:
    """Exchanges of one block, and of two, and the values that pass between these in parts."""
    one_block, two_blocks = (
        split(context, model, sequence_bytes=0)
        for model in (lambda: Stack(UpAndDown(), width=24), of_two)
    )
    return {
        "exchanges": [exchanges_of(one_block), exchanges_of(two_blocks)],
        "parts": described_parts(two_blocks),
        "cuts": cuts(one_block),
    }


def described_parts(stepper: Any) -> list[Any]:
    """Where the sequence is cut, and the shapes of what passes in parts."""
    return [stepper.layout.report.document["sequence"], [shape for _, shape in parts_of(stepper)]]


def test_values_between_blocks_stay_cut(seen: dict[str, Any]) -> None:
    """What one block gives to the next is cut; what a module without such a cut gives or takes is whole. Each border
    spares a gathering in forward and one in backward."""
    observed = seen["at_a_border"][0]
    one_block, two_blocks = observed["exchanges"]

    assert observed["cuts"] == {"up.weight": [0, 1], "down.weight": [1, 1]}
    assert observed["parts"] == [["blocks.0", "blocks.1"], [[2, 3, 24]]]
    assert [after - before for before, after in zip(one_block, two_blocks, strict=True)] == [2, 3]


@look
def parts_of_two(context: Any) -> dict[str, Any]:
    """Of one that is edited in place, and of five places."""
    points = Points()
    five = [(x[:5], target) for x, target in map(points.__getitem__, range(len(points)))]
    return {
        "edited": described_parts(split(context, lambda: of_two(InPlace), sequence_bytes=0)),
        "five": described_parts(split(context, of_two, sequence_bytes=0, data=five)),
    }


def test_values_that_can_not_be_cut_pass_whole(seen: dict[str, Any]) -> None:
    """What is edited in place must be one tensor. Five places are no parts for two ranks: what lies inside of blocks
    and between them is computed whole."""
    observed = seen["parts_of_two"][0]

    assert observed["edited"] == [["blocks.0", "blocks.1"], []]
    assert observed["five"] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 tensor=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "tensor=2",
                "pipeline=2 tensor=2 schedule=zero-bubble",
                "tensor=2 recompute=full",
                "shard=2 tensor=2",
            )
        ),
    ],
)
def test_cut_values_between_blocks_compute_the_same(
    plan: str, tmp_path: Path, small_sequences: None
) -> None:
    """Also where they pass from rank to rank, and where blocks are computed again."""
    ends_alike(of_two, plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 tensor=2",
        "tensor=2",
        "pipeline=2 tensor=2 schedule=zero-bubble",
        "tensor=2 recompute=full",
        "shard=2 tensor=2",
    ],
)
def test_cut_values_between_blocks_of_attention_compute_the_same(
    plan: str, tmp_path: Path, small_sequences: None
) -> None:
    ends_alike(lambda: Stack(Fused(width=24), Fused(width=24), width=24), plan, tmp_path)


class Flat(nn.Module):
    """Products of flat tokens with a bias, as GPT-2 of Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = (
            nn.Parameter(torch.randn(24, 32) / 5),
            nn.Parameter(torch.randn(32, 24) / 5),
        )
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(torch.addmm(self.up_bias, self.norm(x).view(-1, 24), self.up))
        return x + torch.addmm(self.down_bias, made, self.down).view(x.shape)


@look
def of_few_and_more_bytes(context: Any) -> dict[str, Any]:
    few, more = (
        split(context, PRICED["flat"], sequence_bytes=32 * 6 * 24 * 4, batch=samples)
        for samples in (31, 32)
    )
    return {
        "sequences": [stepper.layout.report.document["sequence"] for stepper in (few, more)],
        "ran": run_and_sent(more),
    }


def test_values_of_few_bytes_are_not_cut_along_the_sequence(seen: dict[str, Any]) -> None:
    """What a micro-batch has counts: samples x 6 places x 24 features x 4 bytes. Flat tokens get their sequence back:
    their sums are scattered once they have it, with the bias added once."""
    assert seen["of_few_and_more_bytes"][0]["sequences"] == [[], ["blocks.0"]]


PRICED: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: Stack(Flat(), width=24),
    "fused": lambda: Stack(Fused(width=24), Fused(width=24), width=24),
    "experts": lambda: Stack(StackedExperts(width=24), width=24),
}


def run_and_sent(stepper: Any) -> list[int]:
    forward, backward = exchanged(stepper)
    weight_bytes = sum(local_part(p).numel() * 4 for p in stepper.local_parameters.values())
    return [forward.exchanges, backward.exchanges, weight_bytes]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_bytes", [0, pytest.param(2**30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["flat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fused", "experts"))]
)
def test_a_price_counts_what_ranks_run_and_send(
    run_ranks: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    name: str,
    sequence_bytes: int,
) -> None:
    """The same weights are split, the same messages are sent, and products are those of one rank's parts."""
    monkeypatch.setattr(tensor_run, "SEQUENCE_BYTES", sequence_bytes)
    ran = (
        [of_rank["ran"] for of_rank in request.getfixturevalue("seen")["of_few_and_more_bytes"]]
        if name == "flat" and not sequence_bytes
        else run_ranks(lambda context: run_and_sent(split(context, PRICED[name])), 2)
    )

    job = points_job(PRICED[name])
    profile = profile_job(job)
    pieces = SplitJob(job, profile)
    [rank] = pieces.ranks(paceline.Plan.parse("tensor=2"), (), microbatch_samples=2)
    sent = [
        segment.tensor.counted for segment in rank.profile.segments if segment.tensor is not None
    ]
    assert ran[0] == [
        sum(len(ahead) for ahead, _ in sent),
        sum(len(back) for _, back in sent),
        rank.profile.parameter_bytes,
    ]

    whole = sum(
        sum(p.flops for p in segment.forward.products) for segment in pieces.priced(2)[1].values()
    )
    rank_flops = sum(
        sum(p.flops for p in segment.forward.products) for segment in rank.profile.segments
    )
    assert rank_flops < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "ranks", "groups"),
    [pytest.param("tensor=2", 2, 1, marks=pytest.mark.slow), ("data=2 tensor=2", 4, 3)],
)
def test_a_split_model_adds_no_process_groups(
    plan: str, ranks: int, groups: int, run_ranks: Callable[..., Any]
) -> None:
    """There are that of all ranks and those of axes that are not all of them: a group has threads and connections."""

    def body(context: Any) -> int:
        laid_out(points_job(Mlp), plan, context)
        return len(torch.distributed.distributed_c10d._world.pg_map)

    assert run_ranks(body, ranks) == [groups] * ranks
