"""What one rank does in a step: events on named streams, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMPUTE, NETWORK, SENDING = "compute", "network", "sending"
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter"]
Part = Literal["compute", "optimizer"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Operators on the device.

    part: of the step, for its breakdown.
    after: names of collectives that must have ended.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    function_bytes: float = 0.0
    operators: float = 0.0
    fixed_s: float = 0.0
    part: Part = "compute"
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """Ranks exchange a tensor.

    It starts when the compute stream has come to its place in the program and its own stream is free.

    num_bytes: of the whole tensor: what each rank puts into an all-reduce or a reduce-scatter and gets from an
        all-gather.
    group: ranks that take part.
    name: by which later events wait for it.
    stream: on COMPUTE, computing stops meanwhile.
    times: how often a step; below 1 for what is done every few steps.
    """

    kind: CollectiveName
    num_bytes: float
    group: int
    name: str = ""
    stream: str = NETWORK
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is taken when the compute stream comes here. A negative size gives it back."""

    ledger: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Send:
    """A message to another rank; computing goes on. A rank's messages to all others leave one after the other.

    name: of the message, once between two ranks in a step.
    """

    to: int
    name: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Computing waits for a message of another rank."""

    source: int
    name: str


Event = Compute | Collective | Allocate | Send | Receive
Program = tuple[Event, ...]


def free(ledger: str, num_bytes: float) -> Allocate:
    """Memory is given back."""
    return Allocate(ledger, -num_bytes)
