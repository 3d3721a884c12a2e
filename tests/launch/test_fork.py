"""Work in a fork of this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PARALLEL = """
import torch
from paceline.launch.fork import in_a_fork
torch.set_num_threads(2)
torch.rand(10**6).add_(1)
print(in_a_fork(lambda: float(torch.ones(10**6).add_(1).sum()), timeout_s=20))
"""


@pytest.mark.timeout(60)
def test_a_fork_computes_in_parallel_after_its_parent_did():
    """libgomp's threads of the parent are not in the fork, and are not waited for."""
    done = subprocess.run([sys.executable, "-c", PARALLEL], capture_output=True, text=True, timeout=50)
    assert done.stdout == "2000000.0\n", done.stderr
