"""Gives an optimizer a rank's own parts of distributed tensors as plain ones, if it updates each
element by its own history.

torch's distributed tensors allow such updates, but not all of them: fused and foreach updates need
one kind of tensor in a group, and Rprop writes to masked elements. On plain tensors, an update is
that of a single device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.torch_private.dtensor import part_of, spec_of
from paceline.torch_private.pytree import tree_map_only


class OwnParts:
    """Plain parameters that share memory with this rank's parts."""

    def __init__(self, distributed: Mapping[str, nn.Parameter]) -> None:
        self.distributed: dict[str, Any] = dict(distributed)  # held in parts by ranks, by name
        # This rank's part of each, which it updates.
        self.plain = {
            name: nn.Parameter(p.detach().to_local()) for name, p in self.distributed.items()
        }

    @torch.no_grad()
    def before_update(self) -> None:
        """Give the plain parameters the present values and gradients of the distributed ones.

        Collective if a gradient is cut in another way than its parameter.
        """
        for name, parameter in self.distributed.items():
            gradient, plain, part = parameter.grad, self.plain[name], part_of(parameter)
            if plain.data_ptr() != part.data_ptr():  # FSDP2 has moved the shard to other memory
                plain.data = part
            if (
                gradient is not None
                and spec_of(gradient) is not spec_of(parameter)
                and gradient.placements != parameter.placements
            ):
                gradient = gradient.redistribute(placements=parameter.placements)
            plain.grad = None if gradient is None else part_of(gradient)

    def after_update(self) -> None:
        """Release the gradients of the plain parameters. Their values are shared, so they need no
        copy.
        """
        for plain in self.plain.values():
            plain.grad = None


def as_distributed(value: Any, parameter: Any) -> Any:
    """Convert optimizer state that is this rank's part of a distributed parameter.

    Tensors of that part's shape become distributed like the parameter, wherever they are in lists,
    tuples and mappings.
    """
    from torch.distributed.tensor import DTensor

    shape = parameter.to_local().shape

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape != shape:
            return tensor
        return DTensor.from_local(
            tensor,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    return tree_map_only(torch.Tensor, wrap, value)


def as_plain(value: Any) -> Any:
    """Convert distributed tensors to this rank's parts; the reverse of `as_distributed`."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to_local() if hasattr(tensor, "to_local") else tensor,
        value,
    )
