"""Random numbers for a part of a batch: those that one process draws for these samples.

Every rank has the same state of torch's generators when a step begins. It draws for the whole batch and keeps its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.keras.part import Part, current_part


class WholeBatchDraws(TorchFunctionMode):
    """While it is on, random tensors with this rank's samples along dim 0 are rows of the whole batch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        part = current_part()
        draw = _DRAWS.get(func) if part is not None else None
        return func(*args, **kwargs) if draw is None else draw(part, func, *args, **kwargs)


def _rows(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[part.start:part.start + part.rows]


def _sized(position: int) -> Callable[..., torch.Tensor]:
    """Of a function that is given a shape, from this position on."""
    def draw(part: Part, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "size" in kwargs:
            before, shape = args, tuple(kwargs.pop("size"))
        else:
            before, shape = args[:position], args[position:]
            if len(shape) == 1 and not isinstance(shape[0], int):
                shape = tuple(shape[0])
        if not shape or shape[0] != part.rows:
            return func(*before, size=shape, **kwargs)
        return _rows(part, func(*before, size=(part.total, *shape[1:]), **kwargs))

    return draw


def _randint(part: Part, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """randint(high, size), randint(low, high, size), or by names."""
    position = next((i for i, arg in enumerate(args) if not isinstance(arg, int)), len(args))
    return _sized(position)(part, func, *args, **kwargs)


def _normal(part: Part, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> torch.Tensor:
    if size is None:  # a mean or a deviation for each element
        given = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
        if given and all(map(part.has_samples, given)):
            mean, std = (_embedded(part, value) if isinstance(value, torch.Tensor) else value for value in (mean, std))
            return _rows(part, func(mean, std, **kwargs))
        return func(mean, std, **kwargs)
    return _sized(2)(part, func, mean, std, size=size, **kwargs)


def _embedded(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """In a tensor for the whole batch, whose other rows don't matter."""
    rest = tensor.shape[1:]
    return torch.cat([tensor.new_zeros((part.start, *rest)), tensor,
                      tensor.new_zeros((part.total - part.start - part.rows, *rest))])


def _like(part: Part, func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not part.has_samples(input):
        return func(input, *args, **kwargs)
    return _rows(part, func(_embedded(part, input), *args, **kwargs))


def _in_place(part: Part, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not part.has_samples(tensor):
        return func(tensor, *args, **kwargs)
    drawn = func(tensor.new_empty((part.total, *tensor.shape[1:])), *args, **kwargs)
    with torch.no_grad():
        return tensor.copy_(_rows(part, drawn))


_functional = torch.nn.functional
_DRAWS: dict[Any, Callable[..., Any]] = {
    torch.rand: _sized(0), torch.randn: _sized(0), torch.randint: _randint, torch.normal: _normal,
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.multinomial,
                     torch.dropout, _functional.dropout, _functional.dropout1d, _functional.dropout2d,
                     _functional.dropout3d, _functional.alpha_dropout, _functional.feature_alpha_dropout), _like),
    **dict.fromkeys((torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.bernoulli_, torch.Tensor.exponential_,
                     torch.Tensor.random_, torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.geometric_),
                    _in_place),
}
