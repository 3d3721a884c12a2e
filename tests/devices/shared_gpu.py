"""Lets ranks share a GPU, for tests: their messages are copied to the CPU and travel over gloo.

    install()                                # in this process and its forks
    python -m tests.devices.shared_gpu paceline train job.py --plan data=2 --devices cuda:0,cuda:0

A GPU that is named several times is then that of as many ranks, and each may use its part of the memory. Without this,
Paceline refuses such names, as NCCL refuses two ranks on one GPU. Such runs show what a plan computes: their speed says
nothing, nor does what is predicted of it.

gloo takes few kinds of messages from GPUs. So it gets only CPU tensors: the group that it works for knows no other
device and refuses them. Every copy makes the host wait. As with NCCL, the result of a message exists for the stream
that waited for its work, and a message does not count as a change of its tensors for autograd.
"""

from __future__ import annotations

import runpy
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cluster.cluster import Cluster
from paceline.torch_private.process_groups import send_over

BACKEND = "staged"
_ProcessGroup: Any = dist.ProcessGroup  # whose signatures differ between versions


def install() -> None:
    """Let devices be named several times in this process and its forks."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    local = Cluster.local

    def shared(kind: type[Cluster], devices: str | None = None, **options: Any) -> Cluster:
        times = Counter(devices.split(",") if devices else [])
        if times.total() == len(times):
            return local(devices, **options)
        cluster = local(",".join(times), **options)
        listed = (
            replace(device, memory_bytes=device.memory_bytes // count, backend=BACKEND)
            if device.kind == "cuda"
            else device
            for device in cluster.devices
            for count in [max(1, times[str(device)])]
            for _ in range(count)
        )
        return replace(cluster, devices=tuple(listed))

    Cluster.local = classmethod(shared)  # type: ignore[method-assign,assignment]


def _create(given: Any, options: Any) -> StagedGroup:
    return StagedGroup(given.store, given.group_rank, given.group_size, given.timeout)


class StagedGroup(_ProcessGroup):
    """A process group for tensors of the CPU and of GPUs; see the module.

    over_gloo: the group that carries all messages. It takes tensors of the CPU alone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.over_gloo: Any = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        for group in (self, self.over_gloo):  # this one keeps its name there
            send_over(group, gloo)

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        self.over_gloo.shutdown()

    def abort(self) -> None:
        self.over_gloo.abort()

    def barrier(self, opts: Any) -> dist.Work:
        torch.cuda.synchronize()
        options = dist.BarrierOptions()
        options.timeout = opts.timeout
        return self.over_gloo.barrier(options)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        staged = _Staged()
        return staged.begun(self.over_gloo.broadcast(staged.changed(tensors), opts))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        staged = _Staged(mean_of=self._of_mean(opts))
        return staged.begun(
            self.over_gloo.allreduce(staged.changed(tensors), _as_sum(opts, dist.AllreduceOptions))
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _Several([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        options = _as_sum(opts, dist.ReduceOptions)
        options.rootRank, options.rootTensor = opts.rootRank, opts.rootTensor
        staged = _Staged(mean_of=self._of_mean(opts))
        return staged.begun(self.over_gloo.reduce(staged.changed(tensors), options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        staged = _Staged()
        filled = [staged.filled(tensors) for tensors in outputs]
        return staged.begun(self.over_gloo.allgather(filled, staged.read(inputs), opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        staged = _Staged()
        (filled,) = staged.filled([output])
        return staged.begun(self.over_gloo._allgather_base(filled, *staged.read([input]), opts))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        return _Several(
            [
                self.all_gather_single(output, input, opts)
                for output, input in zip(outputs, inputs, strict=True)
            ]
        )

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        staged = _Staged()
        filled = [staged.filled(tensors) for tensors in outputs]
        return staged.begun(self.over_gloo.gather(filled, staged.read(inputs), opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        staged = _Staged()
        filled = staged.filled(outputs)
        return staged.begun(self.over_gloo.scatter(filled, list(map(staged.read, inputs)), opts))

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        staged = _Staged(mean_of=self._of_mean(opts))
        filled = staged.filled(outputs)
        return staged.begun(
            self.over_gloo.reduce_scatter(
                filled, list(map(staged.read, inputs)), _as_sum(opts, dist.ReduceScatterOptions)
            )
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        staged = _Staged(mean_of=self._of_mean(opts))
        (filled,) = staged.filled([output])
        return staged.begun(
            self.over_gloo._reduce_scatter_base(
                filled, *staged.read([input]), _as_sum(opts, dist.ReduceScatterOptions)
            )
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        return _Several(
            [
                self.reduce_scatter_single(output, input, opts)
                for output, input in zip(outputs, inputs, strict=True)
            ]
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
    ) -> dist.Work:
        staged = _Staged()
        (filled,) = staged.filled([output])
        return staged.begun(
            self.over_gloo.alltoall_base(
                filled, *staged.read([input]), output_sizes, input_sizes, opts
            )
        )

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self.over_gloo.send(_Staged().read(tensors), to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        staged = _Staged()
        return staged.begun(self.over_gloo.recv(staged.filled(tensors), source, tag))

    # What torch calls some of these in older versions.
    _allgather_base, allgather_into_tensor_coalesced = (
        all_gather_single,
        all_gather_single_coalesced,
    )
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = (
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
    )
    alltoall_base = all_to_all_single

    def _of_mean(self, opts: Any) -> int:
        """What a sum is divided by: gloo has no means."""
        return self.size() if opts.reduceOp == dist.ReduceOp.AVG else 1


def _as_sum(opts: Any, kind: type) -> Any:
    """The options of a reduction as gloo takes them: a mean is a sum that is divided later."""
    options = kind()
    options.reduceOp = dist.ReduceOp.SUM if opts.reduceOp == dist.ReduceOp.AVG else opts.reduceOp
    options.timeout = opts.timeout
    return options


class _Staged:
    """The tensors of one message, copied to the CPU where they are not there.

    results: what the message changes, each with the tensor of the CPU that gloo changes in its place.
    mean_of: what those are divided by when they have come.
    """

    def __init__(self, *, mean_of: int = 1) -> None:
        self.results: list[tuple[Tensor, Tensor]] = []
        self.mean_of = mean_of

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that the message reads. The copy waits for the work that makes them."""
        return [
            tensor.detach().contiguous().cpu() if tensor.is_cuda else tensor for tensor in tensors
        ]

    def changed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that it reads and changes."""
        on_cpu = self.read(tensors)
        self.results += zip(tensors, on_cpu, strict=True)
        return on_cpu

    def filled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that it writes alone. Work that still uses their memory is waited for."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        on_cpu = [
            torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_cuda else tensor
            for tensor in tensors
        ]
        self.results += zip(tensors, on_cpu, strict=True)
        return on_cpu

    def begun(self, work: dist.Work) -> dist.Work:
        """The message's work: it is done when the results are where they were asked for."""
        if self.mean_of == 1 and all(tensor is on_cpu for tensor, on_cpu in self.results):
            return work
        return _Bringing(work, self)

    def bring(self) -> None:
        for tensor, on_cpu in self.results:
            if self.mean_of != 1:
                on_cpu.div_(self.mean_of)
            if tensor is not on_cpu:
                tensor.data.copy_(on_cpu)


class _Bringing(dist.Work):
    """Waits for a message, and brings its results to the GPU, once."""

    def __init__(self, work: dist.Work, staged: _Staged) -> None:
        super().__init__()
        self.work, self.staged = work, staged
        self.are_there, self.bringing = False, threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait(timeout)
        with self.bringing:
            if not self.are_there:
                self.staged.bring()
                self.are_there = True
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor for tensor, _ in self.staged.results])
        return future


class _Several(dist.Work):
    """Messages that were asked for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self.works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


if __name__ == "__main__":
    # python -m tests.devices.shared_gpu MODULE ARGUMENTS...: as `python -m MODULE` does
    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
