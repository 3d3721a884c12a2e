"""Faults as values, and what they do to the process that they strike."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from paceline.base.errors import UsageError
from paceline.launch.process.faults import KINDS, Fault, FaultInjector, draw, struck


def injector(run_dir: Path, *faults: str, rank: int = 0) -> FaultInjector:
    return FaultInjector(
        [Fault.read(fault) for fault in faults], rank=rank, run_dir=run_dir, launcher_pid=1
    )


@pytest.mark.parametrize(
    "text",
    [
        "kill 2@50",
        "stop 1@80:save",
        "slow 0:3x",
        "disk_full 0@1:input",
        "flip 1@6:gradients",
    ],
)
def test_text_is_read_as_it_is_written(text):
    assert str(Fault.read(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil 2@50", "did you mean 'kill'"),
        ("kill 2", "RANK@STEP"),
        ("kill 2@0", "begin with 1"),
        ("kill 2@5:nap", "input"),
        ("slow 0@3", "RANK:TIMESx"),
        ("slow 0:0.5x", "at least 1x"),
        ("kill 2@5+3", "RANK@STEP"),
        ("kill -1@3", "RANK@STEP"),
        ("kill 2@5:gradients", "RANK@STEP"),
    ],
)
def test_what_is_no_fault_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        Fault.read(text)


def test_random_faults_follow_the_seed():
    drawn = draw(40, seed=3, world_size=4, steps=9)
    assert (
        drawn == draw(40, seed=3, world_size=4, steps=9) != draw(40, seed=4, world_size=4, steps=9)
    )
    assert {fault.kind for fault in drawn} == set(KINDS) and {fault.rank for fault in drawn} == set(
        range(4)
    )
    assert all(2 <= fault.step <= 9 for fault in drawn if fault.kind != "slow")


def test_a_fault_strikes_its_rank_once_in_its_phase(tmp_path):
    faults = injector(tmp_path, "raise 0@3:backward", "raise 1@1")
    faults.strike(3, "forward")
    faults.strike(2, "backward")
    with pytest.raises(RuntimeError, match="raise 0@3:backward"):
        faults.strike(4, "backward")
    faults.strike(5, "backward")
    injector(tmp_path, "raise 0@3:backward").strike(5, "backward")  # the rank was started again
    assert {number: (each["step"], each["phase"]) for number, each in struck(tmp_path).items()} == {
        0: (4, "backward")
    }


def test_a_bit_of_the_next_update_flips(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    flips = injector(tmp_path, "flip 0@1")
    for each in (flips, injector(tmp_path, "kill 9@9", "flip 0@1")):  # two wait for the update
        each.strike(1, "forward")
    for _ in range(2):
        weight.grad = torch.zeros(2, 3)
        optimizer.step()
    written = weight._version
    flips.strike(1, "input")
    other = Thread(target=flips.strike, args=(1, "optimizer"))
    other.start()
    other.join()
    flips.strike(2, "input")  # on a thread that does not update
    assert (weight == 1).all()
    flips.strike(2, "optimizer")
    flips.strike(3, "input")
    assert weight._version == written  # it is no write that torch sees
    assert (weight != 1).sum() == 1 and weight[0, 0] != 1


@pytest.mark.parametrize("updates", [False, True])
def test_a_bit_of_weights_that_a_rank_never_updates_flips(tmp_path, updates: bool):
    """Between a forward and a backward, as other weights come before the next forward."""
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    flips = injector(tmp_path, "flip 0@2")
    flips.strike(2, "optimizer")
    if updates:
        model.weight.grad = torch.zeros(2, 3)
        torch.optim.SGD([model.weight], lr=0.0).step()
    for step in (3, 4):
        flips.strike(step, "forward")
        model(torch.ones(4, 3))
        if step == 3:
            flips.strike(3, "backward")
    assert torch.equal(model.weight, before)
    flips.strike(4, "backward")
    assert int((model.weight != before).sum()) == (not updates)


def test_a_bit_of_the_next_gradient_flips(tmp_path):
    """That of the first micro-batch whose forward comes next."""
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 2))
    flips = injector(tmp_path, "flip 0@2:gradients")
    gradients = []
    for phase in ("backward", "forward", "forward"):
        flips.strike(2, phase)
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        gradients.append(model[1].weight.grad)
    assert torch.equal(gradients[0], gradients[2])
    assert (gradients[0] != gradients[1]).nonzero().tolist() == [[0, 0]]


def test_the_newest_checkpoint_is_torn(tmp_path, monkeypatch):
    """Once there is an older one, from which the run can go on."""
    signals: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    faults = injector(tmp_path, "tear 0@1")
    for step in (5, 10):
        faults.strike(step, "input")
        assert not signals
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "COMMIT").write_text("{}")
        (folder / "rank-00000.safetensors").write_bytes(bytes(100))
    faults.strike(11, "input")
    sizes = [
        (tmp_path / "checkpoints" / f"step-{step}" / "rank-00000.safetensors").stat().st_size
        for step in (5, 10)
    ]
    assert sizes == [100, 50] and signals == [(1, signal.SIGKILL)]


def test_a_full_disk_takes_no_byte(tmp_path):
    pid = os.fork()
    if not pid:
        try:
            injector(tmp_path, "disk_full 0@1").strike(1, "input")
            (tmp_path / "file").write_text("x")
            os._exit(0)
        except OSError:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
