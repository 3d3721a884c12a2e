"""Blocks that are alike are traced once, in memory that doesn't grow with the model, at the price of all of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.flops import forward_flops
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.model.cost import trace
from paceline.model.cost.blocks import FEWEST, alike_blocks
from paceline.model.cost.profile import Parameter, Profile, Segment, folded
from paceline.model.cost.trace import profile_job
from paceline.planner.estimate import estimate
from paceline.planner.pieces import LazyPieces
from paceline.planner.problem import PlanningProblem
from paceline.strategies.plan import Plan
from paceline.strategies.stages.layers import layered
from paceline.strategies.stages.price import SplitJob

WORDS, LENGTH = 64, 16


class Block(nn.Module):
    """A layer of a Llama: attention with a mask, and a gated MLP."""

    def __init__(self, number: int, width: int, rank: int = 0) -> None:
        super().__init__()
        self.number, self.path = number, f"layers.{number}.attention"
        self.options = {"target": f"layers.{number}.out"}  # as peft keeps it
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )
        if rank:
            self.requires_grad_(False)
            self.low, self.high = (
                nn.Linear(width, rank, bias=False),
                nn.Linear(rank, 3 * width, bias=False),
            )

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        h = self.norms[0](x)
        h = self.qkv(h) + (self.high(self.low(h)) if hasattr(self, "low") else 0.0)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in h.chunk(3, dim=-1))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + scale * self.down(F.silu(gate) * up)


class Small(nn.Module):
    """A layer of one product, where what is in a layer says nothing."""

    def __init__(self, number: int, width: int, rank: int = 0) -> None:
        super().__init__()
        self.number, self.path = number, f"layers.{number}.linear"
        self.linear = nn.Linear(width, width)
        if rank:
            self.requires_grad_(False)
            self.low, self.high = (
                nn.Linear(width, rank, bias=False),
                nn.Linear(rank, width, bias=False),
            )

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        adapted = self.high(self.low(x)) if hasattr(self, "low") else 0.0
        return x + scale * F.silu(self.linear(x) + adapted)


class Llama(nn.Module):
    """rank: of what is trained beside frozen matrices; 0 trains everything. scales: of each layer's MLP."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 32,
        rank: int = 0,
        scales: tuple[float, ...] = (),
        block: type[Block] | type[Small] = Block,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList([block(number, width, rank) for number in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)
        self.scales = scales or (1.0,) * layers
        for module in (self.embed, self.norm, self.head) if rank else ():
            module.requires_grad_(False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = mask[:, None, None, :].bool() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.embed(ids)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x, seen, scale=scale)
        return self.head(self.norm(x))


class ByValue(Llama):
    """Looks at its mask."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool((mask == 0).all()) or int(mask.sum().item()) < 0:
            raise ValueError("nothing is seen")
        return super().forward(ids, mask)


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        ids = torch.arange(LENGTH) % WORDS
        labels = ids.clone()
        labels[:3] = -100
        return {"ids": ids, "mask": torch.ones(LENGTH, dtype=torch.long)}, labels


def summed(out: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum"), (
        labels != -100
    ).sum()


def make_job(model: Any = Llama, **changes: Any) -> Job:
    given = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "batch": 16,
        "steps": 1,
        **changes,
    }
    return Job(model=model, data=Data(), loss=summed, **given)


def unrolled(job: Job) -> Profile:
    """With every block run."""
    with trace.kept_generators():
        runs = trace._fake_runs(job, trace.first_items(job.data, 2), trace.fake_model(job))
        return trace._fit(runs, (), trace.cast_parameters(job))


def same(profile: Profile, other: Profile) -> None:
    for field in fields(Profile):
        if not field.name.startswith("_"):
            assert getattr(profile, field.name) == getattr(other, field.name), field.name


UNLIKE = (1, 2, 3, 4, 7, 8, 9)
OPTIMIZERS = {
    "adam": lambda named: torch.optim.AdamW(named),
    "foreach": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_price_is_that_of_every_block(rank: int, precision: str, optimizer: str):
    """To the byte and FLOP: segments, gradients, state, casts and the update, also beside frozen weights."""
    job = make_job(
        lambda: Llama(rank=rank), precision=precision, optimizer=OPTIMIZERS[optimizer], clip=1.0
    )
    same(profile_job(job), unrolled(job))


def test_each_kind_of_block_is_run_once_a_trace(monkeypatch: pytest.MonkeyPatch):
    """However many there are: two traces; twice more where some might be left out, which has to be found out."""
    ran: list[int] = []
    forward = Small.forward
    monkeypatch.setattr(
        Small,
        "forward",
        lambda self, *args, **more: ran.append(self.number) or forward(self, *args, **more),
    )
    counts = []
    for layers in (4, 12):
        ran.clear()
        profile = profile_job(make_job(lambda layers=layers: Llama(layers, block=Small)))
        counts.append(list(ran))
        assert sum(1 for s in profile.segments if s.unit) == layers
    assert counts == [[0, 0], [0, 0, 0, 0]]


def test_blocks_that_are_called_otherwise_are_kinds_of_their_own():
    """They are equal but for what the model gives them."""
    job = make_job(lambda: Llama(6, scales=(1.0, 0.5) * 3, block=Small))
    runs = trace._fake_runs(job, trace.first_items(job.data, 2), trace.fake_model(job), each=False)
    assert runs[0].repeats.kinds == {
        "layers.0": ["layers.2", "layers.4"],
        "layers.1": ["layers.3", "layers.5"],
    }
    same(trace._fit(runs, ()), unrolled(job))


def test_a_block_that_differs_is_of_no_others_kind():
    """In an attribute, a shape, what is trained, a hook, or a function's argument. Its number and path are none."""
    blocks = [Block(number, 32) for number in range(7)]
    blocks[1].eps = 0.1  # type: ignore[assignment]
    blocks[2].down = nn.Linear(64, 32)
    blocks[3].up.requires_grad_(False)
    blocks[4].out.register_forward_hook(lambda *_: None)
    for number in (7, 8, 9):
        blocks.append(Block(number, 32))
        blocks[number].gate = partial(F.leaky_relu, negative_slope=0.1 * number)  # type: ignore[assignment]
    kinds = alike_blocks({f"layers.{number}": block for number, block in enumerate(blocks)})
    assert [kinds[f"layers.{number}"] for number in UNLIKE] == [
        f"layers.{number}" for number in UNLIKE
    ]
    assert {kinds[f"layers.{number}"] for number in (0, 5, 6)} == {"layers.0"} and FEWEST == 3


class Twice(Llama):
    """Runs its blocks over again."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(x)


class Telling(Small):
    """Leaves something that the model reads."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        self.told = x.mean()
        return super().forward(x, mask, scale=scale)


class Told(Llama):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, mask) + sum(layer.told for layer in self.layers)


class ByNumber(Small):
    """Does without a function in every other layer."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        return super().forward(x, mask, scale=scale) if self.number % 2 else x + self.linear(x)


class ByPath(Small):
    """Does without a function in its first layer."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        return x + self.linear(x) if ".0." in self.path else super().forward(x, mask, scale=scale)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "model",
    [
        partial(Twice, block=Small),
        partial(Told, block=Telling),
        partial(Llama, block=ByNumber),
        partial(Llama, block=ByPath),
    ],
)
def test_blocks_that_stand_for_no_other_are_all_run(model: Any):
    job = make_job(model)
    same(profile_job(job), unrolled(job))


def test_a_model_may_be_converted_where_it_is_built():
    """As adapters are, and models in a type of their own; shared weights stay shared."""

    def built() -> nn.Module:
        model = Llama(block=Small)
        model.head.weight = model.embed.weight
        return model.to(torch.float64)

    profile = profile_job(make_job(built))
    assert not profile.notes
    assert profile.parameter_bytes == 8 * sum(p.numel() for p in built().parameters())


class Around(Llama):
    """Calls its first layer otherwise, and looks at what the others hold."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x.to(layer.up.weight.dtype), mask[:, None, None, :].bool())
        return self.head(self.norm(x))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Around, partial(Llama, block=ByNumber)])
def test_a_capture_of_some_blocks_is_priced_as_one_of_all(model: Any):
    """Blocks that hold nothing while others are recorded are recorded after all where that is not enough."""
    job = make_job(model)
    whole = profile_job(job)
    same(LazyPieces(job, whole).layers(), layered(SplitJob(job, whole)))


class Keeping(Llama):
    """Keeps what it made at its first call, in its type."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = super().forward(ids, mask)
        if not hasattr(self, "kept"):
            self.kept = made.detach().mean()
        return made + self.kept


@pytest.mark.slow
def test_a_planned_model_is_built_once_and_left_as_it_was():
    """For traces, casts, captures, and another precision, which find nothing of each other."""
    built: list[nn.Module] = []
    job = make_job(lambda: built.append(Keeping(block=Small)) or built[-1], precision="bf16")
    problem = PlanningProblem.of(job)
    problem.pieces.layers()
    other = PlanningProblem.of(replace(job, precision="float32"), like=problem)
    assert len(built) == 1
    assert not hasattr(built[0], "kept")
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in built[0].parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in built[0].modules()
    )
    same(other.profile, profile_job(make_job(lambda: Keeping(block=Small))))


def test_weights_in_bf16_are_multiplied_in_bf16():
    """Without autocast, which would be the job's precision."""
    wide, half = (
        PlanningProblem.of(make_job(lambda kind=kind: Llama(3, 4096).to(kind)))
        for kind in (torch.float32, torch.bfloat16)
    )
    assert (wide.computes_in, half.computes_in) == ("float32", "bf16")
    plan, cluster = Plan.parse("data=8"), Cluster.parse("8xH100")
    parts = [problem.price(plan, cluster).breakdown for problem in (wide, half)]
    assert parts[0]["compute"] > 2 * parts[1]["compute"]


PLANS = (
    "data=8",
    "shard=8 recompute=full",
    "data=2 shard=4 zero=1",
    "pipeline=2 data=4 microbatches=2",
    "tensor=2 data=4",
    "pipeline=2 tensor=2 data=2 microbatches=2 schedule=interleaved virtual=2",
)


def test_blocks_fold_whatever_autograd_keeps_of_them():
    """The first keeps less where its input needs no gradient. That takes no time on devices that are described."""
    parameters = tuple(Parameter(f"{unit}.weight", unit, 4, rows=1) for unit in "abc")
    blocks = tuple(
        Segment(unit, gradients=(f"{unit}.weight",), kept_tensors=count)
        for unit, count in zip("abc", (2, 3, 3), strict=True)
    )

    assert [segment.repeat for segment in folded(Profile(parameters, blocks)).segments] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_folded_model_costs_what_all_its_layers_do(rank: int):
    """On devices that are described: seconds, and bytes of the rank that needs most."""
    job = make_job(lambda: Llama(4, rank=rank), precision="bf16")
    whole, cluster = unrolled(job), Cluster.parse("8xH100")
    compact, split = folded(whole), LazyPieces(job, whole).layers()
    every = layered(SplitJob(job, whole))
    assert (
        len(compact.segments) < len(whole.segments)
        and compact.parameter_bytes == whole.parameter_bytes
    )
    assert [s.repeat for s in split.segments if s.unit] in ([4], [1, 3])
    for text in PLANS:
        plan = Plan.parse(text)
        pair = (split, every) if plan.splits_model else (compact, whole)
        folded_estimate, known = (
            estimate(each, plan, cluster, batch=16, precision="bf16") for each in pair
        )
        assert folded_estimate.step_s == pytest.approx(known.step_s, rel=1e-3), text
        assert folded_estimate.peak_memory_bytes == pytest.approx(
            known.peak_memory_bytes, rel=1e-3
        ), text


def test_a_large_model_that_looks_at_values_is_not_run_for_real():
    """Its course is assumed, and the notes say so."""
    large = profile_job(make_job(lambda: ByValue(4, 4096, block=Small)))
    plain = profile_job(make_job(lambda: Llama(4, 4096, block=Small)))

    assert any("not run for real" in note for note in large.notes)
    assert any("values" in note for note in large.notes)
    assert large.parameters == plain.parameters
    assert forward_flops(large) == forward_flops(plain)


LIMITED = """
import resource, sys
import torch
from tests.model.cost.test_blocks import ByValue, Llama, make_job
from paceline.api.planning import plan
models = {"whole": Llama, "by value": ByValue}
made, rank = models[sys.argv[1]], int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
resource.setrlimit(resource.RLIMIT_DATA, (4 * 10**9, 4 * 10**9))
answer = plan(make_job(lambda: made(48, 4096, rank), precision="bf16"), "8xH100")
assert answer.chosen is not None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.slow  # as tests/model/cost/test_trace.py, where a large model costs no memory
@pytest.mark.parametrize(("model", "rank"), [("whole", 0), ("whole", 16), ("by value", 0)])
def test_planning_a_model_of_many_gigabytes_takes_little_memory(model: str, rank: int):
    """39 GB of float32, in a process that may have 4 GB; less than half of one is taken."""
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, model, str(rank)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.splitlines()[-1]) < 0.5e9
