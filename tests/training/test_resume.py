"""A run that is killed and resumed is the run that was never killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conditions import until
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PacelineError
from paceline.servers.roles import RankTask
from paceline.servers.worker import Worker

SAMPLES, BATCH, STEPS = 53, 12, 15  # three epochs with a short last batch of 5


class Net(nn.Module):
    """Some layers, dropout, shapes for a ring of any size, layers that two ranks can split, and a weight that the
    first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 34), nn.GELU(), nn.Dropout(0.1), nn.Linear(34, 17), nn.GELU()
        )
        self.last = nn.ModuleList([nn.Linear(17, 6), nn.Linear(6, 34)])
        self.last[1].weight = self.layers[0].weight
        self.out = nn.Linear(34, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.last[1](torch.tanh(self.last[0](self.layers(x[:, 1:]))))))


NICENESS = os.nice(0)  # of the tests


def make_job(record: Path | None = None, dropout: bool = True) -> paceline.Job:
    """A job whose loss writes down which samples it saw: column 0 of the input is the sample's index."""
    x = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.arange(SAMPLES)
    y = (x[:, 1:].sum(1) > 0).long() + (x[:, 1] > 1).long()

    def model() -> nn.Module:
        net = Net()
        if not dropout:
            net.layers[2].p = 0.0
        return net

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if record is not None and in_rank():
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            with open(record / f"rank-{rank}", "a") as file:
                file.write(" ".join(str(int(index)) for index in target[:, 0]) + "\n")
        return F.cross_entropy(output, target[:, 1])

    return paceline.Job(
        model=model,
        data=TensorDataset(x, torch.stack([torch.arange(SAMPLES), y], 1)),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        batch=BATCH,
        steps=STEPS,
        clip=1.0,
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    )


def in_rank() -> bool:
    """Whether a rank is training, rather than a fork of low priority predicting what the job costs."""
    return multiprocessing.parent_process() is not None and os.nice(0) == NICENESS


def devices(plan: str) -> str:
    return f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}"


def train_and_kill(
    job: paceline.Job, plan: str, run: Path, *, after_step: int, check: bool = True
) -> None:
    """Train in a process of its own and SIGKILL it, and thereby its ranks, once a step was recorded, which they wait
    for in the next one."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if recorded(run) >= after_step:
            time.sleep(1000)
        return job.loss(output, target)

    process = multiprocessing.get_context("fork").Process(
        target=lambda: paceline.train(
            replace(job, loss=loss),
            plan,
            devices=devices(plan),
            run=run,
            save_every=2,
            check=check,
        )
    )
    process.start()
    until(lambda: not process.is_alive() or recorded(run) >= after_step)
    assert process.is_alive(), "the run ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def recorded(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def settled(run: Path) -> None:
    """Wait until the killed run's ranks are gone: their lock is then free."""
    import fcntl

    with open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "after_step"),
    [
        ("single", 7),
        ("data=2", 1),
        ("data=2", 10),
        ("data=3", 8),
        ("data=4", 5),
        ("data=2 shard=2", 6),
        ("shard=2 zero=1 microbatches=2", 9),
        ("pipeline=2", 5),
        ("pipeline=2 data=2 schedule=zero-bubble", 4),
        ("tensor=2", 6),
        ("place=2", 3),
    ],
)
def test_a_killed_run_goes_on_bitwise(plan: str, after_step: int, tmp_path: Path) -> None:
    """SIGKILL of all processes at any step, then resume: every weight is the uninterrupted run's, bit by bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    paceline.train(make_job(), plan, devices=devices(plan), run=whole)
    train_and_kill(make_job(), plan, cut, after_step=after_step)
    settled(cut)

    paceline.train(make_job(), plan, devices=devices(plan), run=cut, resume=True, save_every=2)

    assert all(torch.equal(tensor, weights(cut)[name]) for name, tensor in weights(whole).items())
    assert losses(whole) == losses(cut)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data=2", "shard=3"),
        ("shard=3", "single"),
        ("data=2", "single"),
        ("data=2 shard=2", "data=3"),
        ("single", "shard=2 zero=1"),
        ("pipeline=2 data=2", "shard=3"),
        ("pipeline=2 data=2", "tensor=2"),
        ("pipeline=2 data=2", "single"),
        ("shard=2 tensor=2", "pipeline=2"),
        ("single", "place=2"),
    ],
)
def test_a_run_goes_on_under_another_plan(before: str, after: str, tmp_path: Path) -> None:
    """Stopped under one plan and resumed under another, it ends where one device ends, but for rounding."""
    job = replace(make_job(dropout=False), precision="float64")
    paceline.train(job, "single", run=tmp_path / "whole")
    train_and_kill(job, before, tmp_path / "cut", after_step=6)
    settled(tmp_path / "cut")

    paceline.train(job, after, devices=devices(after), run=tmp_path / "cut", resume=True)

    for name, tensor in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "cut")[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("data=2", "data=3"), ("data=3 microbatches=2", "shard=2"), ("single", "data=4")],
)
def test_every_sample_is_used_once_over_the_two_halves(
    before: str, after: str, tmp_path: Path
) -> None:
    """The indices that the losses saw, up to the checkpoint and after it, make whole epochs in one device's order.
    Losses see the first ones in a check, too."""
    halves = [tmp_path / name for name in ("first", "second", "alone")]
    for half in halves:
        half.mkdir()
    train_and_kill(make_job(halves[0]), before, tmp_path / "run", after_step=7, check=False)
    settled(tmp_path / "run")
    start = max(
        int(path.name.removeprefix("step-"))
        for path in (tmp_path / "run" / "checkpoints").glob("step-*")
    )
    paceline.train(
        make_job(halves[1]),
        after,
        devices=devices(after),
        run=tmp_path / "run",
        resume=True,
        check=False,
    )
    paceline.train(make_job(halves[2]), "single", run=tmp_path / "alone-run")

    used = steps_of(halves[0], before, last=start) + steps_of(halves[1], after, first=start)

    assert used == steps_of(halves[2], "single")
    steps_per_epoch = -(-SAMPLES // BATCH)
    for epoch in range(STEPS // steps_per_epoch):
        in_epoch = used[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]
        assert sorted(chain.from_iterable(in_epoch)) == list(range(SAMPLES))


def steps_of(record: Path, plan: str, *, first: int = 0, last: int = STEPS) -> list[list[int]]:
    """The indices that each step used over all ranks, in order; empty micro-batches are not run."""
    from paceline.job.order import Order, split

    parsed = paceline.Plan.parse(plan)
    cuts = parsed.modifiers.microbatches
    lines = {
        rank: iter(
            [
                list(map(int, line.split()))
                for line in (record / f"rank-{rank}").read_text().splitlines()
            ]
        )
        for rank in range(parsed.world_size)
    }
    order = Order(SAMPLES, BATCH, seed=0)
    steps = []
    for step in range(first, last):
        shares = split(order.window(step).count, [1] * parsed.world_size)
        steps.append(
            [
                index
                for rank in range(parsed.world_size)
                for part in split(len(shares[rank]), [1] * cuts)
                if len(part)
                for index in next(lines[rank])
            ]
        )
    return steps


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["single", "servers=1 workers=2", "servers=1 workers=2 staleness=2"]
)
def test_a_run_that_has_no_step_left_is_resumed(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of whoever started it, between the last checkpoint and the summary. It has its last loss, and
    its servers wait for a worker that comes late."""
    begin = Worker.__init__

    def begin_late(self: Worker, task: RankTask, *, number: int) -> None:
        time.sleep(number)
        begin(self, task, number=number)

    job = replace(make_job(dropout=False), steps=3, epochs=None)
    first = paceline.train(job, plan, run=tmp_path, check=False)
    (tmp_path / "summary.json").unlink()
    monkeypatch.setattr(Worker, "__init__", begin_late)
    again = paceline.train(job, plan, run=tmp_path, resume=True, restarts=0, check=False)
    assert again["final_loss"] == first["final_loss"] and again["steps"] == 3
    assert paceline.audit(tmp_path).passed


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "servers=1 workers=2"])
def test_a_run_that_is_complete_keeps_its_figures_when_it_is_resumed(
    plan: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the resume is refused. With more steps to take, it goes on."""
    run, job = tmp_path / "run", make_job()
    before = dict(paceline.train(job, plan, run=run, steps=2).to_dict())
    kept = {
        path: path.read_bytes()
        for path in run.glob("*.*")
        if path.suffix in (".json", ".safetensors")
    }
    assert run / "summary.json" in kept and run / "model.safetensors" in kept
    again = paceline.train(job, "data=2", run=run, steps=2, resume=True)
    assert again.to_dict() == before and before["step_s"] > 0
    assert f"{run} was complete after 2 steps: nothing was left to train" in capfd.readouterr().err
    with pytest.raises(PacelineError, match="its seed was 0"):
        paceline.train(replace(job, seed=1), "single", run=run, steps=2, resume=True)
    assert {path: path.read_bytes() for path in kept} == kept and not list(run.glob(".model*"))
    assert paceline.train(job, "single", run=run, steps=3, resume=True)["steps"] == 3
    assert json.loads((run / "summary.json").read_text())["plan"] == "single" and not list(
        run.glob(".model*")
    )
