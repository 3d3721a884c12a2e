"""A model's outputs from the rank of its last stage to the ranks of the others. No pickle: JSON, and then tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PlanRefused
from paceline.runtime.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from paceline.strategies.mesh import Mesh


def from_last_stage(outputs: Sequence[Any], mesh: Mesh, device: torch.device) -> list[Any]:
    """What the last rank along the axis of stages has; what others give is not looked at. Collective along it.

    Raises:
        PlanRefused: an output is more than tensors in tuples, lists and mappings.
    """
    axis = mesh.stage_axis
    group, source = mesh.group(axis), mesh.ranks_along(axis)[-1]
    is_source, tensors = mesh.rank == source, list[torch.Tensor]()
    text = json.dumps([_described(output, tensors) for output in outputs]).encode() if is_source else b""
    size = torch.tensor([len(text)])  # on the CPU: what tensors there are is known before they are computed
    dist.broadcast(size, source, group=group)
    raw = torch.frombuffer(bytearray(text), dtype=torch.uint8) if is_source else torch.empty(
        int(size), dtype=torch.uint8)
    dist.broadcast(raw, source, group=group)

    def receive(entry: Mapping[str, Any]) -> torch.Tensor:
        tensor = (tensors.pop(0).contiguous() if is_source
                  else torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device))
        dist.broadcast(tensor, source, group=group)
        return tensor

    def made(entry: Any) -> Any:
        if "dtype" in entry:
            return receive(entry)
        if "items" in entry:
            return {key: made(item) for key, item in entry["items"].items()}
        parts = [made(item) for item in entry["parts"]]
        return tuple(parts) if entry["is_tuple"] else parts

    return [made(entry) for entry in json.loads(bytes(raw.tolist()))]


def _described(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"items": {key: _described(item, tensors) for key, item in value.items()}}
    if isinstance(value, tuple | list):
        return {"parts": [_described(item, tensors) for item in value], "is_tuple": isinstance(value, tuple)}
    raise PlanRefused(f"a model returns a {type(value).__name__}, and this plan sends what ctx.run returns from one "
                      "rank to others", hint="return tensors, tuples, lists or mappings, or use a data=N plan")
