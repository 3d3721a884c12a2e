"""What a compiler saves by fusing operators: bytes that they exchange through memory, and launches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.model.cost.op_calls import MIB, OperatorCall

# Sums down the columns of a matrix, as for the gradient of a bias, in code that torch 2.13 compiles for CPUs: it reads
# 64 bytes of each row in turn. Beyond the pages that the processor finds at once (2048 of 4 KiB) that takes 2.1 ms for
# 12 MiB and 4.1 ms for 16 MiB on an AVX-512 EPYC, where torch's own kernel takes 0.4 and 1.1; up to 6 MiB both are
# equally fast. See docs/strategies/recompute.md.
COLUMN_SUM_BYTES_PER_S, LARGEST_AT_ONCE_BYTES = 5e9, 8 * MIB
# Seconds of a value and a thread in the same code, of operators that it makes slower: random numbers are drawn one by
# one, and masks of ReLU and dropout are written and read one by one. On an AVX-512 Xeon at 2.5 GHz a uniform number
# takes 14 ns, a normal one 71, and a mask's value 16 ns to write and 3.5 to read. See docs/strategies/recompute.md.
_UNIFORM_S, _NORMAL_S, _MASK_S = 14e-9, 71e-9, 19.5e-9
COMPILED_VALUE_S: Mapping[str, float] = {
    "bernoulli_": _UNIFORM_S + _MASK_S,
    "bernoulli": _UNIFORM_S + _MASK_S,
    "native_dropout": _UNIFORM_S + _MASK_S,
    "rand": _UNIFORM_S,
    "rand_like": _UNIFORM_S,
    "randn": _NORMAL_S,
    "randn_like": _NORMAL_S,
    "threshold_backward": _MASK_S,
}


@dataclass(slots=True)
class SparedByFusion:
    """num_bytes: not read or not written any more. operators: not launched any more. kernels: that are left, beside
    products."""

    num_bytes: float = 0.0
    operators: int = 0
    kernels: int = 0


@dataclass(slots=True, eq=False)
class _Operator:
    """stage: products that lie before it, one after the other. kernel: the first operator that it is fused with, or
    itself. handed: bytes of its results that its own kernel reads, by storage. kept: results that others read."""

    place: Hashable
    stage: int
    is_product: bool
    kernel: _Operator | None = None
    handed: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)

    def first(self) -> _Operator:
        operator = self
        while operator.kernel is not None:
            operator = operator.kernel
        return operator


class Fusion:
    """Follows what operators read and write in their order; a storage is named by a number.

    Products (matrices, convolutions, attention) stay kernels of their own. Any other operator is fused with those of
    its place whose results it reads, and with those that read the same tensor, unless a product lies between: one that
    reads what the first has written, and whose result the second reads. A kernel reads each tensor once, and writes
    what others read.
    """

    def __init__(self) -> None:
        self._writers: dict[int, _Operator] = {}
        self._readers: dict[tuple[Hashable, int, int, int], _Operator] = {}
        self._operators: list[_Operator] = []
        self._reads: dict[Hashable, float] = defaultdict(float)

    def add(
        self,
        place: Hashable,
        reads: Sequence[tuple[int, int]],
        writes: Sequence[tuple[int, int]],
        *,
        is_product: bool,
    ) -> None:
        """
        Args:
            reads: The storage and the bytes of each tensor that is read.
            writes: The same of what is written.
        """
        sources = [(storage, num_bytes, self._writers.get(storage)) for storage, num_bytes in reads]
        stages = [
            writer.stage + (writer.is_product and not is_product)
            for *_, writer in sources
            if writer is not None and writer.place == place
        ]
        operator = _Operator(place, max(stages, default=0), is_product)
        self._operators.append(operator)
        for storage, num_bytes, writer in sources:
            self._read(operator, storage, num_bytes, writer)
        for storage, _ in writes:
            self._writers[storage] = operator

    def _read(
        self, operator: _Operator, storage: int, num_bytes: int, writer: _Operator | None
    ) -> None:
        if writer is not None and not writer.is_product:
            if not operator.is_product and (writer.place, writer.stage) == (
                operator.place,
                operator.stage,
            ):
                self._reads[operator.place] += num_bytes
                writer.handed[storage] = max(num_bytes, writer.handed.get(storage, 0))
                _join(operator, writer)
                return
            writer.kept.add(storage)
        if not operator.is_product:
            other = self._readers.setdefault(
                (operator.place, operator.stage, storage, num_bytes), operator
            )
            if other is not operator:
                self._reads[operator.place] += num_bytes
                _join(operator, other)

    def spared(self) -> Mapping[Hashable, SparedByFusion]:
        """By place."""
        spared: dict[Hashable, SparedByFusion] = defaultdict(SparedByFusion)
        for place, num_bytes in self._reads.items():
            spared[place].num_bytes += num_bytes
        for operator in self._operators:
            of_place = spared[operator.place]
            of_place.num_bytes += sum(
                num_bytes
                for storage, num_bytes in operator.handed.items()
                if storage not in operator.kept
            )
            of_place.operators += operator.kernel is not None
            of_place.kernels += operator.kernel is None and not operator.is_product
        return spared


def _join(operator: _Operator, other: _Operator) -> None:
    """Into one kernel."""
    kernel, first = operator.first(), other.first()
    if kernel is not first:
        kernel.kernel = first


def saved_s(
    timed: Sequence[tuple[OperatorCall, float, float]],
    spared_bytes: float,
    *,
    memory_bytes_per_s: float,
    threads: int,
) -> float:
    """Seconds that compiled code takes less than operators that were timed, launches left out.

    What is neither read nor written any more saves time at the rate at which these operators' own plain arithmetic
    moves bytes: that includes how far away memory is. Sums down long columns, random numbers and masks take longer.

    Args:
        timed: Each operator, how often it runs, and its seconds.
        memory_bytes_per_s: Where no plain operator is among them.
        threads: That share the values of random numbers and masks.
    """
    plain = [
        (count * call.num_bytes, count * seconds)
        for call, count, seconds in timed
        if call.is_plain and not _column_bytes(call)
    ]
    moved_bytes, plain_s = (
        (sum(figures) for figures in zip(*plain, strict=True)) if plain else (0.0, 0.0)
    )
    bytes_per_s = moved_bytes / plain_s if plain_s else memory_bytes_per_s
    slower_s = sum(
        count * max(0.0, num_bytes / COLUMN_SUM_BYTES_PER_S - seconds)
        for call, count, seconds in timed
        if (num_bytes := _column_bytes(call)) > LARGEST_AT_ONCE_BYTES
    )
    slower_s += sum(
        count * max(0.0, _compiled_s(call) / threads - seconds) for call, count, seconds in timed
    )
    return spared_bytes / bytes_per_s - slower_s


def _compiled_s(call: OperatorCall) -> float:
    """Of an operator whose compiled code is slow, on one thread; 0 of others."""
    value_s = COMPILED_VALUE_S.get(call.name)
    if value_s is None:
        return 0.0
    operand = next(iter(call.operands()), None)
    shape = operand.shape if operand is not None else call.arguments[0]
    return value_s * math.prod(shape)


def _column_bytes(call: OperatorCall) -> float:
    """That an operator sums down the columns of a matrix; 0 of other operators."""
    if call.operator != "aten.sum.dim_IntList":
        return 0.0
    dims, operand = call.arguments[1], next(iter(call.operands()))
    last = len(operand.shape) - 1
    is_down = (
        isinstance(dims, tuple) and last not in {dim % (last + 1) for dim in dims} and dims != ()
    )
    return call.num_bytes if is_down else 0.0
