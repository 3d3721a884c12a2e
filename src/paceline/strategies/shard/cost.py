"""The cost of sharding: each rank holds a part, gathers a unit when it is used, and keeps its part
of the gradients.

The three stages differ in when FSDP2 gathers and reduces; `run.py` has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from paceline.model.cost.profile import Parameter, Profile
from paceline.simulate.allocator import holes_of_gathered
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event, free
from paceline.strategies.costs import (
    Footprint,
    HookPoint,
    Hooks,
    MomentName,
    Step,
    small_all_reduce,
)
from paceline.strategies.plan import Plan

# Python's time in FSDP2's hooks around one gather or reduction of a unit. Measured; see
# docs/formulas.md.
HOOK_S = 800e-6
# Growth of a CPU rank's resident size by FSDP2's own pages and objects. Measured; see
# docs/formulas.md.
CPU_RUNTIME_BYTES = 12 * 2**20
ROLL_BYTES = 16  # two whole numbers, see `order_check.py`
ROOT = ""
REDUCED = (
    "reduced"  # one name for all units: on accelerators nothing waits for gradients before the end
)


def hold(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    """Return the footprint of the first rank, whose part is the largest.

    Dim 0 is cut into runs of equal length, rounded up.
    """
    local = {p.name: _part(p, plan.axes.shard) for p in profile.parameters}
    return replace(
        footprint,
        gradients_by_unit=True,
        parameters={name: round(footprint.parameters[name] * part) for name, part in local.items()},
        gradients={name: round(footprint.gradients[name] * part) for name, part in local.items()},
        state={name: round(footprint.state[name] * part) for name, part in local.items()},
    )


def _part(parameter: Parameter, ranks: int) -> float:
    return (
        -(-parameter.rows // ranks) / parameter.rows
        if parameter.rows and not parameter.is_sparse
        else 1.0
    )


def _sharded(step: Step, unit: str) -> list[Parameter]:
    """Return a unit's parameters without those that stay whole."""
    return [p for p in step.profile.owned_by(unit) if not p.is_sparse]


def gathers_cast(plan: Plan) -> bool:
    """Whether parameters that autocast casts are cast before they are gathered.

    This holds only for modules that run unchanged. Pieces of split models are not observed, and
    compiled blocks do not always round the values that they cast.
    """
    return plan.axes.shard > 1 and not plan.splits_model and plan.modifiers.compile == "none"


def enter(step: Step) -> Hooks:
    sharding = _Sharding(step)
    return {
        name: getattr(sharding, name) for name in get_args(MomentName) if hasattr(sharding, name)
    }


class _Sharding:
    """The events of FSDP2 at each moment of a step."""

    def __init__(self, step: Step) -> None:
        software = step.software
        self.step, self.zero, self.ranks = step, step.plan.zero, step.plan.axes.shard
        self.on_cpu, self.stride = step.device_kind == "cpu", step.plan.axes.tensor
        # The stream of collectives. On the CPU, FSDP2 waits for each of its collectives.
        self.stream = COMPUTE if self.on_cpu or not software.overlaps else NETWORK
        # Whether a unit is gathered while the one before it computes.
        self.is_ahead = not self.on_cpu and software.prefetches
        self.hook_s = HOOK_S if self.on_cpu else software.hook_s
        # Whether parameters are gathered right after their update and kept whole. This holds below
        # stage 3 on accelerators, if the software does not prefetch, or along a pipeline, whose
        # stages would otherwise wait one after another.
        self.kept_whole = (
            self.zero < 3
            and not self.on_cpu
            and (not software.prefetches or step.plan.axes.pipeline > 1)
        )
        # Whether all gradients are reduced together after the last backward.
        self.reduces_at_the_end = self.zero == 1 and not self.on_cpu and not software.overlaps
        # Whether parameters that autocast casts are cast before they are gathered.
        self.cast = gathers_cast(step.plan)
        # Cache of `_gathered_bytes` by unit.
        self.gathered: dict[str, tuple[float, float]] = {}
        self.units = [segment.unit for segment in step.profile.segments]
        self.first_segment = {unit: self.units.index(unit) for unit in self.units if unit}
        # Segments before whose pass a unit is gathered, in the order of the pass.
        self.forwards = [number for number in range(len(self.units)) if self._is_gathered(number)]
        self.backwards = [
            number for number in reversed(range(len(self.units))) if self.units[number]
        ]

    def start(self, point: HookPoint) -> Iterable[Event]:
        if self.on_cpu:
            yield Allocate("runtime", CPU_RUNTIME_BYTES)
            yield Allocate("communication", self._buffer_bytes())
            yield from holes_of_gathered(
                self.step.device_kind,
                (
                    self._part_gathered(p) * p.num_bytes
                    for p in self.step.profile.parameters
                    for _ in range(p.count)
                ),
            )
        if self.kept_whole:
            yield Allocate(
                "parameters", self._kept_bytes() - self.step.total(self.step.footprint.parameters)
            )

    def begin(self, point: HookPoint) -> Iterable[Event]:
        return self._gather(ROOT) if self._is_gathered_here(point, backward=False) else ()

    def before_forward(self, point: HookPoint) -> Iterable[Event]:
        unit = self.step.segment(point).unit
        if unit:
            yield from self._roll_call()
        if (
            unit
            and self._is_gathered_here(point, backward=False)
            and self._is_gathered(point.segment)
        ):
            if self.is_ahead:
                yield from self._ahead(
                    self.forwards, point, is_first=point.is_first, is_last=point.is_last
                )
            else:
                yield from self._gather(unit)

    def after_forward(self, point: HookPoint) -> Iterable[Event]:
        unit = self.step.segment(point).unit
        if unit and self.zero == 3:
            yield self._release(unit)

    def turn(self, point: HookPoint) -> Iterable[Event]:
        yield from self._roll_call()
        if self.zero == 3:
            yield self._release(ROOT)
            yield from self._gather(ROOT)

    def before_backward(self, point: HookPoint) -> Iterable[Event]:
        unit = self.step.segment(point).unit
        if not unit or not self._is_gathered_here(point, backward=True):
            return ()
        if self.is_ahead:
            return self._ahead(
                self.backwards, point, is_first=point.is_last, is_last=point.is_first
            )
        return self._gather(unit)

    def after_backward(self, point: HookPoint) -> Iterable[Event]:
        unit = self.step.segment(point).unit
        if not unit:
            return
        if self.first_segment[unit] == point.segment:  # the unit's backward is done
            yield from self._reduce(unit, point)
            if self.zero < 3 and self.step.is_last(point):
                yield self._release(unit)
        if self.zero == 3:
            yield self._release(unit)

    def done(self, point: HookPoint) -> Iterable[Event]:
        yield from self._reduce(ROOT, point)
        if self.zero == 3 or self.step.is_last(point):
            yield self._release(ROOT)

    def finish(self, point: HookPoint) -> Iterable[Event]:
        parameters = self.step.profile.parameters
        if sparse_bytes := sum(p.gradient_bytes * p.count for p in parameters if p.is_sparse):
            yield Collective(
                "all_reduce", sparse_bytes, self.ranks, stream=COMPUTE, stride=self.stride
            )
        if self.reduces_at_the_end:
            whole_bytes = self.step.profile.reduced_part * sum(
                p.gradient_bytes * p.count for p in parameters if not p.is_sparse
            )
            yield Collective(
                "reduce_scatter",
                whole_bytes,
                self.ranks,
                name=REDUCED,
                stream=COMPUTE,
                stride=self.stride,
            )
            yield free(
                "gradients",
                sum(
                    (p.gradient_bytes - self.step.footprint.gradients[p.name]) * p.count
                    for p in parameters
                ),
            )
        if not self.on_cpu:
            yield Compute(after=(REDUCED,))

    def update(self, point: HookPoint) -> Iterable[Event]:
        if self.kept_whole:
            yield Collective(
                "all_gather",
                self._kept_bytes(),
                self.ranks,
                name="gather",
                stream=COMPUTE,
                stride=self.stride,
            )

    def _issue(self, unit: str) -> Iterable[Event]:
        whole_bytes, local_bytes = self._gathered_bytes(unit)
        yield Allocate("communication", 0 if self.on_cpu else whole_bytes + local_bytes)
        yield Collective(
            "all_gather",
            whole_bytes,
            self.ranks,
            name=f"gather {unit}",
            stream=self.stream,
            stride=self.stride,
        )

    def _take(self, unit: str) -> Iterable[Event]:
        whole_bytes, local_bytes = self._gathered_bytes(unit)
        yield Allocate("parameters", whole_bytes)
        parameter_bytes = (self._part_gathered(p) * p.num_bytes for p in _sharded(self.step, unit))
        yield Compute(
            moved_bytes=2 * (whole_bytes + local_bytes),
            fixed_s=self.hook_s,
            after=(f"gather {unit}",),
            new_blocks=tuple(parameter_bytes) if self.on_cpu else (),
        )
        yield free("communication", 0 if self.on_cpu else whole_bytes + local_bytes)

    def _buffer_bytes(self) -> float:
        """Return the bytes of the buffers that a CPU rank reuses for gathers and reductions; see
        `exchange.py`. Shared pages count for every rank that touches them, and a rank reads its part
        of all ranks' buffers."""
        units = {ROOT, *self.units}
        gathered_bytes = max(self._gathered_bytes(unit)[0] for unit in units)
        own_bytes = gathered_bytes + max(self._sent_bytes(unit) for unit in units)
        return own_bytes * (1 + (self.ranks - 1) / self.ranks)

    def _sent_bytes(self, unit: str) -> float:
        """Return the bytes of a unit's gradients in the form in which they are reduced."""
        return self.step.profile.reduced_part * sum(
            p.gradient_bytes for p in _sharded(self.step, unit) if p.trainable
        )

    def _gather(self, unit: str) -> Iterable[Event]:
        if self._gathered_bytes(unit)[0]:
            yield from self._issue(unit)
            yield from self._take(unit)

    def _release(self, unit: str) -> Event:
        return free("parameters", 0 if self.kept_whole else self._gathered_bytes(unit)[0])

    def _reduce(self, unit: str, point: HookPoint) -> Iterable[Event]:
        """Yield the reduction of a unit: its gradients go into a buffer, and each rank gets the sum
        of its part."""
        if self.reduces_at_the_end:
            return
        trainable = [p for p in _sharded(self.step, unit) if p.trainable]
        whole_bytes = sum(p.gradient_bytes for p in trainable)
        local_bytes = sum(self.step.footprint.gradients[p.name] for p in trainable)
        if not whole_bytes or not (self.zero > 1 or self.step.is_last(point)):
            return
        sent_bytes = self._sent_bytes(unit)
        buffer_bytes = local_bytes if self.on_cpu else sent_bytes + local_bytes
        yield Allocate("communication", buffer_bytes)
        yield Compute(
            moved_bytes=2 * sent_bytes,
            fixed_s=self.hook_s,
            new_blocks=(local_bytes,) if self.on_cpu else (),
        )
        name = f"reduce {unit}" if self.on_cpu else REDUCED
        yield Collective(
            "reduce_scatter",
            sent_bytes,
            self.ranks,
            name=name,
            stream=self.stream,
            stride=self.stride,
        )
        yield Compute(moved_bytes=3 * local_bytes, after=(name,) if self.on_cpu else ())
        yield free("communication", buffer_bytes)
        if point.microbatch == 0 or self.zero == 1:  # the first reduction of the window
            yield free("gradients", whole_bytes - local_bytes)

    def _roll_call(self) -> Iterable[Event]:
        """Yield the exchange in which CPU ranks compare the next unit.

        On GPUs only the first forwards have it.
        """
        if self.step.software.roll_call and self.on_cpu:
            yield small_all_reduce(ROLL_BYTES, self.ranks, name="roll", stride=self.stride)

    def _is_gathered_here(self, point: HookPoint, *, backward: bool) -> bool:
        return not self.kept_whole and (self.zero == 3 or (point.microbatch == 0 and not backward))

    def _is_gathered(self, segment: int) -> bool:
        """Whether a unit is gathered for a segment's forward."""
        unit = self.units[segment]
        return bool(unit) and (self.zero == 3 or self.first_segment[unit] == segment)

    def _ahead(
        self, segments: Sequence[int], point: HookPoint, *, is_first: bool, is_last: bool
    ) -> Iterable[Event]:
        """Use the unit that was requested before, and request the next one.

        segments: the segments in the order of the pass.
        """
        unit, place = self.units[point.segment], segments.index(point.segment)
        if place == 0 and is_first:
            yield from self._issue(unit)
        yield from self._take(unit)
        if not is_last:
            yield from self._issue(unit)
        elif place + 1 < len(segments):
            yield from self._issue(self.units[segments[place + 1]])

    def _kept_bytes(self) -> float:
        """Return the bytes of all whole parameters in the form in which they are gathered."""
        return sum(
            self._part_gathered(p) * p.num_bytes * p.count for p in self.step.profile.parameters
        )

    def _gathered_bytes(self, unit: str) -> tuple[float, float]:
        """Return the bytes of gathering a unit's parameters: of the whole unit, and of the part
        that this rank sends."""
        if unit not in self.gathered:
            owned = _sharded(self.step, unit)
            self.gathered[unit] = (
                sum(self._part_gathered(p) * p.num_bytes for p in owned),
                sum(self._part_gathered(p) * self.step.footprint.parameters[p.name] for p in owned),
            )
        return self.gathered[unit]

    def _part_gathered(self, parameter: Parameter) -> float:
        """Return the bytes that are gathered per byte of a parameter."""
        return self.step.profile.gathered_part * (parameter.gathered_part if self.cast else 1.0)
