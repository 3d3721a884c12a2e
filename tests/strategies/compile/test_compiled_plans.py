"""Plans whose blocks are compiled compute what one device computes, and say what was compiled and why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.compiled import (
    Block,
    Breaking,
    Net,
    Recurrent,
    compiled_job,
    counts,
    fails,
    prints,
    traced,
    traced_with_means,
)
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.base.errors import PlanRefused
from paceline.launch.process.failure import RankFailed
from paceline.strategies.compile import run as compile_run
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan

# torch looks at the gradient of every input that it traces, and warns of it.
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute")]

PLANS = [
    "single",
    "data=2 microbatches=2",
    "shard=2 recompute=full",
    "shard=2 zero=1 microbatches=2",
    "pipeline=2 recompute=full",
    "place=2",
    "servers=1 workers=2",
    "data=2 recompute=full",
    "shard=2 zero=2",
    "data=2 shard=2",
    "pipeline=2 shard=2",
    "pipeline=2 data=2 schedule=interleaved",
    "servers=2 workers=2 colocate=yes recompute=full",
]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces blocks and their backward, and runs the operators one by one."""
    monkeypatch.setattr(compile_run, "inductor", traced)
    monkeypatch.setattr(compile_run, "inductor_with_means", traced_with_means)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled code that runs of this session share, and no other."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    if before is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def train(plan: str, folder: Path, **changes: Any) -> dict[str, Any]:
    paceline.train(compiled_job(**changes), plan, run=folder)
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.checked_runs
@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS)
def test_every_kind_of_plan(plan: str, tmp_path: Path, without_compiler: None) -> None:
    """The first update is held against one device, with what dropout draws replaced by its mean. Equal blocks are
    compiled once, and for training alone."""
    # Servers keep no buffers that change; where a rank cuts its samples, a block counts each piece.
    counts_alike = not any(word in plan for word in ("servers", "microbatches", "pipeline"))
    summary = train(
        f"{plan} compile=blocks",
        tmp_path / "run",
        precision="float64",
        model=lambda: Net(counts=counts_alike),
        validation=compiled_job().data,
    )

    assert summary["check"]["verdict"] == "passed", summary["check"]
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("rank-*.log"))
    assert "compiled 'blocks.0'" in logs and "compiled 'blocks.2'" in logs
    if "server" not in plan:  # whose summary has nothing of compiling
        assert summary["compile"]["compiled"] >= 2
    if (
        plan == "single"
    ):  # two blocks are alike and one is wider; an evaluation would need compilations of its own
        assert summary["compile"]["compiled"] == 2 and not summary["compile"]["recompiled"]
        assert summary["validation_loss"] is not None


@pytest.mark.slow
def test_all_steps_and_a_resumed_run_are_one_device_s(without_compiler: None) -> None:
    """By `verify`, in float32 and float64, over an epoch with a short last batch."""
    (certificate,) = paceline.verify(
        compiled_job(), ["data=2 recompute=full compile=blocks"], steps=4
    )
    assert certificate.passed, certificate.describe()


@pytest.mark.slow
def test_real_kernels_leave_names_alone_and_name_what_is_compiled_again(
    tmp_path: Path, cache: None
) -> None:
    """torch's compiler itself: two ranks, a batch of another size in the fourth step, an evaluation, and a run that
    goes on without compiling. Without dropout it ends where one device does."""
    job = compiled_job(lambda: Net(drop=0.0, last_hidden=12), validation=compiled_job().data)
    paceline.train(job, "single", run=tmp_path / "plain", steps=4)
    paceline.train(job, "data=2 compile=blocks", run=tmp_path / "compiled", steps=4)
    summary = json.loads((tmp_path / "compiled" / "summary.json").read_text())

    assert summary["validation_loss"] is not None
    again = summary["compile"]["recompiled"]
    # Of the last sample, rank 1 has none.
    assert {(entry["rank"], entry["block"]) for entry in again} == {(0, "blocks.0")}
    assert all("size mismatch" in entry["again"] for entry in again)
    assert all(
        f"compiled '{entry['block']}' again in"
        in (tmp_path / "compiled" / "logs" / f"rank-{entry['rank']}.log").read_text()
        for entry in again
    )
    plain, compiled = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled")
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)

    paceline.train(job, "data=2", run=tmp_path / "compiled", steps=5, resume=True)


def test_means_of_dropout_have_the_gradient_of_no_dropout() -> None:
    """In compiled code alone, where nothing else replaces what the backward runs."""
    block, x = (
        Block(drop=0.2, counts=False).double(),
        torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
    )
    compiled = torch.compile(block.forward, fullgraph=True, backend=traced_with_means)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(block.eval()(x).sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.slow
@pytest.mark.checked_runs
def test_real_kernels_pass_the_check_with_dropout(tmp_path: Path, cache: None) -> None:
    """torch's compiler with means in the place of what dropout draws."""
    assert train("single compile=blocks", tmp_path / "run")["check"]["verdict"] == "passed"


@pytest.mark.slow
def test_recomputation_draws_the_same_again(tmp_path: Path, without_compiler: None) -> None:
    """With dropout on, a run with recomputation ends where one without it does."""
    losses = [
        train(plan, tmp_path / str(number), precision="float64")["final_loss"]
        for number, plan in enumerate(
            ("single compile=blocks", "single compile=blocks recompute=full")
        )
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.slow
def test_modules_that_are_taken_whole_are_named(tmp_path: Path, without_compiler: None) -> None:
    """A piece of a split model whose code no graph can hold runs as it is, and the summary says so."""
    summary = train("pipeline=2 compile=blocks", tmp_path / "run", model=_WithNumpy)
    assert summary["compile"]["uncompiled"] and summary["compile"]["compiled"]


def test_a_buffer_that_torch_would_lose_keeps_its_block_as_it_is() -> None:
    """torch 2.13 forgets what compiled code writes to float64 scalars."""
    model = Net().double()
    model.blocks[1].register_buffer("seen", torch.zeros((), dtype=torch.float64))
    watch = _prepared(model)
    assert list(watch.uncompiled) == ["blocks.1"] and "'seen'" in watch.uncompiled["blocks.1"]
    assert [compile_run.is_compiled(block) for block in model.blocks] == [True, False, True]


def test_a_block_with_a_recurrent_layer_stays_as_it_is() -> None:
    """torch.compile takes no nn.GRU; a model of such blocks alone is refused before it runs."""

    def model(*blocks: nn.Module) -> Any:
        return _prepared(nn.Sequential(*blocks))

    watch = model(nn.Linear(6, 6), Recurrent(nn.GRU(6, 6)))
    assert watch.uncompiled == {"1": "torch.compile takes no nn.GRU"}
    with pytest.raises(PlanRefused, match="leave out compile=blocks"):
        model(Recurrent(nn.GRU(6, 6)), Recurrent(nn.LSTM(6, 6)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single compile=blocks", "pipeline=2 compile=blocks"])
def test_blocks_beside_recurrent_ones_are_compiled(
    plan: str, tmp_path: Path, without_compiler: None
) -> None:
    """Those too, where a model is split: a graph of a piece holds the layer as one operator."""
    summary = train(plan, tmp_path / "run", model=_WithRecurrent)
    assert list(summary["compile"]["uncompiled"]) == (
        ["blocks.1"] if plan.startswith("single") else []
    )
    assert summary["compile"]["compiled"]


class _WithRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Recurrent(nn.GRU(6, 6)), Block()])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(6, 6), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.append(len(self.steps))
        return self.linear(x) * (1.0 + 0.01 * len(self.steps))


class _WithNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), _Numpy(), Block()])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("forward", "steps", "message"),
    [
        (prints, 1, "torch.compile can't compile 'layers.0' as a whole (Unsupported"),
        (counts, 12, "'layers.0' had to be compiled too often"),
        (fails, 1, "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_can_t_be_compiled_is_refused_by_name(
    forward: Any, steps: int, message: str, tmp_path: Path, without_compiler: None
) -> None:
    """And a block that fails by itself fails with its own error."""
    with pytest.raises(RankFailed) as failed:
        train(
            "single compile=blocks", tmp_path / "run", model=lambda: Breaking(forward), steps=steps
        )
    assert message in str(failed.value)
    assert ("leave out compile=blocks" in str(failed.value)) == (forward is not fails)


def _prepared(model: nn.Module) -> Any:
    plan = Plan.parse("single compile=blocks")
    return compile_run.prepare(model, plan=plan, mesh=Mesh(plan.axes.sizes(), 0))


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_is_compiled_already_is_refused(whole: bool) -> None:
    model = Net()
    if whole:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    else:
        model.blocks[1].compile(backend="eager")
    with pytest.raises(PlanRefused) as refused:
        _prepared(model)
    assert ("the model is compiled" if whole else "'blocks.1' is compiled") in str(refused.value)
    assert "leave out torch.compile" in str(refused.value)


def test_without_a_compiler_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PlanRefused, match="needs a C\\+\\+ compiler") as refused:
        _prepared(Net())
    assert "install g++" in str(refused.value)


def test_names_stay_as_they_are() -> None:
    model, before = Net(), list(Net().state_dict())
    _prepared(model)
    assert list(model.state_dict()) == before
    assert all(compile_run.is_compiled(block) for block in model.blocks)
    assert not compile_run.is_compiled(model.out)
