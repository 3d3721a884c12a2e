"""Saves, copies and restores that take longer than the patience, and hosts without memory for copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from conditions import until
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import CheckpointError, PacelineError
from paceline.base.long_work import long_work
from paceline.base.waiting import waiting
from paceline.checkpoint import assemble, files, pieces_of, read, write
from paceline.checkpoint.assemble import write_model
from paceline.checkpoint.files import NewFile
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.write import Writer
from paceline.launch.process import memory_files, rank_process

PATIENCE_S = 1.0  # from when ranks save, copy or restore, or hang there
WEIGHT = torch.arange(40_000, dtype=torch.float32)


def job() -> pl.Job:
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 60))
    return pl.Job(
        model=lambda: torch.nn.Linear(4, 60),
        data=data,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam(named),
        batch=4,
        steps=2,
    )


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each word that long work goes on."""
    heard: list[int] = []
    monkeypatch.setattr(long_work, "tell", lambda: heard.append(1))
    return heard


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch, hang_begins: Path) -> None:
    """Each 512 bytes of a file take a while to write."""
    empty = NewFile._empty

    def empty_late(self: NewFile) -> None:
        hang_begins.touch()
        time.sleep(0.4)
        empty(self)

    monkeypatch.setattr(files, "BUFFER_BYTES", 512)
    monkeypatch.setattr(NewFile, "_empty", empty_late)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "servers=1 workers=1",
        "servers=2 workers=2 colocate=yes",
        "servers=1 workers=2 staleness=1",
    ],
)
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.sweep(1)
def test_a_save_may_take_longer_than_the_patience(
    plan: str, copies: bool, tmp_path: Path, slow_files: None, monkeypatch: pytest.MonkeyPatch
):
    """Each rank writes 1.5 kB or more, and so for longer than that. The run waits for the last one, for one that comes
    while another is written, and without copies for all."""
    monkeypatch.setattr(Writer, "has_memory_for", lambda self, pieces: copies)
    result = pl.train(
        job(),
        plan,
        run=tmp_path / "run",
        timeout_s=PATIENCE_S,
        restarts=0,
        save_every=1,
        check=False,
        table=False,
    )
    assert result["steps"] == 2


@pytest.mark.slow
def test_a_copy_may_take_longer_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_begins: Path
):
    """Each rank writes 1.5 kB or more into memory after the first step."""
    pwrite = os.pwrite

    def late(descriptor: int, data: memoryview, offset: int) -> int:
        hang_begins.touch()
        time.sleep(0.6)
        return pwrite(descriptor, data[:512], offset)

    monkeypatch.setattr(memory_files, "os", SimpleNamespace(**{**vars(os), "pwrite": late}))
    result = pl.train(
        job(),
        "data=2",
        run=tmp_path / "run",
        timeout_s=PATIENCE_S,
        restarts=1,
        check=False,
        table=False,
    )
    assert result["steps"] == 2
    assert (tmp_path / "run" / "journal.jsonl").read_text().count("after") == 1


def test_large_states_are_copied_and_read_in_pieces(
    signs: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_files, "_CALL_BYTES", 10)
    descriptor = memory_files.memory_file("paceline-test")
    memory_files.write_at(descriptor, memoryview(bytes(range(25))), 0)
    read = bytearray(25)
    memory_files.read_at(descriptor, memoryview(read), 0)
    os.close(descriptor)
    assert read == bytes(range(25)) and len(signs) == 3 + 3


@pytest.mark.sweep(1)
@pytest.mark.parametrize("phase", ["part", "commit"])
def test_a_rank_whose_disk_hangs_is_named(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_begins: Path
):
    """Rank 1 while it writes its part, or rank 0 while it writes for all: the other one waits, and is not meant."""
    culprit = 1 if phase == "part" else 0
    empty, merged = NewFile._empty, write.merged

    def hang_in_part(self: NewFile) -> None:
        if phase == "part" and "rank-00001" in self.path.name:
            hang_begins.touch()
            threading.Event().wait()
        empty(self)

    def hang_in_commit(parts: Any) -> Any:
        if phase == "commit":
            hang_begins.touch()
            threading.Event().wait()
        return merged(parts)

    monkeypatch.setattr(NewFile, "_empty", hang_in_part)
    monkeypatch.setattr(write, "merged", hang_in_commit)
    with pytest.raises(PacelineError) as caught:
        pl.train(
            job(),
            "data=2",
            run=tmp_path / "run",
            timeout_s=PATIENCE_S,
            restarts=0,
            check=False,
            table=False,
        )
    assert f"rank {culprit} " in str(caught.value).splitlines()[0]
    assert "all ranks wait" not in str(caught.value)


@pytest.mark.slow
def test_an_export_may_take_longer_than_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 alone writes the model; what the others wait in has no limit. A collective has 8 s here."""
    pauses = iter(range(36))

    class Late(NewFile):
        def write_from(self, tensor: torch.Tensor) -> None:
            for _ in pauses:
                time.sleep(0.25)
                long_work.advanced()
            super().write_from(tensor)

    monkeypatch.setattr(rank_process, "_LAST_RESORT_S", 0.0)
    monkeypatch.setattr(assemble, "NewFile", Late)
    result = pl.train(
        job(),
        "data=2",
        run=tmp_path / "run",
        timeout_s=4.0,
        restarts=0,
        check=False,
        table=False,
    )
    assert result["steps"] == 2


@pytest.mark.slow
def test_a_restore_and_an_export_may_take_longer_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_begins: Path
):
    """Rank 0 alone checks files and writes the model, and others wait for it."""
    pl.train(job(), "data=2", run=tmp_path / "run", check=False, table=False)
    check = read._check_sums

    def check_late(*args: Any) -> None:
        hang_begins.touch()
        for _ in range(6):
            time.sleep(0.25)
            long_work.advanced()
        check(*args)

    class Late(NewFile):
        def write_from(self, tensor: torch.Tensor) -> None:
            for _ in range(6):
                time.sleep(0.25)
                long_work.advanced()
            super().write_from(tensor)

    monkeypatch.setattr(read, "_check_sums", check_late)
    monkeypatch.setattr(assemble, "NewFile", Late)
    result = pl.train(
        replace(job(), steps=3),
        "data=2",
        run=tmp_path / "run",
        resume=True,
        timeout_s=PATIENCE_S,
        restarts=0,
        check=False,
        table=False,
    )
    assert result["steps"] == 3


@pytest.mark.slow
def test_signs_end_where_the_writing_stops(
    tmp_path: Path, signs: list[int], monkeypatch: pytest.MonkeyPatch
):
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
    heard: list[int] = []  # at each look of the writer after the stop

    def look() -> None:
        if stops.is_set():
            heard.append(len(signs))
        if len(heard) == 8:
            goes_on.set()

    writer.meanwhile = look
    writer.wait()
    assert heard[2] == heard[7]


@pytest.mark.slow
def test_ranks_wait_for_a_part_that_grows(
    tmp_path: Path, slow_files: None, signs: list[int], monkeypatch: pytest.MonkeyPatch
):
    """It takes longer than they would wait for one that does not."""
    monkeypatch.setattr(write, "_TOUCH_S", 0.1)
    writers = [
        Writer(tmp_path, rank=rank, world_size=3, attempt="a", timeout_s=2.0) for rank in range(3)
    ]
    for rank, writer in enumerate(writers):
        writer.save(1, pieces_of(f"w{rank}", WEIGHT[:1000] if rank == 1 else WEIGHT[:2]), {})
    for writer in (writers[2], writers[0], writers[1]):
        writer.wait()
    assert open_checkpoint(tmp_path / "checkpoints" / "step-1").read("w1").equal(WEIGHT[:1000])
    assert len(signs) >= 3


@pytest.mark.slow
def test_reading_says_that_it_goes_on(
    tmp_path: Path, signs: list[int], monkeypatch: pytest.MonkeyPatch
):
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
    monkeypatch.setattr(assemble, "_RUN_BYTES", 40_000)
    write_model(tmp_path / "model", checkpoint, {"w": "w"})
    assert len(signs) == 1 + 2 * 4  # each part is read, and written


def test_other_threads_are_heard_while_the_main_one_waits(signs: list[int]):
    """Else it may hang meanwhile."""

    def advance() -> None:
        thread = threading.Thread(target=long_work.advanced)
        thread.start()
        thread.join()

    advance()
    assert not signs
    with waiting:
        advance()
    assert len(signs) == 1


def test_a_damaged_file_ends_the_check_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody needs their sums, and nobody gives a sign while they are read."""
    for name, num_bytes in (("first", 10), ("second", 10**6)):
        (tmp_path / name).write_bytes(bytes(num_bytes))
    buffers: list[int] = []
    found = threading.Event()

    class Slow:
        def update(self, data: memoryview) -> None:
            buffers.append(len(data))
            if len(data) == 1000:
                found.wait()
                time.sleep(0.05)

        def hexdigest(self) -> str:
            found.set()
            return "?"

    monkeypatch.setattr(read, "_SUMMED_BYTES", 1000)
    monkeypatch.setattr(read, "xxhash", type("Slowed", (), {"xxh3_128": Slow}))
    with pytest.raises(CheckpointError, match="first is damaged"):
        read._check_sums(tmp_path, {"first": (10, "right"), "second": (10**6, "right")}, "xxh3_128")
    assert len(buffers) < 1000


def test_a_rank_waits_once_its_own_part_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that whose writing hangs is the one that is named."""
    stops, empty, states = threading.Event(), NewFile._empty, dict[int, list[bool]]()

    def stop(self: NewFile) -> None:
        if "00001" in self.path.name:
            stops.wait()
        empty(self)

    monkeypatch.setattr(NewFile, "_empty", stop)
    writers = [Writer(tmp_path, rank=rank, world_size=2, attempt="a") for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.save(1, pieces_of(f"w{rank}", WEIGHT), {})

    def wait_for(rank: int) -> None:
        writers[rank].meanwhile = lambda: states.setdefault(rank, []).append(
            bool(writers[rank]._save._waits)
        )
        writers[rank].wait()

    threads = [threading.Thread(target=wait_for, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: 1 in states and states.get(0, [False])[-1])
    assert not states[1][-1]
    stops.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The host has so many bytes free."""
    return lambda num_bytes: monkeypatch.setattr(write, "free_memory_bytes", lambda: num_bytes)


def test_without_copies_a_save_is_waited_for(tmp_path: Path):
    """It is whole when `save` returns, as the next step may change what it is of, and no memory is taken."""
    weight = WEIGHT.clone()
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a")
    writer.takes_snapshots = False
    for step in (1, 2):
        writer.save(step, pieces_of("w", weight), {})
        weight += 1
    assert not writer._staging.memory
    for step in (1, 2):
        there = open_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        assert there.read("w").equal(WEIGHT + step - 1)


@pytest.mark.parametrize(("share", "fits"), [(0.9, False), (1.1, True)])
def test_copies_of_all_ranks_of_a_host_take_a_part_of_its_free_memory(
    tmp_path: Path, little_memory: Any, share: float, fits: bool
):
    """What a rank has taken is not missing, though nothing else is free."""
    writer = Writer(tmp_path, rank=0, world_size=1, attempt="a", num_ranks=2)
    pieces = list(pieces_of("w", WEIGHT))
    little_memory(int(share * 2 * WEIGHT.nbytes / write._MEMORY_SHARE))
    assert writer.has_memory_for(pieces) is fits
    writer.save(1, pieces, {})
    writer.wait()
    little_memory(0)
    assert writer.has_memory_for(pieces)
    assert not writer.has_memory_for(list(pieces_of("w", torch.cat([WEIGHT, WEIGHT]))))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("plan", "asks"),
    [("data=2", "for saves"), ("data=2", "in a callback"), ("servers=2 workers=1", "for saves")],
)
def test_a_run_without_memory_for_copies_goes_on(
    tmp_path: Path,
    plan: str,
    asks: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """All ranks decide alike, though one alone has too little; that is said once. No rank takes memory."""

    class Saving(pl.Callback):
        def on_epoch(self, run: Any, epoch: Any) -> None:
            run.save()

    has_memory = Writer.has_memory_for
    monkeypatch.setattr(
        Writer, "has_memory_for", lambda self, pieces: self.rank == 0 and has_memory(self, pieces)
    )
    if plan == "data=2":  # a server decides for itself
        monkeypatch.setattr(write.Staging, "copy", lambda *args: pytest.fail("memory"))
    saving = {"save_every": 2} if asks == "for saves" else {}
    each = replace(job(), steps=4, callbacks=[Saving()] if asks == "in a callback" else [])
    result = pl.train(each, plan, run=tmp_path / "run", check=False, table=False, **saving)
    assert (
        result["steps"] == 4
        and len(list((tmp_path / "run" / "checkpoints").glob("step-*/COMMIT"))) == 2
    )
    assert capfd.readouterr().err.count("each save blocks the run") == 1
