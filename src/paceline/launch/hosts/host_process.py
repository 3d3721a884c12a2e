"""A process that a cluster starts once on each host: torch's elastic agent takes its place and starts the host's ranks.

Kubeflow Trainer (variables PET_*, which are also those of torchrun's own options) and SkyPilot (SKYPILOT_*) say which
host this is. Nothing is done in a process that already is a rank, or on a single host, whose ranks are forks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from paceline.base.errors import ClusterError
from paceline.launch.hosts.environment import whole_number

SKYPILOT_PORT = 8008  # where ranks meet, as SkyPilot's own examples of distributed jobs have it


@dataclass(frozen=True, slots=True)
class Host:
    """This process's host among those of a run.

    index: from 0. num_ranks: of each host; None where the cluster leaves that to the program. address, port: of the
    first host, where ranks meet. least_hosts: with which the run goes on; None if it ends with the first that is lost.
    """

    launcher: str
    index: int
    num_hosts: int
    num_ranks: int | None
    address: str
    port: int
    least_hosts: int | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with fewer hosts if some are lost."""
        return self.least_hosts is not None

    def ranks(self, world_size: int | None, num_gpus: int) -> int:
        """How many ranks the host starts: what the cluster says, else its part of the plan's, else one a GPU, else one.

        world_size: that the plan or --procs asks for, if they do.

        Raises:
            ClusterError: they can't be that many.
        """
        if world_size is None:
            return self.num_ranks or num_gpus or 1
        each, rest = divmod(world_size, self.num_hosts)
        if rest or (self.num_ranks is not None and self.num_ranks != each):
            there = f" with {self.num_ranks} ranks each" if self.num_ranks is not None else ""
            fitting = self.num_hosts * (self.num_ranks or max(1, each))
            raise ClusterError(
                f"{self.launcher} runs {self.num_hosts} hosts{there}, and {world_size} ranks are asked for",
                hint=f"a plan of {fitting} ranks, or no --plan for one replica a rank",
            )
        return each

    def agent(self, num_ranks: int, command: Sequence[str]) -> list[str]:
        """The command line of torch's agent that runs `command` as so many ranks of this host."""
        return [
            sys.executable,
            "-m",
            "paceline.launch.hosts.agent",
            "--nnodes",
            str(self.num_hosts),
            "--node-rank",
            str(self.index),
            "--nproc-per-node",
            str(num_ranks),
            "--master-addr",
            self.address,
            "--master-port",
            str(self.port),
            "--no-python",
            "--",
            *command,
        ]


def host(environ: Mapping[str, str] = os.environ, *, hosts: str | None = None) -> Host | None:
    """Which of several hosts this is; None where ranks are started otherwise.

    hosts: MIN:MAX or a number, from which the run takes hosts as they come and go; by default what PET_NNODES says, and
        a number there is fixed.

    Raises:
        ClusterError: the cluster's variables are incomplete or contradict each other.
    """
    if "RANK" in environ or "SLURM_STEP_ID" in environ:
        return None
    if "PET_NNODES" in environ:
        return _checked(_elastic(_of_kubeflow(environ), hosts))
    if "SKYPILOT_NODE_IPS" in environ:
        return _checked(_elastic(_of_skypilot(environ), hosts))
    if hosts is not None:
        raise ClusterError(
            f"--hosts {hosts}: nothing says which of them this is",
            hint="PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT on each host say it",
        )
    return None


def _elastic(host: Host, hosts: str | None) -> Host:
    """The host with the numbers of hosts that the command asks for.

    Raises:
        ClusterError: they are none, or not the cluster's.
    """
    if hosts is None:
        return host
    least, most = _range(hosts, "--hosts")
    if most != host.num_hosts:
        raise ClusterError(
            f"--hosts {hosts}, and {host.launcher} runs {host.num_hosts} hosts",
            hint=f"--hosts {min(least, host.num_hosts)}:{host.num_hosts}",
        )
    return replace(host, least_hosts=least)


def _range(text: str, name: str) -> tuple[int, int]:
    """MIN:MAX, or one number for both.

    Raises:
        ClusterError: it is neither.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ClusterError(
            f"{name} {text} is no number of hosts and not MIN:MAX", hint=f"{name} 2:3"
        )
    return int(match[1]), int(match[2] or match[1])


def _of_kubeflow(environ: Mapping[str, str]) -> Host:
    each = environ.get("PET_NPROC_PER_NODE", "auto")
    least, num_hosts = _range(environ["PET_NNODES"], "PET_NNODES")
    is_single = num_hosts == 1
    return Host(
        "Kubeflow",
        0 if is_single else whole_number(environ, "PET_NODE_RANK"),
        num_hosts,
        whole_number(environ, "PET_NPROC_PER_NODE")
        if each not in ("auto", "gpu", "cpu", "xpu")
        else None,
        environ.get("PET_MASTER_ADDR", "") if not is_single else "127.0.0.1",
        whole_number(environ, "PET_MASTER_PORT", "29500"),
        least if ":" in environ["PET_NNODES"] else None,
    )


def _of_skypilot(environ: Mapping[str, str]) -> Host:
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    num_hosts = whole_number(environ, "SKYPILOT_NUM_NODES", str(len(addresses)))
    if num_hosts != len(addresses):
        raise ClusterError(
            f"SKYPILOT_NUM_NODES={num_hosts} and SKYPILOT_NODE_IPS has {len(addresses)} addresses",
            hint="SkyPilot sets both; unset them to run by hand",
        )
    gpus = whole_number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", "0")
    return Host(
        "SkyPilot",
        whole_number(environ, "SKYPILOT_NODE_RANK"),
        num_hosts,
        gpus or None,
        addresses[0] if addresses else "",
        SKYPILOT_PORT,
    )


def _checked(host: Host) -> Host | None:
    if host.num_hosts == 1:
        return None
    is_index = host.index >= 0 and (
        host.index < host.num_hosts or host.is_elastic
    )  # more hosts wait as spares
    if not (is_index and host.address and 0 < host.port < 65536):
        raise ClusterError(
            f"{host.launcher} says this is host {host.index} of {host.num_hosts}, which meet at "
            f"'{host.address}':{host.port}; that makes no sense",
            hint="hosts count from 0, and all name the address of the first",
        )
    return host


def become_agent(place: Host, num_ranks: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by torch's agent; see `Host.agent`."""
    words = place.agent(num_ranks, command)
    print(
        f"host {place.index} of {place.num_hosts} ({place.launcher}): {num_ranks} ranks, which meet at "
        f"{place.address}:{place.port}",
        file=sys.stderr,
        flush=True,
    )
    os.execv(words[0], words)
