"""Autograd's counts, hooks and engine.

Private names: `Tensor._version`, `Tensor._base`, `Tensor._backward_hooks`,
`Tensor._post_accumulate_grad_hooks`, `torch._C._current_graph_task_id`,
`torch.autograd._engine_run_backward`, `torch.autograd.function._SingleLevelFunction`. Tested with
torch 2.11 and 2.13.

Without versions, writes can be seen by `TensorSnapshot` alone, at the cost of a comparison. If
torch calls functions or backwards in another way, `replaced` must replace that way, or captures
lose the gradients of a model's own functions without an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

# The number of writes to a tensor's memory that torch has counted; in C, as each step asks for many.
version_of = attrgetter("_version")
# Attributes that can be read without a look at a tensor's values.
GETTERS = (torch.Tensor._version.__get__, torch.Tensor._backward_hooks.__get__)  # type: ignore[attr-defined, union-attr]


def is_view_of_other(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._base is not None


def is_in_backward() -> bool:
    """Whether this thread runs a part of a backward."""
    return torch._C._current_graph_task_id() != -1


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the hooks of `Tensor.register_hook` by number. A removed one disappears from it."""
    return tensor._backward_hooks or {}


def accumulated_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook`, which callers may change."""
    return tensor._post_accumulate_grad_hooks or {}


def apply_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an autograd function as torch does, also where `replaced` is entered."""
    return super(_SingleLevelFunction, function).apply(*args, **kwargs)


@contextmanager
def replaced(apply: Callable[..., Any], backward: Callable[..., Any]) -> Iterator[None]:
    """Let `apply(function, ...)` run each autograd function, and `backward(run, ...)` each backward.

    run: torch's own backward, with the same arguments.
    """
    run_backward = torch.autograd._engine_run_backward
    # Not Function.apply: that may be bound already, as in `sign = Sign.apply`. It ends in this one.
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = partial(backward, run_backward)
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward = run_backward
