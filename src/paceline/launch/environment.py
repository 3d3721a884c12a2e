"""Whether this process was started by torchrun or Slurm, and how its ranks find each other."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Environment:
    """This process's place among ranks that something else started."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int


def current(environ: Mapping[str, str] = os.environ) -> Environment | None:
    """What torchrun or Slurm says about this process; None when it was started by hand.

    Raises:
        ClusterError: the launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = [environ.get(name, "0" if name == "LOCAL_RANK" else "") for name in names]
        if not values[3]:
            values[3] = values[1] if values[1] == "1" else "1"
        if missing := [name for name, value in zip(names, values, strict=True) if not value]:
            raise ClusterError(f"RANK and WORLD_SIZE are set and {', '.join(missing)} is not",
                               hint="start the ranks with torchrun, or unset RANK and WORLD_SIZE to run by hand")
        rank, world_size, local_rank, local_world_size = map(int, values[:4])
        return _checked(Environment("torchrun", rank, world_size, local_rank, local_world_size, values[4],
                                    int(values[5])))
    if environ.get("SLURM_STEP_ID", "").isdigit() and int(environ.get("SLURM_NTASKS", "1")) > 1:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", "1")))
        job = int(environ.get("SLURM_JOB_ID", "0")) * 7 + int(environ["SLURM_STEP_ID"])
        return _checked(Environment(
            "Slurm", int(environ["SLURM_PROCID"]), int(environ["SLURM_NTASKS"]), int(environ.get("SLURM_LOCALID", "0")),
            int(tasks[0]) if tasks else 1, environ.get("MASTER_ADDR") or _first_host(nodes),
            int(environ.get("MASTER_PORT", 20000 + job % 20000)),
        ))
    return None


def _checked(found: Environment) -> Environment:
    if not 0 <= found.rank < found.world_size:
        raise ClusterError(f"{found.launcher} gave rank {found.rank} of {found.world_size}")
    return found


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[03-05,9]`."""
    if shutil.which("scontrol"):
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30)
        if listed.returncode == 0 and listed.stdout.strip():
            return listed.stdout.split()[0]
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if not match:
        raise ClusterError(f"can't read the first host of Slurm's node list '{nodes}'", hint="set MASTER_ADDR")
    return match[1] + (match[2] or "")


def interface_towards(address: str) -> str | None:
    """The name of the network interface whose address other hosts see when this one talks to `address`.

    gloo otherwise listens on what the host's own name resolves to, which is often the loopback address, and
    hosts then can't reach each other.
    """
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket sends nothing here: it only picks a route
            own = probe.getsockname()[0]
        except OSError:
            return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == own for found in addresses):
            return str(name)
    return None
