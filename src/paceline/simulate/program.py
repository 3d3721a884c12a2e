"""What one rank does in a step: events on named streams, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.model.cost.profile import Product

# HOST launches what the device computes.
COMPUTE, NETWORK, SENDING, HOST = "compute", "network", "sending", "host"
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "push", "pull"]
Part = Literal["compute", "optimizer"]


@dataclass(frozen=True, slots=True)
class Compute:
    """Operators on the device.

    fixed_s: seconds of the host, which an accelerator computes beside.
    new_blocks: bytes of each block of memory that is taken for this and given back soon, on a CPU.
    part: of the step, for its breakdown.
    after: names of collectives that must have ended; one that is in no step has.
    products: what `flops` consists of, where shapes are known: of all samples.
    is_compiled: whether operators are fused.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    function_bytes: float = 0.0
    operators: float = 0.0
    fixed_s: float = 0.0
    part: Part = "compute"
    after: tuple[str, ...] = ()
    products: tuple[Product, ...] = ()
    is_compiled: bool = False
    new_blocks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """Ranks exchange a tensor.

    It starts when the compute stream has come to its place in the program and its own stream is free.

    num_bytes: of the whole tensor: what each rank puts into an all-reduce or a reduce-scatter and gets from an
        all-gather.
    group: ranks that take part. stride: how far apart neighbours among them are numbered.
    name: by which later events wait for it.
    stream: on COMPUTE, computing stops meanwhile.
    times: how often a step; below 1 for what is done every few steps.
    servers: that workers push to or pull from; `group` are the workers. is_colocated: whether they are in workers'
        processes.
    is_compressed: it then travels over the network also where ranks share memory (`launch/collectives/group.py`).
    """

    kind: CollectiveName
    num_bytes: float
    group: int
    name: str = ""
    stream: str = NETWORK
    times: float = 1.0
    stride: int = 1
    servers: int = 0
    is_colocated: bool = False
    is_compressed: bool = False


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


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same events so many times over, without messages among them. They are played until a round takes as long as
    the one before; the others are counted."""

    events: tuple[Event, ...]
    count: int


Event = Compute | Collective | Allocate | Send | Receive | Repeat
Program = tuple[Event, ...]


def free(ledger: str, num_bytes: float) -> Allocate:
    """Memory is given back."""
    return Allocate(ledger, -num_bytes)
