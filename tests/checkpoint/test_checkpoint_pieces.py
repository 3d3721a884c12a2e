"""Boxes of tensors: their algebra, and what a rank holds of a plain tensor or a DTensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import Region, TensorPiece, pieces_of
from paceline.checkpoint.owners import Owners
from paceline.checkpoint.pieces import uncovered
from paceline.strategies.mesh import Mesh

SIDE = 7


@st.composite
def regions(draw: st.DrawFn) -> Region:
    starts = draw(st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)))
    return Region(starts, tuple(draw(st.integers(0, SIDE - start)) for start in starts))


@given(regions(), st.lists(regions(), max_size=4))
def test_uncovered_is_exact(region: Region, boxes: list[Region]) -> None:
    """What remains of a region is each element that no box holds, once."""
    expected = torch.zeros(SIDE, SIDE, dtype=torch.int64)
    expected[region.slices((0, 0))] = 1
    for box in boxes:
        expected[box.slices((0, 0))] = 0

    coverage = torch.zeros_like(expected)
    for rest in uncovered(region, boxes):
        coverage[rest.slices((0, 0))] += 1

    assert torch.equal(coverage, expected)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.lists(
        st.tuples(
            st.sampled_from([(), ("data",), ("shard",), ("data", "shard")]), st.integers(0, 50)
        ),
        max_size=20,
    ),
)
def test_of_ranks_that_hold_a_tensor_alike_one_writes_it(
    sizes: tuple[int, int], dealt: list[tuple[Any, int]]
) -> None:
    """And no rank writes more than the largest tensor beyond its equals."""
    meshes = [
        Mesh({"data": sizes[0], "shard": sizes[1]}, rank) for rank in range(sizes[0] * sizes[1])
    ]
    owners = [Owners(mesh) for mesh in meshes]
    written: dict[tuple[Any, int], int] = {}
    for axes, length in dealt:
        takers = [
            mesh for mesh, each in zip(meshes, owners, strict=True) if each.owns(axes, length)
        ]
        others = {
            tuple(place for axis, place in mesh.coordinates.items() if axis not in axes)
            for mesh in takers
        }
        assert (
            len(others)
            == len(takers)
            == len(meshes) // math.prod(meshes[0].sizes[axis] for axis in axes)
        )
        for mesh in takers:
            written[axes, mesh.rank] = written.get((axes, mesh.rank), 0) + length
    for axes in {axes for axes, _ in dealt}:
        shared = [
            written.get((axes, mesh.rank), 0)
            for mesh in meshes
            if all(mesh.coordinates[axis] == 0 for axis in mesh.sizes if axis not in axes)
        ]
        assert max(shared) - min(shared) <= 50 + len(dealt)


def test_ranks_of_a_host_write_all_that_they_hold() -> None:
    """Four replicas on two hosts: both of a host share its tensors out, and one has what the first rank has."""
    owners = [Owners(Mesh({"data": 4}, rank), host_ranks=2) for rank in range(4)]
    written = [[each.owns(("data",), length) for each in owners] for length in (10, 5, 5)]
    assert written == [[True, False] * 2, [False, True] * 2, [False, True] * 2]
    assert [each.is_first(["data"]) for each in owners] == [True, False] * 2


def test_a_scalar_is_covered_by_a_scalar_alone() -> None:
    """A region without dims holds one element."""
    scalar = Region((), ())
    assert uncovered(scalar, []) == [scalar]
    assert uncovered(scalar, [scalar]) == []


def test_a_plain_tensor_is_one_whole_piece() -> None:
    """A plain tensor, a scalar and an empty one give one piece that shares their memory."""
    for tensor in (torch.randn(3, 4, requires_grad=True), torch.tensor(2.0), torch.empty(0, 3)):
        [piece] = pieces_of("w", tensor)
        assert (piece.shape, piece.offsets) == (tuple(tensor.shape), (0,) * tensor.ndim)
        assert piece.tensor.data_ptr() == tensor.data_ptr()
        assert not piece.tensor.requires_grad


@pytest.mark.parametrize("num_rows", [10, 9, 2])
def test_dtensor_pieces_tile_the_whole(num_rows: int) -> None:
    """Ranks' pieces of an unevenly sharded DTensor are its rows in order; a rank without rows has no piece."""
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.arange(num_rows * 3.0).reshape(num_rows, 3)
    chunks = whole.chunk(4)
    all_pieces = []
    for rank in range(4):
        with mesh_of(4, rank) as mesh:
            local = chunks[rank].clone() if rank < len(chunks) else torch.empty(0, 3)
            tensor = DTensor.from_local(
                local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride()
            )
            pieces = pieces_of("w", tensor)
        assert len(pieces) == (rank < len(chunks))
        all_pieces += pieces

    assert [piece.offsets[0] for piece in all_pieces] == [
        sum(len(c) for c in chunks[:i]) for i in range(len(chunks))
    ]
    assert all(piece.shape == (num_rows, 3) for piece in all_pieces)
    assert torch.equal(torch.cat([piece.tensor for piece in all_pieces]), whole)


def test_hybrid_dtensor_pieces_are_equal_on_replicas() -> None:
    """With data=2 shard=2 the ranks of one shard hold the same piece, and say so by its offsets."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    offsets = []
    for rank in range(4):
        with mesh_of(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
            tensor = DTensor.from_local(
                torch.zeros(2, 3), mesh, [Replicate(), Shard(0)], run_check=False
            )
            offsets += [piece.offsets for piece in pieces_of("w", tensor)]

    assert offsets == [(0, 0), (2, 0), (0, 0), (2, 0)]


def test_an_empty_dtensor_has_a_piece() -> None:
    """A DTensor without elements is still named by every rank, so that it is in the checkpoint."""
    from torch.distributed.tensor import DTensor, Shard

    with mesh_of(4, 3) as mesh:
        tensor = DTensor.from_local(
            torch.empty(0, 3), mesh, [Shard(0)], shape=torch.Size((0, 3)), stride=(3, 1)
        )
        [piece] = pieces_of("w", tensor)
    assert piece.shape == (0, 3) and math.prod(piece.tensor.shape) == 0


def test_a_dtensor_with_the_wrong_local_part_is_refused() -> None:
    """A local part that isn't what the placement says is named, not written as something else."""
    from torch.distributed.tensor import DTensor, Shard

    with mesh_of(4, 1) as mesh:
        tensor = DTensor.from_local(
            torch.zeros(2, 3), mesh, [Shard(0)], shape=torch.Size((12, 3)), stride=(3, 1)
        )
        with pytest.raises(
            ValueError, match=r"'w': this rank holds \(2, 3\) where its mesh says \(3, 3\)"
        ):
            pieces_of("w", tensor)


def test_a_piece_outside_its_tensor_is_refused() -> None:
    """Offsets that reach out of the whole tensor name both."""
    with pytest.raises(
        ValueError, match=r"'w': a part of shape \(3,\) at \(2,\) doesn't lie in \(4,\)"
    ):
        TensorPiece("w", (4,), (2,), torch.zeros(3))
    with pytest.raises(ValueError, match="doesn't lie in"):
        TensorPiece("w", (4,), (0, 0), torch.zeros(3))


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.int4), torch.eye(2).to_sparse()])
def test_what_safetensors_cannot_hold_is_refused(tensor: torch.Tensor) -> None:
    """A dtype or layout that the file format lacks is named before anything is written."""
    with pytest.raises(ValueError, match=r"'w' is torch\.(strided torch\.int4|sparse_coo)"):
        pieces_of("w", tensor)


@contextmanager
def mesh_of(world_size: int, rank: int) -> Iterator[object]:
    """A mesh of ranks that send nothing, seen from one of them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()
