"""The verb train on several hosts that may come and go.

This module chooses the plan for each number of hosts and starts the ranks of this host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.api.plan_choice import is_auto
from paceline.base.errors import UsageError
from paceline.launch.hosts.host_process import Host
from paceline.launch.hosts.liveness import MOST_SILENCE_S
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.fault_policy import RESTARTS
from paceline.planner.resized import resized
from paceline.runs import folder
from paceline.strategies.plan import Plan


def train_on_hosts(
    place: Host,
    plan: str | Plan | None,
    train: Callable[..., Any],
    *,
    run: str | Path | None = None,
    procs: int | None = None,
    timeout_s: float = MOST_SILENCE_S,
    restarts: int | None = None,
) -> dict[str, Any] | None:
    """Train as this host's part of a run, until the run has ended.

    Returns the run's figures on the first host, None on the others.

    Args:
        plan: For all hosts. With fewer hosts the run goes on under `resized` plans, which are known
            before it begins. Without a plan, it goes on with one replica per rank.
        train: Called in each rank with its plan.
        run: The folder that all hosts see; it says where to go on.

    Raises:
        UsageError: there is no run folder, or no plan for some number of hosts.
        RankFailed, PeerLost: see `run_host`.
    """
    if run is None:
        raise UsageError(
            "a run on hosts that come and go needs a run folder that all of them see",
            hint="--run DIR",
        )
    from paceline.cluster.accelerators import gpus
    from paceline.launch.hosts.elastic import run_host
    from paceline.launch.hosts.keeper import MeetingPlace

    settled = None if plan is None or is_auto(plan) else Plan.read(plan)
    num_ranks = place.ranks(settled.world_size if settled is not None else procs, len(gpus()))
    least = place.least_hosts or place.num_hosts
    plans = {
        count * num_ranks: settled and resized(settled, count * num_ranks)
        for count in range(least, place.num_hosts + 1)
    }
    for count in range(least, place.num_hosts):
        if settled is not None and place.index == 0:
            print(
                f"with {count} of {place.num_hosts} hosts the plan will be {plans[count * num_ranks]}",
                file=sys.stderr,
                flush=True,
            )

    def body() -> None:
        train(plans[int(os.environ["WORLD_SIZE"])])

    meeting = MeetingPlace(place, patience_s=timeout_s)
    try:
        run_host(
            meeting,
            num_ranks,
            body,
            patience_s=timeout_s,
            restarts=RESTARTS if restarts is None else restarts,
        )
    except RankFailed as failed:
        if meeting.is_kept_here:
            plan_of_all = settled or Plan.of(data=num_ranks * place.num_hosts)
            folder.write_failure(Path(run), str(plan_of_all), failed)
        raise
    return folder.read_summary(Path(run)) if meeting.is_kept_here else None
