"""Saves and restores that take longer than the patience, and hosts without memory for copies."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.long_work import long_work
from paceline.runtime.checkpoint import files, pieces_of, read, write
from paceline.runtime.checkpoint.files import NewFile
from paceline.runtime.checkpoint.read import open_checkpoint
from paceline.runtime.checkpoint.write import Writer, write_model

WEIGHT = torch.arange(40_000, dtype=torch.float32)


def job() -> pl.Job:
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 60))
    return pl.Job(model=lambda: torch.nn.Linear(4, 60), data=data, loss=torch.nn.functional.mse_loss,
                  optimizer=lambda named: torch.optim.Adam(named), batch=4, steps=2)


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each word that long work goes on."""
    heard: list[int] = []
    monkeypatch.setattr(long_work, "tell", lambda: heard.append(1))
    return heard


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each 512 bytes of a file take a while to write."""
    empty = NewFile._empty

    def empty_late(self: NewFile) -> None:
        time.sleep(0.25)
        empty(self)

    monkeypatch.setattr(files, "BUFFER_BYTES", 512)
    monkeypatch.setattr(NewFile, "_empty", empty_late)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("plan", ["data=2", "server=1 workers=1"])
def test_a_save_may_take_longer_than_the_patience(plan: str, tmp_path: Path, slow_files: None):
    """The last one, which the run waits for, writes some 3 kB and so takes more than a second."""
    result = pl.train(job(), plan, run=tmp_path / "run", timeout_s=1.0, restarts=0, check=False, table=False)
    assert result["steps"] == 2


@pytest.mark.timeout(60)
def test_signs_end_where_the_writing_stops(tmp_path: Path, signs: list[int], monkeypatch: pytest.MonkeyPatch):
    stops, goes_on, empty = threading.Event(), threading.Event(), NewFile._empty

    def stop(self: NewFile) -> None:
        if self.num_bytes > 1000:
            stops.set()
            goes_on.wait()
        empty(self)

    monkeypatch.setattr(files, "BUFFER_BYTES", 512)
    monkeypatch.setattr(NewFile, "_empty", stop)
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    writer.save(1, pieces_of("w", WEIGHT))
    heard: list[int] = []

    def count() -> None:
        stops.wait()
        time.sleep(3 * write.LOOK_S)
        heard.append(len(signs))
        time.sleep(5 * write.LOOK_S)
        heard.append(len(signs))
        goes_on.set()

    threading.Thread(target=count).start()
    writer.wait()
    assert heard[0] == heard[1]


@pytest.mark.timeout(60)
def test_ranks_wait_for_a_part_that_grows(tmp_path: Path, slow_files: None, signs: list[int],
                                          monkeypatch: pytest.MonkeyPatch):
    """It takes five times as long as they would wait for one that does not."""
    monkeypatch.setattr(write, "_TOUCH_S", 0.1)
    writers = [Writer(tmp_path, rank=rank, world_size=3, attempt="a", timeout_s=0.7) for rank in range(3)]
    for rank, writer in enumerate(writers):
        writer.save(1, pieces_of(f"w{rank}", WEIGHT[:1700] if rank == 1 else WEIGHT[:2]), {})
    for writer in (writers[2], writers[0], writers[1]):
        writer.wait()
    assert open_checkpoint(tmp_path / "checkpoints" / "step-1").read("w1").equal(WEIGHT[:1700])
    assert len(signs) >= 3


@pytest.mark.timeout(60)
def test_reading_says_that_it_goes_on(tmp_path: Path, signs: list[int], monkeypatch: pytest.MonkeyPatch):
    """Checksums, tensors, and a model that is written."""
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    writer.save(1, pieces_of("w", WEIGHT), {})
    writer.wait()
    signs.clear()

    class Slow:
        def __init__(self) -> None:
            self.digest = xxhash.xxh3_128()

        def update(self, data: memoryview) -> None:
            time.sleep(2 * write.LOOK_S / 5)
            self.digest.update(data)

        def hexdigest(self) -> str:
            return str(self.digest.hexdigest())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "_SUMMED_BYTES", 8000)
        patch.setattr(read, "xxhash", type("Slowed", (), {"xxh3_128": Slow}))
        checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    assert len(signs) >= 3
    signs.clear()
    checkpoint.read("w")
    assert len(signs) == 1
    monkeypatch.setattr(write, "_RUN_BYTES", 40_000)
    write_model(tmp_path / "model", {"w": (torch.float32, (40_000,))},
                lambda name, offsets, shape: WEIGHT[offsets[0]:offsets[0] + shape[0]])
    assert len(signs) == 1 + 4


def test_other_threads_are_not_heard(signs: list[int]):
    """The main one may hang meanwhile."""
    thread = threading.Thread(target=long_work.advanced)
    thread.start()
    thread.join()
    assert not signs


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The host has so many bytes free."""
    return lambda num_bytes: monkeypatch.setattr(write, "free_memory_bytes", lambda: num_bytes)


def test_without_memory_for_copies_a_save_is_waited_for(tmp_path: Path, little_memory: Any,
                                                        caplog: pytest.LogCaptureFixture):
    """It is whole when `save` returns, as the next step may change what it is of; no memory is taken, which is said
    once."""
    little_memory(2 * WEIGHT.nbytes)
    weight = WEIGHT.clone()
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a", num_ranks=2)
    with caplog.at_level(logging.WARNING):
        writer.prepare(pieces_of("w", weight))
        for step in (1, 2):
            writer.save(step, pieces_of("w", weight), {})
            weight += 1
    writer.wait()
    assert writer._snapshot is None
    for step in (1, 2):
        there = open_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert there.read("w").equal(WEIGHT + step - 1)
    (record,) = caplog.records
    assert "each save blocks the run until it is written" in record.getMessage()


def test_memory_that_was_taken_is_not_missing(tmp_path: Path, little_memory: Any):
    """Later saves copy, too, although copies have taken what was free."""
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a", num_ranks=2)
    little_memory(3 * WEIGHT.nbytes)
    for step in (1, 2):
        writer.save(step, pieces_of("w", WEIGHT), {})
        assert writer._save is not None
        writer.wait()
        little_memory(0)
    (larger,) = pieces_of("w", torch.cat([WEIGHT, WEIGHT]))
    writer.save(3, [replace(larger)], {})
    assert writer._save is None


def test_a_run_without_memory_for_copies_goes_on(tmp_path: Path, little_memory: Any, capfd: pytest.CaptureFixture[str]):
    little_memory(0)
    result = pl.train(job(), "data=2", run=tmp_path / "run", save_every=1, check=False, table=False)
    assert result["steps"] == 2 and len(list((tmp_path / "run" / "checkpoints").glob("step-*/COMMIT"))) == 2
    assert capfd.readouterr().err.count("each save blocks the run") == 1
