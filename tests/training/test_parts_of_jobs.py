"""Parts that a job gives: the example of docs/callbacks.md, under every kind of plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import JobError, PlanError
from paceline.launch.process.failure import RankFailed
from paceline.runs.metrics import read_history
from paceline.training.run import TrainingRun

PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.md"
STEPS, RESUMED, CLIP = 6, 4, 0.05
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(24) % 10
Norms = dict[str, float]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)
    ).double()


@pytest.fixture(scope="module")
def example() -> pl.Job:
    """The page's job; in float64, with all samples in every step."""
    (code,) = re.findall(
        r"```python\n(class GradientNorms.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(code.splitlines()) <= 40
    torch.manual_seed(1)
    data = TensorDataset(X, Y)
    names: dict[str, Any] = {"pl": pl, "torch": torch, "F": F, "Net": net, "train_set": data}
    exec(code, names)
    job: pl.Job = names["job"]()
    return replace(
        job,
        precision="float64",
        batch=len(X),
        epochs=None,
        steps=STEPS,
        clip=CLIP,
        init=net().state_dict(),
    )


@pytest.fixture(scope="module")
def expected(example: pl.Job) -> list[Norms]:
    """The norms of a plain loop on one device, in each step."""
    model = net()
    model.load_state_dict(example.init)
    optimizer = example.optimizer(model.named_parameters())
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norms.append({name: float(g.norm()) for name, g in gradients.items()})
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)) > CLIP
        optimizer.step()
    return norms


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2", "shard=2", "tensor=2", "pipeline=2"])
def test_norms_of_gradients_are_those_of_one_device(
    plan: str, example: pl.Job, expected: list[Norms], tmp_path: Path
):
    """Before clipping, of whole gradients. A run that is resumed goes on from what the part knew."""
    run = tmp_path / "run"
    pl.train(example, plan, steps=RESUMED, run=run, table=False, check=False)
    result = pl.train(example, plan, run=run, resume=True, table=False, check=False)
    logged = {
        row["step"]: row["gradient_norms"] for row in read_history(run) if "gradient_norms" in row
    }
    assert logged == {
        step: pytest.approx(expected[step - 1], rel=1e-9) for step in range(2, STEPS + 1, 2)
    }
    greatest = {name: max(row[name] for row in logged.values()) for name in expected[0]}
    assert result["greatest_norms"] == greatest != logged[STEPS]


def test_servers_refuse_parts(example: pl.Job, tmp_path: Path):
    """Their ranks have another loop. Nothing is started."""
    with pytest.raises(PlanError, match=r"servers=S and a job with parts= don't compose"):
        pl.train(example, "servers=1 workers=2", run=tmp_path / "run", table=False)
    assert not (tmp_path / "run").exists()


class Same(pl.RunPart):
    """Keeps something in checkpoints under a name that every run has."""

    def __init__(self, run: TrainingRun) -> None:
        pass

    def document(self) -> dict[str, Any]:
        return {"seed": 1}


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda run: None, "functions that return a pl.RunPart, got a NoneType"),
        (Same, r"document\(\) of Same has 'seed', a name that is taken"),
    ],
)
def test_what_is_no_part_is_refused_before_the_first_step(
    part: Any, why: str, example: pl.Job, tmp_path: Path
):
    """Not at the first save, when steps would be lost."""
    with pytest.raises(RankFailed, match=why):
        pl.train(replace(example, parts=[part]), "single", run=tmp_path, table=False, check=False)
    assert read_history(tmp_path) == []


def test_a_job_takes_functions_that_make_parts(example: pl.Job):
    """An object would be shared by runs. Trials of a plan have none of the job's parts."""
    with pytest.raises(JobError, match="parts must be a list of functions of the run"):
        replace(example, parts=[pl.RunPart()])
    trial: Any = SimpleNamespace(settings=SimpleNamespace(is_trial=True), job=example)
    assert TrainingRun.parts_of_job(trial) == []
