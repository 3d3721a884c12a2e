"""What only updates write to is copied beside the next forward and backward, however long that takes."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.base.errors import CheckpointError
from paceline.checkpoint import open_checkpoint, snapshot
from paceline.checkpoint.pieces import TensorPiece, pieces_of
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.write import Writer
from paceline.launch.process.malloc import trim_heap
from paceline.launch.process.memory_use import PeakMemory, reset_peak
from paceline.strategies.plan import Plan
from paceline.training.stepper import Stepper


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.05)


def lbfgs(named: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([parameter for _, parameter in named], max_iter=3)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 6, generator=made, dtype=torch.float64)
    return [(row, row[:2]) for row in inputs]


def plain_job(optimizer: Any = adamw) -> pl.Job:
    return pl.Job(
        model=lambda: nn.Linear(6, 2, dtype=torch.float64),
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        data=data(),
        batch=12,
        steps=5,
        precision="float64",
    )


def own_job() -> pl.Job:
    """A step with two updates, and an average that follows."""

    def step(ctx: Any, batch: Any) -> None:
        for name in ("first", "second"):
            ctx.backward(
                name,
                batch.input,
                lambda output, batch: nn.functional.mse_loss(output, batch.target),
            )
            ctx.update(name)

    names = ("first", "second")
    return pl.Job(
        models={name: lambda: nn.Linear(6, 2, dtype=torch.float64) for name in names},
        training_step=step,
        optimizers=dict.fromkeys(names, adamw),
        followers={"average": pl.ema("first", 0.9)},
        data=data(),
        batch=12,
        steps=5,
        precision="float64",
    )


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are made on another thread end long after the backward."""
    fill = snapshot.copy

    def filled(target: torch.Tensor, tensor: torch.Tensor) -> None:
        if threading.current_thread().name == "paceline-snapshot":
            time.sleep(0.02)
        fill(target, tensor)

    monkeypatch.setattr(snapshot, "copy", filled)


def saved(job: pl.Job, plan: str, run: Path) -> dict[int, dict[str, torch.Tensor]]:
    """What each checkpoint of a run holds."""
    pl.train(
        job,
        plan=plan,
        devices=f"cpu:0-{Plan.parse(plan).world_size - 1}",
        run=run,
        save_every=1,
        check="no",
    )
    checkpoints = [open_checkpoint(path) for path in sorted((run / "checkpoints").glob("step-*"))]
    return {each.step: {name: each.read(name) for name in each.tensors} for each in checkpoints}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        (plain_job(), "shard=2"),
        (own_job(), "single"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (plain_job(lbfgs), "single"),
                (plain_job(), "data=2 local=2"),
                (own_job(), "data=2"),
            )
        ),
    ],
)
def test_a_checkpoint_holds_the_state_of_its_step(
    slow_copies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: pl.Job, plan: str
):
    """As if the run had waited for each copy."""
    beside = saved(job, plan, tmp_path / "beside")
    monkeypatch.setattr(Stepper, "is_for_updates", lambda self, name: False)
    alone = saved(job, plan, tmp_path / "alone")
    assert alone.keys() == beside.keys() and len(alone) > 1
    for step, tensors in alone.items():
        assert tensors.keys() == beside[step].keys() and any(
            name.startswith("optimizer/") for name in tensors
        )
        for name, tensor in tensors.items():
            assert torch.equal(tensor, beside[step][name]), f"{name} after step {step}"


def test_an_update_waits_for_the_copies(tmp_path: Path, slow_copies: None) -> None:
    state, weight = torch.zeros(4, 1000), torch.zeros(1000)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    pieces = [*pieces_of("optimizer/state", state), *pieces_of("parameters/weight", weight)]
    for step in (1, 2):
        writer.save(step, pieces, {}, is_for_updates=lambda name: name.startswith("optimizer/"))
        weight += 1  # at once
        writer.before_update()
        state += 1
        writer.wait()
        there = open_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert (
            there.read("optimizer/state").eq(step - 1).all()
            and there.read("parameters/weight").eq(step - 1).all()
        )


def test_a_save_without_memory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot.os, "posix_fallocate", refuse)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    with pytest.raises(CheckpointError, match="No space left"):
        writer.save(1, pieces_of("w", torch.zeros(4)), {})
    monkeypatch.undo()
    writer.save(2, pieces_of("w", torch.ones(4)), {})
    writer.wait()
    assert open_checkpoint(tmp_path / "checkpoints" / "step-2").read("w").eq(1).all()


def test_memory_of_saves_is_not_the_ranks_own(tmp_path: Path, run_ranks: Any) -> None:
    """Neither while it is there, nor when it is gone, and memory that is taken beside it and later is."""
    mib = 2**20

    def body(context: Any) -> list[int]:
        trim_heap()  # of the process that this one is a fork of: its holes would take what is made here
        reset_peak()
        peak = PeakMemory(context.device)
        pieces = list(pieces_of("w", torch.ones(64 * mib // 4)))
        peaks = [peak.bytes()]
        for attempt in ("a", "b"):
            writer = Writer(tmp_path, rank=0, world_size=1, attempt=attempt)
            writer.save(1, pieces, {})
            peaks.append(peak.bytes())
            writer.wait()
            taken = torch.ones((100 if attempt == "a" else 200) * mib // 4)
            peaks.append(peak.bytes())
            del writer, taken
            gc.collect()
            peaks.append(peak.bytes())
        return [size // mib for size in peaks]

    (peaks,) = run_ranks(body, 1)
    base, *others = peaks
    assert 64 <= base < 90
    for size, expected in zip(others, (0, 100, 100, 100, 200, 200), strict=True):
        assert base + expected - 2 <= size <= base + expected + 20, peaks


def test_memory_that_cannot_be_pinned_is_the_save_s_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that pins it before says nothing."""
    refused_names: list[str] = []

    def refuse(staging: Staging, piece: TensorPiece) -> torch.Tensor:
        refused_names.append(piece.name)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Staging, "_memory_for", refuse)
    Staging().reserve(pieces_of("w", torch.zeros(4)))
    assert refused_names == ["w"]
