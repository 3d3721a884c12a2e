"""Work in a fork of this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.launch.fork import in_a_fork


@pytest.mark.timeout(60)
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
