"""The program of one rank's step: the work of one device, and what each strategy of the plan adds to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from paceline.cluster.devices import DeviceKind
from paceline.cluster.software import PACELINE, Software
from paceline.model.cost.profile import Profile
from paceline.simulate.allocator import holes_of_added, holes_of_update
from paceline.simulate.program import Allocate, Compute, Event, Program, Repeat, free
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.batch_norm.cost import sums as sums_of_batch_norms
from paceline.strategies.costs import (
    ADDED,
    Footprint,
    Hook,
    HookPoint,
    Hooks,
    MomentName,
    Step,
    at_once,
    compute,
    small_all_reduce,
)
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import Item, RankCost, course

# Python around a micro-batch that no operator accounts for: hooks, seeds, the loss's bookkeeping. Measured on a
# model of one small layer, one core; see docs/formulas.md.
MICROBATCH_S = 0.6e-3


def start_s(profile: Profile, plan: Plan) -> float:
    """Seconds that a run under the plan takes once, and other plans don't."""
    return sum(cost.start_s(profile, plan) for cost in ActivePlan(plan).costs)


def starts_late(plan: Plan) -> bool:
    """Whether a run under the plan takes seconds once that other plans don't."""
    return any(cost.start_s is not at_once for cost in ActivePlan(plan).costs)


def rank_program(
    rank: RankCost,
    plan: Plan,
    device_kind: DeviceKind,
    *,
    snapshot: bool = True,
    software: Software = PACELINE,
) -> Program:
    """What a rank does in a step: the first of those that hold equal parts, which holds the most of every cut.

    snapshot: whether checkpoints are written while training goes on.
    """
    filling = fill(
        rank.profile, plan, device_kind, rank.samples, snapshot=snapshot, software=software
    )
    return filling.events(course(rank))


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """What happens at the moments of a step.

    hooks: of each moment, in their order.
    """

    step: Step
    hooks: Mapping[MomentName, tuple[Hook, ...]]

    def events(self, course: Iterable[Item]) -> Program:
        """A course of moments with what the rooms do at each. Moments between the first and the last of segments that
        are alike become a repetition."""
        events: list[Event] = []
        items = [item for item in course if not isinstance(item, tuple) or self.hooks.get(item[0])]
        position = 0
        while position < len(items):
            item = items[position]
            position += 1
            if not isinstance(item, tuple):
                events.append(item)
                continue
            name, moment = item
            if moment.is_first or moment.is_last:
                events += self.at(name, moment)
                continue
            alike = [(name, moment)]
            while (
                position < len(items)
                and isinstance(item := items[position], tuple)
                and item[1] == moment
            ):
                alike.append(item)
                position += 1
            body = [event for each in alike for event in self.at(*each)]
            events.append(Repeat(tuple(body), self.step.segment(moment).repeat - 2))
        return tuple(events)

    def at(self, name: MomentName, moment: HookPoint) -> list[Event]:
        return [event for hook in self.hooks.get(name, ()) for event in hook(moment)]


def fill(
    profile: Profile,
    plan: Plan,
    device_kind: DeviceKind,
    microbatch_samples: Sequence[float],
    *,
    snapshot: bool,
    software: Software = PACELINE,
) -> LoweredStep:
    """The rooms that a plan enters, with what one rank holds and computes in them."""
    rooms = ActivePlan(plan).costs
    for room in rooms:
        profile = room.narrow(profile, plan, software)
    footprint = Footprint(
        {p.name: p.num_bytes for p in profile.parameters},
        {p.name: p.gradient_bytes for p in profile.parameters},
        {p.name: p.state_bytes for p in profile.parameters},
    )
    for room in rooms:
        footprint = room.hold(footprint, plan, profile)
    step = Step(profile, plan, device_kind, tuple(microbatch_samples), footprint, software)
    entered = (_OneDevice(step).hooks(), *(room.enter(step) for room in rooms))
    return LoweredStep(
        step,
        {
            name: _in_order(name, entered)
            for name in get_args(MomentName)
            if snapshot or name != "save"
        },
    )


def _in_order(name: MomentName, entered: Sequence[Hooks]) -> tuple[Hook, ...]:
    """What happens at a moment: the outermost room comes first before a pass, the innermost at all other moments."""
    named = [hooks[name] for hooks in entered if name in hooks]
    return tuple(reversed(named) if name.startswith("before_") else named)


class _OneDevice:
    """The work that every plan has in common, with what this rank holds."""

    def __init__(self, step: Step) -> None:
        self.step, self.profile, self.footprint = step, step.profile, step.footprint
        self.gradient_bytes = {p.name: p.gradient_bytes for p in step.profile.parameters}

    def hooks(self) -> Hooks:
        return {
            "start": self.start,
            "begin": self.begin,
            "forward": self.forward,
            "backward": self.backward,
            "done": self.done,
            "meet": self.meet,
            "update": self.update,
            "save": self.save,
        }

    def start(self, point: HookPoint) -> Iterable[Event]:
        yield Allocate(
            "parameters", self.step.total(self.footprint.parameters) + self.profile.buffer_bytes
        )
        yield Allocate("optimizer", self.step.total(self.footprint.state))
        yield Allocate(
            "gradients",
            self.step.total(self.footprint.gradients) if self.footprint.gradients_kept else 0,
        )
        yield from holes_of_update(  # of the step before
            self.step.device_kind,
            self.footprint.gradients.values(),
            self.profile.update_peak_bytes * self._updated_part(),
            keeps_gradients=self.footprint.gradients_kept,
        )

    def begin(self, point: HookPoint) -> Iterable[Event]:
        yield Allocate("activations", self.profile.batch_bytes.at(self.step.samples(point)))
        yield Compute(
            fixed_s=MICROBATCH_S
            if self.step.device_kind == "cpu"
            else self.step.software.microbatch_s
        )

    def forward(self, point: HookPoint) -> Iterable[Event]:
        segment, samples = self.step.segment(point), self.step.samples(point)
        peak_bytes = segment.forward_peak_bytes.at(samples)
        yield Allocate("activations", peak_bytes)
        yield compute(segment.forward, samples)
        yield from sums_of_batch_norms(self.step, segment)
        yield free("activations", peak_bytes)
        yield Allocate("activations", segment.kept_bytes.at(samples))

    def backward(self, point: HookPoint) -> Iterable[Event]:
        segment, samples = self.step.segment(point), self.step.samples(point)
        gradient_bytes = [self.gradient_bytes[name] for name in segment.gradients]
        # The first micro-batch's gradients stay, a later one's are added to them one at a time; so are all
        # where their memory is kept.
        stay = point.microbatch == 0 and not self.footprint.gradients_kept
        passing_bytes = 0 if stay else max(gradient_bytes, default=0)
        yield Allocate("gradients", sum(gradient_bytes) if stay else passing_bytes)
        peak_bytes = segment.backward_peak_bytes.at(samples)
        yield Allocate("activations", peak_bytes)
        yield compute(segment.backward, samples)
        yield from sums_of_batch_norms(self.step, segment)
        if (
            not stay and self.step.device_kind == "cpu"
        ):  # on accelerators the products add to it themselves
            yield Compute(moved_bytes=ADDED * sum(gradient_bytes), operators=len(gradient_bytes))
        if not stay:
            yield from holes_of_added(self.step.device_kind, passing_bytes)
        yield free("activations", peak_bytes + segment.kept_bytes.at(samples))
        yield free("gradients", passing_bytes)

    def done(self, point: HookPoint) -> Iterable[Event]:
        yield free("activations", self.profile.batch_bytes.at(self.step.samples(point)))

    def meet(self, point: HookPoint) -> Iterable[Event]:
        """One small all-reduce of the loss, its count, and which parameters were used, in float64, where ranks meet in
        every step. Replicas' running statistics meet twice: to see which of them differ, and to become their mean
        (`training/replicas/buffers.py`)."""
        if self.step.plan.world_size > 1 and self.step.plan.outer_steps is None:
            figures = 3 + sum(p.trainable for p in self.profile.parameters)
            yield small_all_reduce(8 * figures, self.step.plan.world_size, name="meet")
            replicas = self.step.plan.axes.num_ranks(lambda axis: axis.cuts_samples)
            if replicas > 1 and (values := self.profile.statistics_bytes / 4):
                yield small_all_reduce(3 * 8 * values, replicas, name="statistics")
                yield small_all_reduce(8 * values, replicas, name="statistics")

    def update(self, point: HookPoint) -> Iterable[Event]:
        part = self._updated_part()
        passes = self.step.software.update_passes
        yield Allocate("optimizer", self.profile.update_peak_bytes * part)
        work = compute(self.profile.update, samples=0, part="optimizer")
        yield Compute(
            moved_bytes=work.moved_bytes * part * passes,
            function_bytes=work.function_bytes * part,
            operators=work.operators,
            fixed_s=self.step.software.step_s,
            part="optimizer",
        )
        yield free("optimizer", self.profile.update_peak_bytes * part)

    def _updated_part(self) -> float:
        """Of all gradients, what this rank updates with."""
        whole_bytes = self.step.total(self.gradient_bytes)
        return self.step.total(self.footprint.gradients) / whole_bytes if whole_bytes else 0.0

    def save(self, point: HookPoint) -> Iterable[Event]:
        """A checkpoint is written in the background from a copy in the host's memory."""
        if self.step.device_kind == "cpu":
            footprint = self.footprint
            yield Allocate(
                "checkpoint",
                self.step.total(footprint.parameters) + self.step.total(footprint.state),
            )
