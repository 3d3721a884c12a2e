"""Copies from which a checkpoint is written beside the steps, and their memory."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.base.errors import CheckpointError
from paceline.checkpoint import open_checkpoint, staging
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.write import Writer
from paceline.launch.process.malloc import trim_heap
from paceline.launch.process.memory_use import PeakMemory, reset_peak


def test_a_save_is_of_the_moment_of_saving(tmp_path: Path) -> None:
    """Whatever is written to its tensors while they are on the way to the disk, with one memory for all saves."""
    state, weight = torch.zeros(4, 1000), torch.zeros(1000)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    pieces = [*pieces_of("optimizer/state", state), *pieces_of("parameters/weight", weight)]
    for step in (1, 2):
        writer.save(step, pieces, {})
        weight += 1
        state += 1
        writer.wait()
        there = open_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert there.read("optimizer/state").eq(step - 1).all()
        assert there.read("parameters/weight").eq(step - 1).all()


def test_a_save_without_memory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, count: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    make = staging.mmap.mmap
    monkeypatch.setattr(staging.mmap, "mmap", refuse)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    with pytest.raises(CheckpointError, match="Cannot allocate memory"):
        writer.save(1, pieces_of("w", torch.zeros(4)), {})
    monkeypatch.setattr(staging.mmap, "mmap", make)
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
