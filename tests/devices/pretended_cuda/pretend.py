"""Lets torch find the pretended device where a CUDA build has its C symbols; torch.cuda's Python runs unchanged."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pretended_cuda.build import MODULE

_DRIVER = "/dev/nvidiactl"


class _Before(MetaPathFinder):
    """Does something just before a module is imported."""

    def __init__(self, work: dict[str, Callable[[], None]]) -> None:
        self.work = work

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name in self.work:
            self.work.pop(name)()


def pretend(library: Path) -> None:
    """Give this process, and the forks of it, CUDA devices.

    Raises:
        RuntimeError: torch is imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported, and has asked for its CUDA library already")
    ctypes.CDLL(
        str(library), mode=ctypes.RTLD_GLOBAL
    )  # torch asks for its CUDA library once, when it is loaded
    sys.meta_path.insert(
        0,
        _Before(
            {
                "torch.cuda": lambda: _give_cuda(_load(library)),
                "torch.distributed.distributed_c10d": lambda: _give_nccl(sys.modules[MODULE]),
            }
        ),
    )
    exists = Path.exists
    Path.exists = lambda self, **options: str(self) == _DRIVER or exists(self, **options)  # type: ignore[method-assign]
    import torch

    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        sys.modules[MODULE].resize_storage(
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size
        )
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


def _load(library: Path) -> ModuleType:
    loader = ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def _give_cuda(device: Any) -> None:
    """The C symbols of a CUDA build, before torch.cuda looks for them."""
    import torch.version

    c = sys.modules["torch._C"]
    torch.version.cuda = "13.0"  # type: ignore[assignment]
    kind = 1  # c10::DeviceType::CUDA

    def init() -> None:
        device.use_driver()
        cuda = sys.modules["torch.cuda"]
        cuda.default_generators = tuple(
            map(device.default_generator, range(device.count_devices()))
        )
        cuda._get_device_properties = _properties

    def _properties(index: int) -> Any:
        return SimpleNamespace(
            name="Pretended",
            major=9,
            minor=0,
            total_memory=device.capacity_bytes(),
            multi_processor_count=132,
            is_integrated=False,
            is_multi_gpu_board=False,
            warp_size=32,
            gcnArchName="",
            max_threads_per_multi_processor=2048,
        )

    def memory_info(index: int) -> tuple[int, int]:
        free, total = device.memory_info(index)
        return max(0, free - int(os.environ.get("PRETENDED_CUDA_TAKEN_BYTES", 0))), total

    def stream(index: int, number: int) -> tuple[int, int, int]:
        return number, index if index >= 0 else device.current_device(), kind

    symbols = {
        "getDeviceCount": device.count_devices,
        "init": init,
        "isInBadFork": device.is_in_bad_fork,
        "getDevice": device.current_device,
        "setDevice": device.set_device,
        "exchangeDevice": device.exchange_device,
        "maybeExchangeDevice": device.exchange_device,
        "synchronize": device.synchronize,
        "getCurrentStream": lambda index: stream(index, device.current_stream(index)),
        "getDefaultStream": lambda index: stream(index, 0),
        "setStream": lambda stream_id, device_index, device_type: device.set_stream(
            stream_id, device_index
        ),
        "getCurrentRawStream": device.current_stream,
        "isCurrentStreamCapturing": lambda: False,
        "emptyCache": device.empty_cache,
        "memoryStats": device.memory_stats,
        "resetPeakMemoryStats": device.reset_peak,
        "resetAccumulatedMemoryStats": device.reset_accumulated,
        "getArchFlags": lambda: "sm_90",
        "getCompiledVersion": lambda: 13000,
        "getDriverVersion": lambda: 13000,
        "canDeviceAccessPeer": lambda device, other: True,
        "ipc_collect": lambda: None,
        "getAllocatorBackend": lambda: "native",
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        "get_cudnn_benchmark_limit": lambda: 10,
        "set_cudnn_benchmark_limit": lambda limit: None,
    }
    for name, symbol in symbols.items():
        setattr(c, f"_cuda_{name}", symbol)
    c._CudaStreamBase, c._CudaEventBase = _stream_type(device), _event_type(device)
    c._CUDAGraph, c._graph_pool_handle = object, lambda: (0, 0)
    c._CudaDeviceProperties, c._has_cuda = SimpleNamespace, True
    c._cudart = SimpleNamespace(
        cudaMemGetInfo=memory_info, cudaError=SimpleNamespace(success=0), cudaGetErrorString=str
    )


def _stream_type(device: Any) -> type:
    c = sys.modules["torch._C"]

    class CudaStream(c.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int = 0,
            device_type: int = 1,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_id is None:
                stream_id, device_index = device.new_stream(priority), device.current_device()
            return super().__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    return CudaStream


def _event_type(device: Any) -> type:
    c = sys.modules["torch._C"]

    class CudaEvent(c.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(
                cls, device="cuda", enable_timing=enable_timing, blocking=blocking
            )

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end: Any) -> float:
            return device.elapsed_ms(self.event_id, end.event_id)

    return CudaEvent


def _give_nccl(device: Any) -> None:
    """A backend that torch takes for NCCL's, before torch.distributed looks for one."""
    c10d = sys.modules["torch._C"]._distributed_c10d  # type: ignore[attr-defined]

    class Options(SimpleNamespace):
        pass

    class IsNccl(type):
        def __instancecheck__(cls, given: Any) -> bool:
            return isinstance(given, c10d.Backend) and given.name() == "nccl"

    class ProcessGroupNCCL(metaclass=IsNccl):
        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            return device.on_gloo(
                c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            )

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    sys.modules["torch._C"]._nccl_version = lambda: 2 << 32 | 27 << 16 | 7  # type: ignore[attr-defined]
    sys.modules["torch._C"]._nccl_version_suffix = lambda: b""  # type: ignore[attr-defined]


if __name__ == "__main__":
    # python -m pretended_cuda.pretend LIBRARY (-m MODULE | FILE) ARGUMENTS...: as python does, with CUDA devices
    import runpy

    pretend(Path(sys.argv[1]))
    import paceline.cluster.accelerators

    paceline.cluster.accelerators.WORKSPACES = 0  # it has no cuBLAS
    sys.path.insert(0, str(Path.cwd()))
    if sys.argv[2] == "-m":
        sys.argv = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
