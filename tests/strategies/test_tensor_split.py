"""Fused and stacked weights are cut so that what follows stays cut, and layers that hold parts draw for themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_models import Fused, Points, Stack, StackedExperts, job_of, laid_out
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.profile import profile_job
from paceline.runtime.feed import example_batch
from paceline.strategies.mesh import local_part
from paceline.strategies.stages.price import SplitJob
from paceline.strategies.tensor import run as tensor_run
from paceline.strategies.tensor.cut import Cut, cut_of_placement
from paceline.strategies.tensor.draws import apart
from paceline.strategies.tensor.piece import SplitPiece
from paceline.strategies.tensor.published import published
from tests.verify.verify_jobs import passes


@pytest.fixture
def small_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of few bytes are cut along their sequence, too."""
    monkeypatch.setattr(tensor_run, "SEQUENCE_BYTES", 0)


def cuts(stepper: Any) -> dict[str, tuple[int, int]]:
    """Dim and blocks of every weight of the blocks that is cut."""
    found = {name: cut_of_placement(p.placements[0]) for name, p in stepper.local_parameters.items()
             if name.startswith("blocks.0") and p.ndim > 1 and hasattr(p, "placements")}
    return {name.removeprefix("blocks.0."): (cut.dim, cut.blocks) for name, cut in found.items() if cut}


@pytest.mark.parametrize(("model", "expected"), [
    pytest.param(lambda: Stack(Fused()), {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2],
                                          "down.weight": [1, 1]}, marks=pytest.mark.slow),
    (lambda: Stack(Fused(view=True)),
     {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2], "down.weight": [1, 1]}),
    (lambda: Stack(StackedExperts()), {"up": [2, 2], "down": [2, 1]}),
])
def test_fused_and_stacked_weights(model: Callable[[], nn.Module], expected: dict[str, list[int]],
                                   run_ranks: Callable[..., Any]) -> None:
    """q, k and v of one product, gates, and experts in one tensor: columns block by block, then rows."""
    found = run_ranks(lambda context: cuts(laid_out(job_of(model), "tensor=2", context)), 2)

    assert found[0] == expected


@pytest.mark.sweep(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_splits_what_float32_splits(precision: str, run_ranks: Callable[..., Any]) -> None:
    """A split differs from the whole by the rounding of the dtype that products are computed in."""
    job = job_of(lambda: Stack(Fused()), precision=precision)

    found = run_ranks(lambda context: cuts(laid_out(job, "tensor=2", context)), 2)

    assert found[0] == {"qkv.weight": [0, 3], "o.weight": [1, 1], "gated.weight": [0, 2], "down.weight": [1, 1]}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["tensor=2", "shard=2 tensor=2"])
@pytest.mark.parametrize("model", [lambda: Stack(StackedExperts()), lambda: Stack(Fused()),
                                   lambda: Stack(Fused(view=True))])
def test_they_compute_what_one_device_computes(model: Callable[[], nn.Module], plan: str,
                                               small_sequences: None) -> None:
    """Alone and in shards, on parts of the sequence."""
    passes(job_of(model, clip=0.5), plan)


@pytest.mark.slow  # as the models of tests/verify/test_split.py, whose values are small
@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2"])
def test_they_compute_the_same_on_whole_sequences(plan: str) -> None:
    """Values of few bytes are not cut along their sequence."""
    passes(job_of(lambda: Stack(Fused()), clip=0.5), plan)


def test_a_run_with_blocks_goes_on_elsewhere(tmp_path: Path) -> None:
    """Weights and moments that are cut block by block are saved under their places in the whole."""
    def job(steps: int) -> paceline.Job:
        return job_of(lambda: Stack(Fused()), steps=steps)

    paceline.train(job(4), "single", devices="cpu:0", run=tmp_path / "whole")
    paceline.train(job(2), "tensor=2", devices="cpu:0,cpu:1", run=tmp_path / "moved")
    paceline.train(job(3), "single", devices="cpu:0", run=tmp_path / "moved", resume=True)
    paceline.train(job(4), "tensor=2", devices="cpu:0,cpu:1", run=tmp_path / "moved", resume=True)

    from safetensors.torch import load_file
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "moved" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


def test_a_rank_has_its_part_of_every_block() -> None:
    """The first of two ranks has the first half of each."""
    class Mesh:
        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return 1

    whole = torch.arange(12)

    assert Cut(0, 3).local_slice(whole, Mesh()).tolist() == [2, 3, 6, 7, 10, 11]  # type: ignore[arg-type]
    assert Cut(0).local_slice(whole, Mesh()).tolist() == [6, 7, 8, 9, 10, 11]  # type: ignore[arg-type]


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
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64),
                                                   nn.Dropout(0.5))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks[0](x)
        return found


class _Masks(TorchFunctionMode):
    """Notes what each dropout of a rank's own program drops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.dropout.default:
            self.seen.append((found == 0).int().tolist())
        return found


def test_dropout_masks(run_ranks: Callable[..., Any]) -> None:
    """Ranks drop other ones of the features that they share out, and the same ones of what each of them has."""
    def body(context: Any) -> list[Any]:
        stepper = laid_out(job_of(Dropped, loss=lambda output, target: output.square().mean()), "tensor=2", context)
        batch = example_batch(stepper.job, 2)
        stepper.layout.forward(batch)  # records
        torch.manual_seed(1)
        with _Masks() as masks:
            stepper.layout.forward(batch)
        return masks.seen

    first, second = run_ranks(body, 2)
    assert len(first) == 2
    assert first[0] != second[0]
    assert first[1] == second[1]


def kept_bytes(stepper: Any) -> int:
    """What a rank keeps between forward and backward of four samples, without weights."""
    weights = {local_part(p).untyped_storage().data_ptr() for p in stepper.local_parameters.values()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = local_part(tensor.detach()).untyped_storage()
        seen[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        kept.append(tensor)
        return tensor

    stepper.layout.forward(example_batch(stepper.job, 4))  # captures
    kept: list[torch.Tensor] = []  # alive, so that no two have one address
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stepper.layout.forward(example_batch(stepper.job, 4))
    return sum(seen.values())


def test_what_lies_between_is_cut_along_the_sequence(run_ranks: Callable[..., Any], small_sequences: None,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm and residual sums of a part of the sequence are kept; where it doesn't divide they are whole."""
    job = job_of(lambda: Stack(Fused(width=24), width=24))

    def body(context: Any) -> tuple[list[str], int]:
        stepper = laid_out(job, "tensor=2", context)
        return stepper.layout.report.document["sequence"], kept_bytes(stepper)

    with_parts = run_ranks(body, 2)[0]
    monkeypatch.setattr(SplitPiece, "_has_sequence", lambda self, value: False)
    without = run_ranks(body, 2)[0]

    assert with_parts[0] == ["blocks.0"] and without[0] == []
    # Of the norm half of its input of 4 x 6 x 24 and of the mean and deviation of 4 x 6, in float32.
    assert without[1] - with_parts[1] == 4 * (4 * 6 * 24 + 2 * 4 * 6) // 2


def parts_of(stepper: Any, samples: int = 4) -> list[tuple[str, tuple[int, ...]]]:
    """Values between pieces of which a rank has a part, each with the shape of that."""
    captured = stepper.layout._staged(example_batch(stepper.job, samples)).capture
    names = {name for piece in captured.pieces for name in piece.parts}
    return [(name, captured.values[name].shape) for name in captured.values if name in names]


def test_values_between_blocks_stay_cut(run_ranks: Callable[..., Any], small_sequences: None) -> None:
    """What one block gives to the next is cut; what a module without such a cut gives or takes is whole. Each border
    spares a gathering in forward and one in backward."""
    def body(context: Any, blocks: int) -> Any:
        job = job_of(lambda: Stack(*(Fused(width=24) for _ in range(blocks)), width=24))
        stepper, batch = laid_out(job, "tensor=2", context), example_batch(job, 4)
        stepper.layout.forward(batch)  # records
        with _Counted() as forward:
            output = stepper.layout.forward(batch)
        with torch.autograd.set_multithreading_enabled(False), _Counted() as backward:
            output.square().mean().backward()
        return [list(shape) for _, shape in parts_of(stepper)], forward.exchanges, backward.exchanges

    one, two = run_ranks(lambda context: [body(context, blocks) for blocks in (1, 2)], 2)[0]

    assert [shapes for shapes, *_ in (one, two)] == [[], [[4, 3, 24]]]
    assert [two[at] - one[at] for at in (1, 2)] == [4, 5]


class InPlace(Fused):
    """A block that changes what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def test_values_that_can_not_be_cut_pass_whole(run_ranks: Callable[..., Any], small_sequences: None) -> None:
    """What is edited in place must be one tensor."""
    job = job_of(lambda: Stack(Fused(width=16, heads=4), InPlace(width=16, heads=4), width=16))

    assert run_ranks(lambda context: parts_of(laid_out(job, "tensor=2", context)), 2)[0] == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["pipeline=2 tensor=2", "tensor=2", "pipeline=2 tensor=2 schedule=zero-bubble",
                                  "tensor=2 recompute=full", "shard=2 tensor=2"])
def test_cut_values_between_blocks_compute_the_same(plan: str, small_sequences: None) -> None:
    """Also where they pass from rank to rank, and where blocks are computed again."""
    passes(job_of(lambda: Stack(Fused(width=24), Fused(width=24), width=24), clip=0.5), plan)


def test_a_sequence_that_does_not_divide(run_ranks: Callable[..., Any], small_sequences: None) -> None:
    """Five places are no parts for two ranks: what lies inside of blocks and between them is computed whole."""
    points = Points()
    job = job_of(lambda: Stack(Fused(width=24), Fused(width=24), width=24),
                 data=[(x[:5], target) for x, target in map(points.__getitem__, range(len(points)))])

    def body(context: Any) -> Any:
        stepper = laid_out(job, "tensor=2", context)
        return stepper.layout.report.document["sequence"], parts_of(stepper)

    assert run_ranks(body, 2)[0] == [[], []]


class Flat(nn.Module):
    """Products of flat tokens with a bias, as GPT-2 of Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Parameter(torch.randn(24, 32) / 5), nn.Parameter(torch.randn(32, 24) / 5)
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(torch.addmm(self.up_bias, self.norm(x).view(-1, 24), self.up))
        return x + torch.addmm(self.down_bias, made, self.down).view(x.shape)


@pytest.mark.parametrize(("samples", "expected"), [
    pytest.param(32, ["blocks.0", "blocks.1"], marks=pytest.mark.slow), (31, [])])
def test_values_of_few_bytes_are_not_cut_along_the_sequence(run_ranks: Callable[..., Any], samples: int,
                                                            expected: list[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """What a micro-batch has counts: samples x 6 places x 24 features x 4 bytes."""
    monkeypatch.setattr(tensor_run, "SEQUENCE_BYTES", 32 * 6 * 24 * 4)
    job = job_of(lambda: Stack(Fused(width=24), Fused(width=24), width=24), batch=samples)

    found = run_ranks(lambda context: laid_out(job, "tensor=2", context).layout.report.document["sequence"], 2)

    assert found[0] == expected


class _Counted(TorchDispatchMode):
    """Counts this thread's collectives and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.exchanges += func.namespace == "c10d"
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_a_block_exchanges_four_times(run_ranks: Callable[..., Any]) -> None:
    """Two sums after rows in forward, two before columns in backward, as in Megatron-LM, where no sequence is cut. They
    take the memory of the products that they sum."""
    def body(context: Any, blocks: int) -> list[int]:
        job = job_of(lambda: Stack(*(Fused(width=24) for _ in range(blocks)), width=24))
        stepper, batch = laid_out(job, "tensor=2", context), example_batch(job, 4)
        stepper.layout.forward(batch)  # records
        with _Counted() as forward:
            output = stepper.layout.forward(batch)
        with torch.autograd.set_multithreading_enabled(False), _Counted() as backward:
            output.square().mean().backward()
        return [forward.exchanges, backward.exchanges, forward.copies + backward.copies]

    one, two = run_ranks(lambda context: [body(context, blocks) for blocks in (1, 2)], 2)[0]

    assert [after - before for before, after in zip(one, two, strict=True)] == [2, 2, 0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sequence_bytes", [0, 2**30])
@pytest.mark.parametrize("model", [
    lambda: Stack(Flat(), width=24), lambda: Stack(Fused(width=24), Fused(width=24), width=24),
    lambda: Stack(StackedExperts(width=24), width=24)])
def test_a_price_counts_what_ranks_run_and_send(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                model: Any, sequence_bytes: int) -> None:
    """The same weights are split, the same messages are sent, and products are those of one rank's parts."""
    monkeypatch.setattr(tensor_run, "SEQUENCE_BYTES", sequence_bytes)
    job = job_of(model)

    def body(context: Any) -> Any:
        stepper, batch = laid_out(job, "tensor=2", context), example_batch(job, 4)
        stepper.layout.forward(batch)  # records
        with _Counted() as forward:
            output = stepper.layout.forward(batch)
        with torch.autograd.set_multithreading_enabled(False), _Counted() as backward:
            output.square().mean().backward()
        held = sum(local_part(p).numel() * 4 for p in stepper.local_parameters.values())
        return [forward.exchanges, backward.exchanges, held]

    profile = profile_job(job)
    split = SplitJob(job, profile)
    [rank] = split.ranks(paceline.Plan.parse("tensor=2"), (), microbatch_samples=4)
    sent = [segment.tensor.counted for segment in rank.profile.segments if segment.tensor is not None]
    assert run_ranks(body, 2)[0] == [sum(len(ahead) for ahead, _ in sent), sum(len(back) for _, back in sent),
                                     rank.profile.parameter_bytes]

    whole = sum(sum(p.flops for p in segment.forward.products) for segment in split.priced(4)[1].values())
    own = sum(sum(p.flops for p in segment.forward.products) for segment in rank.profile.segments)
    assert own < 0.6 * whole


def test_flat_tokens_get_their_sequence_back(run_ranks: Callable[..., Any], small_sequences: None) -> None:
    """Their sums are scattered once they have it, with the bias added once."""
    job = job_of(lambda: Stack(Flat(), Flat(), width=24))

    found = run_ranks(lambda context: laid_out(job, "tensor=2", context).layout.report.document["sequence"], 2)

    assert found[0] == ["blocks.0", "blocks.1"]


class Planned(nn.Module):
    """Two plain layers with a plan that no derivation would find."""

    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)
        self.tp_plan = tp_plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


PLANS = [({}, {"up.weight": (0, 1), "down.weight": (1, 1)}),
         ({"blocks.*.up": "rowwise", "blocks.*.down": "colwise"}, {"up.weight": (1, 1), "down.weight": (0, 1)}),
         ({"blocks.*.up": "replicate"}, {"down.weight": (0, 1)}),
         ({"blocks.*.up.weight": "colwise", "blocks.*.nothing": "rowwise", "blocks.*.down": "unheard_of"},
          {"up.weight": (0, 1), "down.weight": (1, 1)})]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("plan", "expected"), PLANS)
def test_a_plan_that_the_model_brings(plan: dict[str, str], expected: dict[str, tuple[int, int]],
                                      run_ranks: Callable[..., Any]) -> None:
    """Its cuts are taken, where they say anything; they cost speed at worst."""
    def model() -> nn.Module:
        made = Stack(Planned(plan), Planned(plan), width=24)
        made.tp_plan = plan
        return made

    found = run_ranks(lambda context: cuts(laid_out(job_of(model), "tensor=2", context)), 2)
    assert found[0] == {name: list(cut) for name, cut in expected.items()}

    passes(job_of(model), "tensor=2")


def test_transformers_plans_are_read() -> None:
    """Patterns of modules and of parameters, with a base model's prefix."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)
    found = published(transformers.LlamaForCausalLM(config))

    assert found["model.layers.1.self_attn.q_proj.weight"] == found["lm_head.weight"] == "columns"
    assert found["model.layers.0.mlp.down_proj.weight"] == "rows"
    assert "model.norm.weight" not in found
    assert published(nn.Linear(2, 2)) == {}


@pytest.mark.parametrize(("plan", "ranks", "groups"), [
    pytest.param("tensor=2", 2, 1, marks=pytest.mark.slow), ("data=2 tensor=2", 4, 3)])
def test_a_split_model_adds_no_process_groups(plan: str, ranks: int, groups: int,
                                              run_ranks: Callable[..., Any]) -> None:
    """There are that of all ranks and those of axes that are not all of them: a group has threads and connections."""
    def body(context: Any) -> int:
        laid_out(job_of(lambda: Stack(Fused())), plan, context)
        return len(torch.distributed.distributed_c10d._world.pg_map)

    assert run_ranks(body, ranks) == [groups] * ranks
