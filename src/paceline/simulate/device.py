"""How fast one rank's device is: a few short measurements, kept in a cache for this machine."""

from __future__ import annotations

import math
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
from paceline.model.cost.fusion import saved_s

if TYPE_CHECKING:
    import torch

    from paceline.model.cost.op_calls import OperatorCall
    from paceline.model.cost.operators import OperatorTimes
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
MEASURED_S = 0.04  # of each of the seven kernels that are timed
LARGER_BELOW_S = (
    0.005  # of products after which larger ones, of 64 times the arithmetic, are tried too
)
# What a second thread brings of what a first one does; see docs/formulas.md.
THREAD_EFFICIENCY = 0.9
# Of operators in a step by the same ones in turns, and seconds a step beside operators: a batch is put together,
# gradients are let go of, figures are read. The first was fitted on `single` of eight jobs of 4 to 160 ms a step, the
# second on six nets of 1 to 8 ms; see docs/formulas.md.
IN_A_STEP, BESIDE_OPERATORS_S = 1.06, 1.2e-3
FIGURES = (
    "flops_per_s",
    "bf16_flops_per_s",
    "memory_bytes_per_s",
    "function_bytes_per_s",
    "operator_s",
)  # kept
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
    timed: Operators of the job that were timed one by one; those count where they are known.
    turns: Ranks that take turns on one core.
    new_page_s: Of a byte in pages that are new to the process.
    page_block_bytes: From which on a block of memory has pages of its own.
    """

    flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    function_bytes_per_s: float
    operator_s: float
    timed: OperatorTimes | None = field(default=None, compare=False)
    turns: float = 1.0
    new_page_s: float = 0.0
    page_block_bytes: float = KEPT_BLOCK_BYTES

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
        of few rows waits for its weights. Operators that were timed take as long as they did then."""
        if self.timed is not None and event.calls:
            return self._timed_s(event, precision), 0.0
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

    def _timed_s(self, event: Compute, precision: Precision) -> float:
        """Of operators one by one, and of autograd beside each."""
        assert self.timed is not None
        timed = [
            (call, count, self._call_s(call, self.timed, precision)) for call, count in event.calls
        ]
        total_s = sum(count * seconds for _, count, seconds in timed)
        beside_s = max(0.0, self.operator_s - self.timed.launch_s)
        least_s = 0.0
        if event.is_compiled:
            total_s -= saved_s(
                timed,
                event.spared_bytes,
                memory_bytes_per_s=self.memory_bytes_per_s,
                threads=self.timed.threads,
            )
            total_s -= event.spared_operators * self.timed.launch_s
            least_s = event.flops / self.matrix_flops_per_s(precision)
        once_s = BESIDE_OPERATORS_S if event.part == "optimizer" else 0.0
        return (
            event.fixed_s
            + once_s
            + max(self.turns * IN_A_STEP * total_s + event.operators * beside_s, least_s)
        )

    def _call_s(self, call: OperatorCall, times: OperatorTimes, precision: Precision) -> float:
        """One that was not timed takes as long as what it computes and moves."""
        seconds = times.seconds(call)
        if seconds is not None:
            return seconds
        return (
            call.flops / self.matrix_flops_per_s(precision)
            if call.flops
            else call.num_bytes / self.function_bytes_per_s
        )

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

    Takes about 0.3 s the first time. A CPU is measured on one thread, whatever `num_threads` says: kernels on
    several would leave threads behind that children forked later wait for without end. The rates are those of a
    rank alone; ranks that share a memory bus or a power limit are slower. On a machine with GPUs a fork measures.
    """
    rates = _read(kind)
    if rates is None or cache.age_s("device", kind) > oldest_s:
        rates = _rates(apart_from_cuda(lambda: _figures(_measure(kind))))
        cache.write("device", kind, _figures(rates))
    return rates.with_threads(num_threads) if kind == "cpu" else rates


def _measure(kind: DeviceKind) -> DeviceRates:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = torch.device(kind)
        return DeviceRates(
            flops_per_s=_matrix_flops_per_s(device, torch.float32),
            bf16_flops_per_s=_matrix_flops_per_s(device, torch.bfloat16),
            memory_bytes_per_s=_memory_bytes_per_s(device),
            function_bytes_per_s=_function_bytes_per_s(device),
            operator_s=_operator_s(device),
        )
    finally:
        torch.set_num_threads(before)


def _matrix_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a linear layer's three products: forward, the gradient of its input, the gradient of its weight."""
    import torch

    flops_per_s = 0.0
    for side in MATRIX_SIDES[device.type]:
        a = torch.ones(side, side, device=device, dtype=dtype)
        seconds = _seconds(partial(_products, a), device)
        flops_per_s = 3 * 2 * side**3 / seconds
        if seconds > LARGER_BELOW_S:
            break
    return flops_per_s


def _products(a: torch.Tensor) -> None:
    a @ a.t(), a @ a, a.t() @ a


def _memory_bytes_per_s(device: torch.device) -> float:
    """Of out = a + b: two tensors read and one written."""
    import torch

    a = torch.ones(STREAM_BYTES[device.type] // 4, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    return 3 * a.nbytes / _seconds(lambda: torch.add(a, b, out=out), device)


def _function_bytes_per_s(device: torch.device) -> float:
    """Of a GELU, a layer norm and a softmax, each reading one tensor and writing one."""
    import torch
    import torch.nn.functional as F

    a = torch.ones(STREAM_BYTES[device.type] // 4, device=device).view(-1, 256)
    functions = (lambda: F.gelu(a), lambda: F.layer_norm(a, (256,)), lambda: F.softmax(a, -1))
    return 2 * a.nbytes * len(functions) / sum(_seconds(function, device) for function in functions)


def _operator_s(device: torch.device) -> float:
    """Of a chain of tiny operators, forward and backward: four operators a link of the chain."""
    import torch

    leaf = torch.ones(TINY, device=device, requires_grad=True)
    links = 10

    def chain() -> None:
        x = leaf
        for _ in range(links):
            x = (x * 2.0).sin()
        x.backward(torch.ones_like(x), inputs=[leaf])
        leaf.grad = None

    return _seconds(chain, device) / (4 * links)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some calls: whatever else uses the machine only makes one slower."""
    import torch

    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()  # allocates, and compiles what is compiled when first used
    fastest, deadline = once(), time.perf_counter() + MEASURED_S
    while time.perf_counter() < deadline:
        fastest = min(fastest, once())
    return fastest


def _read(kind: DeviceKind) -> DeviceRates | None:
    """The rates in the cache; None if they aren't there or make no sense."""
    stored = cache.read("device", kind)
    try:
        rates = _rates(stored)
    except (ValueError, KeyError, TypeError):
        return None
    return rates if all(0 < value < math.inf for value in _figures(rates).values()) else None


def _figures(rates: DeviceRates) -> dict[str, float]:
    return {name: getattr(rates, name) for name in FIGURES}


def _rates(figures: Mapping[str, float]) -> DeviceRates:
    flops_per_s, bf16_flops_per_s, memory_bytes_per_s, function_bytes_per_s, operator_s = (
        float(figures[name]) for name in FIGURES
    )
    return DeviceRates(
        flops_per_s, bf16_flops_per_s, memory_bytes_per_s, function_bytes_per_s, operator_s
    )
