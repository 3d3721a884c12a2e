"""A rank's training run under a plan with servers."""

from __future__ import annotations

from typing import Any

from paceline.job import Job
from paceline.launch.context import RankContext
from paceline.plan import Plan
from paceline.runtime.loop import Settings
from paceline.runtime.servers.coordinator import Coordinator
from paceline.runtime.servers.roles import Meeting, Roles, servers_of
from paceline.runtime.servers.server import Follower
from paceline.runtime.servers.shelf import build
from paceline.runtime.servers.worker import Worker


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> dict[str, Any] | None:
    """Serve or work, as the plan has it for this rank. Returns the summary on rank 0.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    context.num_trained += 1
    meeting = Meeting(context, f"servers/{context.num_trained}")
    roles = Roles.of(plan, context.rank)
    if roles.server is None:
        assert roles.worker is not None
        Worker(context, job, plan, settings, number=roles.worker, meeting=meeting).run()
        return None
    context.beat("build")
    model, shards = build(job, context.device, servers_of(plan).server)
    if roles.server == 0:
        return Coordinator(context, job, plan, settings, number=0, model=model, shards=shards, meeting=meeting).run()
    Follower(context, job, plan, settings, number=roles.server, model=model, shards=shards, meeting=meeting).run()
    return None
