"""Modes that see every operator, and what an operator says of its arguments.

Private names: `torch.utils._python_dispatch` with `TorchDispatchMode`,
`is_traceable_wrapper_subclass`, `_disable_current_modes`, `_get_current_dispatch_mode_stack` and
`_pop_mode_temporarily`; `torch._C.DisableTorchFunction`, `torch._C.DisableTorchFunctionSubclass`,
`torch._C.DispatchKey`, `torch._ops` with `OpOverload` and `HigherOrderOperator`,
`OpOverload._schema`, `OpOverload._dispatch_cache`. Tested with torch 2.11 and 2.13.

`TorchDispatchMode` is in torch's documentation ("Extending PyTorch"), and torch.utils.flop_counter
imports it from wherever it is. torch/_higher_order_ops/utils.py leaves modes, and `get_alias_info` in
torch/utils/_python_dispatch.py reads schemas: they show what has taken a name's place.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction as without_functions
from torch._C import DisableTorchFunctionSubclass as without_subclass_functions
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_all_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as entered_modes
from torch.utils._python_dispatch import _pop_mode_temporarily as without_last_mode

from paceline.torch_private.pytree import tree_leaves


class OperatorMode(TorchDispatchMode):
    """While it is entered, `run_operator` runs in the place of each operator, with modes below it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run_operator(func, args, kwargs or {})

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and return what it returns."""
        return func(*args, **kwargs)


def schema_of(operator: Any) -> Any:
    """Return an operator's name, arguments and returns; None for any other function."""
    return getattr(operator, "_schema", None)


def is_writing(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments; False for any other function."""
    return getattr(schema_of(operator), "is_mutable", False)


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values to which an operator writes, also those in lists."""
    for place, argument in enumerate(schema_of(operator).arguments if is_writing(operator) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator only calls others, so that it may return a view of its argument."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def forget_kernels(operator: OpOverload) -> None:
    """Let torch look again for an operator's kernels, because others were registered."""
    operator._dispatch_cache.clear()
