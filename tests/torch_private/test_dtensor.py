"""`torch_private/dtensor.py` and `placements.py`: parts of DTensors, how they are cut and moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from paceline.torch_private.dtensor import part_of, spec_of, with_spec
from paceline.torch_private.placements import StridedShard, local_shape, replaced_moves


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this is the second."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def rows(mesh: DeviceMesh, part: torch.Tensor) -> DTensor:
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def test_a_part_is_the_tensor_that_this_rank_holds(mesh: DeviceMesh):
    """Of a parameter and of a gradient, too; any other tensor is itself."""
    part = torch.ones(2, 3)
    weight = torch.nn.Parameter(rows(mesh, part))
    assert part_of(weight).data_ptr() == part.data_ptr() and type(part_of(weight)) is torch.Tensor
    (weight * 2).sum().backward()
    assert torch.equal(part_of(weight.grad), weight.grad.to_local())
    assert part_of(part) is part and spec_of(part) is None


def test_a_spec_says_how_a_tensor_is_cut(mesh: DeviceMesh):
    """Gradients of a kind share it, as far as they can."""
    spec = spec_of(rows(mesh, torch.ones(2, 3)))
    assert (spec.mesh, spec.placements, spec.shape) == (mesh, (Shard(0),), (4, 3))


def test_a_part_with_a_spec_is_a_dtensor(mesh: DeviceMesh):
    """The same as by `from_local`, and no leaf of a graph."""
    weight: Any = torch.nn.Parameter(rows(mesh, torch.ones(2, 3)))
    part = torch.zeros(2, 3)
    made = with_spec(type(weight), part, spec_of(weight))
    assert type(made) is DTensor and not made.requires_grad and part_of(made) is part
    assert made.shape == (4, 3) and made.placements == weight.placements
    weight.grad = made
    assert (made + 1).to_local().tolist() == [[1, 1, 1]] * 2


def test_blocks_of_a_dim_are_cut_one_by_one(mesh: DeviceMesh):
    """As of a product that computes q, k and v."""
    placement = StridedShard(0, split_factor=3)
    assert (placement.dim, placement.split_factor) == (0, 3)
    assert spec_of(DTensor.from_local(torch.ones(6), mesh, [placement], run_check=False)).shape == (
        12,
    )
    assert local_shape(torch.Size([12, 5]), mesh, [placement]) == (6, 5)
    assert local_shape(torch.Size([3, 5]), mesh, [Shard(0)]) == (1, 5)  # the second rank's
    assert local_shape(torch.Size([3, 5]), mesh, [Replicate()]) == (3, 5)


def test_moves_can_be_replaced(mesh: DeviceMesh):
    """An operator asks for one where its rule needs whole tensors."""
    x, moves = rows(mesh, torch.ones(2, 3)), []
    weight = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])

    def move(local: torch.Tensor, before: Any, after: Any, **options: Any) -> torch.Tensor:
        moves.append((before.placements, after.placements))
        return torch.ones(local_shape(before.shape, after.mesh, after.placements))

    with replaced_moves(move), torch.no_grad():
        torch.mm(x, weight)
        assert not moves
        torch.sort(x, dim=0)
    assert moves == [((Shard(0),), (Replicate(),))]
