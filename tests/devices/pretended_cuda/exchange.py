"""Messages of two ranks that share a pretended GPU, beside the same messages of tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from paceline.cluster.cluster import Cluster
from paceline.launch.local.ranks import run_local
from paceline.launch.process.context import RankContext

SIZE = 2
Exchange = Callable[[torch.device, torch.dtype], list[Tensor]]


def _numbers_of_rank(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Other numbers on each rank."""
    count = int(torch.Size(shape).numel())
    return (
        (torch.arange(count, dtype=dtype) * (dist.get_rank() + 1) + dist.get_rank())
        .view(shape)
        .to(device)
    )


def _reduced(op: Any = dist.ReduceOp.SUM, *, later: bool = False) -> Exchange:
    def exchange(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        tensor = _numbers_of_rank(device, dtype, 3, 2)
        work = dist.all_reduce(tensor, op, async_op=later)
        if work is not None:
            work.wait()
        return [tensor]

    return exchange


def _not_contiguous(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensor = _numbers_of_rank(device, dtype, 3, 2).t()
    dist.broadcast(tensor if device.type == "cuda" else (tensor := tensor.contiguous()), 1)
    return [tensor]


def _reduce(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensor = _numbers_of_rank(device, dtype, 5)
    dist.reduce(tensor, 1)
    return [tensor] if dist.get_rank() == 1 else []


def _gathered(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensor = _numbers_of_rank(device, dtype, 4)
    lists = [torch.zeros_like(tensor) for _ in range(SIZE)]
    dist.all_gather(lists, tensor)
    whole = torch.zeros(SIZE * 4, dtype=dtype, device=device)
    dist.all_gather_into_tensor(whole, tensor)
    at_one = [torch.zeros_like(tensor) for _ in range(SIZE)] if dist.get_rank() == 0 else None
    dist.gather(tensor, at_one, 0)
    return [*lists, whole, *(at_one or [])]


def _scattered(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    parts, part = (
        list(_numbers_of_rank(device, dtype, SIZE, 3)),
        torch.zeros(3, dtype=dtype, device=device),
    )
    dist.scatter(part, parts if dist.get_rank() == 0 else None, 0)
    return [part]


def _reduce_scattered(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    whole, part, other = (
        _numbers_of_rank(device, dtype, SIZE * 3),
        *torch.zeros(2, 3, dtype=dtype, device=device),
    )
    dist.reduce_scatter(part, list(whole.view(SIZE, 3)))
    dist.reduce_scatter_tensor(other, whole)
    return [part, other]


def _swapped(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Pieces of unequal length."""
    rank, tensor = dist.get_rank(), _numbers_of_rank(device, dtype, 5)
    received = torch.zeros(4 if rank == 0 else 6, dtype=dtype, device=device)
    dist.all_to_all_single(received, tensor, [2 + rank, 2 + rank], [2, 3])
    return [received]


def _together(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    tensors = [_numbers_of_rank(device, dtype, 2), _numbers_of_rank(device, dtype, 3)]
    with _coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    return tensors


def _functional(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """As DTensor asks."""
    tensor, group = _numbers_of_rank(device, dtype, 4), dist.group.WORLD
    pending = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        functional.broadcast(tensor, 1, group),
        functional.all_to_all_single(tensor, None, None, group),
    ]
    return [functional.wait_tensor(each) for each in pending]


def _crossing(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Both ranks expect two messages before they send: as pipelines do."""
    rank, tensors = dist.get_rank(), [torch.zeros(3, dtype=dtype, device=device) for _ in range(4)]
    expected = [dist.irecv(tensor, 1 - rank) for tensor in tensors[:2]]
    sent = [dist.isend(_numbers_of_rank(device, dtype, 3) + k, 1 - rank) for k in range(2)]
    batch = (
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, tensors[2], 1 - rank),
                dist.P2POp(dist.isend, tensors[0], 1 - rank),
            ]
        )
        if rank
        else []
    )
    for work in (*expected, *sent):
        work.wait()
    if not rank:
        batch = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensors[0], 1), dist.P2POp(dist.irecv, tensors[3], 1)]
        )
    for work in batch:
        work.wait()
    return tensors


EXCHANGES: dict[str, Exchange] = {
    "sum": _reduced(),
    "most": _reduced(dist.ReduceOp.MAX),
    "sum, waited for later": _reduced(later=True),
    "not contiguous": _not_contiguous,
    "sum on one rank": _reduce,
    "gathered": _gathered,
    "scattered": _scattered,
    "sum in parts": _reduce_scattered,
    "swapped": _swapped,
    "together": _together,
    "functional": _functional,
}


class _Seen:
    """Stands in front of gloo's group and notes the devices of all tensors that it is given."""

    def __init__(self, group: Any, devices: set[str]) -> None:
        self.group, self.devices = group, devices

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            self._note(given)
            return getattr(self.group, name)(*given)

        return ask

    def _note(self, given: Any) -> None:
        if isinstance(given, Tensor):
            self.devices.add(given.device.type)
        elif isinstance(given, list | tuple):
            for each in given:
                self._note(each)


def _refusals(group: Any, device: torch.device) -> dict[str, str]:
    """What gloo's own group says to tensors of a GPU."""
    x, y = torch.ones(SIZE, device=device), torch.ones(SIZE, device=device)
    operations: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: group.allreduce([x]),
        "broadcast": lambda: group.broadcast([x]),
        "allgather": lambda: group.allgather([[x, y]], [x]),
        "send": lambda: group.send([x], 1 - dist.get_rank(), 0),
        "recv": lambda: group.recv([x], 1 - dist.get_rank(), 0),
        "gather": lambda: group._allgather_base(torch.ones(SIZE * SIZE, device=device), x),
    }
    refusals = {}
    for name, ask in operations.items():
        try:
            ask()
            refusals[name] = "taken"
        except RuntimeError as error:
            refusals[name] = str(error).splitlines()[0]
    return refusals


def _rank(context: RankContext) -> dict[str, Any]:
    group, devices = dist.group.WORLD, set[str]()
    refusals = _refusals(group.over_gloo, context.device)
    group.over_gloo, gloo_group = _Seen(group.over_gloo, devices), group.over_gloo
    is_alike: dict[str, Any] = {}
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        for name, exchange in EXCHANGES.items():
            on_gpu, on_cpu = (
                exchange(torch.device(kind), dtype) for kind in (context.device, "cpu")
            )
            alike = [
                a.device == context.device and torch.equal(a.cpu(), b)
                for a, b in zip(on_gpu, on_cpu, strict=True)
            ]
            is_alike[f"{name}, {dtype}"] = all(alike)
    for kind in (context.device, torch.device("cpu")):
        mean, part = (
            _numbers_of_rank(kind, torch.float64, SIZE),
            torch.zeros(1, dtype=torch.float64, device=kind),
        )
        dist.reduce_scatter_tensor(part, mean, dist.ReduceOp.AVG)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        is_alike[f"mean on {kind.type}"] = (
            mean.tolist() == [0.5, 2.0] and part.item() == [0.5, 2.0][dist.get_rank()]
        )
    crossed = _crossing(context.device, torch.float64)
    expected = (
        _numbers_of_rank(torch.device("cpu"), torch.float64, 3) * 0
        + torch.arange(3) * (2 - dist.get_rank())
        + 1
        - dist.get_rank()
    )
    is_alike["crossing"] = torch.equal(crossed[0].cpu(), expected) and torch.equal(
        crossed[1].cpu(), expected + 1
    )
    saved = _numbers_of_rank(context.device, torch.float64, 3).requires_grad_()
    product, version = saved * saved, saved._version
    dist.broadcast(saved.detach(), 0)
    is_alike["no change to autograd"] = (
        saved._version == version and product.sum().backward() is None
    )
    later = torch.ones(2, device=context.device)
    work = dist.all_reduce(later, async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    is_alike["polled"] = later.tolist() == [SIZE, SIZE]
    dist.barrier()
    group.over_gloo = gloo_group
    return {
        "alike": is_alike,
        "devices": sorted(devices),
        "refusals": refusals,
        "backend": dist.get_backend(),
    }


def exchanged() -> list[dict[str, Any]]:
    """What each rank found."""
    return run_local(_rank, Cluster.local(",".join(["cuda:0"] * SIZE)).devices, timeout_s=60)
