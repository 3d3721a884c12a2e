"""Values inside others: in tuples, lists, deques, mappings and dataclasses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, by index, key or name of the field; None for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list | deque):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def with_items(value: Any, items: Iterable[Any]) -> Any:
    """Return a container of the same class that holds these items in the places of its own. The
    rest of it stays: a model's output may have more than its items.
    """
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    twin = {} if type(value) is dict else copy.copy(value)
    is_record = not isinstance(value, Mapping | list | deque)
    for (key, _), item in zip(items_of(value) or (), items, strict=True):
        if is_record:
            object.__setattr__(twin, key, item)
        else:
            twin[key] = item
    return twin


def map_tensors(
    function: Callable[[Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool] = lambda value: False,
) -> Any:
    """Return the value with every tensor in it replaced. What it holds besides stays.

    is_leaf: whether something else than a tensor is given to the function, too.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence

    if isinstance(value, torch.Tensor) or is_leaf(value):
        return function(value)
    inside = partial(map_tensors, function, is_leaf=is_leaf)  # lengths of sequences stay on the CPU
    if (items := items_of(value)) is not None:
        lengths = value.batch_sizes if isinstance(value, PackedSequence) else None
        return with_items(value, [item if item is lengths else inside(item) for _, item in items])
    if hasattr(value, "apply") and hasattr(value, "to") and not isinstance(value, torch.nn.Module):
        return copy.copy(value).apply(function)  # a batch of graphs (torch_geometric)
    return value


def map_batch(function: Callable[[torch.Tensor], Any], batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return (input, target) with every tensor replaced. A target that is the input itself stays
    so.
    """
    made = map_tensors(function, batch[0])
    return made, made if batch[1] is batch[0] else map_tensors(function, batch[1])


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, item in items_of(value) or ():
            yield from tensors_in(item)
