"""A lost rank does not cost a run its steps: the next ranks go on from copies in memory, to the same weights."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline as pl
from paceline.base.logs import logger
from paceline.checkpoint.pieces import Region, TensorPiece
from paceline.launch.process.memory_store import StateCopies
from paceline.servers.server import Server
from paceline.strategies.mesh import Mesh
from paceline.training.parts import memory_checkpoint
from paceline.training.parts.copied_state import open_copies, open_newest
from paceline.training.parts.drift import fingerprints
from paceline.training.parts.memory_checkpoint import Copier

INPUTS = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SAMPLES = list(zip(INPUTS, INPUTS.sum(1, keepdim=True).tanh(), strict=True))
STEPS = 12


class Fatal:
    """Data that ends the first process that reads more than a number of samples; one that is killed leaves a mark."""

    def __init__(self, mark: Path | None, number: int) -> None:
        self.mark, self.number = mark, number

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        if self.mark is not None and torch.utils.data.get_worker_info() is None:
            seen = self.mark.with_name(f"{self.mark.name}-{os.getpid()}")
            count = int(seen.read_text()) + 1 if seen.exists() else 1
            seen.write_text(str(count))
            if count > self.number:
                try:
                    os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
        return SAMPLES[index]


def job_of(mark: Path | None, samples: int) -> pl.Job:
    """A few steps. mark, samples: the first process to read more samples than that is killed and makes this file."""

    def net() -> torch.nn.Module:
        return torch.nn.Sequential(
            *(
                torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2))
                for _ in range(4)
            ),
            torch.nn.Linear(8, 1),
        )

    return pl.Job(
        model=net,
        data=Fatal(mark, samples),
        loss=F.mse_loss,
        batch=8,
        steps=STEPS,
        precision="float64",
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.03),
        clip=1.0,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    )


def train(
    run: Path, plan: str, *, mark: Path | None = None, samples: int = 0, **options: Any
) -> Any:
    return pl.train(job_of(mark, samples), plan, run=run, check=False, table=False, **options)


def steps_of(run: Path) -> list[int]:
    return [
        line["step"]
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]


PLANS = ["pipeline=2 microbatches=2"]  # parts/test_lost_ranks.py has replicas
SLOW_PLANS = [
    "single",
    "data=2",
    "shard=2",
    "shard=2 zero=1",
    "tensor=2",
    "data=2 local=3",
    "data=2 local=3 outer=diloco",
    "data=2 compress=powersgd",
    "place=2",
    "data=2 microbatches=2",
    "servers=1 workers=2",
]


@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW_PLANS)]
)
def test_a_run_outlives_the_death_of_a_rank(
    tmp_path: Path, plan: str, capfd: pytest.CaptureFixture[str]
):
    """Weights and losses are those of the undisturbed run, bit by bit, and each step is recorded once."""
    train(tmp_path / "whole", plan)
    samples = 8 * 7 // (1 if plan in ("single", "place=2") else 2)
    train(tmp_path / "run", plan, mark=tmp_path / "killed", samples=samples)
    assert (tmp_path / "killed").exists()
    expected, actual = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert "all ranks start again" in capfd.readouterr().err


class FatalToWorkers(Fatal):
    """Data that signals the first loader worker that reads one of its samples."""

    ends_by = signal.SIGKILL

    def __getitem__(self, index: int) -> Any:
        if (
            torch.utils.data.get_worker_info() is not None
            and index == 17
            and not self.mark.exists()
        ):
            self.mark.touch()
            os.kill(os.getpid(), self.ends_by)
        return SAMPLES[index]


def test_a_run_outlives_the_death_of_a_loader_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    train(tmp_path / "whole", "single")
    killing = replace(job_of(None, 0), data=FatalToWorkers(tmp_path / "killed", 0))
    pl.train(killing, "single", run=tmp_path / "run", check=False, table=False, loader_workers=1)
    assert (tmp_path / "killed").exists()
    expected, actual = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "run"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert "rank 0: a process that reads its data was killed" in capfd.readouterr().err


def test_a_loader_worker_outlives_a_request_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Schedulers send it to all processes: the rank needs its worker to end the step and to save."""
    monkeypatch.setattr(FatalToWorkers, "ends_by", signal.SIGTERM)
    terminated_job = replace(job_of(None, 0), data=FatalToWorkers(tmp_path / "asked", 0))
    pl.train(
        terminated_job,
        "single",
        run=tmp_path / "run",
        check=False,
        table=False,
        loader_workers=1,
        restarts=0,
    )
    assert (tmp_path / "asked").exists() and steps_of(tmp_path / "run") == list(range(1, STEPS + 1))


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """So that the updates in the time of two copies are no matter of the machine's speed."""
    time.sleep(0.05)
    return F.mse_loss(output, target)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "server", "most"),
    [
        ("servers=2 workers=2 staleness=2", 0, 8),
        pytest.param("servers=2 workers=2", 1, 4, marks=pytest.mark.slow),
        pytest.param("servers=2 workers=3 staleness=inf", 1, 8, marks=pytest.mark.slow),
        pytest.param("servers=2 workers=2 colocate=yes", 1, 4, marks=pytest.mark.slow),
        ("servers=2 workers=2 staleness=2 colocate=yes", 0, 8),
    ],
)
def test_servers_go_on_from_copies(
    tmp_path: Path,
    plan: str,
    server: int,
    most: int,
    paceline_rehearse: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also in the middle of a step, where updates of parts of it are made; without a checkpoint. Copies are made as
    often as can be. The second server takes longer for them than for an update: no copy has a part of the next one."""
    copy = Server.copy

    def copy_late(self: Server, *args: Any) -> None:
        time.sleep(0.05 * self.number)
        copy(self, *args)

    monkeypatch.setattr(Copier, "affordable_every", lambda self, step_s, **share: 1)
    monkeypatch.setattr(Server, "copy", copy_late)
    job = replace(job_of(None, 0), clip=None, loss=slow_loss)
    outcome = paceline_rehearse(job, plan, f"kill {server}@9", save_every=STEPS)
    assert outcome.audit.recomputed_updates <= most and outcome.audit.launches == 2


def piece(name: str, tensor: torch.Tensor, rows: int, first: int) -> TensorPiece:
    return TensorPiece(
        name, (rows, *tensor.shape[1:]), (first, *(0 for _ in tensor.shape[1:])), tensor
    )


class _Context:
    attempt, local_world_size = "first", 2

    def __init__(self, rank: int) -> None:
        self.rank = self.slot = rank


def copier_of(rank: int, copies: StateCopies | None, *, num_parts: int = 1) -> Copier:
    """One of two ranks of a host."""
    return Copier(_Context(rank), copies, 2, (rank % num_parts, num_parts))  # type: ignore[arg-type]


def test_copies_are_read_as_a_checkpoint_is():
    """Parts of several ranks make a whole tensor; of dtypes and layouts of all kinds, none is lost."""
    copies = StateCopies(2)
    whole = torch.arange(24.0).reshape(6, 4).t().contiguous().t()  # its rows don't lie in a row
    scalar, flags, empty = (
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 3),
    )
    pair = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for rank in range(2):
        pieces = [piece("rows", whole[3 * rank : 3 * rank + 3], 6, 3 * rank)]
        if rank == 0:
            pieces += [
                TensorPiece("scalar", (), (), scalar),
                TensorPiece("flags", (2,), (0,), flags),
                TensorPiece("empty", (0, 3), (0, 0), empty),
                TensorPiece("pair", (2,), (0,), pair),
            ]
        copier_of(rank, copies, num_parts=2).copy(7, pieces, {"step": 7} if rank == 0 else None)
    copied = open_copies(7, [(copies, rank) for rank in range(2)])
    assert copied.document == {"step": 7} and copied.step == 7
    for name, expected in (
        ("rows", whole),
        ("scalar", scalar),
        ("flags", flags),
        ("empty", empty),
        ("pair", pair),
    ):
        assert torch.equal(copied.read(name), expected)
    assert torch.equal(copied.read("rows", Region((2, 1), (2, 2))), whole[2:4, 1:3])
    copies.close()


@pytest.mark.parametrize("flipped", [False, True])
def test_copies_of_replicas_that_differ_are_passed_over(
    tmp_path: Path, flipped: bool, monkeypatch: pytest.MonkeyPatch
):
    """Else all ranks would go on from a flipped bit and then agree on it."""
    copies, warnings = StateCopies(2), list[str]()
    monkeypatch.setattr(logger, "warning", warnings.append)
    for rank in range(2):
        weight, state = torch.ones(1000), torch.zeros(1000)
        if flipped and rank == 0:
            state.view(torch.int32)[7] ^= 1 << 20
        stepper: Any = SimpleNamespace(
            mesh=Mesh({"data": 2}, rank),
            local_parameters={"w": weight},
            model=torch.nn.Module(),
            buffers=SimpleNamespace(unlike=set()),
            step_sync=SimpleNamespace(global_weights=lambda weights: weights),
        )
        rows = fingerprints(stepper, lambda axis, state=state: {"optimizer/w/exp_avg": state})
        owned = [TensorPiece("parameters/w", (1000,), (0,), weight)] if rank == 0 else []
        copier_of(rank, copies).copy(5, [*owned, *rows], {"step": 5} if rank == 0 else None)
    context: Any = SimpleNamespace(
        rank=0,
        slot=0,
        world_size=2,
        local_world_size=2,
        copies=copies,
        host_copies=None,
        num_starts=2,
        store=None,
    )
    newest = open_newest(context, tmp_path, lambda copied: None)
    assert (newest is None) == flipped
    assert warnings == (
        [
            "the copies in memory of step 5 are passed over: the state differs between rank 0 and rank 1, "
            "and nothing shows which of them is right"
        ]
        if flipped
        else []
    )
    copies.close()


def test_the_newest_copy_is_the_last_that_all_ranks_made():
    """A rank that dies in a copy leaves the one before it; what others had copied since is forgotten."""
    copies = StateCopies(2)
    assert copies.newest(range(2)) is None
    for step in (4, 5):
        for rank in range(2):
            copies.write(rank, step, [memoryview(b"%d" % step)], b"{}")
    copies.write(0, 6, [memoryview(b"6")], b"{}")
    with pytest.raises(TypeError):
        copies.write(1, 6, [memoryview(b"6"), "no bytes"], b"{}")  # type: ignore[list-item]
    assert (copies.newest(range(2)), set(copies.steps(1))) == (5, {5})
    for rank in range(2):
        copies.keep(rank, until=5)
    assert set(copies.steps(0)) == {5}
    copies.write(0, 6, [memoryview(b"6")], b"[0]")
    assert copies.extent(0, 6) == (1, 4) and copies.extent(0, 5) == (1, 3)
    assert copies.newest(range(2)) == 5
    copies.close()


def test_copies_fit_into_half_of_the_memory_beside_those_that_are_made(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two of each rank of the host; what is made already is there to be written over."""
    monkeypatch.setattr(memory_checkpoint, "free_memory_bytes", lambda: free_bytes)
    memory = StateCopies(2)
    copier = copier_of(0, memory)
    pieces = [piece("rows", torch.zeros(100, 10), 100, 0)]  # 4,000 bytes
    free_bytes = 31_999
    assert not copier.fits(pieces)
    free_bytes = 32_000
    assert copier.fits(pieces)
    copier.copy(1, pieces, None)
    made_bytes = memory.num_bytes(0)
    assert 4000 < made_bytes < 4400  # with its index
    free_bytes = 32_000 - 2 * made_bytes
    assert copier.fits(pieces)
    free_bytes -= 1
    assert not copier.fits(pieces)
    memory.give_back(0)
    assert memory.num_bytes(0) == 0
    memory.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "poor_rank"), [("data=2", 1), ("servers=1 workers=1 staleness=1", 0)]
)
def test_without_memory_no_copy_is_begun(
    tmp_path: Path,
    plan: str,
    poor_rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """On no rank if one of them has no memory: the kernel would end it in the first copy, and then in all restarts."""
    monkeypatch.setattr(Copier, "fits", lambda self, pieces: self.context.rank != poor_rank)
    monkeypatch.setattr(Copier, "_write", lambda *arguments: pytest.fail("a copy was made"))
    train(tmp_path / "run", plan)
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    err = capfd.readouterr().err
    assert (
        err.count("memory has no room for copies of the state") == 1
        and "all ranks start again" not in err
    )


@pytest.mark.parametrize(
    "plan", ["data=2", pytest.param("servers=1 workers=1 staleness=1", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_if_memory_is_refused(
    tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """A kernel that promises no more than it has (vm.overcommit_memory=2) refuses what looks free. No rank makes copies
    then, as those of one rank alone are of no use."""
    write = StateCopies.write

    def refused(self: StateCopies, rank: int, *arguments: Any, **options: Any) -> None:
        if plan.startswith("server") or rank == 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        write(self, rank, *arguments, **options)

    monkeypatch.setattr(StateCopies, "write", refused)
    train(tmp_path / "run", plan)
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    err = capfd.readouterr().err
    assert err.count("refuses memory for a copy of the state: Cannot allocate memory") == 1
    assert err.count("memory has no room for copies of the state") == 1


def test_a_copy_of_a_gpu_counts_until_it_is_in_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    """A thread writes it beside the steps. The first one also pins the memory, and does not count: on an H200, it put
    copies hundreds of steps apart."""
    copier = copier_of(0, None)
    copier._staging = SimpleNamespace(wait=lambda: None)  # type: ignore[assignment]
    clock_s = 10.0

    def write(*arguments: Any) -> None:
        nonlocal clock_s
        clock_s += 0.2

    monkeypatch.setattr(copier, "_write", write)
    monkeypatch.setattr(memory_checkpoint, "time", SimpleNamespace(perf_counter=lambda: clock_s))
    copier._write_staged(1, [], "null", None)
    assert not copier._latest_s
    copier._write_staged(2, [], "null", clock_s - 0.05)
    assert list(copier._latest_s) == [pytest.approx(0.05)] and copier._error is None


def test_the_pace_of_copies_is_set_before_the_first_and_after_1_2_4_and_8(
    monkeypatch: pytest.MonkeyPatch,
):
    """By the time of a copy and of a step. Without memory there are no more."""
    copier = copier_of(0, None)
    copier._latest_s.append(0.01)
    monkeypatch.setattr(copier, "fits", lambda pieces: True)
    set_after = []
    for copier.num_copies in range(10):
        copier.every = 0
        assert copier.set_pace([], [0.5, 0.4, 9.0], steps=2)
        assert copier.every in (0, copier.affordable_every(0.25))
        set_after += [copier.num_copies] if copier.every else []
    assert set_after == [0, 1, 2, 4, 8]
    copier.num_copies = 16
    monkeypatch.setattr(copier, "fits", lambda pieces: False)
    assert not copier.set_pace([], [])


def test_one_slow_copy_does_not_put_copies_apart():
    """Other work on the machine delays one now and then: the median of the latest counts."""
    copier = copier_of(0, None)
    assert copier.affordable_every(0.1) == 1
    copier._latest_s.extend([0.001, 0.5, 0.001])
    assert copier.affordable_every(0.05) == 2
