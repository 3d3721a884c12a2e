"""Two hosts as network namespaces behind a bridge train to the weights of one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_digits.py"
PACELINE = [sys.executable, "-P", "-m", "paceline"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.78.0.1 and 10.78.0.2, joined by a bridge in a third."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the ip command to make network namespaces")
    tag = uuid.uuid4().hex[:6]
    switch, names = f"pl{tag}s", [f"pl{tag}h{i}" for i in (1, 2)]
    try:
        try:
            _run("ip", "netns", "add", switch)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"can't make network namespaces: {error.stderr.decode().strip()}")
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


@pytest.mark.root
@pytest.mark.timeout(900)
def test_two_hosts_under_torchrun_reach_the_weights_of_one(hosts: list[str], tmp_path: Path) -> None:
    """The same plan across two hosts gives the same weights, and gloo finds the interface by itself."""
    arguments = [str(EXAMPLE), "--plan", "data=2", "--steps", "30", "--set", "width=8"]
    # One thread a rank on both sides: another number of threads sums in another order.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GLOO", "MASTER", "RANK", "WORLD"))}
    environ["OMP_NUM_THREADS"] = "1"
    nodes = [subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
         str(rank), "--nproc-per-node", "1", "--master-addr", "10.78.0.1", "--master-port", "29400", "--no-python",
         "--", *PACELINE, "train", *arguments, "--run", str(tmp_path / "two")],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank, name in enumerate(hosts)]
    try:
        said = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    subprocess.run([*PACELINE, "train", *arguments, "--run", str(tmp_path / "one")], env=environ, check=True,
                   capture_output=True, timeout=400)

    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))

    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
