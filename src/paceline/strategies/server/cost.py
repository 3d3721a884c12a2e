"""What parameter servers add to a worker's step: gradients on their way to them, and weights on their way back.

Without staleness a step's weights are there once every worker's gradients were, so what a step shows is both ways in
turn, hidden by the backward that makes the gradients and by the forward that waits for weights layer by layer. With
staleness a worker computes while its weights and gradients are under way, and a step takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.plan import Plan, Servers
from paceline.profile.profile import Profile
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, CollectiveName, Compute, Event
from paceline.strategies.costs import Held, Hooks, Moment, Room, Step

# Reading a gradient from the wire, adding it, and writing the weights to the wire: what a server's memory moves for
# each byte that a worker sends, beside the optimizer's own passes.
SERVER_PASSES = 3
PUSHED, PULLED = "pushed", "pulled"


def enter(step: Step) -> Hooks:
    sync = step.plan.sync
    assert isinstance(sync, Servers)
    wire = 0.5 if step.plan.modifiers.compress == "bf16" else 1.0
    is_stale = sync.staleness != 0
    sizes = {p.name: p.gradient_bytes * wire for p in step.profile.parameters if p.trainable}
    whole = sum(sizes[p.name] * p.count for p in step.profile.parameters if p.trainable)
    # Workers overlap a step's messages with the next step's computing; what is left over is waited for once.
    stream = NETWORK if step.software.overlaps or is_stale else COMPUTE

    def travel(kind: CollectiveName, num_bytes: float, name: str) -> Event:
        return Collective(kind, num_bytes, sync.workers, name=name, stream=stream, servers=sync.server,
                          is_colocated=sync.colocate == "yes")

    def of(at: Moment) -> float:
        return sum(sizes.get(name, 0.0) for name in step.segment(at).gradients)

    def start(at: Moment) -> Iterable[Event]:
        """A second copy of the weights, into which the next ones come; the server's part where it is in the process."""
        yield Allocate("communication", whole)

    def before_forward(at: Moment) -> Iterable[Event]:
        """Weights come first layers first, one layer ahead of the one that waits for them."""
        if at.microbatch == 0 and (num_bytes := of(at)):
            yield travel("pull", num_bytes, PULLED)
            if not is_stale:
                yield Compute(after=(PULLED,))

    def after_backward(at: Moment) -> Iterable[Event]:
        if step.is_last(at) and (num_bytes := of(at)):
            yield travel("push", num_bytes, PUSHED)

    def finish(at: Moment) -> Iterable[Event]:
        """The server adds what all workers sent; its own passes over the weights are the update's."""
        yield Compute(after=(PUSHED, PULLED))
        yield Compute(moved_bytes=SERVER_PASSES * sync.workers * whole / sync.server, part="optimizer")

    return {"start": start, "before_forward": before_forward, "after_backward": after_backward, "finish": finish}


def hold(held: Held, plan: Plan, profile: Profile) -> Held:
    """Servers have the optimizer's state."""
    return replace(held, state=dict.fromkeys(held.state, 0))


ROOM = Room(is_active=lambda plan: isinstance(plan.sync, Servers), enter=enter, hold=hold)
