"""How long a job's own operators take on this machine's CPU, with as many ranks at work as a plan has.

Each distinct operator is called a few times with operands of its shapes, in a fork for each rank, all at the same
operator at the same time: so ranks have their threads, and share memory and caches. An operand that a step touches
again only after many others is brought from as far away. What was timed is kept for this machine, unless other work had
its cores, and as long as some operators that are timed anew are as fast as they were.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.cluster import threads_of_a_rank, usable_cores
from paceline.launch.fork import die_with, in_a_fork
from paceline.profile import cache
from paceline.profile.calls import FAR, MIB, UNKNOWN, Operand, OperatorCall

if TYPE_CHECKING:
    import torch

MEASURED_S = 0.004  # of an operator's calls
FEWEST, MOST = 5, 200  # of them
ALIKE = 0.05  # by which the two fastest calls may differ, as a part, where nothing disturbs them
SLOW_S, LONGEST_S = 0.03, 0.15  # of an operator's calls on one thread, and on several, which are disturbed more easily
LARGEST_BYTES = 2**30  # of an operator's operands
BUDGET_S = 20.0  # of a session; what is left is priced by what it computes and moves
MOST_CRASHES = 5
MOST_KEPT = 30_000
MOST_COPIES = 64
MADE_BYTES = 32 * MIB  # of results that are held, so that further ones come into memory that was not used for long
WAIT_S = 0.5  # at most for the other ranks before each operator
CANT = -1.0  # seconds of an operator that failed
# Of a session's time that its thread has a core: 0.93 to 1.0 on two quiet cores, and 0.2 to 0.7 beside other work.
QUIET_SHARE = 0.85
# Once times are old, so many operators are timed anew. If two of them take so many times as long as they did, or as
# little, all are.
MOST_COMPARED, OTHER_PACE = 8, 1.25

LAUNCHED = OperatorCall("aten.mul.Tensor", (Operand((64,), (1,), "float32", 0.0), 2.0))
# Of 64 MiB each, which is more than caches hold, and more than the C library takes from its heap: what is made is in
# pages that are new.
_LARGE = Operand((2**24,), (1,), "float32", float(FAR))
IN_PLACE, MADE = OperatorCall("aten.add_.Tensor", (_LARGE, _LARGE)), OperatorCall("aten.add.Tensor", (_LARGE, _LARGE))
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
        self._kept = {key: value for key, value in seconds.items()
                      if isinstance(value, float) and (value == CANT or 0 < value < math.inf)
                      } if isinstance(seconds, dict) else {}
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

    def knows(self, calls: Iterable[OperatorCall]) -> bool:
        """Whether all of them were timed, or can't be."""
        return all(call.operator == UNKNOWN or _key(call) in self._known for call in calls)

    def measure(self, calls: Iterable[OperatorCall]) -> None:
        """Time those that are not known yet. Times that were taken while other work had the cores count in this process
        and are not kept."""
        if not self.measures:
            return
        wanted = {_key(call): call for call in calls if call.operator != UNKNOWN}
        known = [call for call in wanted.values() if call not in _RATES and self.seconds(call)]
        if known and time.time() - self._compared_s > cache.OLD_S:
            self._compare_pace(known)
        missing = {key: call for key, call in wanted.items() if key not in self._known and key not in self._skipped}
        if not missing:
            return
        measured = self._session(list(missing.values()))
        self._skipped.update(key for key, seconds in zip(missing, measured.seconds, strict=True) if seconds is None)
        times = {key: seconds for key, seconds in zip(missing, measured.seconds, strict=True) if seconds is not None}
        self._known |= times
        if measured.is_quiet:
            self._kept |= times
            self._write()
        elif not OperatorTimes._has_warned:
            OperatorTimes._has_warned = True
            print("note: other work had this machine's cores while operators were timed, so predictions are rougher; "
                  "the operators are timed again next time", file=sys.stderr)

    def _compare_pace(self, known: Sequence[OperatorCall]) -> None:
        """Forget all times if the machine has another pace than when they were taken, by some of these operators."""
        self._compared_s = time.time()
        sample = known[::-(-len(known) // MOST_COMPARED)]
        measured = self._session(sample)
        if not measured.is_quiet:
            return
        before = [self._known[_key(call)] for call in sample]
        changes = [max(seconds / before_s, before_s / seconds)
                   for seconds, before_s in zip(measured.seconds, before, strict=True) if seconds not in (None, CANT)]
        if changes and sum(change > OTHER_PACE for change in changes) >= min(2, len(changes)):
            self._known.clear()
            self._kept.clear()
        self._write()

    def _session(self, calls: Sequence[OperatorCall]) -> TimedCalls:
        return session(calls, self.processes, self.threads, keeps_heap=self.keeps_heap)

    def _write(self) -> None:
        self._kept = dict(list(self._kept.items())[-MOST_KEPT:])
        cache.write(self._name, "cpu", {"compared_s": self._compared_s, "seconds": self._kept})


def operator_times(num_ranks: int, *, measures: bool = True, keeps_heap: bool = True) -> OperatorTimes:
    """Of this process: what it has timed it does not read again."""
    return _operator_times(num_ranks, threads_of_a_rank(num_ranks), measures, keeps_heap)


@lru_cache(maxsize=16)
def _operator_times(num_ranks: int, threads: int, measures: bool, keeps_heap: bool) -> OperatorTimes:
    """threads: that a rank has; OMP_NUM_THREADS may change while this process lives."""
    return OperatorTimes(num_ranks, measures=measures, keeps_heap=keeps_heap)


_keys: dict[str, str] = {}


def _key(call: OperatorCall) -> str:
    key = _keys.get(call.key)
    if key is None:
        key = _keys[call.key] = blake2b(call.key.encode(), digest_size=9).hexdigest()
    return key


class TimedCalls(NamedTuple):
    """seconds: of each call; CANT of one that fails, None of one for which no time was left. cpu_share: the part of the
    time for which the thread that timed them had a core."""

    seconds: list[float | None]
    cpu_share: float

    @property
    def is_quiet(self) -> bool:
        """Whether no other work had the cores."""
        return self.cpu_share >= QUIET_SHARE


def session(calls: Sequence[OperatorCall], processes: int, threads: int, *, keeps_heap: bool = True,
            budget_s: float = BUDGET_S) -> TimedCalls:
    """Time operators where so many processes with so many threads call them."""
    import paceline.launch.process  # noqa: F401  here, so that not every fork loads it

    board = _Board(len(calls), processes)
    deadline_s = time.monotonic() + budget_s
    set_up = partial(_set_up, threads, keeps_heap=keeps_heap)
    for _ in range(MOST_CRASHES):
        try:
            in_a_fork(lambda: _lead(calls, board, set_up, deadline_s), timeout_s=budget_s + 60)
            break
        except RuntimeError:  # a kernel may end its process
            board.seconds[board.at] = CANT
    return TimedCalls([None if math.isnan(seconds) else seconds for seconds in board.seconds[:len(calls)]],
                   board.cpu_share)


class _Board:
    """Memory that ranks share: seconds of each call, and which call each rank is ready for, or has done.

    at: the call that the lead is at.
    """

    def __init__(self, num_calls: int, processes: int) -> None:
        self.processes = processes
        shared = memoryview(mmap.mmap(-1, 8 * (num_calls + processes + 4))).cast("d")
        self.seconds, self.ready = shared[:num_calls], shared[num_calls:-4]
        self._done, self._lead_s = shared[-4:-2], shared[-2:]
        for k in range(num_calls):
            self.seconds[k] = math.nan
        self._done[0] = self._done[1] = -1

    @property
    def at(self) -> int:
        return int(self._done[1])

    @property
    def cpu_share(self) -> float:
        """The part of the lead's time for which it had a core."""
        wall_s, cpu_s = self._lead_s
        return cpu_s / wall_s if wall_s else 1.0

    def account(self, wall_s: float, cpu_s: float) -> None:
        """What the lead took for a call."""
        self._lead_s[0] += wall_s
        self._lead_s[1] += cpu_s

    def prepare(self, number: int) -> None:
        self._done[1] = number

    def begin(self, number: int) -> None:
        """The lead waits until the others have called the operator once, or can't."""
        deadline_s = time.perf_counter() + WAIT_S
        while min(self.ready[1:], default=number + 1) < number + 1 and time.perf_counter() < deadline_s:
            pass

    def end(self, number: int, seconds: float) -> None:
        self.seconds[number] = seconds
        self._done[0] = number

    def is_done(self, number: int) -> bool:
        return self._done[0] >= number


def _lead(calls: Sequence[OperatorCall], board: _Board, set_up: Callable[[], Arena], deadline_s: float) -> None:
    """Time operators, beside ranks that call the same ones. set_up: this process, as a rank is."""
    import torch

    parent, peers, before = os.getpid(), [], torch.get_num_threads()
    for rank in range(1, board.processes):
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                _follow(calls, board, set_up, rank)
            finally:
                os._exit(0)
        peers.append(pid)
    try:
        arena = set_up()
        for number, call in enumerate(calls):
            if not math.isnan(board.seconds[number]):
                continue
            if time.monotonic() > deadline_s:
                break
            board.prepare(number)
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            try:
                again = _prepared(call, arena)
                again()
                board.begin(number)
                board.end(number, _seconds(again, torch.get_num_threads()))
            except Exception:
                board.end(number, CANT)
            board.account(time.perf_counter() - began_s, time.thread_time() - began_cpu_s)
            arena.mend()
    finally:
        torch.set_num_threads(before)  # where this is no fork, but a process that was forked for more than this
        torch.set_grad_enabled(True)
        for pid in peers:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _follow(calls: Sequence[OperatorCall], board: _Board, set_up: Callable[[], Arena], rank: int) -> None:
    """Call each operator until the lead has timed it."""
    arena = set_up()
    for number, call in enumerate(calls):
        if board.is_done(number) or not math.isnan(board.seconds[number]):
            continue
        with suppress(Exception):
            again = _prepared(call, arena)
            board.ready[rank] = number + 1
            while not board.is_done(number):
                again()
        arena.mend()


def _set_up(threads: int, *, keeps_heap: bool) -> Arena:
    import torch

    from paceline.launch.heap import set_up_heap

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    set_up_heap(keep=keeps_heap)
    return Arena()


def _seconds(again: Callable[[], object], threads: int) -> float:
    """Of some calls, as a quarter of them take at most: others that use the machine make the rest slower. Of few calls
    the fastest counts, once another one is nearly as fast. On one thread what the thread itself was busy counts;
    several are never slower than one, but where others are in their way."""
    import torch

    alone_s = math.inf
    if threads > 1:
        torch.set_num_threads(1)
        alone_s = _seconds(again, 1)
        torch.set_num_threads(threads)
        again()
    clock = time.thread_time if threads == 1 else time.perf_counter

    def once() -> float:
        began_s = clock()
        again()
        return clock() - began_s

    times = [once()]
    deadline_s = time.perf_counter() + (LONGEST_S if threads > 1 else SLOW_S)
    count = max(FEWEST, min(MOST, math.ceil(MEASURED_S / times[0])))
    while len(times) < 2 or (len(times) < count and time.perf_counter() < deadline_s) or (
            len(times) < FEWEST and not _are_alike(times)):
        times.append(once())
    return min(alone_s, statistics.quantiles(times, n=4)[0] if len(times) > FEWEST else min(times))


def _are_alike(times: Sequence[float]) -> bool:
    """Whether two calls are as fast as each other, and no call is faster."""
    fastest, next_s = sorted(times)[:2]
    return next_s <= (1 + ALIKE) * fastest


class Arena:
    """Memory that operands are parts of, all of it touched before. Values are positive and differ: kernels take other
    ways for what is equal, as pooling does, and for what has no root."""

    def __init__(self) -> None:
        self._values: dict[torch.dtype, torch.Tensor] = {}

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, as numbers of a type."""
        import torch

        if dtype not in self._values:
            block = torch.rand(MIB // dtype.itemsize).add_(0.1).to(dtype)
            self._values[dtype] = block.repeat(2 * FAR // MIB)
        return self._values[dtype]

    def mend(self) -> None:
        """After operators have written into it: what is neither huge nor tiny takes as long as ordinary numbers."""
        for values in self._values.values():
            sample = values[::4097].abs()
            if not bool(((sample > 1e-6) & (sample < 1e6)).all()):
                values.uniform_(0.1, 1.1)

    def operand(self, operand: Operand, begin: int) -> torch.Tensor:
        """begin: in bytes, of where the operand is; in memory of its own if it doesn't fit there."""
        import torch

        dtype = getattr(torch, operand.dtype)
        if not dtype.is_floating_point:
            return torch.ones(operand.shape, dtype=dtype)
        values, needed = self.of(dtype), _needed(operand)
        first = begin // dtype.itemsize
        if first + needed > len(values):
            values, first = torch.full((needed,), 0.5, dtype=dtype), 0
        return values.as_strided(operand.shape, operand.stride, first)


def _needed(operand: Operand) -> int:
    """Values between an operand's first and its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True)) if all(
        operand.shape) else 0


def _num_bytes(operand: Operand) -> int:
    import torch

    return _needed(operand) * int(getattr(torch, operand.dtype).itemsize)


def _prepared(call: OperatorCall, arena: Arena) -> Callable[[], object]:
    """Call it, each time with other copies of those operands that are far away.

    Raises:
        Exception: it can't be called so.
    """
    import torch

    namespace, name, overload = call.operator.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    operands = list(call.operands())
    if sum(map(_num_bytes, operands)) > LARGEST_BYTES:
        raise MemoryError(call.operator)
    sizes = [-(-_num_bytes(operand) // 64) * 64 for operand in operands]
    near_bytes = sum(size for operand, size in zip(operands, sizes, strict=True) if not operand.window)
    far_bytes = max(64, sum(size for operand, size in zip(operands, sizes, strict=True) if operand.window))
    places, ends = [], {True: 0, False: near_bytes}  # near operands come first, then copies of all others together
    for operand, size in zip(operands, sizes, strict=True):
        places.append(ends[not operand.window])
        ends[not operand.window] += size
    spread = [max(1, min(MOST_COPIES, operand.window // far_bytes, (2 * FAR - near_bytes) // far_bytes))
              for operand in operands]
    strides = [max(far_bytes, operand.window // MOST_COPIES // 64 * 64) for operand in operands]
    most = _most_index(name, call)
    fixed = {k: torch.randint(most, operand.shape, dtype=getattr(torch, operand.dtype))
             for k, operand in enumerate(operands) if operand.dtype in ("int64", "int32")}

    def made(copy: int) -> tuple[list[Any], dict[str, Any]]:
        tensors = iter([fixed[k] if k in fixed else arena.operand(operand, places[k] + copy % spread[k] * strides[k])
                        for k, operand in enumerate(operands)])
        return [_given(a, tensors) for a in call.arguments], {key: _given(a, tensors) for key, a in call.options}

    if name == "mkldnn_rnn_layer_backward":
        return _layer_backward(made(0)[0])
    copies = deque(made(copy) for copy in range(max(spread, default=1)))
    results: deque[Any] = deque(maxlen=1)

    def again() -> None:
        copies.rotate(-1)
        arguments, options = copies[0]
        results.append(operator(*arguments, **options))

    again()
    made_bytes = _made_bytes(results[0])
    window = Operand((), (), "", call.made_distance_bytes).window
    if kept := min(MOST_COPIES, min(window, MADE_BYTES) // made_bytes if made_bytes else 0):
        results = deque((torch.full((made_bytes // 4 + 1,), 0.5) for _ in range(kept)), maxlen=kept)
    return again


def _layer_backward(arguments: list[Any]) -> Callable[[], object]:
    """Of a recurrent layer: it needs what its forward left behind."""
    import torch

    (x, *weights), (hx, cx) = arguments[:5], arguments[5:7]
    *gradients, reverse, mode, size, layers, biases, train, two_ways, sizes, batch_first, _ = arguments[10:]
    with torch.enable_grad():  # else it leaves nothing
        y, hy, cy, left = torch.ops.aten.mkldnn_rnn_layer.default(x, *weights, hx, cx, reverse, sizes, mode, size,
                                                                  layers, biases, two_ways, batch_first, train)
    return lambda: torch.ops.aten.mkldnn_rnn_layer_backward.default(
        x, *weights, hx, cx, y, hy, cy, *gradients, reverse, mode, size, layers, biases, train, two_ways, sizes,
        batch_first, left)


def _made_bytes(result: Any) -> int:
    import torch

    if isinstance(result, torch.Tensor):
        return result.nbytes
    return sum(map(_made_bytes, result)) if isinstance(result, tuple | list) else 0


def _given(value: Any, tensors: Any) -> Any:
    import torch

    if isinstance(value, Operand):
        return next(tensors)
    if isinstance(value, tuple):
        return [_given(part, tensors) for part in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _most_index(name: str, call: OperatorCall) -> int:
    """Above the numbers in tensors of whole numbers: rows of a table, or classes. 0 fits everywhere."""
    operands = list(call.operands())
    if name == "embedding":
        return operands[0].shape[0]
    if name == "embedding_dense_backward":
        return int(call.arguments[2])
    if name in ("nll_loss_forward", "nll_loss_backward"):
        return operands[name == "nll_loss_backward"].shape[1]
    return 1
