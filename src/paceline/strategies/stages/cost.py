"""The step of a rank: its part of the model in its schedule's order, and messages to other ranks.

A rank with the whole model has one stage and no messages. The engine runs the same order of
actions. The simulator plays all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.model.cost.profile import Profile
from paceline.simulate.program import (
    COMPUTE,
    Allocate,
    Collective,
    Compute,
    Event,
    Receive,
    Repeat,
    Send,
    free,
)
from paceline.strategies.costs import (
    BACKWARD,
    FORWARD,
    HookPoint,
    MomentName,
    compute,
    moments,
)
from paceline.strategies.stages.schedule import Action, ActionKind

ENDING: tuple[MomentName, ...] = ("finish", "meet", "update", "save")
Item = Event | tuple[MomentName, HookPoint]
POSTED_AHEAD = 2  # actions for whose messages a rank has buffers: the current one and the next


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A value, or a gradient, that passes between a stage and another rank in each micro-batch."""

    name: str
    peer: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage as a run of its rank's segments, and its messages."""

    segments: range
    takes: tuple[StageMessage, ...] = ()  # values from other ranks, in forward
    gives: tuple[StageMessage, ...] = ()  # values to other ranks, in forward
    regains: tuple[StageMessage, ...] = ()  # gradients from other ranks, in backward
    returns: tuple[StageMessage, ...] = ()  # gradients to other ranks, in backward

    def arriving(self, kind: ActionKind) -> tuple[StageMessage, ...]:
        """Return the messages that an action of this kind needs."""
        return {"F": self.takes, "W": ()}.get(kind, self.regains)

    def leaving(self, kind: ActionKind) -> tuple[StageMessage, ...]:
        return {"F": self.gives, "W": ()}.get(kind, self.returns)


@dataclass(frozen=True)
class RankCost:
    """The cost of a rank, such as that at one place along the axis of stages."""

    profile: Profile  # of the rank's own part
    stages: dict[int, StageCost]  # by number
    order: Sequence[Action]
    samples: Sequence[float]  # of each micro-batch, in the profile's unit
    batch_bytes: float = 0.0  # inputs and targets of all micro-batches
    tied_bytes: float = 0.0  # gradients of parameters that other ranks also use
    tied_stride: int = 1  # difference between the numbers of these ranks
    action_s: float = 0.0  # host time of an action besides its operators
    is_whole: bool = False  # whether the model is not cut, so that no messages are waited for


def whole_rank(profile: Profile, samples: Sequence[float]) -> RankCost:
    """Return the cost of a rank with the whole model, for micro-batches of its own."""
    stage = StageCost(range(len(profile.segments)))
    order = [Action(kind, 0, number) for number in range(len(samples)) for kind in ("F", "B")]
    return RankCost(profile, {0: stage}, order, samples, is_whole=True)


def course(rank: RankCost) -> Iterator[Item]:
    """Yield the rank's step as messages, and as moments to which the plan's strategies add
    events."""
    yield "start", HookPoint()
    if not rank.is_whole:
        yield Allocate("activations", rank.batch_bytes)
    posted: set[Action] = set()
    for position, action in enumerate(rank.order):
        stage, microbatch = rank.stages[action.stage], action.microbatch
        for coming in () if rank.is_whole else rank.order[position : position + POSTED_AHEAD]:
            if coming not in posted:
                posted.add(coming)
                # The buffers for its messages are kept until the stage's backward is done.
                messages = rank.stages[coming.stage].arriving(coming.kind)
                yield Allocate("communication", sum(m.num_bytes for m in messages))
        for message in stage.arriving(action.kind):
            yield Receive(message.peer, f"{message.name}.{microbatch}")
        if rank.action_s:
            yield Compute(fixed_s=rank.action_s)
        if action.kind == "F":
            yield from forward_course(rank, stage, microbatch)
        elif action.kind == "I":
            yield from input_gradients(rank.profile, stage, rank.samples[microbatch])
        else:
            yield from backward_course(rank, stage, microbatch)
        for message in stage.leaving(action.kind):
            yield Send(message.peer, f"{message.name}.{microbatch}", message.num_bytes)
        if action.kind in ("B", "W") and not rank.is_whole:
            yield free("communication", sum(m.num_bytes for m in (*stage.takes, *stage.regains)))
    yield from ending_course(rank)


def ending_course(rank: RankCost) -> Iterator[Item]:
    """Yield what follows a rank's last action: the all-reduce of gradients of parameters that two
    ranks use, then the last moments of a step."""
    if rank.tied_bytes:
        yield Collective(
            "all_reduce", rank.tied_bytes, 2, name="ties", stream=COMPUTE, stride=rank.tied_stride
        )
    for name in ENDING:
        yield name, HookPoint()


def forward_course(
    rank: RankCost, stage: StageCost, microbatch: int
) -> Iterator[tuple[MomentName, HookPoint]]:
    """Yield the moments of a stage's forward of a micro-batch."""
    yield "begin", HookPoint(microbatch, stage.segments.start)
    for segment in stage.segments:
        yield from moments(FORWARD, microbatch, segment, rank.profile.segments[segment].repeat)


def input_gradients(profile: Profile, stage: StageCost, samples: float) -> Iterator[Event]:
    """Yield the half of a stage's backward that other stages wait for.

    The other half computes weight gradients.
    """
    for segment in (profile.segments[k] for k in reversed(stage.segments)):
        yield Repeat((compute(segment.backward, samples),), segment.repeat)


def backward_course(
    rank: RankCost, stage: StageCost, microbatch: int
) -> Iterator[tuple[MomentName, HookPoint]]:
    """Yield the moments of a stage's backward of a micro-batch."""
    yield "turn", HookPoint(microbatch, stage.segments.start)
    for segment in reversed(stage.segments):
        yield from moments(BACKWARD, microbatch, segment, rank.profile.segments[segment].repeat)
    yield "done", HookPoint(microbatch, stage.segments.start)
