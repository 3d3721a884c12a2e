"""Assigns rows of parameters to servers, and divides them into chunks for sending.

The functions are pure, and give the same result on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from paceline.base.errors import PlanError

BYTES_BEFORE_BF16 = {"float32": 4, "float64": 8}  # dtypes that compress=bf16 sends as bfloat16
# One message has a sixteenth of a server's bytes, within these bounds. It is large enough that
# Python's work for it (50 us) is a tenth of its time on a fast link. It is small enough that the
# first message is sent early in a backward, and that the last one, which nothing hides, is short.
CHUNKS = 16
_LEAST_BYTES, _MOST_BYTES = 512 * 2**10, 2 * 2**20
# A chunk of at least this size is closed at the end of a parameter, so that it need not wait for
# the next parameter.
_CLOSED_BYTES = 64 * 2**10
# A tensor with more than this part of a server's fair share is cut over all servers. The other
# tensors, which stay whole, can't make a server more unbalanced than this.
_SMALL = 1 / 8


@dataclass(frozen=True, slots=True)
class ServedParameter:
    """A parameter as servers see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."
    item_bytes: int
    optimizer: str = ""  # name of the optimizer that updates it, in a job with several
    may_split: bool = True  # whether it may be cut; not if the optimizer uses whole tensors

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> RowSlice:
        return RowSlice(**asdict(self), start=start, stop=stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice(ServedParameter):
    """Consecutive rows of a parameter along dim 0. A scalar has one row, which is the whole."""

    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """The position in the whole parameter, along each dim."""
        return (self.start, *(0 for _ in self.shape[1:])) if self.shape else ()

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.item_bytes

    @property
    def first_element(self) -> int:
        """The index of the first element in the whole parameter, row after row."""
        return self.start * math.prod(self.shape[1:]) if self.shape else 0


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The elements of one slice that are part of a chunk."""

    slice: int  # index among the server's slices
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The content of one message: a run of elements of one dtype that a server holds."""

    dtype: str
    wire_dtype: str  # dtype in the message
    # Position in the server's memory of that dtype, where its slices come one after another.
    start: int
    stop: int
    num_bytes: int  # size of the message
    spans: tuple[ChunkSpan, ...]
    optimizer: str = ""  # name of the optimizer that updates all of it, in a job with several


@dataclass(frozen=True, slots=True)
class Shard:
    """The parameters that one server holds."""

    # The last parameter of the model comes first, in the order of backward; with several
    # optimizers, one optimizer after the other.
    slices: tuple[RowSlice, ...]
    chunks: tuple[Chunk, ...] = ()  # in the same order
    # Parameters of which single rows are sent, and which are in no chunk; in the model's order.
    tables: tuple[RowSlice, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in (*self.slices, *self.tables))

    def updated_by(self, optimizer: str | None) -> list[int]:
        """Return the numbers of the chunks that an optimizer updates; those of all chunks for
        None."""
        return [
            number
            for number, chunk in enumerate(self.chunks)
            if optimizer in (None, chunk.optimizer)
        ]

    def numels(self) -> dict[str, int]:
        """Return the number of elements of each dtype, without tables."""
        numels: dict[str, int] = {}
        for part in self.slices:
            numels[part.dtype] = numels.get(part.dtype, 0) + part.numel
        return numels


def assign(
    parameters: Sequence[ServedParameter],
    num_servers: int,
    *,
    compress: str = "none",
    chunk_bytes: int | None = None,
    tables: Sequence[ServedParameter] = (),
) -> tuple[Shard, ...]:
    """Balance parameters over servers by bytes.

    Large tensors are cut over all servers, so that every link is busy throughout a backward. Other
    tensors stay whole. The largest first, each goes to the server that has least.

    Args:
        parameters: The parameters in the model's order.
        compress: "none", or "bf16" to send real numbers as bfloat16.
        chunk_bytes: The largest size of a message; by default it depends on the bytes that a server
            holds.
        tables: Parameters of which single rows are sent; each is cut evenly over all servers.

    Raises:
        PlanError: a server would hold nothing.
    """
    fair_bytes = sum(parameter.num_bytes for parameter in parameters) / num_servers
    if chunk_bytes is None:
        chunk_bytes = _most_chunk_bytes(fair_bytes)
    pieces: list[list[tuple[int, RowSlice]]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    whole: list[int] = []

    def put(server: int, number: int, start: int, stop: int) -> None:
        part = parameters[number].rows(start, stop)
        pieces[server].append((number, part))
        loads[server] += part.num_bytes

    for number, parameter in enumerate(parameters):
        rows = parameter.num_rows
        if (
            parameter.may_split
            and rows > 1
            and parameter.num_bytes > _SMALL * fair_bytes
            and num_servers > 1
        ):
            by_load = sorted(range(num_servers), key=lambda server: (loads[server], server))
            # The servers with least get the remaining rows.
            for place, server in enumerate(by_load):
                start, stop = (rows * (num_servers - k) // num_servers for k in (place + 1, place))
                if start < stop:
                    put(server, number, start, stop)
        else:
            whole.append(number)
    for number in sorted(whole, key=lambda number: (-parameters[number].num_bytes, number)):
        emptiest = min(range(num_servers), key=lambda server: (loads[server], server))
        put(emptiest, number, 0, parameters[number].num_rows)
    if not all(loads) and not tables:
        kind = (
            "rows of parameters"
            if any(parameter.may_split for parameter in parameters)
            else "parameters"
        )
        raise PlanError(
            f"servers={num_servers} servers and {len(parameters)} parameters: the model has too few {kind} "
            "for each to hold some",
            hint=f"at most {sum(map(bool, loads))} servers",
        )
    optimizers = list(dict.fromkeys(parameter.optimizer for parameter in parameters))
    # The last parameter first, in the order of backward.
    ordered = [
        tuple(
            part
            for _, part in sorted(
                slices, key=lambda item: (optimizers.index(item[1].optimizer), -item[0])
            )
        )
        for slices in pieces
    ]
    return tuple(
        Shard(
            slices,
            _chunks(slices, compress, chunk_bytes),
            tuple(
                table.rows(
                    table.num_rows * k // num_servers, table.num_rows * (k + 1) // num_servers
                )
                for table in tables
            ),
        )
        for k, slices in enumerate(ordered)
    )


def _most_chunk_bytes(fair_bytes: float) -> int:
    """Return the largest size of a message. fair_bytes: bytes that each server holds."""
    return int(min(max(_LEAST_BYTES, fair_bytes / CHUNKS), _MOST_BYTES))


def mean_chunks(parameters: Iterable[tuple[float, int]], num_servers: int) -> float:
    """Estimate the number of chunks of a server from the parameters' sizes alone.

    parameters: (bytes of one parameter, number of equal parameters).

    >>> round(mean_chunks([(256 * 2**10, 8), (1024, 8)], 2), 1)
    8.1
    """
    parameters = list(parameters)
    fair_bytes = sum(num_bytes * count for num_bytes, count in parameters) / num_servers
    most_bytes, whole_chunks, small_bytes = _most_chunk_bytes(fair_bytes), 0.0, 0.0
    for num_bytes, count in parameters:
        is_cut = num_bytes > _SMALL * fair_bytes
        piece_bytes, pieces = (
            (num_bytes / num_servers, count) if is_cut else (num_bytes, count / num_servers)
        )
        if piece_bytes >= _CLOSED_BYTES:
            whole_chunks += pieces * math.ceil(piece_bytes / most_bytes)
        else:
            small_bytes += pieces * piece_bytes
    return max(1.0, whole_chunks + small_bytes / _CLOSED_BYTES)


def wire_format(dtype: str, item_bytes: int, compress: str) -> tuple[str, int]:
    """Return the dtype in which an element of a tensor is sent, and its bytes in that dtype.

    >>> wire_format("float64", 8, "bf16"), wire_format("float16", 2, "bf16"), wire_format("float64", 8, "none")
    (('bfloat16', 2), ('float16', 2), ('float64', 8))
    """
    return (
        ("bfloat16", 2)
        if compress == "bf16" and dtype in BYTES_BEFORE_BF16
        else (dtype, item_bytes)
    )


def _chunks(slices: Sequence[RowSlice], compress: str, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut each dtype's memory into runs of at most `chunk_bytes` bytes, in the order in which they
    are complete."""
    chunks: list[tuple[int, Chunk]] = []
    starts = dict.fromkeys((part.dtype for part in slices), 0)
    held = [(number, part) for number, part in enumerate(slices) if part.numel]
    for dtype, optimizer in dict.fromkeys((part.dtype, part.optimizer) for _, part in held):
        alike = [
            (number, part)
            for number, part in held
            if (part.dtype, part.optimizer) == (dtype, optimizer)
        ]
        wire_dtype, item_bytes = wire_format(dtype, alike[0][1].item_bytes, compress)
        most = max(1, chunk_bytes // item_bytes)
        start, used = starts[dtype], 0
        spans: list[ChunkSpan] = []
        for number, part in alike:
            offset = 0
            while offset < part.numel:
                taken = min(part.numel - offset, most - used)
                spans.append(ChunkSpan(number, offset, offset + taken))
                offset, used = offset + taken, used + taken
                is_end = offset == part.numel
                is_last = number == alike[-1][0]
                if used == most or (is_end and (is_last or used * item_bytes >= _CLOSED_BYTES)):
                    chunk = Chunk(
                        dtype,
                        wire_dtype,
                        start,
                        start + used,
                        used * item_bytes,
                        tuple(spans),
                        optimizer,
                    )
                    chunks.append((number, chunk))
                    start, used, spans = start + used, 0, []
        starts[dtype] = start
    return tuple(chunk for _, chunk in sorted(chunks, key=lambda item: item[0]))


def fingerprint(shards: Sequence[Shard]) -> bytes:
    """Return 32 bytes that are equal for two peers if they cut the same model in the same way."""
    document = json.dumps(
        [
            [asdict(part) for parts in (shard.slices, shard.chunks, shard.tables) for part in parts]
            for shard in shards
        ],
        sort_keys=True,
    )
    return hashlib.sha256(document.encode()).digest()
