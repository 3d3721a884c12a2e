"""Sends a model's outputs from the rank of its last stage to the ranks of the others. It uses JSON
and tensors, no pickle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import PlanRefused
from paceline.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.strategies.mesh import Mesh


def from_last_stage(
    outputs: Sequence[Any], place: int, mesh: Mesh, device: torch.device
) -> list[Any]:
    """Return the outputs of the rank that runs the last stage. The other ranks' arguments are
    ignored. Collective along the axis of stages.

    place: of that rank along this axis.

    Raises:
        PlanRefused: an output is more than tensors, numbers and text in tuples, lists, mappings and
            dataclasses.
    """
    axis = mesh.stage_axis
    group, source = mesh.group(axis), mesh.ranks_along(axis)[place]
    is_source, tensors = mesh.rank == source, list[torch.Tensor]()
    text = (
        json.dumps([described(output, tensors) for output in outputs]).encode()
        if is_source
        else b""
    )
    size = torch.tensor(
        [len(text)]
    )  # on the CPU, because the shapes of tensors are known before their values are computed
    dist.broadcast(size, source, group=group)
    raw = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if is_source
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(raw, source, group=group)

    def receive(entry: Mapping[str, Any]) -> torch.Tensor:
        tensor = (
            tensors.pop(0).contiguous()
            if is_source
            else torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
        )
        dist.broadcast(tensor, source, group=group)
        return tensor

    return [rebuilt(entry, receive) for entry in json.loads(bytes(raw.tolist()))]


def described(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Describe an output for JSON. Its tensors are appended to `tensors`, in the order in which
    `rebuilt` asks for them.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, Mapping):
        return {
            "kind": _name(value),
            "items": [[key, described(item, tensors)] for key, item in value.items()],
        }
    if isinstance(value, tuple | list):
        return {"kind": _name(value), "parts": [described(item, tensors) for item in value]}
    if is_dataclass(value):
        return {
            "kind": _name(value),
            "fields": [
                [field.name, described(getattr(value, field.name), tensors)]
                for field in fields(value)
            ],
        }
    raise PlanRefused(
        f"a model returns a {type(value).__name__}, and this plan sends what ctx.run returns from one "
        "rank to others",
        hint="return tensors, tuples, lists, mappings or dataclasses, or use a data=N plan",
    )


def rebuilt(entry: Mapping[str, Any], receive: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    """Return an output of its original class from its description.

    receive: makes a tensor from its entry.
    """
    if "dtype" in entry:
        return receive(entry)
    if "value" in entry:
        return entry["value"]
    kind = _named(*entry["kind"])
    if "parts" in entry:
        parts = [rebuilt(part, receive) for part in entry["parts"]]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    items = {key: rebuilt(item, receive) for key, item in entry.get("items", entry.get("fields"))}
    if "items" in entry:
        return kind(**items) if hasattr(kind, "__dataclass_fields__") else kind(items)
    record = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(record, name, item)
    return record


def _name(value: Any) -> tuple[str, str]:
    """Return the module and the name of a value's class, by which other ranks find it."""
    kind = type(value)
    try:
        is_known = _named(kind.__module__, kind.__qualname__) is kind
    except (KeyError, AttributeError):
        is_known = False
    if not is_known:
        raise PlanRefused(
            f"a model returns a {kind.__qualname__}, which other ranks can't find in {kind.__module__}",
            hint="define that class at the top of a module, or use a data=N plan",
        )
    return kind.__module__, kind.__qualname__


def _named(module: str, name: str) -> Any:
    kind = attrgetter(name)(sys.modules[module])
    if not isinstance(kind, type) or not (
        issubclass(kind, Mapping | tuple | list) or is_dataclass(kind)
    ):
        raise AttributeError(f"{module}.{name} is no class of outputs")
    return kind
