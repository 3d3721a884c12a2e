"""Copy models whose forwards were replaced on their modules, so that the copy runs its own
modules.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from paceline.torch_private.autograd import accumulated_hooks, gradient_hooks


def copied(model: nn.Module, *, shares_frozen: bool = False) -> nn.Module:
    """Return a deep copy of the model.

    `copy.deepcopy` does not copy the hooks of parameters, and does not change functions. A forward
    with which a library replaces a module's own often holds the earlier forward of the original
    module; the copy would then use the original's weights.

    Args:
        shares_frozen: Whether parameters that are not trained share memory with the original.
    """
    memo: dict[int, Any] = _sharing(model) if shares_frozen else {}
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        forward = vars(module).get("forward")
        if forward is not None:
            module.forward = _twin(forward, memo)
    for parameter in model.parameters():
        made: nn.Parameter = memo[id(parameter)]
        if made.requires_grad:
            for hook in gradient_hooks(parameter).values():
                made.register_hook(_twin(hook, memo))
            for hook in accumulated_hooks(parameter).values():
                made.register_post_accumulate_grad_hook(_twin(hook, memo))
    return twin


def _sharing(model: nn.Module) -> dict[int, Any]:
    """Return copies of the parameters that are not trained, by the id of the parameter whose memory
    each shares.
    """
    shared: dict[int, Any] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad and type(parameter) is nn.Parameter:
            shared[id(parameter)] = twin = nn.Parameter(parameter.detach(), requires_grad=False)
            vars(twin).update(vars(parameter))
    return shared


def _twin(value: Any, memo: Mapping[int, Any]) -> Any:
    """Return the copy's counterpart of a value: a module's copy, or a function that refers to
    copies.
    """
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_twin(value.__func__, memo), _twin(value.__self__, memo))
    if isinstance(value, FunctionType) and value.__closure__:
        contents = [cell.cell_contents for cell in value.__closure__]
        twins = [_twin(item, memo) for item in contents]
        if all(twin is item or twin == item for twin, item in zip(twins, contents, strict=True)):
            return value
        made = FunctionType(
            value.__code__,
            value.__globals__,
            value.__name__,
            value.__defaults__,
            tuple(map(CellType, twins)),
        )
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        return made
    return value
