"""Whether this process was started by torchrun or Slurm, and how its ranks find each other."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import ClusterError, PacelineError, UsageError


@dataclass(frozen=True, slots=True)
class Environment:
    """This process's place among ranks that something else started. num_starts: how often it has started them."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    num_starts: int = 1

    @property
    def variables(self) -> dict[str, str]:
        """The variables from which a rank's process reads this by `current`."""
        return {
            "PACELINE_LAUNCHER": self.launcher,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.num_starts - 1),
        }


def current(environ: Mapping[str, str] = os.environ) -> Environment | None:
    """What torchrun or Slurm says about this process; None when it was started by hand.

    Raises:
        ClusterError: the launcher's variables are incomplete or contradict each other.
        UsageError: see `refuse_tls`.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        refuse_tls(environ)
        return _checked(_of_torchrun(environ))
    if (
        environ.get("SLURM_STEP_ID", "").isdigit()
        and whole_number(environ, "SLURM_NTASKS", "1") > 1
    ):
        refuse_tls(environ)
        return _checked(_of_slurm(environ))
    return None


def refuse_tls(environ: Mapping[str, str] = os.environ) -> None:
    """
    Raises:
        UsageError: PACELINE_TLS asks for encryption, which this version does not do.
    """
    if environ.get("PACELINE_TLS", "") not in ("", "0"):
        raise UsageError(
            f"PACELINE_TLS={environ['PACELINE_TLS']}: Paceline encrypts nothing between hosts any more, as gloo, "
            "NCCL and the store where ranks meet never were encrypted",
            hint="a network that encrypts, such as WireGuard or your cloud's own, covers all of them; then unset "
            "PACELINE_TLS",
        )


@contextmanager
def told_to_torchrun() -> Iterator[None]:
    """Give the message of an error in the block to torchrun, which prints it below all tracebacks."""
    try:
        yield
    except PacelineError as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            with suppress(OSError):
                Path(path).write_text(
                    json.dumps({"message": str(error), "timestamp": int(time.time())})
                )
        raise


def _of_torchrun(environ: Mapping[str, str]) -> Environment:
    defaults = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name, defaults.get(name))]:
        raise ClusterError(
            f"RANK and WORLD_SIZE are set and {', '.join(missing)} is not",
            hint="start the ranks with torchrun, or unset RANK and WORLD_SIZE to run by hand",
        )
    rank, world_size, local_rank, local_world_size = (
        whole_number(environ, name, defaults.get(name)) for name in names[:4]
    )
    num_starts = 1 + whole_number(environ, "TORCHELASTIC_RESTART_COUNT", "0")
    return Environment(
        environ.get("PACELINE_LAUNCHER", "torchrun"),
        rank,
        world_size,
        local_rank,
        local_world_size,
        environ["MASTER_ADDR"],
        whole_number(environ, "MASTER_PORT"),
        num_starts,
    )


def _of_slurm(environ: Mapping[str, str]) -> Environment:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = whole_number(environ, "SLURM_JOB_ID", "0") * 7 + whole_number(environ, "SLURM_STEP_ID")
    return Environment(
        "Slurm",
        whole_number(environ, "SLURM_PROCID"),
        whole_number(environ, "SLURM_NTASKS"),
        whole_number(environ, "SLURM_LOCALID", "0"),
        _tasks_here(environ),
        environ.get("MASTER_ADDR") or _first_host(nodes),
        whole_number(environ, "MASTER_PORT", str(20000 + job % 20000)),
    )


def whole_number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """
    Raises:
        ClusterError: the variable is missing and has no default, or is something else.
    """
    text = environ.get(name, default)
    if text is None or not re.fullmatch(r"\d+", text):
        raise ClusterError(
            f"{name} is not set" if text is None else f"{name}={text} is not a whole number",
            hint="a launcher sets it; outside of one, unset its variables",
        )
    return int(text)


def _checked(started: Environment) -> Environment:
    place = (
        f"rank {started.rank} of {started.world_size}, {started.local_rank} of {started.local_world_size} "
        "on its host"
    )
    if not (
        started.rank < started.world_size
        and started.local_rank < started.local_world_size <= started.world_size
    ):
        raise ClusterError(
            f"{started.launcher} says this is {place}, which contradicts itself",
            hint="ranks count from 0; check the launcher's numbers of nodes and of processes a node",
        )
    return started


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks on this node. Slurm lists them node by node: `2(x3),1`."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE", "1")
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    counts = [int(tasks) for tasks, times in runs for _ in range(int(times or 1))]
    return counts[min(whole_number(environ, "SLURM_NODEID", "0"), len(counts) - 1)] if counts else 1


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[03-05,9]`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to the first comma outside brackets
    if not match:
        raise ClusterError(
            f"can't read the first host of Slurm's node list '{nodes}'", hint="set MASTER_ADDR"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def interface_towards(address: str) -> str | None:
    """The name of the network interface whose address other hosts see when this one talks to `address`.

    gloo otherwise listens on what the host's own name resolves to, which is often the loopback address, and
    hosts then can't reach each other.
    """
    import psutil

    address_here = address_towards(address)
    if address_here is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address_here for each in addresses):
            return str(name)
    return None


def address_towards(address: str) -> str | None:
    """The address of this host that others see when it talks to `address`; None if it can't."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                (address, 9)
            )  # a datagram socket sends nothing here: it only picks a route
            return str(probe.getsockname()[0])
        except OSError:
            return None
