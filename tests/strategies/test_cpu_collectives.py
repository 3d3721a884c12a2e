"""Gathering and reduce-scatter among CPU ranks: the same values as torch's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from paceline.strategies.cpu_collectives import gather_in_place, reduce_scatter
from paceline.strategies.mesh import Mesh
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.exchange import Exchanges

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64)


def test_all_ranks_have_all_parts_and_their_part_of_the_sum(run_ranks: Callable[..., Any]) -> None:
    """Of one dim or several, of every kind of numbers, with and without contents."""

    def body(context: Any) -> list[bool]:
        group, rank, equal = dist.group.WORLD, context.rank, []
        assert group is not None
        for dtype in DTYPES:
            for shape in ((3,), (2, 5), (0, 4)):
                parts = [
                    torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) * (r + 1)
                    for r in range(3)
                ]
                whole = torch.zeros(3 * shape[0], *shape[1:], dtype=dtype)
                whole[rank * shape[0] : (rank + 1) * shape[0]] = parts[rank]
                gather_in_place(whole, group)
                equal.append(torch.equal(whole, torch.cat(parts)))
                part = torch.zeros(shape, dtype=dtype)
                reduce_scatter(part, whole, group)
                equal.append(torch.equal(part, 3 * parts[rank]))
        return equal

    for equal in run_ranks(body, 3):
        assert all(equal) and len(equal) == 2 * 3 * len(DTYPES)


def test_other_sums_than_plain_ones(run_ranks: Callable[..., Any]) -> None:
    def body(context: Any) -> list[float]:
        group, part = dist.group.WORLD, torch.zeros(1)
        assert group is not None
        reduce_scatter(
            part, torch.tensor([2.0, 4.0]) * (context.rank + 1), group, dist.ReduceOp.MAX
        )
        return part.tolist()

    assert run_ranks(body, 2) == [[4.0], [8.0]]


def test_what_is_scattered_stays_as_it_is(run_ranks: Callable[..., Any]) -> None:
    """Whether its parts lie one after the other, where no copy is needed to send them, or not."""

    def body(context: Any) -> list[Any]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        exchanges = Exchanges(mesh.devices("cpu")["tensor"])
        results = []
        for dim, mode in product((0, 1), (torch.no_grad, torch.inference_mode)):
            with mode():
                x = torch.arange(8.0).reshape(2, 4) * (context.rank + 1)
                before = x.clone()
                part = exchanges.scatter(Cut(dim))(x)
            total = torch.arange(8.0).reshape(2, 4) * 3
            results += [
                torch.equal(x, before),
                torch.equal(part, total.chunk(2, dim)[context.rank]),
            ]
        return results

    assert run_ranks(body, 2) == [[True] * 8] * 2
