"""Which checkpoints stay where --keep says how many, and what a save that is cut off anywhere leaves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import CheckpointError
from paceline.checkpoint import TensorPiece, Writer, newest_checkpoint, write
from paceline.checkpoint import prune as prune_module
from paceline.checkpoint.prune import later_saves, prune


def saved(run_dir: Path, *steps: int) -> Path:
    for step in steps:
        writer = Writer(run_dir, rank=0, world_size=1, attempt=f"save{step}")
        writer.save(
            step, [TensorPiece("w", (40,), (0,), torch.full((40,), float(step)))], {"step": step}
        )
        writer.wait()
    return run_dir


def steps_of(run_dir: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*")
    )


def test_the_newest_the_best_and_those_of_keep_best_stay(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, 5, 6)
    evaluations = [(1, 3.0), (2, 1.0), (7, 0.1), (4, float("nan"))]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "validation_loss": loss}) + "\n" for step, loss in evaluations
        )
        + "torn {"
    )
    (tmp_path / "best.json").write_text(json.dumps({"checkpoints": [{"step": 3, "value": 1.0}]}))
    prune(tmp_path, newest=2)
    assert steps_of(tmp_path) == [2, 3, 5, 6]


def test_a_launch_removes_what_is_left_of_a_checkpoint(tmp_path, monkeypatch):
    """A run can be killed while it removes one."""

    def kill(path: Path) -> None:
        raise KeyboardInterrupt

    saved(tmp_path, 1, 2)
    monkeypatch.setattr(prune_module, "remove", kill)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, newest=1)
    assert steps_of(tmp_path) == [2]
    Writer(tmp_path, rank=0, world_size=1, attempt="next")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_damaged_notes_lose_no_checkpoint_but_old_ones(tmp_path):
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "best.json").write_text('{"checkpoints": [7]}')
    prune(tmp_path, newest=1)
    assert steps_of(tmp_path) == [3]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "servers=1 workers=1"])
def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(tmp_path, plan):
    """A run goes on from the one before it, and with one to keep would have removed that before it saved another."""
    pairs = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    job = pl.Job(
        model=lambda: nn.Linear(3, 2),
        data=pairs,
        loss=nn.functional.mse_loss,
        batch=8,
        steps=8,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    options = {"run": tmp_path, "check": False, "table": False, "save_every": 2}
    pl.train(job, plan, **options)
    for path in (tmp_path / "checkpoints").glob("step-8/*.safetensors"):
        path.write_bytes(b"")
    pl.train(job, plan, resume=True, keep=1, steps=7, **options)
    assert steps_of(tmp_path) == [7, 8]
    assert (
        newest_checkpoint(tmp_path, accept=lambda checkpoint: None, warn=lambda text: None).step
        == 7
    )


def test_a_checkpoint_that_is_written_anew_counts(tmp_path):
    saved(tmp_path, 2, 4)
    passed_over = later_saves(tmp_path, after=2)
    saved(tmp_path, 3)
    prune(tmp_path, newest=1, passed_over=passed_over)
    assert steps_of(tmp_path) == [3, 4]
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="anew")
    writer.save(4, [TensorPiece("w", (40,), (0,), torch.zeros(40))], {"step": 4})
    writer.wait()
    prune(tmp_path, newest=1, passed_over=passed_over)
    assert steps_of(tmp_path) == [4]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "servers=1 workers=2"])
def test_a_run_keeps_as_many_as_it_was_told(tmp_path, plan):
    pairs = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    job = pl.Job(
        model=lambda: nn.Linear(3, 2),
        data=pairs,
        loss=nn.functional.mse_loss,
        batch=6,
        steps=10,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    pl.train(job, plan, run=tmp_path / "run", save_every=2, keep=2, check=False)
    assert steps_of(tmp_path / "run") == [8, 10]


def test_a_disk_without_room_is_found_before_the_save(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setattr(write, "_disk_of", lambda path: (path.parent, 159))
    monkeypatch.setattr(write, "write_tensors", lambda *_: pytest.fail("it began to write"))
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="full")
    writer.save(2, [TensorPiece("w", (40,), (0,), torch.zeros(40))])
    with pytest.raises(
        CheckpointError, match=r"No space left on device \(160 bytes needed, 159 bytes free\)"
    ):
        writer.wait()
    assert steps_of(tmp_path) == [1]
    assert not [path for path in (tmp_path / "checkpoints").glob(".step*") if path.is_dir()]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cuts", [150, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_that_is_cut_off_anywhere_loses_no_other_checkpoint(
    tmp_path, cuts: int, is_committed: bool
):
    """By a crash before its folder had its name, or of a disk that lost what it had said was written."""
    folder = saved(tmp_path, 1, 2) / "checkpoints" / "step-2"
    files, source = sorted(folder.iterdir()), random.Random(0)
    if not is_committed:
        hidden = folder.with_name(".step-2.save2-1")
        folder.rename(hidden)
        files = sorted(hidden.iterdir())
    for _ in range(cuts):
        path = source.choice(files)
        whole = path.read_bytes()
        path.write_bytes(whole[: source.randrange(len(whole))])
        newest = newest_checkpoint(tmp_path, accept=lambda checkpoint: None, warn=lambda text: None)
        assert newest is not None and newest.document == {"step": 1}, path
        assert newest.read("w").tolist() == [1.0] * 40
        path.write_bytes(whole)
