"""How long a job's own operators take on this machine's CPU, with as many ranks at work as a plan has.

Each distinct operator is called a few times with operands of its shapes, in turns with others, in a fork for each rank,
all at the same operators at the same time: so ranks have their threads, and share memory and caches. An operand that a
step touches again only after many others is brought from as far away. What was timed is kept for this machine, unless
other work had its cores, and as long as some operators that are timed anew are as fast as they were.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar

from paceline.cluster.cluster import threads_of_a_rank
from paceline.cluster.limits import usable_cores
from paceline.model.cost import cache
from paceline.model.cost.op_calls import FAR, UNKNOWN, Operand, OperatorCall
from paceline.model.cost.session import CANT, TURNS, TimedCalls, session

MOST_KEPT = 30_000
# Once times are old, so many operators are timed anew. If a quarter of them take so many times as long as they did, or
# as little, all are.
MOST_COMPARED, OTHER_PACE = TURNS, 1.25

LAUNCHED = OperatorCall("aten.mul.Tensor", (Operand((64,), (1,), "float32", 0.0), 2.0))
# Of 64 MiB each, which is more than caches hold, and more than the C library takes from its heap: what is made is in
# pages that are new.
_LARGE = Operand((2**24,), (1,), "float32", float(FAR))
IN_PLACE, MADE = (
    OperatorCall("aten.add_.Tensor", (_LARGE, _LARGE)),
    OperatorCall("aten.add.Tensor", (_LARGE, _LARGE)),
)
_RATES = (LAUNCHED, IN_PLACE, MADE)


class OperatorTimes:
    """Seconds of operators where so many ranks are at work.

    measures: whether those that are not known are timed; no while ranks are at work.
    keeps_heap: whether ranks keep the memory that they free; those with a memory limit give it back, and pay for new
        pages each time.
    """

    _has_warned: ClassVar[bool] = False  # once a process

    def __init__(self, num_ranks: int, *, measures: bool = True, keeps_heap: bool = True) -> None:
        self.measures, self.keeps_heap = measures, keeps_heap
        self.processes, self.threads = min(num_ranks, usable_cores()), threads_of_a_rank(num_ranks)
        self._name = f"operators-{self.processes}x{self.threads}" + ("" if keeps_heap else "-lean")
        stored = cache.read(self._name, "cpu")
        document = stored if isinstance(stored, dict) else {}
        seconds, compared_s = document.get("seconds"), document.get("compared_s")
        # When times were last compared with the machine, and those that were taken while nothing else had the cores.
        self._compared_s = compared_s if isinstance(compared_s, float) else time.time()
        self._kept = (
            {
                key: value
                for key, value in seconds.items()
                if isinstance(value, float) and (value == CANT or 0 < value < math.inf)
            }
            if isinstance(seconds, dict)
            else {}
        )
        self._known = dict(self._kept)
        self._skipped: set[str] = set()  # for which there was no time in this process

    @property
    def launch_s(self) -> float:
        """Of an operator that has next to nothing to do, without autograd."""
        self.measure([LAUNCHED])
        return self.seconds(LAUNCHED) or 0.0

    @property
    def memory_bytes_per_s(self) -> float | None:
        """Read and written by plain arithmetic on what no cache holds."""
        self.measure([IN_PLACE])
        seconds = self.seconds(IN_PLACE)
        return 3 * 4 * 2**24 / seconds if seconds else None

    @property
    def new_page_s(self) -> float:
        """A byte of memory that is new to a process."""
        self.measure([IN_PLACE, MADE])
        return max(0.0, (self.seconds(MADE) or 0.0) - (self.seconds(IN_PLACE) or 0.0)) / (4 * 2**24)

    def seconds(self, call: OperatorCall) -> float | None:
        """None of an operator that was not timed, or can't be."""
        seconds = self._known.get(_key(call), CANT)
        return None if seconds == CANT else seconds

    def measure(self, calls: Iterable[OperatorCall]) -> None:
        """Time those that are not known yet. Times that were taken while other work had the cores count in this process
        and are not kept."""
        if not self.measures:
            return
        wanted = {_key(call): call for call in calls if call.operator != UNKNOWN}
        known = [call for call in wanted.values() if call not in _RATES and self.seconds(call)]
        if known and time.time() - self._compared_s > cache.OLD_S:
            self._compare_pace(known)
        missing = {
            key: call
            for key, call in wanted.items()
            if key not in self._known and key not in self._skipped
        }
        if not missing:
            return
        measured = self._session(list(missing.values()), beside=known)
        self._skipped.update(
            key for key, seconds in zip(missing, measured.seconds, strict=True) if seconds is None
        )
        times = {
            key: seconds
            for key, seconds in zip(missing, measured.seconds, strict=True)
            if seconds is not None
        }
        self._known |= times
        if measured.is_quiet:
            self._kept |= times
            self._write()
        elif not OperatorTimes._has_warned:
            OperatorTimes._has_warned = True
            print(
                "note: other work had this machine's cores while operators were timed, so predictions are rougher; "
                "the operators are timed again next time",
                file=sys.stderr,
            )

    def _compare_pace(self, known: Sequence[OperatorCall]) -> None:
        """Forget all times if the machine has another pace than when they were taken, by some of these operators."""
        self._compared_s = time.time()
        sample = known[:: -(-len(known) // MOST_COMPARED)]
        measured = self._session(sample)
        if not measured.is_quiet:
            return
        before = [self._known[_key(call)] for call in sample]
        changes = [
            max(seconds / before_s, before_s / seconds)
            for seconds, before_s in zip(measured.seconds, before, strict=True)
            if seconds not in (None, CANT)
        ]
        if changes and sum(change > OTHER_PACE for change in changes) >= max(1, len(changes) / 4):
            self._known.clear()
            self._kept.clear()
        self._write()

    def _session(
        self, calls: Sequence[OperatorCall], beside: Sequence[OperatorCall] = ()
    ) -> TimedCalls:
        return session(
            calls, self.processes, self.threads, beside=beside, keeps_heap=self.keeps_heap
        )

    def _write(self) -> None:
        self._kept = dict(list(self._kept.items())[-MOST_KEPT:])
        cache.write(self._name, "cpu", {"compared_s": self._compared_s, "seconds": self._kept})


def operator_times(
    num_ranks: int, *, measures: bool = True, keeps_heap: bool = True
) -> OperatorTimes:
    """Of this process: what it has timed it does not read again."""
    return _operator_times(num_ranks, threads_of_a_rank(num_ranks), measures, keeps_heap)


@lru_cache(maxsize=16)
def _operator_times(
    num_ranks: int, threads: int, measures: bool, keeps_heap: bool
) -> OperatorTimes:
    """threads: that a rank has; OMP_NUM_THREADS may change while this process lives."""
    return OperatorTimes(num_ranks, measures=measures, keeps_heap=keeps_heap)


_keys: dict[str, str] = {}


def _key(call: OperatorCall) -> str:
    key = _keys.get(call.key)
    if key is None:
        key = _keys[call.key] = blake2b(call.key.encode(), digest_size=9).hexdigest()
    return key
