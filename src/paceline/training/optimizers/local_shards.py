"""A rank's own parts of distributed tensors as plain ones, for optimizers that update each element by its own history.

torch's distributed tensors allow such updates, but not all of them: fused and foreach updates need one kind of tensor
in a group, and Rprop writes to masked elements. On plain tensors, an update is that of a single device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class OwnParts:
    """Plain parameters that share memory with this rank's parts.

    distributed: what ranks hold in parts, by name. plain: what this rank updates of it.
    """

    def __init__(self, distributed: Mapping[str, nn.Parameter]) -> None:
        self.distributed: dict[str, Any] = dict(distributed)
        self.plain = {
            name: nn.Parameter(p.detach().to_local()) for name, p in self.distributed.items()
        }

    @torch.no_grad()
    def before_update(self) -> None:
        """Let the plain parameters have the values and gradients that the distributed ones have now. Collective if a
        gradient is cut in another way than its parameter."""
        for name, parameter in self.distributed.items():
            gradient, plain, part = parameter.grad, self.plain[name], parameter._local_tensor
            if plain.data_ptr() != part.data_ptr():  # a shard that FSDP2 has put elsewhere
                plain.data = part
            if (
                gradient is not None
                and gradient._spec is not parameter._spec
                and gradient.placements != parameter.placements
            ):
                gradient = gradient.redistribute(placements=parameter.placements)
            plain.grad = None if gradient is None else gradient._local_tensor

    def after_update(self) -> None:
        """Values are shared; gradients are let go."""
        for plain in self.plain.values():
            plain.grad = None


def as_distributed(value: Any, parameter: Any) -> Any:
    """Optimizer state that is this rank's part of a distributed parameter: tensors of that part's shape, wherever they
    are in lists, tuples and mappings, become distributed like it."""
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

    return _mapped(wrap, value)


def as_plain(value: Any) -> Any:
    """The other way."""
    return _mapped(
        lambda tensor: tensor.to_local() if hasattr(tensor, "to_local") else tensor, value
    )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
