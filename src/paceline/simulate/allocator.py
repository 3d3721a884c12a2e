"""What allocators hold besides tensors that are alive: holes in the heap of a CPU rank, and what torch's caching
allocator and the driver take of a GPU.

Rooms say what is allocated and freed. What that leaves behind on a kind of device is said here alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from paceline.cluster.devices import DeviceKind
from paceline.launch.process.malloc import KEPT_BLOCK_BYTES
from paceline.simulate.play import Timeline
from paceline.simulate.program import Allocate, Event

# What a rank's resident size grows by besides tensors, once it runs: library pages that it touches for the first
# time, kernels that are compiled for its shapes, threads, the network's buffers. Measured; see docs/formulas.md.
CPU_RUNTIME_BYTES = 40 * 2**20
# Holes in the C library's heap, as a part of the most bytes of activations, which come and go in many sizes.
# Measured with glibc 2.36; see docs/memory.md.
CPU_HOLES = 0.4
CPU_HOLES_LEAN = 0.1  # of a rank with a memory limit, whose large tensors have pages of their own
# What the heap keeps of bytes that recomputation lets go, in holes too small for what comes next. Measured on byte GPTs
# of 4 and 12 layers, as above.
CPU_HOLES_LEFT = 0.5
# Holes that a gradient leaves in a heap that is kept, when it was added to another and is given back: smaller things
# are put into its place. Measured as above. These holes have a ledger of their own, as ranks with a limit keep no heap.
HOLES_ADDED = "holes of a kept heap"
CPU_HOLES_ADDED = 0.2
# Holes that an update leaves: of what it makes for a moment, and so many largest gradients, where gradients are let go
# of in every step and where their memory is kept. What is made next, of other sizes, is put into their places. Measured
# as above.
CPU_HOLES_UPDATED, CPU_HOLES_UPDATED_KEPT = 2.0, 1.0
# Holes that parameters leave which are gathered and let go again and again, a byte of them: of those that take 4 MiB or
# more whole. Smaller ones share what is free. Measured as above.
CPU_HOLES_GATHERED, GATHERED_FROM_BYTES = 2.0, 4 * 2**20
# Holes beside the activations of a layer whose output is exchanged under a tensor axis, a byte of them. Measured on
# GPTs, a Llama and an encoder; see docs/memory.md.
CPU_HOLES_EXCHANGED = 0.7
# torch's allocator rounds tensors of 10 MiB and more up to whole 2 MiB, by 1 MiB in the mean, which is 2 % of one of
# 50 MiB; smaller ones share blocks of 20 and of 2 MiB, of which the last is not full (kRoundLarge, kLargeBuffer and
# kSmallBuffer in c10/cuda/CUDACachingAllocator.h). What fragmentation adds is not foreseen.
ROUNDED_PART, ROUNDED_BYTES = 0.02, 22 * 2**20


@dataclass(frozen=True, slots=True)
class CpuHeap:
    """glibc's heap. gives_back: whether large tensors return to the system when they are freed, as in ranks with a
    memory limit, which leaves few holes."""

    gives_back: bool = False

    def resident(self, tensors: Timeline) -> Timeline:
        """The timeline as a run measures its memory: the process's resident size above that of an empty rank."""
        ledger = dict(tensors.ledger)
        ledger["runtime"] = ledger.get("runtime", 0) + CPU_RUNTIME_BYTES
        added = ledger.pop(HOLES_ADDED, 0)
        part = CPU_HOLES_LEAN if self.gives_back else CPU_HOLES
        ledger["holes"] = (
            ledger.get("holes", 0)
            + (0 if self.gives_back else added)
            + round(part * tensors.highest.get("activations", 0))
        )
        return replace(tensors, peak_memory_bytes=sum(ledger.values()), ledger=ledger)

    def set_aside(self, tensor_bytes: float) -> dict[str, int]:
        """Bytes of the device that are no tensors' beside so many bytes of them, by what they are for."""
        return {}

    def room(self, memory_bytes: int) -> float:
        """The most bytes of tensors with which a rank stays within its device."""
        return max(0.0, memory_bytes - CPU_RUNTIME_BYTES)


@dataclass(frozen=True, slots=True)
class CudaCaching:
    """torch's caching allocator on a GPU. context_bytes, nccl_bytes: of the driver, and of buffers for messages.
    workspace_bytes: that it hands out to cuBLAS. rounded_part, rounded_bytes: that it takes above the tensors: a part
    of them, and once."""

    context_bytes: int = 0
    nccl_bytes: int = 0
    workspace_bytes: int = 0
    rounded_part: float = 0.0
    rounded_bytes: int = 0

    def resident(self, tensors: Timeline) -> Timeline:
        """The timeline as a run measures its memory: what the allocator hands out."""
        ledger = (
            {**tensors.ledger, "workspaces": self.workspace_bytes}
            if self.workspace_bytes
            else tensors.ledger
        )
        return replace(tensors, peak_memory_bytes=sum(ledger.values()), ledger=ledger)

    def set_aside(self, tensor_bytes: float) -> dict[str, int]:
        aside = {
            "context": self.context_bytes,
            "NCCL": self.nccl_bytes,
            "reserve": round(self.rounded_part * tensor_bytes) + self.rounded_bytes,
        }
        return {name: num_bytes for name, num_bytes in aside.items() if num_bytes}

    def room(self, memory_bytes: int) -> float:
        return max(
            0.0,
            (memory_bytes - self.workspace_bytes - sum(self.set_aside(0.0).values()))
            / (1 + self.rounded_part),
        )


Allocator = CpuHeap | CudaCaching


def holes_of_added(kind: DeviceKind, num_bytes: float) -> Iterable[Event]:
    """What a gradient leaves behind that was added to another one and is given back."""
    if kind == "cpu" and num_bytes < KEPT_BLOCK_BYTES:
        yield Allocate(HOLES_ADDED, CPU_HOLES_ADDED * num_bytes)


def holes_of_update(
    kind: DeviceKind, gradient_bytes: Collection[float], made_bytes: float, *, keeps_gradients: bool
) -> Iterable[Event]:
    """What an update leaves behind. gradient_bytes: of each. made_bytes: what it makes for a moment."""
    if kind == "cpu" and (largest_bytes := max(gradient_bytes, default=0.0)):
        leaving_bytes = max(
            (each for each in gradient_bytes if each < KEPT_BLOCK_BYTES), default=0.0
        )
        times = CPU_HOLES_UPDATED_KEPT if keeps_gradients else CPU_HOLES_UPDATED
        yield Allocate(HOLES_ADDED, (times + made_bytes / largest_bytes) * leaving_bytes)


def holes_of_freed(kind: DeviceKind, num_bytes: float) -> Iterable[Event]:
    """What activations leave behind that are freed while what was made after them stays."""
    if kind == "cpu":
        yield Allocate("holes", CPU_HOLES_LEFT * num_bytes)


def holes_of_gathered(kind: DeviceKind, tensor_bytes: Iterable[float]) -> Iterable[Event]:
    """What parameters leave behind that are gathered in every step. tensor_bytes: of each, whole."""
    if kind == "cpu":
        yield Allocate(
            HOLES_ADDED,
            CPU_HOLES_GATHERED
            * sum(
                num_bytes
                for num_bytes in tensor_bytes
                if GATHERED_FROM_BYTES <= num_bytes < KEPT_BLOCK_BYTES
            ),
        )


def holes_of_exchanged(kind: DeviceKind, kept_bytes: float) -> Iterable[Event]:
    """What is left beside activations of a layer that ranks exchange parts of."""
    if kind == "cpu":
        yield Allocate(HOLES_ADDED, CPU_HOLES_EXCHANGED * kept_bytes)
