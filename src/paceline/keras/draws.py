"""Random numbers for a part of a batch: those that one process draws for these samples.

Every rank has the same state of torch's generators when a step begins. It draws for the whole batch and keeps its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.keras.part import Part, current_part

# What rows of a tensor are that has several for each sample: the batch several times over, as where two batches are
# joined; or all rows of a sample together, as where steps of sequences become rows; or nothing that is cut by samples.
ORDERS = ("blocks", "runs", "none")
several: set[bool] = set()  # not empty once such a tensor was drawn in this process


class WholeBatchDraws(TorchFunctionMode):
    """While it is on, random tensors with this rank's samples along dim 0 are rows of the whole batch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = current_part()
        draw = _DRAWS.get(func) if part is not None else None
        return func(*args, **kwargs) if draw is None else draw(part, func, *args, **kwargs)


def _times(part: Part, length: int) -> int:
    """How many rows a random tensor has for each of this rank's samples; 0 if its rows are no samples."""
    times, rest = divmod(length, part.rows)
    if rest or not times:
        return 0
    if times > 1:
        several.add(True)
        return times if part.order != "none" else 0
    return times


def _rows(part: Part, whole: torch.Tensor, times: int) -> torch.Tensor:
    """Those of this rank's samples."""
    if times == 1 or part.order == "runs":
        return whole[times * part.start : times * (part.start + part.rows)]
    blocks = whole.reshape(times, part.total, *whole.shape[1:])[
        :, part.start : part.start + part.rows
    ]
    return blocks.reshape(times * part.rows, *whole.shape[1:])


def _embedded(part: Part, tensor: torch.Tensor, times: int) -> torch.Tensor:
    """In a tensor for the whole batch, whose other rows don't matter."""
    blocks = 1 if part.order == "runs" else times
    per_sample, rest = times // blocks, tensor.shape[1:]
    before = tensor.new_zeros((blocks, per_sample * part.start, *rest))
    after = tensor.new_zeros((blocks, per_sample * (part.total - part.start - part.rows), *rest))
    cut = tensor.reshape(blocks, per_sample * part.rows, *rest)
    return torch.cat([before, cut, after], dim=1).reshape(times * part.total, *rest)


def _sized(position: int) -> Callable[..., torch.Tensor]:
    """Of a function that is given a shape, from this position on."""

    def draw(part: Part, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "size" in kwargs:
            before, shape = args, tuple(kwargs.pop("size"))
        else:
            before, shape = args[:position], args[position:]
            if len(shape) == 1 and not isinstance(shape[0], int):
                shape = tuple(shape[0])
        times = _times(part, shape[0]) if shape else 0
        if not times:
            return func(*before, size=shape, **kwargs)
        return _rows(part, func(*before, size=(times * part.total, *shape[1:]), **kwargs), times)

    return draw


def _randint(part: Part, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """randint(high, size), randint(low, high, size), or by names."""
    position = next((i for i, arg in enumerate(args) if not isinstance(arg, int)), len(args))
    return _sized(position)(part, func, *args, **kwargs)


def _normal(
    part: Part, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any
) -> torch.Tensor:
    if size is not None:
        return _sized(2)(part, func, mean, std, size=size, **kwargs)
    return _like(part, func, mean, std, **kwargs)


def _like(part: Part, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of a function of tensors for each element."""
    values = (*args, *kwargs.values())
    lengths = {v.shape[0] if v.dim() else 0 for v in values if isinstance(v, torch.Tensor)}
    times = _times(part, lengths.pop()) if len(lengths) == 1 else 0
    if not times:
        return func(*args, **kwargs)

    def whole(value: Any) -> Any:
        return _embedded(part, value, times) if isinstance(value, torch.Tensor) else value

    named = {name: whole(value) for name, value in kwargs.items()}
    return _rows(part, func(*map(whole, args), **named), times)


def _in_place(
    part: Part, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    times = _times(part, tensor.shape[0]) if tensor.dim() else 0
    if not times:
        return func(tensor, *args, **kwargs)
    drawn = func(tensor.new_empty((times * part.total, *tensor.shape[1:])), *args, **kwargs)
    with torch.no_grad():
        return tensor.copy_(_rows(part, drawn, times))


_functional = torch.nn.functional
_DRAWS: dict[Any, Callable[..., Any]] = {
    torch.rand: _sized(0),
    torch.randn: _sized(0),
    torch.randint: _randint,
    torch.normal: _normal,
    **dict.fromkeys(
        (
            torch.rand_like,
            torch.randn_like,
            torch.randint_like,
            torch.bernoulli,
            torch.multinomial,
            torch.dropout,
            _functional.dropout,
            _functional.dropout1d,
            _functional.dropout2d,
            _functional.dropout3d,
            _functional.alpha_dropout,
            _functional.feature_alpha_dropout,
        ),
        _like,
    ),
    **dict.fromkeys(
        (
            torch.Tensor.uniform_,
            torch.Tensor.normal_,
            torch.Tensor.bernoulli_,
            torch.Tensor.exponential_,
            torch.Tensor.random_,
            torch.Tensor.cauchy_,
            torch.Tensor.log_normal_,
            torch.Tensor.geometric_,
        ),
        _in_place,
    ),
}
