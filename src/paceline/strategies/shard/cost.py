"""What sharding changes: each rank holds a part, gathers a unit when it is used and keeps its part of the gradients.

The three stages differ in when FSDP2 gathers and reduces; `run.py` has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.plans import Plan
from paceline.profile.profile import Parameter, Profile
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event, free
from paceline.strategies.costs import Held, Hooks, Moment, Room, Step

# What an operator on a sharded tensor costs above one on a plain tensor, in Python: it is looked up and unwrapped.
# Measured on AdamW's operators, one core; see docs/prediction.md.
DTENSOR_OPERATOR_S = 25e-6
# What FSDP2's hooks cost around one gathering or reduction of a unit, in Python. Measured likewise.
HOOK_S = 800e-6
# What a CPU rank's resident size grows by for FSDP2's own pages and objects. Measured likewise.
CPU_RUNTIME_BYTES = 12 * 2**20
ROLL_BYTES = 16  # two whole numbers, see `roll.py`
ROOT = ""
REDUCED = "reduced"  # on accelerators nobody waits for a unit's gradients before the end


def hold(held: Held, plan: Plan, profile: Profile) -> Held:
    """The first rank's part, which is the largest: dim 0 is cut into runs of equal length, rounded up."""
    local = {p.name: _part(p, plan.axes.shard) for p in profile.parameters}
    return replace(
        held, gradients_by_unit=True,
        parameters={name: round(held.parameters[name] * part) for name, part in local.items()},
        gradients={name: round(held.gradients[name] * part) for name, part in local.items()},
        state={name: round(held.state[name] * part) for name, part in local.items()},
    )


def _part(parameter: Parameter, ranks: int) -> float:
    return -(-parameter.rows // ranks) / parameter.rows if parameter.rows and not parameter.is_sparse else 1.0


def _sharded(step: Step, unit: str) -> list[Parameter]:
    """A unit's parameters without those that stay whole."""
    return [p for p in step.profile.owned_by(unit) if not p.is_sparse]


def gathers_cast(plan: Plan) -> bool:
    """Whether parameters that autocast casts are cast before they are gathered: those of modules that run as they are.

    Pieces of split models are not looked at. Compiled blocks need not round what they cast.
    """
    return plan.axes.shard > 1 and not plan.splits_model and plan.modifiers.compile == "none"


def enter(step: Step) -> Hooks:
    zero, ranks, software = step.plan.zero, step.plan.axes.shard, step.software
    on_cpu = step.device_kind == "cpu"
    # On the CPU a collective of FSDP2 ends before it goes on.
    stream = COMPUTE if on_cpu or not software.overlaps else NETWORK
    is_ahead = not on_cpu and software.prefetches
    hook_s = HOOK_S if on_cpu else software.hook_s
    units = [segment.unit for segment in step.profile.segments]
    first_segment = {unit: units.index(unit) for unit in units if unit}
    stride = step.plan.axes.tensor
    # Without gathering ahead, and along a pipeline, whose stages would wait one after another, parameters that are only
    # updated in parts are gathered where they were updated, and kept whole.
    kept_whole = zero < 3 and not on_cpu and (not software.prefetches or step.plan.axes.pipeline > 1)

    sparse_bytes = sum(p.gradient_bytes * p.count for p in step.profile.parameters if p.is_sparse)
    at_the_end = zero == 1 and not on_cpu and not software.overlaps

    def issue(unit: str) -> Iterable[Event]:
        whole, local = _gathered_bytes(step, unit)
        yield Allocate("communication", whole + local)
        yield Collective("all_gather", whole, ranks, name=f"gather {unit}", stream=stream, stride=stride)

    def take(unit: str) -> Iterable[Event]:
        whole, local = _gathered_bytes(step, unit)
        yield Allocate("parameters", whole)
        yield Compute(moved_bytes=2 * (whole + local), fixed_s=hook_s, after=(f"gather {unit}",))
        yield free("communication", whole + local)

    def gather(unit: str) -> Iterable[Event]:
        if _gathered_bytes(step, unit)[0]:
            yield from issue(unit)
            yield from take(unit)

    def release(unit: str) -> Event:
        return free("parameters", 0 if kept_whole else _gathered_bytes(step, unit)[0])

    def reduce(unit: str, at: Moment) -> Iterable[Event]:
        """The unit's gradients go into a buffer, and each rank gets the sum of its part."""
        if at_the_end:
            return
        trainable = [p for p in _sharded(step, unit) if p.trainable]
        whole, local = sum(p.gradient_bytes for p in trainable), sum(step.held.gradients[p.name] for p in trainable)
        if not whole or not (zero > 1 or step.is_last(at)):
            return
        sent = whole * step.profile.reduced_part
        yield Allocate("communication", sent + local)
        yield Compute(moved_bytes=2 * sent, fixed_s=hook_s)
        name = f"reduce {unit}" if on_cpu else REDUCED
        yield Collective("reduce_scatter", sent, ranks, name=name, stream=stream, stride=stride)
        yield Compute(moved_bytes=3 * local, after=(name,) if on_cpu else ())
        yield free("communication", sent + local)
        if at.microbatch == 0 or zero == 1:  # the first reduction of the window
            yield free("gradients", whole - local)

    def start(at: Moment) -> Iterable[Event]:
        if on_cpu:
            yield Allocate("runtime", CPU_RUNTIME_BYTES)
        if kept_whole:
            yield Allocate("parameters", _kept_bytes(step) - step.total(step.held.parameters))

    def roll_call() -> Iterable[Event]:
        """The ranks compare which unit comes next; on GPUs in the first forwards only."""
        if software.roll_call and on_cpu:
            yield Collective("all_reduce", ROLL_BYTES, ranks, name="roll", stream=COMPUTE, stride=stride)

    def gathered_here(at: Moment, *, backward: bool) -> bool:
        return not kept_whole and (zero == 3 or (at.microbatch == 0 and not backward))

    def is_gathered(segment: int) -> bool:
        """Whether a segment's forward is one that a gathering is for."""
        return bool(units[segment]) and (zero == 3 or first_segment[units[segment]] == segment)

    def ahead(segments: Sequence[int], at: Moment, *, is_first: bool, is_last: bool) -> Iterable[Event]:
        """Take the unit that was asked for, and ask for the next one. segments: in the order of the pass."""
        unit, place = units[at.segment], segments.index(at.segment)
        if place == 0 and is_first:
            yield from issue(unit)
        yield from take(unit)
        if not is_last:
            yield from issue(unit)
        elif place + 1 < len(segments):
            yield from issue(units[segments[place + 1]])

    forwards = [number for number in range(len(units)) if is_gathered(number)]
    backwards = [number for number in reversed(range(len(units))) if units[number]]

    def begin(at: Moment) -> Iterable[Event]:
        return gather(ROOT) if gathered_here(at, backward=False) else ()

    def before_forward(at: Moment) -> Iterable[Event]:
        unit = step.segment(at).unit
        if unit:
            yield from roll_call()
        if unit and gathered_here(at, backward=False) and is_gathered(at.segment):
            if is_ahead:
                yield from ahead(forwards, at, is_first=at.is_first, is_last=at.is_last)
            else:
                yield from gather(unit)

    def after_forward(at: Moment) -> Iterable[Event]:
        unit = step.segment(at).unit
        if unit and zero == 3:
            yield release(unit)

    def turn(at: Moment) -> Iterable[Event]:
        yield from roll_call()
        if zero == 3:
            yield release(ROOT)
            yield from gather(ROOT)

    def before_backward(at: Moment) -> Iterable[Event]:
        unit = step.segment(at).unit
        if not unit or not gathered_here(at, backward=True):
            return ()
        if is_ahead:
            return ahead(backwards, at, is_first=at.is_last, is_last=at.is_first)
        return gather(unit)

    def after_backward(at: Moment) -> Iterable[Event]:
        unit = step.segment(at).unit
        if not unit:
            return
        if first_segment[unit] == at.segment:  # backward is through with the unit
            yield from reduce(unit, at)
            if zero < 3 and step.is_last(at):
                yield release(unit)
        if zero == 3:
            yield release(unit)

    def done(at: Moment) -> Iterable[Event]:
        yield from reduce(ROOT, at)
        if zero == 3 or step.is_last(at):
            yield release(ROOT)

    def finish(at: Moment) -> Iterable[Event]:
        if sparse_bytes:
            yield Collective("all_reduce", sparse_bytes, ranks, stream=COMPUTE, stride=stride)
        if at_the_end:
            whole = step.profile.reduced_part * sum(p.gradient_bytes * p.count for p in step.profile.parameters
                                                    if not p.is_sparse)
            yield Collective("reduce_scatter", whole, ranks, name=REDUCED, stream=COMPUTE, stride=stride)
            yield free("gradients", sum((p.gradient_bytes - step.held.gradients[p.name]) * p.count
                                        for p in step.profile.parameters))
        if not on_cpu:
            yield Compute(after=(REDUCED,))

    def update(at: Moment) -> Iterable[Event]:
        yield Compute(fixed_s=step.profile.update.operators * DTENSOR_OPERATOR_S, part="optimizer")
        if kept_whole:
            yield Collective("all_gather", _kept_bytes(step), ranks, name="gather", stream=COMPUTE, stride=stride)

    return {"start": start, "begin": begin, "before_forward": before_forward, "after_forward": after_forward,
            "turn": turn, "before_backward": before_backward, "after_backward": after_backward, "done": done,
            "finish": finish, "update": update}


def _kept_bytes(step: Step) -> float:
    """Of all parameters, whole, as they are gathered."""
    return sum(_part_gathered(step, p) * p.num_bytes * p.count for p in step.profile.parameters)


def _gathered_bytes(step: Step, unit: str) -> tuple[float, float]:
    """Of a unit's parameters on their way: whole, and what this rank sends."""
    owned = _sharded(step, unit)
    return (sum(_part_gathered(step, p) * p.num_bytes for p in owned),
            sum(_part_gathered(step, p) * step.held.parameters[p.name] for p in owned))


def _part_gathered(step: Step, parameter: Parameter) -> float:
    """Bytes that are gathered a byte of a parameter."""
    return step.profile.gathered_part * (parameter.gathered_part if gathers_cast(step.plan) else 1.0)


ROOM = Room(is_active=lambda plan: plan.axes.shard > 1, enter=enter, hold=hold)
