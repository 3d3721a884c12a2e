"""Two hosts as network namespaces behind a bridge train to the weights of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.jobfile import JobFile

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_digits.py"
PACELINE = [sys.executable, "-P", "-m", "paceline"]


@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("plan", "asked"), [
    ("data=2", {}),
    pytest.param("server=1 workers=1", {"PACELINE_TLS": "1", "PACELINE_SECRET": "ab" * 32}, marks=pytest.mark.slow),
])
def test_two_hosts_under_torchrun_reach_the_weights_of_one(
    hosts: list[str], tmp_path: Path, plan: str, asked: dict[str, str]
) -> None:
    """The same plan across two hosts gives the same weights, also encrypted; gloo finds the interface by itself."""
    arguments = [str(EXAMPLE), "--plan", plan, "--steps", "10", "--set", "width=8", "--check", "no"]
    # One thread a rank on both sides: another number of threads sums in another order.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO", "MASTER", "RANK", "WORLD"))}
    environ["OMP_NUM_THREADS"] = "1"
    nodes = [subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
         str(rank), "--nproc-per-node", "1", "--master-addr", "10.78.0.1", "--master-port", "29400", "--no-python",
         "--", *PACELINE, "train", *arguments, "--run", str(tmp_path / "two")],
        env={**environ, **asked}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank, name in enumerate(hosts)]
    try:
        said = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    paceline.train(JobFile.parse(str(EXAMPLE), {"width": 8}), plan, steps=10, run=tmp_path / "one", check=False)

    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))

    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
