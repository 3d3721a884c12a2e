"""The one device of a proof, on which its plain loop computes. The compared tensors are on the
CPU.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from paceline.job import Job
from paceline.model import casts
from paceline.torch_private.dispatch import TorchDispatchMode
from paceline.torch_private.pytree import tree_leaves

# Operators that torch may run on tensor cores, by their names below autograd.
_USERS = {
    "matrix products": frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_addmm_activation"}),
    "convolutions": frozenset({"convolution"}),
    "recurrent layers": frozenset({"_cudnn_rnn"}),
}
# Rounding of a number with ten bits of mantissa; NVIDIA, "A100 Tensor Core GPU Architecture"
# (2020).
TF32_EPSILON = 2.0**-10
_TF32_CAPABILITY = (8, 0)  # the first compute capability with TF32

_device: ContextVar[torch.device | None] = ContextVar("device", default=None)


def one_device() -> torch.device:
    """Return the device on which the plain loop computes; the CPU unless `computing_on` set another
    one.
    """
    return _device.get() or torch.device("cpu")


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Let the plain loop compute on this device inside the context."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def autocast(job: Job) -> AbstractContextManager[Any]:
    """Return the numeric context of the job's forward passes on the proof's one device."""
    return casts.autocast(job, one_device())


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def tf32() -> dict[str, bool]:
    """Return for which kinds of operators torch may round float32 factors to TF32 on this
    device.
    """
    backends: Any = torch.backends
    device = one_device()
    is_there = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY
    )
    allowed = {
        "matrix products": backends.cuda.matmul,
        "convolutions": backends.cudnn.conv,
        "recurrent layers": backends.cudnn.rnn,
    }
    return {
        kind: is_there and backend.fp32_precision == "tf32" for kind, backend in allowed.items()
    }


def rounds_to_tf32(operator: Any, result: Any, allowed: dict[str, bool]) -> bool:
    """Whether an operator with this result rounds its factors to TF32.

    Args:
        allowed: The result of `tf32`.
    """
    first = result[0] if isinstance(result, tuple | list) else result
    return (
        isinstance(first, torch.Tensor)
        and first.is_cuda
        and first.dtype == torch.float32
        and any(
            allowed[kind] and operator.overloadpacket.__name__ in names
            for kind, names in _USERS.items()
        )
    )


class Dtypes(TorchDispatchMode):
    """A mode that records the floating-point types of operators' results, and whether an operator
    rounds to TF32.

    It leaves out float8 (see `tolerances.EPSILON`).
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes, self.tf32, self.rounds_to_tf32 = dtypes, tf32(), False
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the context."""
        self.is_paused = True
        yield
        self.is_paused = False

    @property
    def epsilon(self) -> float:
        """The rounding of the coarsest numbers that were seen."""
        return max(
            [
                TF32_EPSILON if self.rounds_to_tf32 else 0.0,
                *(torch.finfo(dtype).eps for dtype in self.dtypes),
            ]
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        self.rounds_to_tf32 |= rounds_to_tf32(func, result, self.tf32)
        self.dtypes |= {
            leaf.dtype
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
            and leaf.is_floating_point()
            and leaf.ndim
            and leaf.itemsize > 1
        }
        return result


def described() -> dict[str, Any]:
    """Return what a certificate says of the device; JSON-able. Only GPUs have "tf32", see
    `tf32`.
    """
    device = one_device()
    if device.type == "cpu":
        return {
            "kind": "cpu",
            "capability": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
        }
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "kind": device.type,
        "name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "machine": platform.machine(),
        "tf32": tf32(),
    }
