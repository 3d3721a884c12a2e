"""Sends a model's outputs from the rank of its last stage to the ranks of the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.codec import ByName, head_of, value_of
from paceline.base.errors import PlanRefused
from paceline.base.nested import items_of
from paceline.launch.collectives.values import value_of_one
from paceline.strategies.mesh import Mesh


def from_last_stage(
    outputs: Sequence[Any], place: int, mesh: Mesh, device: torch.device
) -> Sequence[Any]:
    """Return the outputs of the rank that runs the last stage; the same ones if there is one stage.
    The other ranks' arguments are ignored. Collective along the axis of stages.

    place: of that rank along this axis.

    Raises:
        PlanRefused: an output is more than tensors, numbers and text in tuples, lists, mappings and
            dataclasses.
    """
    axis = mesh.stage_axis
    if mesh.sizes[axis] == 1:
        return outputs
    group, source = mesh.group(axis), mesh.ranks_along(axis)[place]
    is_source = mesh.rank == source
    head, tensors = head_of(list(outputs), _opened) if is_source else (b"", list[torch.Tensor]())
    # On the CPU, because the shapes of tensors are known before their values are computed.
    head = value_of_one(head.decode(), source, group).encode()

    def filled(tensor: torch.Tensor, is_cuda: bool) -> torch.Tensor:
        tensor = (
            tensors.pop(0).contiguous() if is_source else torch.empty_like(tensor, device=device)
        )
        dist.broadcast(tensor, source, group=group)
        return tensor

    received: list[Any] = value_of(head, filled, _made)
    return received


def _opened(value: Any, name: str) -> ByName:
    """Give an output that is a container by its class and its items."""
    items, kind = items_of(value), type(value)
    if items is None:
        raise PlanRefused(
            f"a model returns a {kind.__name__}, and this plan sends what ctx.run returns from one "
            "rank to others",
            hint="return tensors, tuples, lists, mappings or dataclasses, or use a data=N plan",
        )
    try:
        is_known = _named(kind.__module__, kind.__qualname__) is kind
    except (KeyError, AttributeError):
        is_known = False
    if not is_known:
        raise PlanRefused(
            f"a model returns a {kind.__qualname__}, which other ranks can't find in {kind.__module__}",
            hint="define that class at the top of a module, or use a data=N plan",
        )
    return ByName(kind.__module__, kind.__qualname__, dict(items))


def _made(found: ByName) -> Any:
    """Return an output of its original class."""
    kind, parts = _named(found.module, found.name), found.parts
    if issubclass(kind, tuple | list):
        return kind(*parts.values()) if hasattr(kind, "_fields") else kind(parts.values())
    if issubclass(kind, Mapping):
        return kind(**parts) if hasattr(kind, "__dataclass_fields__") else kind(parts)
    record = object.__new__(kind)
    for name, item in parts.items():
        object.__setattr__(record, name, item)
    return record


def _named(module: str, name: str) -> Any:
    kind = attrgetter(name)(sys.modules[module])
    if not isinstance(kind, type) or not (
        issubclass(kind, Mapping | tuple | list) or is_dataclass(kind)
    ):
        raise AttributeError(f"{module}.{name} is no class of outputs")
    return kind
