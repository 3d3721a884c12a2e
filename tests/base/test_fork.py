"""Work in a fork of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from paceline.base import fork
from paceline.base.fork import in_a_fork
from paceline.cluster import accelerators
from paceline.cluster.gpu_use import start_autograd_without_gpus


def test_a_fork_computes_in_parallel_after_its_parent_did(start_child: Any):
    """libgomp's threads of the parent are not in the fork, and are not waited for."""

    def compute() -> None:
        torch.set_num_threads(2)
        torch.rand(10**6).add_(1)
        print(in_a_fork(lambda: float(torch.ones(10**6).add_(1).sum()), timeout_s=20))

    def be_the_parent() -> None:
        thread = threading.Thread(target=compute)  # the first in its process to compute in parallel
        thread.start()
        thread.join()

    parent = start_child(be_the_parent)
    parent.exit_code()
    assert parent.stderr == "2000000.0\n"


_FAKES_THEN_A_FORK = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from paceline.base import fork
from paceline.base.fork import in_a_fork
from paceline.cluster.gpu_use import apart_from_cuda

def backward():
    torch.ones((), requires_grad=True).backward()

def of_fakes():
    with FakeTensorMode():
        backward()

apart_from_cuda(of_fakes)
in_a_fork(backward)
"""


@pytest.mark.skipif(
    not torch.version.cuda, reason="needs a build of torch for CUDA (but no GPU): others count none"
)
def test_forks_run_a_backward_after_one_of_fake_tensors():
    """In a process of its own: this one's autograd has started."""
    done = subprocess.run(
        [sys.executable, "-c", _FAKES_THEN_A_FORK], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("built_for", "num_gpus", "starts"), [("13.0", 0, 1), ("13.0", 2, 0), (None, 0, 0)]
)
def test_autograd_starts_before_fake_tensors_where_torch_finds_no_gpu(
    built_for: str | None, num_gpus: int, starts: int, monkeypatch: pytest.MonkeyPatch
):
    backwards: list[Any] = []
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(accelerators, "has_gpus", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backwards.append(loss))
    start_autograd_without_gpus.__wrapped__()
    assert len(backwards) == starts


def test_a_fork_ends_with_an_interrupt_of_its_parent(monkeypatch: pytest.MonkeyPatch):
    """A notebook lives on after it, and nobody waits for the answer."""
    pids: list[int] = []
    make_fork = os.fork

    def noted() -> int:
        pid = make_fork()
        pids.append(pid)
        return pid

    def interrupted(descriptor: int, deadline_s: float | None) -> bytes:
        os.close(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", noted)
    monkeypatch.setattr(fork, "_read_until", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_a_fork(lambda: time.sleep(1000))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
