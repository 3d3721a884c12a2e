"""What parameter servers add to a worker's step: gradients on their way to them, and weights on their way back.

Gradients leave while backward goes on. A server updates what has come from all workers and sends it back on the other
direction of the same links, so weights travel beside later gradients. A step shows the slower direction, as far as
computing does not hide it, and then the way back of the last chunk, with which the next forward begins. With staleness
a worker computes while its weights and gradients are under way, and a step takes the longest of the three.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.base.errors import PlanError
from paceline.model.cost.profile import Profile
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

# Reading a gradient from the wire, adding it, and writing the weights to the wire: what a server's memory moves for
# each byte that a worker sends, beside the optimizer's own passes.
SERVER_PASSES = 3
# Of a core, for each message that a process sends or takes: threads of CPU workers took 9 to 19 ms a step beside the
# update for 76 to 156 messages (GPT 128 wide, two towers, a wide perceptron; one and two servers in two workers).
MESSAGE_S = 1e-4
WITHOUT_STATISTICS = "GroupNorm or LayerNorm in place of BatchNorm, or a data=N plan"
PUSHED, PULLED, WEIGHTS = "pushed", "pulled", "weights"


def enter(step: Step) -> Hooks:
    """
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
            servers=sync.server,
            is_colocated=sync.colocate == "yes",
        )

    def start(point: HookPoint) -> Iterable[Event]:
        """A second copy of the weights, into which the next ones come. On a CPU a rank holds its own server's part,
        too; elsewhere servers are on hosts."""
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
        """The server adds what all workers sent; its own passes over the weights are the update's."""
        if not is_stale:
            yield Compute(after=(PUSHED, PULLED))
            yield travel("pull", all_bytes / CHUNKS, PULLED, COMPUTE)
        if step.device_kind == "cpu":  # else hosts have cores beside workers
            yield Compute(fixed_s=MESSAGE_S * _num_messages(step.profile, sync))
        yield Compute(
            moved_bytes=SERVER_PASSES * sync.workers * all_bytes / sync.server, part="optimizer"
        )

    return {"start": start, "after_backward": after_backward, "finish": finish}


def _num_messages(profile: Profile, sync: Servers) -> float:
    """That a worker's process sends and takes in a step; of a server in it, too."""
    chunks = mean_chunks(
        [(p.gradient_bytes, p.count) for p in profile.parameters if p.trainable], sync.server
    )
    by_servers = (
        2 * chunks * sync.workers * min(1.0, sync.server / sync.workers)
        if sync.colocate == "yes"
        else 0.0
    )
    return 2 * chunks * sync.server + by_servers


def sent_part(dtype: str, compress: str) -> float:
    """Bytes that are sent for a byte of a tensor.

    >>> sent_part("float32", "none"), sent_part("float32", "bf16"), sent_part("float64", "bf16")
    (1.0, 0.5, 0.25)
    """
    return (
        2 / BYTES_BEFORE_BF16[dtype] if compress == "bf16" and dtype in BYTES_BEFORE_BF16 else 1.0
    )


def server_ledger(profile: Profile, plan: Plan) -> dict[str, int]:
    """What one server holds: its part of the weights, of the sum of their gradients and of the optimizer's state."""
    sync = plan.sync
    assert isinstance(sync, Servers)
    parts = {
        "parameters": profile.parameter_bytes,
        "gradients": sum(p.gradient_bytes * p.count for p in profile.parameters),
        "optimizer": sum(p.state_bytes * p.count for p in profile.parameters),
    }
    return {name: -(-whole // sync.server) for name, whole in parts.items()}


def hold(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    """Servers have the optimizer's state."""
    return replace(footprint, state=dict.fromkeys(footprint.state, 0))
