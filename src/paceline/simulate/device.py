"""How fast one rank's device is: a few short measurements, kept in a cache for this machine."""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from paceline.cluster.devices import DeviceKind
from paceline.cluster.gpu_use import apart_from_cuda
from paceline.job import AUTOCAST, Precision
from paceline.launch.process.malloc import KEPT_BLOCK_BYTES
from paceline.model.cost import cache

if TYPE_CHECKING:
    import torch

    from paceline.model.cost.profile import Product
    from paceline.simulate.program import Compute

# Sides of the matrix products, of which the largest that a device computes within milliseconds counts: large enough for
# the rate of a layer. A device that has no kernel of its own for a dtype, such as the bfloat16 of many CPUs, computes
# one of 4,096 in minutes.
MATRIX_SIDES = {"cpu": (256,), "cuda": (256, 1024, 4096)}
# Bytes of the tensors that elementwise operators are timed on: a layer's weights with their
# optimizer state, more than the caches next to a core hold.
STREAM_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
# A tensor of this many values costs nothing but its operator's launch.
TINY = 64
MEASURED_S = 0.04  # of each of the eight kernels that are timed
# Rates are good for an hour, after which a CPU may have another pace: power modes, what runs beside a virtual machine.
# Those whose noise is above the limit are good for a minute. On two quiet cores the noise is 0.02 to 0.1, and beside
# other work on both 0.3 to 1.
OLD_S, NOISY_S, MOST_NOISE = 3600.0, 60.0, 0.2
OTHER_PACE = 1.25  # rates that changed by more than this factor are of another pace
LARGER_BELOW_S = (
    0.005  # of products after which larger ones, of 64 times the arithmetic, are tried too
)
# What a second thread brings of what a first one does; see docs/formulas.md.
THREAD_EFFICIENCY = 0.9
# What is kept of them, with when and how they were measured.
RATES = (
    "flops_per_s",
    "bf16_flops_per_s",
    "memory_bytes_per_s",
    "function_bytes_per_s",
    "operator_s",
)
SPEEDS = RATES[:4]
OTHER_FIGURES = ("new_page_s", "noise", "measured_at")
ITEM_BYTES: Mapping[Precision, int] = {
    "float32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 2,
    "float64": 8,
}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What one rank's device does in a second, measured or stated.

    flops_per_s: Matrix products in float32.
    bf16_flops_per_s: The same in bfloat16.
    memory_bytes_per_s: Read and written by plain arithmetic, such as an optimizer's.
    function_bytes_per_s: Read and written by activation functions, norms and the like.
    operator_s: Seconds that launching one operator takes, with its part of autograd's bookkeeping.
    new_page_s: Of a byte in pages that are new to the process.
    page_block_bytes: From which on a block of memory has pages of its own.
    noise: See `_Stopwatch`. measured_at: When that was, in seconds since 1970; 0 of rates that are stated.
    """

    flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    function_bytes_per_s: float
    operator_s: float
    new_page_s: float = 0.0
    page_block_bytes: float = KEPT_BLOCK_BYTES
    noise: float = field(default=0.0, compare=False)
    measured_at: float = field(default=0.0, compare=False)

    def matrix_flops_per_s(self, precision: Precision) -> float:
        """The rate of matrix products under a job's precision; float64 has half the lanes of float32.

        fp16 and fp8 are taken for bf16, and TF32 for float32: they are not measured.
        """
        if precision in AUTOCAST:
            return self.bf16_flops_per_s
        return self.flops_per_s / 2 if precision == "float64" else self.flops_per_s

    @property
    def slowdown(self) -> float:
        """Collectives of CPU ranks take turns with computing, and are counted there."""
        return 0.0

    @property
    def collective_s(self) -> float:
        """Of a CPU rank it is in the link's latency."""
        return 0.0

    def seconds(self, event: Compute, precision: Precision) -> tuple[float, float]:
        """Of some operators: each waits for the arithmetic, for memory or for its launch, one after another. A product
        of few rows waits for its weights."""
        return (
            event.flops / self.matrix_flops_per_s(precision)
            + self._starved_s(event.products, precision)
            + event.moved_bytes / self.memory_bytes_per_s
            + event.function_bytes / self.function_bytes_per_s
            + event.operators * self.operator_s
            + self.new_page_s
            * sum(block for block in event.new_blocks if block >= self.page_block_bytes)
            + event.fixed_s
        ), 0.0

    def _starved_s(self, products: Sequence[Product], precision: Precision) -> float:
        """By how much products take longer than their arithmetic: each of their matrices is read or written once.

        Source: Williams, Waterman and Patterson 2009, Roofline.
        """
        flops_per_s, item_bytes = self.matrix_flops_per_s(precision), ITEM_BYTES[precision]
        return sum(
            max(
                0.0,
                product.values * item_bytes / self.memory_bytes_per_s - product.flops / flops_per_s,
            )
            for product in products
            if product.kind == "linear"
        )

    def with_threads(self, num_threads: int) -> DeviceRates:
        """The rates of so many threads together, from those of one. Launching doesn't get faster."""
        factor = 1 + THREAD_EFFICIENCY * (num_threads - 1)
        return replace(self.slowed(1 / factor), operator_s=self.operator_s)

    def slowed(self, factor: float) -> DeviceRates:
        """The rates where everything takes so many times as long."""
        return replace(
            self,
            flops_per_s=self.flops_per_s / factor,
            bf16_flops_per_s=self.bf16_flops_per_s / factor,
            memory_bytes_per_s=self.memory_bytes_per_s / factor,
            function_bytes_per_s=self.function_bytes_per_s / factor,
            operator_s=self.operator_s * factor,
            new_page_s=self.new_page_s * factor,
        )


def measure_device(
    kind: DeviceKind, num_threads: int = 1, *, oldest_s: float = math.inf
) -> DeviceRates:
    """This machine's rates for a rank with so many threads, from the cache if they are there and at most so old.

    Takes about 0.4 s the first time. Rates that other work disturbed are good for a minute, unless any age is good. A
    CPU is measured on one thread, whatever `num_threads` says: kernels on several would leave threads behind that
    children forked later wait for without end. The rates are those of a rank alone; ranks that share a memory bus or a
    power limit are slower. On a machine with GPUs a fork measures.
    """
    rates = _read(kind)
    if rates is not None and rates.measured_at not in _measured_here:
        is_disturbed = rates.noise > MOST_NOISE and oldest_s < math.inf
        oldest_s = min(oldest_s, NOISY_S) if is_disturbed else oldest_s
    if rates is None or time.time() - rates.measured_at > oldest_s:
        rates = apart_from_cuda(lambda: _measure(kind))
        _measured_here.add(rates.measured_at)
        cache.write("device", kind, _figures(rates))
    return rates.with_threads(num_threads) if kind == "cpu" else rates


# When this process measured rates: all of its prices come from the same ones, however noisy.
_measured_here: set[float] = set()


def refresh_device(kind: DeviceKind) -> str:
    """Measure again, where a step took far more or less than the rates say.

    Returns:
        What changed, for people; empty if the rates were new, or are much the same.
    """
    before = _read(kind)
    if before is None or time.time() - before.measured_at < NOISY_S:
        return ""
    now = measure_device(kind, oldest_s=0.0)
    faster = statistics.geometric_mean(
        getattr(now, name) / getattr(before, name) for name in SPEEDS
    )
    if max(faster, 1 / faster) < OTHER_PACE:
        return ""
    when = time.strftime("%d %B %H:%M", time.localtime(before.measured_at))
    return (
        f"its rates of {when} (noise {100 * before.noise:.0f} %) were off, and were measured again: they are "
        f"{faster:.2g} times as high (noise {100 * now.noise:.0f} %)"
    )


def _measure(kind: DeviceKind) -> DeviceRates:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        watch = _Stopwatch(torch.device(kind))
        memory_bytes_per_s, new_page_s = _memory(watch)
        return DeviceRates(
            flops_per_s=_matrix_flops_per_s(watch, torch.float32),
            bf16_flops_per_s=_matrix_flops_per_s(watch, torch.bfloat16),
            memory_bytes_per_s=memory_bytes_per_s,
            function_bytes_per_s=_function_bytes_per_s(watch),
            operator_s=_operator_s(watch),
            new_page_s=new_page_s,
            noise=watch.noise,
            measured_at=time.time(),
        )
    finally:
        torch.set_num_threads(before)


class _Stopwatch:
    """Times kernels on a device.

    noise: by how much the median call of a kernel was slower than its fastest one, as a part; of the kernel where it
        was most.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.noise = device, 0.0

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of the fastest of some calls: whatever else uses the machine only makes one slower."""
        self._once(run)  # allocates, and compiles what is compiled when first used
        taken, deadline = [self._once(run)], time.perf_counter() + MEASURED_S
        while time.perf_counter() < deadline:
            taken.append(self._once(run))
        fastest = min(taken)
        self.noise = max(self.noise, statistics.median(taken) / fastest - 1)
        return fastest

    def _once(self, run: Callable[[], object]) -> float:
        import torch

        started = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


def _matrix_flops_per_s(watch: _Stopwatch, dtype: torch.dtype) -> float:
    """Of a linear layer's three products: forward, the gradient of its input, the gradient of its weight."""
    import torch

    flops_per_s = 0.0
    for side in MATRIX_SIDES[watch.device.type]:
        a = torch.ones(side, side, device=watch.device, dtype=dtype)
        seconds = watch.seconds(partial(_products, a))
        flops_per_s = 3 * 2 * side**3 / seconds
        if seconds > LARGER_BELOW_S:
            break
    return flops_per_s


def _products(a: torch.Tensor) -> None:
    a @ a.t(), a @ a, a.t() @ a


def _memory(watch: _Stopwatch) -> tuple[float, float]:
    """The rate of out = a + b, which reads two tensors and writes one; and by how many seconds a byte takes longer in
    pages that are new, on a CPU."""
    import torch

    a = torch.ones(STREAM_BYTES[watch.device.type] // 4, device=watch.device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    in_place_s = watch.seconds(lambda: torch.add(a, b, out=out))
    new_page_s = 0.0
    if watch.device.type == "cpu":
        made_s = watch.seconds(lambda: torch.add(a, b, out=_in_new_pages(a.nbytes)))
        new_page_s = max(0.0, made_s - in_place_s) / a.nbytes
    return 3 * a.nbytes / in_place_s, new_page_s


def _in_new_pages(num_bytes: int) -> torch.Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.float32)


def _function_bytes_per_s(watch: _Stopwatch) -> float:
    """Of a GELU, a layer norm and a softmax, each reading one tensor and writing one."""
    import torch
    import torch.nn.functional as F

    a = torch.ones(STREAM_BYTES[watch.device.type] // 4, device=watch.device).view(-1, 256)
    functions = (lambda: F.gelu(a), lambda: F.layer_norm(a, (256,)), lambda: F.softmax(a, -1))
    return 2 * a.nbytes * len(functions) / sum(map(watch.seconds, functions))


def _operator_s(watch: _Stopwatch) -> float:
    """Of a chain of tiny operators, forward and backward: four operators a link of the chain."""
    import torch

    leaf = torch.ones(TINY, device=watch.device, requires_grad=True)
    links = 10

    def chain() -> None:
        x = leaf
        for _ in range(links):
            x = (x * 2.0).sin()
        x.backward(torch.ones_like(x), inputs=[leaf])
        leaf.grad = None

    return watch.seconds(chain) / (4 * links)


def _read(kind: DeviceKind) -> DeviceRates | None:
    """The rates in the cache; None if they aren't there or make no sense."""
    stored = cache.read("device", kind)
    try:
        rates = DeviceRates(**{name: float(stored[name]) for name in (*RATES, *OTHER_FIGURES)})
    except (ValueError, KeyError, TypeError):
        return None
    figures = _figures(rates)
    make_sense = all(0 <= value < math.inf for value in figures.values()) and all(
        figures[name] for name in RATES
    )
    return rates if make_sense else None


def _figures(rates: DeviceRates) -> dict[str, float]:
    return {name: getattr(rates, name) for name in (*RATES, *OTHER_FIGURES)}
