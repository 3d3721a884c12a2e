"""What a rank holds of a model that is cut into stages: its pieces as modules, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.capture.graph import Piece
from paceline.strategies.units import name_in_model, name_of_attribute


class PieceModule(nn.Module):
    """The parameters of one piece, as a module of its own that can be sharded and recomputed.

    split: makes what runs a piece whose parameters are split over ranks; None if they are whole.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter],
                 split: Callable[[Piece], Callable[..., tuple[torch.Tensor, ...]]] | None = None) -> None:
        super().__init__()
        self.split = split
        self.runs: dict[int, tuple[Piece, Callable[..., tuple[torch.Tensor, ...]]]] = {}
        for name, parameter in parameters.items():
            self.register_parameter(name_of_attribute(name), parameter)

    def forward(self, piece: Piece, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run any capture's piece with this key. tensors: the model's buffers that it needs, then its inputs."""
        if id(piece) not in self.runs:
            self.runs[id(piece)] = (piece, self.split(piece) if self.split else piece.run)
        run = self.runs[id(piece)][1]
        return run(*(getattr(self, name_of_attribute(name)) for name in piece.parameters), *tensors)


class Pieces(nn.Module):
    """All pieces of a rank. It is never called itself; its parameters have the names that the model gives them.

    unused: parameters that no piece of the model uses.
    buffers_: the model's buffers by name.
    """

    def __init__(self, pieces: Mapping[str, PieceModule], unused: Mapping[str, nn.Parameter],
                 buffers_: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces.values())
        for name, parameter in unused.items():
            self.register_parameter(name_of_attribute(name), parameter)
        self.by_key, self.buffers_ = dict(pieces), buffers_

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in super().named_parameters(*args, **options):
            yield name_in_model(path), parameter

    def run(self, piece: Piece, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        buffers = [self.buffers_[name] for name in piece.buffers]
        module = self.by_key.get(piece.key)
        outputs: tuple[torch.Tensor, ...] = (piece.run(*buffers, *inputs) if module is None  # it has no parameters
                                             else module(piece, *buffers, *inputs))
        return outputs
