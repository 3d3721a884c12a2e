"""`torch_private/cuda.py`: whether a fork can use CUDA."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
def test_forks_of_a_process_that_uses_no_cuda_are_good():
    """A process of its own is asked: a backward, as in earlier tests, uses CUDA where torch is built for it."""
    code = (
        "from paceline.base.fork import in_a_fork\n"
        "from paceline.torch_private.cuda import is_in_bad_fork\n"
        "print(is_in_bad_fork(), in_a_fork(is_in_bad_fork))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert ran.stdout.split() == ["False", "False"], ran.stderr


def test_torch_asks_before_it_starts_cuda():
    assert "_is_in_bad_fork" in torch.cuda._lazy_init.__code__.co_names
