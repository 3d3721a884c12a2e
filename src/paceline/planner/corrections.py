"""Corrects prices by rehearsals: those of the rehearsed plans, and those of plans like them.

The step time of a rehearsed plan is the measured one. A plan that runs the same code on as many ranks gets the same
factor on its time and the same bytes on its memory, interpolated by the number of micro-batches between two rehearsed
plans. Any other plan gets the correction of the plans that are most like it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.planner.estimate import Estimate, MemoryNeed
from paceline.planner.rank import kind_of
from paceline.planner.space import uncompiled_variant
from paceline.plans import Plan
from paceline.strategies.registry import active

# Half the width of an 80 % interval around a step's time, as a natural logarithm: of a plan that was rehearsed, of
# one whose kind was, and of others. Fitted on `benchmarks.regret`; see docs/formulas.md.
SPREAD = {"itself": 0.075, "kind": 0.13, "nothing": 0.5}
FAR = 4  # times as many micro-batches, or as few, from which a plan of the same kind is worth a rehearsal of its own
COMMUNICATION = "communication"
MEASURED = "unaccounted"  # of a ledger: what was measured above everything that is accounted for


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A few steps of a plan on the devices: the mean step, the fullest rank's peak, and seconds that it took
    once, as for compiling; of ranks without a process group with what they take to start.

    gain_s: by which a step of compiled code is shorter than one of the blocks' own, of steps in turns; None where code
        is not compiled.
    """

    step_s: float
    peak_memory_bytes: int
    start_s: float = 0.0
    gain_s: float | None = None


class Corrections:
    """Rehearsals beside what had been predicted for them."""

    def __init__(self) -> None:
        self._found: dict[Plan, Rehearsal] = {}
        self._off: dict[tuple[object, ...], dict[Plan, _Off]] = {}

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._found

    def add(self, plan: Plan, predicted: Estimate, found: Rehearsal) -> None:
        """predicted: without any correction."""
        self._found[plan] = found
        for likeness in _likenesses(plan):
            self._off.setdefault(likeness, {})[plan] = _Off.of(predicted, found)

    def knows_kind_of(self, plan: Plan) -> bool:
        """Whether a plan was rehearsed that runs the same code on as many ranks."""
        return _likenesses(plan)[0] in self._off

    def is_far(self, plan: Plan) -> bool:
        """Whether all of its kind that were rehearsed have many more or many fewer micro-batches."""
        known = self._off.get(_likenesses(plan)[0], {})
        return all(max(plan.num_microbatches / one.num_microbatches,
                       one.num_microbatches / plan.num_microbatches) >= FAR for one in known)

    def apply(self, plan: Plan, predicted: Estimate) -> Estimate:
        """The estimate with what is known of plans like it, and how sure that is."""
        spread = SPREAD["itself" if plan in self else "kind" if self.knows_kind_of(plan) else "nothing"]
        off = _Off.of(predicted, self._found[plan]) if plan in self else self._of_the_nearest(plan)
        step_s = self._step_s(plan) if plan in self else predicted.step_s * off.factor
        return replace(
            predicted, step_s=step_s, low_s=step_s / math.exp(spread), high_s=step_s * math.exp(spread),
            peak_memory_bytes=predicted.peak_memory_bytes + off.num_bytes, ledger=_with(predicted.ledger, off),
            breakdown=self._breakdown(predicted, step_s), is_measured=plan in self,
            start_s=self._start_s(plan, predicted),
            needs=tuple(MemoryNeed(need.name, need.device, _with(need.ledger, off)) for need in predicted.needs))

    def _step_s(self, plan: Plan) -> float:
        """Two runs of one plan differ by more than compiled code may gain: where both plans were rehearsed, the gain
        that was found in turns counts."""
        found = self._found[plan]
        plain = self._found.get(uncompiled_variant(plan))
        return found.step_s if found.gain_s is None or plain is None else plain.step_s - found.gain_s

    def _start_s(self, plan: Plan, predicted: Estimate) -> float:
        """A rehearsal leaves compiled code in torch's cache, so that a run starts sooner than it did."""
        return self._found[plan].start_s if plan in self and predicted.start_s else predicted.start_s

    def _of_the_nearest(self, plan: Plan) -> _Off:
        """What the plans that are most like this one are off by; their memory only if they are of its kind."""
        for nearness, likeness in enumerate(_likenesses(plan)):
            if likeness in self._off:
                known = self._off[likeness]
                if nearness == 0:
                    return _between(known, plan)
                factor = statistics.geometric_mean(off.factor for off in known.values())
                return _Off(factor, round(statistics.median(off.num_bytes for off in known.values()))
                            if nearness < 3 else 0)
        return _Off(1.0, 0)

    def _breakdown(self, predicted: Estimate, step_s: float) -> dict[str, float]:
        """Computing is off by the least that any plan is off by; what is left over is waiting for others."""
        least = min((off.factor for off in self._off.get((), {}).values()), default=1.0)
        busy = {name: least * seconds for name, seconds in predicted.breakdown.items() if name != COMMUNICATION}
        shrunk = min(1.0, step_s / sum(busy.values())) if any(busy.values()) else 1.0
        busy = {name: shrunk * seconds for name, seconds in busy.items()}
        return {**busy, COMMUNICATION: max(0.0, step_s - sum(busy.values()))}


@dataclass(frozen=True, slots=True)
class _Off:
    """By what a step is longer, as a factor, and a peak higher."""

    factor: float
    num_bytes: int

    @classmethod
    def of(cls, predicted: Estimate, found: Rehearsal) -> _Off:
        return cls(found.step_s / predicted.step_s, found.peak_memory_bytes - predicted.peak_memory_bytes)


def _between(known: Mapping[Plan, _Off], plan: Plan) -> _Off:
    """A line through what is known, over the logarithm of the number of micro-batches; level beyond its ends."""
    def at(one: Plan) -> float:
        return math.log(one.num_microbatches)

    below = [one for one in known if at(one) <= at(plan)]
    above = [one for one in known if at(one) >= at(plan)]
    low = max(below, key=at, default=min(above, key=at, default=plan))
    high = min(above, key=at, default=low)
    part = (at(plan) - at(low)) / (at(high) - at(low)) if at(high) > at(low) else 0.0
    first, second = known[low], known[high]
    return _Off(first.factor ** (1 - part) * second.factor ** part,
                round((1 - part) * first.num_bytes + part * second.num_bytes))


def _likenesses(plan: Plan) -> tuple[tuple[object, ...], ...]:
    """What a plan shares with others, from plans that run the same code to all plans."""
    kind, ranks = kind_of(plan), plan.world_size
    code = tuple((strategy.name, strategy.code(plan)) for strategy in active(plan))
    return (kind, ranks, code), (kind, ranks), (kind,), ()


def _with(ledger: Mapping[str, int], off: _Off) -> dict[str, int]:
    return {**ledger, MEASURED: off.num_bytes} if off.num_bytes else dict(ledger)
