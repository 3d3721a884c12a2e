"""When a rank gives holes of its heap back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Job, train
from paceline.base.fork import in_a_fork
from paceline.launch.process.malloc import (
    GIVEN_BACK_BLOCK_BYTES,
    KEPT_BLOCK_BYTES,
    LOOK_EVERY_S,
    TIME_SHARE,
    HeapTrimmer,
    set_up_heap,
    trim_heap,
)

MIB = 2**20


@pytest.fixture(autouse=True)
def no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)


class Rank:
    """A rank whose resident size is as `looks` say, one after the other, once it is looked at."""

    def __init__(self, *looks: int, kind: str = "cpu", trim_s: float = 0.0) -> None:
        self.now_s, self.trims, self.trim_s = 0.0, [], trim_s
        self.looks = list(looks)
        self.heap = HeapTrimmer(
            kind,
            resident_bytes=lambda: self.looks.pop(0),
            trim=self._trim,
            clock=lambda: self.now_s,
        )

    def _trim(self) -> None:
        self.trims.append(self.now_s)
        self.now_s += self.trim_s

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.heap.poll()


def test_a_rank_that_does_not_grow_gives_nothing_back():
    """It is looked at every 10 s; a tenth more is no growth."""
    rank = Rank(100, 109, 105, 109)
    rank.live(4 * LOOK_EVERY_S)

    assert rank.trims == [] and rank.looks == []


def test_a_rank_that_grows_gives_holes_back_each_time_it_has_grown():
    """The look after that says what it needs."""
    rank = Rank(100, 105, 112, 101, 108, 112, 100)
    rank.live(7 * LOOK_EVERY_S)

    assert rank.trims == [3 * LOOK_EVERY_S, 6 * LOOK_EVERY_S]


def test_a_rank_that_shrinks_has_another_usual_size():
    rank = Rank(100, 60, 70)
    rank.live(3 * LOOK_EVERY_S)

    assert rank.trims == [3 * LOOK_EVERY_S]


def test_giving_back_takes_a_small_part_of_the_time():
    """A second for it: the next look is 200 s later."""
    rank = Rank(100, 150, 100, trim_s=1.0)
    rank.live(2 * LOOK_EVERY_S + 1.0 / TIME_SHARE)

    assert len(rank.trims) == 1 and rank.looks == [100]
    rank.live(LOOK_EVERY_S)
    assert rank.looks == []


@pytest.mark.parametrize("setting", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_heap_that_the_user_has_set_up_stays_so(monkeypatch, setting):
    monkeypatch.setenv(setting, "glibc.malloc.arena_max=1")
    rank = Rank(100, 200)
    rank.live(2 * LOOK_EVERY_S)

    assert rank.looks == [100, 200]


def test_gpu_ranks_have_no_such_heap():
    rank = Rank(100, 200, kind="cuda")
    rank.live(2 * LOOK_EVERY_S)

    assert rank.looks == [100, 200]


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` says."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap: run on Linux")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "num_bytes", [GIVEN_BACK_BLOCK_BYTES // 2, 2 * GIVEN_BACK_BLOCK_BYTES, 2 * KEPT_BLOCK_BYTES]
)
def test_blocks_beyond_the_threshold_have_pages_of_their_own(keep: bool, num_bytes: int):
    def own_pages() -> bool:
        set_up_heap(keep=keep)
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc.restype, libc.malloc.argtypes, libc.mallinfo2.restype = (
            ctypes.c_void_p,
            [ctypes.c_size_t],
            Mallinfo,
        )
        before = libc.mallinfo2().hblkhd
        assert libc.malloc(num_bytes)
        return bool(libc.mallinfo2().hblkhd - before >= num_bytes)

    assert in_a_fork(own_pages) == (
        num_bytes >= (KEPT_BLOCK_BYTES if keep else GIVEN_BACK_BLOCK_BYTES)
    )


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap: run on Linux")
def test_holes_are_given_back_to_the_system():
    """Every second block of 256 KiB is freed: no hole is at the heap's end."""

    def hold_holes() -> list[int]:
        set_up_heap(keep=True)
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        blocks = [libc.malloc(MIB // 4) for _ in range(400)]
        for block in blocks:
            ctypes.memset(block, 1, MIB // 4)
        for block in blocks[::2]:
            libc.free(block)
        before_bytes = psutil.Process().memory_info().rss
        trim_heap()
        return [before_bytes, psutil.Process().memory_info().rss]

    before_bytes, after_bytes = in_a_fork(hold_holes, timeout_s=60.0)

    assert before_bytes - after_bytes > 40 * MIB


@pytest.mark.parametrize("plan", ["single", "servers=1 workers=1"])
def test_ranks_look_after_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: str):
    looks = tmp_path / "looks"
    looks.touch()

    def poll(heap: HeapTrimmer) -> None:
        with looks.open("a") as file:
            file.write("look\n")

    monkeypatch.setattr(HeapTrimmer, "poll", poll)
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    job = Job(
        model=lambda: nn.Linear(2, 1),
        data=data,
        loss=nn.functional.mse_loss,
        batch=2,
        steps=3,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    train(job, plan=plan, run=tmp_path / "run", check=False)

    assert len(looks.read_text().splitlines()) >= 3
