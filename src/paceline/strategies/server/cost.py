"""The cost that parameter servers add to a worker's step: it sends gradients, and receives weights.

A worker sends gradients during backward. A server updates the weights of a chunk that has come from
all workers. It sends them back in the other direction of the same links, so that weights and later
gradients are transferred at the same time. The time of a step includes the slower direction, as far
as computing does not hide it. It also includes the transfer of the last chunk's weights, which the
next forward needs. With staleness, a worker computes while weights and gradients are transferred,
and a step takes the longest of the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.base.errors import PlanError
from paceline.model.cost.profile import Profile
from paceline.simulate.allocator import CPU_RUNTIME_BYTES
from paceline.simulate.program import (
    COMPUTE,
    NETWORK,
    Allocate,
    Collective,
    CollectiveName,
    Compute,
    Event,
)
from paceline.strategies.costs import Footprint, HookPoint, Hooks, Step
from paceline.strategies.plan import Plan
from paceline.strategies.server.keys import Servers
from paceline.strategies.server.shards import BYTES_BEFORE_BF16, CHUNKS, mean_chunks

# Passes over a server's memory for each byte that a worker sends, besides those of the optimizer:
# receiving the gradient, adding it, and sending the weights.
SERVER_PASSES = 3
# Core seconds for each message that a process sends or receives. Threads of CPU workers took 9 to
# 19 ms a step, besides the update, for 76 to 156 messages (GPT 128 wide, two towers, a wide
# perceptron; one and two servers in two workers).
MESSAGE_S = 1e-4
WITHOUT_STATISTICS = "GroupNorm or LayerNorm in place of BatchNorm, or a data=N plan"
PUSHED, PULLED, WEIGHTS = "pushed", "pulled", "weights"


def enter(step: Step) -> Hooks:
    """Return the events of a worker's step.

    Raises:
        PlanError: the model has running statistics, which servers don't keep.
    """
    sync = step.plan.sync
    assert isinstance(sync, Servers)
    if step.profile.statistics_bytes:
        raise PlanError(
            "training changes the model's running statistics, and servers keep trained parameters alone",
            hint=WITHOUT_STATISTICS,
        )
    is_stale = sync.staleness != 0
    sent_bytes = {
        p.name: p.gradient_bytes * sent_part(p.dtype, step.plan.modifiers.compress)
        for p in step.profile.parameters
        if p.trainable
    }
    all_bytes = sum(sent_bytes[p.name] * p.count for p in step.profile.parameters if p.trainable)
    beside = step.software.overlaps or is_stale

    def travel(kind: CollectiveName, num_bytes: float, name: str, stream: str) -> Event:
        return Collective(
            kind,
            num_bytes,
            sync.workers,
            name=name,
            stream=stream if beside else COMPUTE,
            servers=sync.servers,
            is_colocated=sync.colocate == "yes",
        )

    def start(point: HookPoint) -> Iterable[Event]:
        """Allocate a second copy of the weights, which receives the next ones.

        On a CPU, a rank with a server in its process also holds the server's part. Otherwise
        servers use the memory of the host.
        """
        yield Allocate("communication", all_bytes)
        if step.device_kind == "cpu" and sync.colocate == "yes":
            for name, held_bytes in server_ledger(step.profile, step.plan).items():
                yield Allocate(name, held_bytes)

    def after_backward(point: HookPoint) -> Iterable[Event]:
        num_bytes = sum(sent_bytes.get(name, 0.0) for name in step.segment(point).gradients)
        if step.is_last(point) and num_bytes:
            yield travel("push", num_bytes, PUSHED, NETWORK)
            yield travel("pull", num_bytes, PULLED, WEIGHTS)

    def finish(point: HookPoint) -> Iterable[Event]:
        """Yield the work of the server, which adds the gradients of all workers.

        The optimizer's passes over the weights are counted in the update.
        """
        if not is_stale:
            yield Compute(after=(PUSHED, PULLED))
            yield travel("pull", all_bytes / CHUNKS, PULLED, COMPUTE)
        if step.device_kind == "cpu":  # otherwise the hosts have cores that workers don't use
            yield Compute(fixed_s=MESSAGE_S * _num_messages(step.profile, sync))
        yield Compute(
            moved_bytes=SERVER_PASSES * sync.workers * all_bytes / sync.servers, part="optimizer"
        )

    return {"start": start, "after_backward": after_backward, "finish": finish}


def _num_messages(profile: Profile, sync: Servers) -> float:
    """Return the messages that a worker's process, with a server in it, sends and receives in a
    step."""
    chunks = mean_chunks(
        [(p.gradient_bytes, p.count) for p in profile.parameters if p.trainable], sync.servers
    )
    by_servers = (
        2 * chunks * sync.workers * min(1.0, sync.servers / sync.workers)
        if sync.colocate == "yes"
        else 0.0
    )
    return 2 * chunks * sync.servers + by_servers


def sent_part(dtype: str, compress: str) -> float:
    """Return the bytes that are sent per byte of a tensor.

    >>> sent_part("float32", "none"), sent_part("float32", "bf16"), sent_part("float64", "bf16")
    (1.0, 0.5, 0.25)
    """
    return (
        2 / BYTES_BEFORE_BF16[dtype] if compress == "bf16" and dtype in BYTES_BEFORE_BF16 else 1.0
    )


def server_ledger(profile: Profile, plan: Plan) -> dict[str, int]:
    """Return the bytes of one server: its part of the weights, the gradients' sum and the optimizer
    state."""
    sync = plan.sync
    assert isinstance(sync, Servers)
    parts = {
        "parameters": profile.parameter_bytes,
        "gradients": sum(p.gradient_bytes * p.count for p in profile.parameters),
        "optimizer": sum(p.state_bytes * p.count for p in profile.parameters),
    }
    return {name: -(-whole // sync.servers) for name, whole in parts.items()}


def ranks_apart(profile: Profile, plan: Plan) -> Mapping[str, Mapping[str, int]]:
    """Return the memory of servers that have ranks of their own."""
    assert isinstance(plan.sync, Servers)
    if plan.sync.colocate == "yes":
        return {}
    return {"each server": {**server_ledger(profile, plan), "runtime": CPU_RUNTIME_BYTES}}


def hold(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    """Return the footprint of a worker, without optimizer state: servers hold it."""
    return replace(footprint, state=dict.fromkeys(footprint.state, 0))
