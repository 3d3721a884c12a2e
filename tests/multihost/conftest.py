"""Clusters of this machine: hosts as network namespaces, a Slurm of one node, Ray of two nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.namespaces import NetworkHost, NoNamespaces, network_hosts


@pytest.fixture
def hosts() -> Iterator[list[NetworkHost]]:
    """Two namespaces, 10.78.0.1 and 10.78.0.2, joined by a bridge in a third."""
    try:
        with network_hosts(2) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a Slurm of one node with two cores."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("slurmctld and slurmd are not installed: apt install slurm-wlm")
    if os.geteuid() != 0:
        pytest.skip("starting slurmctld and slurmd needs root: run as root")
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "paceline").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n'
    )
    (tmp_path / "bin" / "paceline").chmod(0o755)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(f"""
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    environment = {
        **os.environ,
        "SLURM_CONF": str(configuration),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    daemons = []
    for name in ("slurmctld", "slurmd"):
        with open(tmp_path / f"{name}.txt", "w") as printed:
            daemons.append(
                subprocess.Popen(
                    [name, "-D"], env=environment, stdout=printed, stderr=subprocess.STDOUT
                )
            )
    try:
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
