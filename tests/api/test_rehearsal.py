"""Runs under faults, scripted and random: they end with the weights of an undisturbed run and every sample once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.api.rehearsal import _compared, _recorded
from paceline.checkpoint.dtypes import save_tensors
from paceline.launch.process.faults import KINDS, Fault, Kind
from paceline.runs.folder import METRICS, MODEL, read_failure
from tests.namespaces import NoNamespaces
from tests.rehearsal_on_hosts import Cut, rehearse_on_hosts

SURVIVED: tuple[Kind, ...] = tuple(
    kind for kind in KINDS if kind != "flip"
)  # replicas find that, and it stays


def job(steps: int = 12) -> pl.Job:
    source = torch.Generator().manual_seed(0)
    pairs = TensorDataset(
        torch.randn(20, 3, generator=source).double(), torch.randn(20, 2, generator=source).double()
    )
    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        data=pairs,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        batch=6,
        steps=steps,
        precision="float64",
    )


@pytest.mark.slow
def test_a_rank_and_a_launcher_that_die_cost_time_alone(paceline_rehearse):
    outcome = paceline_rehearse(
        job(),
        "data=2",
        "kill 1@4:backward",
        "raise 1@6:backward",
        "kill_launcher 0@8",
        save_every=3,
    )
    assert outcome.weights == "equal" and outcome.audit.launches >= 2
    assert all(effect.next_step_s is not None for effect in outcome.effects)
    assert outcome.exit_codes[-3:] == (1, -9, 0) and "passed" in outcome.describe()
    assert outcome.messages[-2].startswith("rank 1 on ")
    assert outcome.to_dict()["samples_lost"] == outcome.to_dict()["samples_repeated"] == 0


def test_a_fault_that_does_not_strike_is_told(paceline_rehearse):
    outcome = paceline_rehearse(job(4), "single", "kill 0@9")
    assert outcome.effects[0].step is None and "did not strike" in outcome.describe()


def test_an_undisturbed_run_that_fails_is_told_with_its_hint(tmp_path):
    """There is nothing to compare with, so what its failure says to do is all that helps."""
    unused = replace(job(), loss=lambda output, target: target.square().mean())
    with pytest.raises(
        pl.PacelineError, match=r"(?s)undisturbed run failed: rank 0 .*hint: "
    ) as caught:
        pl.rehearse(unused, "single", run=tmp_path)
    assert caught.value.hint == read_failure(tmp_path / "undisturbed")["hint"]


def test_what_cannot_be_rehearsed_is_refused(tmp_path):
    with pytest.raises(pl.PacelineError, match="has 2 ranks"):
        pl.rehearse(job(), "data=2", ["kill 2@3"], run=tmp_path)


PLANS = [
    "data=2",
    "shard=2",
    "pipeline=2",
    "single",
    "data=2 local=3",
    "tensor=2",
    "servers=1 workers=2",
    "servers=1 workers=2 staleness=2",
    "data=2 shard=2",
    "place=2",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_random_faults(tmp_path, seed: int):
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 4, "timeout_s": 4}
    from paceline.launch.process.faults import draw

    plan = PLANS[seed]
    world_size = pl.Plan.parse(plan).world_size
    faults = draw(1 + seed % 4, seed=seed, world_size=world_size, steps=12, kinds=SURVIVED)
    outcome = pl.rehearse(job(), plan, faults, **options)
    assert outcome.passed, outcome.describe()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize(
    ("plan", "faults"),
    [
        ("data=3", [Cut.of(2, 6)]),
        ("shard=3", [Cut.of(1, 6, 8.0), Fault.read("kill 0@9")]),
        ("shard=3", [Cut.of(0, 6, 12.0)]),
    ],
)
def test_hosts_that_are_cut_off(tmp_path, plan: str, faults: list[Fault]):
    """The others go on under a plan for fewer ranks, or wait for the first host."""
    try:
        outcome = rehearse_on_hosts(
            job(), plan, faults, run=tmp_path / "run", save_every=3, timeout_s=4.0
        )
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert outcome.passed and outcome.effects[0].step == 6, outcome.describe()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], ("equal", 0.0)),
        ([1.0, -math.inf], [1.5, -math.inf], ("different", 0.5)),
        ([1.0, 2.0], [1.0, math.nan], ("different", math.inf)),
    ],
)
def test_weights_that_are_not_finite_are_compared(tmp_path, first, second, expected):
    """A mask of -inf is equal to itself, and NaN in one of two runs is no small difference."""
    for name, values in (("first", first), ("second", second)):
        (tmp_path / name).mkdir()
        tensors = {"a": torch.zeros(2), "b": torch.tensor(values)}
        save_tensors(tmp_path / name / MODEL, tensors)
    assert _compared(tmp_path / "first", tmp_path / "second") == expected


def test_a_line_that_a_kill_cut_is_passed_over(tmp_path):
    line = json.dumps({"step": 1, "time": 2.0, "step_s": 0.1, "samples": 4, "loss": 1.0})
    (tmp_path / METRICS).write_text(f'{line}\n{{"step": 2, "ti\n{line}\n{{"step"')
    assert _recorded(tmp_path) == [(1, 2.0)] * 2
