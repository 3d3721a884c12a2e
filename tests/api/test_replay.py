"""Steps that are computed again: equal to the bit where nothing went wrong, and others where a bit flipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.api.replay import replay
from paceline.api.train import TrainRequest
from paceline.base.errors import UsageError
from paceline.launch.process.faults import Fault
from paceline.runs import journal
from paceline.runs.folder import JOURNAL
from paceline.runs.metrics import read_history
from paceline.training.parts.spikes import SpikeAction

STEPS, SAVE_EVERY = 12, 4
PLANS = (
    "single",
    "data=2",
    "shard=2",
    "pipeline=2 tensor=2",
    "data=2 local=3",
    "servers=1 workers=2",
)


def job(**fields: Any) -> pl.Job:
    source = torch.Generator().manual_seed(0)
    pairs = TensorDataset(
        torch.randn(40, 6, generator=source), torch.randn(40, 2, generator=source)
    )
    return pl.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)),
            "data": pairs,
            "loss": nn.functional.mse_loss,
            "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01),
            "batch": 8,
            "steps": STEPS,
            "clip": 1.0,
            **fields,
        }
    )


def trained(
    run: Path, plan: str, *faults: str, on_spike: SpikeAction | None = None, **fields: Any
) -> Path:
    TrainRequest.of(job(**fields), None, plan).train(
        run,
        save_every=SAVE_EVERY,
        check=False,
        faults=tuple(map(Fault.read, faults)),
        on_spike=on_spike,
    )
    return run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", PLANS)
def test_a_right_step_is_equal_to_the_bit(plan: str, tmp_path: Path):
    """It goes on from the checkpoint before the step, and leaves the run's folder as it was."""
    run = trained(tmp_path / "run", plan)
    before = contents(run)
    again = replay(run, 11, job=job())
    assert (again.verdict, again.step) == ("equal", 11) and again.passed
    assert again.after == (9 if "local" in plan else 8)  # where replicas meet next
    assert again.num_compared >= 3 and "equal to the bit" in again.describe()
    assert contents(run) == before


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "fault"), [("single", "flip 0@6"), ("data=2", "flip 1@6:gradients")]
)
def test_a_bit_that_flipped_shows_from_its_step_on(plan: str, fault: str, tmp_path: Path):
    """Nothing in the run found it: no replica holds the weights, or all made the same wrong update. Checkpoints since
    have it: a step that follows from them is equal."""
    run = trained(tmp_path / "run", plan, fault)
    again = replay(run, 8, job=job())
    assert not again.passed and again.equal_to in (5, 6) and again.after == 4
    assert (
        "DIFFERENT from step" in again.describe() and "equal to the bit before" in again.describe()
    )
    assert {each.figure for each in again.differences} == {"loss", "gradient norm", "weights"}
    assert replay(run, 12, job=job()).verdict == "equal"


def test_another_plan_rounds_otherwise(tmp_path: Path):
    run = trained(tmp_path / "run", "single")
    again = replay(run, 3, "data=2", job=job())
    assert again.passed and again.after == 0 and again.plan == "data=2"
    assert all(each.figure != "weights" for each in again.differences)
    assert json.loads(json.dumps(again.to_dict()))["verdict"] in ("rounding", "equal")


def test_what_can_not_be_computed_again(tmp_path: Path):
    run = trained(tmp_path / "run", "servers=1 workers=2 staleness=inf")
    with pytest.raises(UsageError, match="can't be computed again: which worker's update comes"):
        replay(run, 5, job=job())
    with pytest.raises(UsageError, match="recorded no step 13; its steps are 1 to 12"):
        replay(run, 13, job=job())
    with pytest.raises(UsageError, match="does not say which job it is of"):
        replay(run, 5)
    with pytest.raises(UsageError, match=r"is not the folder of a run: it has no plan\.json"):
        replay(tmp_path, 5)


@pytest.mark.slow
def test_spikes_that_the_run_left_out_are_left_out_again(tmp_path: Path):
    """A sample of each epoch is no number."""
    samples = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    samples[3, 2] = torch.nan
    data = TensorDataset(samples, torch.ones(40, 2))
    run = trained(tmp_path / "run", "data=2", on_spike="skip", data=data)
    spikes = [row["step"] for row in read_history(run) if "spike" in row]
    assert len(spikes) >= 2
    for step in spikes:
        again = replay(run, step, job=job(data=data))
        assert again.verdict == "equal" and again.after < step


def test_a_step_after_a_spike_that_was_rewound_does_not_follow(tmp_path: Path):
    run = trained(tmp_path / "run", "single")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "rewound_to": 4, "time": 0.0}) + "\n")
    with pytest.raises(UsageError, match="went back to the weights of step 4 after step 10"):
        replay(run, 12, job=job())
    assert replay(run, 10, job=job()).verdict == "equal"


@pytest.mark.slow
def test_the_journal_has_a_fingerprint_of_what_was_saved(tmp_path: Path):
    """Of steps that the last launch goes on from: a later one replaces those of steps that were undone."""
    run = trained(tmp_path / "run", "data=2")
    assert list(journal.fingerprints(run / JOURNAL)) == [1, 4, 8, 12]
    again = pl.train(job(steps=16), "data=2", run=run, resume=True, check=False, table=False)
    prints = journal.fingerprints(again.run_dir / JOURNAL)
    assert list(prints) == [1, 4, 8, 12, 13, 16] and len(set(prints.values())) == 6
    assert pl.audit(run).passed
