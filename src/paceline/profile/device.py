"""How fast one rank's device is: a few short measurements, kept in a cache for this machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster import DeviceKind, usable_cores

if TYPE_CHECKING:
    import torch

# Sides of the matrix products: large enough for the rate of a layer, small enough to take milliseconds.
MATRIX_SIDE = {"cpu": 256, "cuda": 4096}
# Bytes of the tensors that elementwise operators are timed on: more than the caches next to a core hold.
STREAM_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# A tensor of this many values costs nothing but its operator's launch.
TINY = 64
MEASURED_S = 0.05  # of each of the five figures
CACHE_VERSION = 1


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What one rank's device does in a second, measured or stated.

    flops_per_s: Matrix products in float32.
    bf16_flops_per_s: The same in bfloat16.
    memory_bytes_per_s: Read and written by plain arithmetic, such as an optimizer's.
    function_bytes_per_s: Read and written by activation functions, norms and the like.
    operator_s: Seconds that launching one operator takes, with its part of autograd's bookkeeping.
    """

    flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    function_bytes_per_s: float
    operator_s: float

    def matrix_flops_per_s(self, precision: str) -> float:
        """The rate of matrix products under a job's precision; float64 has half the lanes of float32."""
        return {"bf16": self.bf16_flops_per_s, "float64": self.flops_per_s / 2}.get(precision, self.flops_per_s)


def measure_device(kind: DeviceKind, num_threads: int) -> DeviceRates:
    """This machine's rates for a rank with so many threads, from the cache if they are there.

    Takes about 0.3 s the first time. The rates are those of a rank alone; ranks that share a memory bus or a
    power limit are slower. On the CPU it runs kernels on `num_threads` threads: not in a process that is to fork
    ranks afterwards, whose children could wait for these threads for ever.
    """
    path = _cache_path(kind, num_threads)
    try:
        found = json.loads(path.read_text())
        rates = DeviceRates(**{name: float(found[name]) for name in DeviceRates.__slots__})
        if all(value > 0 for value in asdict(rates).values()):
            return rates
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: measured again
    rates = _measure(kind, num_threads)
    _write(path, rates)
    return rates


def _measure(kind: DeviceKind, num_threads: int) -> DeviceRates:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
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

    side = MATRIX_SIDE[device.type]
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 3 * 2 * side**3 / _seconds(lambda: (a @ a.t(), a @ a, a.t() @ a), device)


def _memory_bytes_per_s(device: torch.device) -> float:
    """Of out = a + b: two tensors read and one written."""
    import torch

    a = torch.ones(STREAM_BYTES[device.type] // 4, device=device)
    out = torch.empty_like(a)
    return 3 * a.nbytes / _seconds(lambda: torch.add(a, a, out=out), device)


def _function_bytes_per_s(device: torch.device) -> float:
    """Of a GELU, a layer norm and a softmax, each reading one tensor and writing one."""
    import torch
    import torch.nn.functional as F

    a = torch.ones(STREAM_BYTES[device.type] // 4, device=device).view(-1, 256)
    return 6 * a.nbytes / _seconds(lambda: (F.gelu(a), F.layer_norm(a, (256,)), F.softmax(a, -1)), device)


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
    """Median seconds of a call, after one that warms up."""
    import torch

    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    deadline = time.perf_counter() + MEASURED_S
    taken = [once()]
    while time.perf_counter() < deadline:
        taken.append(once())
    return statistics.median(taken)


def _cache_path(kind: DeviceKind, num_threads: int) -> Path:
    """The file of this machine, this torch and this many threads."""
    identity = "\n".join(map(str, (CACHE_VERSION, kind, num_threads, usable_cores(), _processor(kind), _torch_version())))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "paceline" / f"device-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _processor(kind: DeviceKind) -> str:
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _write(path: Path, rates: DeviceRates) -> None:
    """Keep the rates; several ranks may do so at once. A cache that can't be written is no reason to stop."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(rates), indent=1))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
