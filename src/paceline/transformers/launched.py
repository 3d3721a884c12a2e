"""Handle a script that torchrun or `accelerate launch` started: its first process starts all ranks,
the others end.

Launchers let every process run the script up to its Trainer. From there on one process is enough:
it controls the run, and its ranks do not run the script.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from paceline.base.errors import UsageError
from paceline.launch.hosts.environment import current

_OF_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def stand_alone() -> int | None:
    """Make the first process forget the launcher, and end the others with status 0.

    Returns:
        The number of processes that the launcher started; None if this is the only one.

    Raises:
        UsageError: the processes are on several hosts, or Slurm started them.
    """
    launcher = current()
    if (
        launcher is None
        or launcher.launcher != "torchrun"
        or launcher.local_world_size < launcher.world_size
    ):
        if launcher is not None and launcher.world_size > 1:
            raise UsageError(
                f"{launcher.launcher} started {launcher.world_size} processes, {launcher.local_world_size} of them "
                "here, and this Trainer starts its own ranks, on one host",
                hint=f"start one process: PACELINE_PLAN=data={launcher.local_world_size} python {sys.argv[0]}",
            )
        return None
    if dist.is_initialized():
        if (
            "gloo" in dist.get_backend_config()
        ):  # leaving while another process still connects would end that one
            dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    if launcher.rank:
        print(
            f"process {launcher.rank} of {launcher.world_size} ends here: the first one starts all ranks",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(0)
    for name in _OF_LAUNCHER:
        os.environ.pop(name, None)
    return launcher.world_size if launcher.world_size > 1 else None
