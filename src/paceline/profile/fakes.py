"""Models on fake tensors: moved and converted as constructors do, and given values where they ask for some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def convertible() -> Iterator[None]:
    """While this is entered, `Module.to` and its like put new fake tensors into the place of others.

    torch swaps what is behind a parameter, which a fake one, that others refer to, does not allow. Modules that share
    a parameter share the new one.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    plain: Callable[..., nn.Module] = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, Any, torch.Tensor]] = {}

    def converted(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        key = id(convert), id(tensor)
        if key not in made:
            with torch.no_grad():
                new = convert(tensor)
            if new is not tensor and isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[key] = convert, tensor, new  # both are kept, so that no other object gets their numbers
        return made[key][2]

    def apply(module: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
        own = [(held, name, tensor) for held in (module._parameters, module._buffers)
               for name, tensor in held.items() if tensor is not None]
        if not any(isinstance(tensor, FakeTensor) for _, _, tensor in own):
            return plain(module, convert, recurse)
        for child in module.children() if recurse else ():
            child._apply(convert)
        for held, name, tensor in own:
            held[name] = converted(tensor, convert)  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


class AssumedValues(TorchDispatchMode):
    """Gives a forward on fake tensors the values that it asks for: numbers are 1, conditions are false, and whatever
    is chosen by a mask is all there is. To be entered after the mode that makes tensors fake.

    asked: how many times.
    """

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        try:
            return func(*args, **kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException):
            assumed = _ASSUMED.get(func._overloadpacket)
            if assumed is None:
                raise
            self.asked += 1
            return assumed(*args)


def _number(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)


def _all_chosen(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += _all_places(index).unbind(1) if is_mask else [index]  # type: ignore[arg-type]
    return torch.ops.aten.index.Tensor(tensor, places)


_ASSUMED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense: _number,
    torch.ops.aten.equal: lambda one, other: False,
    torch.ops.aten.nonzero: _all_places,
    torch.ops.aten.index: _all_chosen,
    torch.ops.aten.masked_select: lambda tensor, mask: tensor.new_empty(tensor.numel()),
}
