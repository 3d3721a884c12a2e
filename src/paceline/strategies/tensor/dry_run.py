"""Finds what one rank of a tensor axis would run and send, on fake tensors and without ranks.

Pieces are cut by the same rules as in a run (`run.py`). A run also finds pieces whose split
computes a different result than the whole piece; this module does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from paceline.model.cost.profile import Exchange
from paceline.model.graph import Piece
from paceline.strategies.tensor.exchange import Exchanges
from paceline.strategies.tensor.piece import SplitPiece
from paceline.strategies.tensor.program import Program
from paceline.strategies.tensor.run import TensorSplit, leaves_of, why_whole


class PaperMesh(DeviceMesh):
    """A mesh of one dim without a process group. This process represents its first rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__(
            "cpu", torch.arange(ranks), mesh_dim_names=("tensor",), _init_backend=False, _rank=0
        )

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0


class Counted(Exchanges):
    """Exchanges that record what would be sent, in order, and send nothing."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.sent: list[Exchange] = []

    def all_reduce(self, x: torch.Tensor) -> None:
        self.sent.append(Exchange("all_reduce", x.nbytes))

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.sent.append(Exchange("all_gather", whole.nbytes))

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        self.sent.append(Exchange("reduce_scatter", whole.nbytes))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Record an all-gather with `sent` as the whole tensor, for which a rank sends as many
        bytes."""
        self.sent.append(Exchange("all_gather", sent.nbytes))


def try_on_paper(
    run: SplitPiece,
    weights: list[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: list[torch.Tensor],
    trained: list[bool],
) -> tuple[list[torch.Tensor], str | None]:
    """Try to split a piece, on fake tensors; see `Tried`. A piece that can be recorded can be
    split."""
    with torch.no_grad():
        outputs = list(run.piece.run(*weights, *buffers, *inputs))
    leaves = leaves_of(weights, inputs, trained)
    reason = None
    try:
        with torch.enable_grad():
            for _ in range(2):  # a weight may be cut after an operator has used it whole
                run.recorded([*leaves[: len(weights)], *buffers, *leaves[len(weights) :]])
    except Exception as error:
        reason = why_whole(error)
    cuts = any(name in run.cuts for name in run.piece.parameters)
    return outputs, reason if reason is not None or cuts else ""


def program_of(
    piece: Piece, split: TensorSplit, tensors: list[torch.Tensor]
) -> tuple[Program, Counted]:
    """Return the program of a split piece for such tensors, and the exchanges that record what it
    sends when it runs."""
    assert split.mesh is not None
    exchanges = Counted(split.mesh)
    run = SplitPiece(
        piece,
        split.mesh,
        dict(split.cuts),
        sequence=piece.key in split.sequence,
        exchanges=exchanges,
    )
    with torch.enable_grad():
        return run.recorded(tensors), exchanges
