"""What a compiler saves by fusing operators: bytes that they exchange through memory, and launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field


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
