"""A rank's part of a split parameter as a plain leaf of autograd's graph, which costs less host
time than a DTensor.

Forwards read the leaf. When its gradient is complete, it becomes the parameter's gradient, and the
parameter's hooks are called.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

_LEAF = "_paceline_leaf"


def give_leaf(parameter: nn.Parameter) -> None:
    """Let forwards read this rank's part of a DTensor as a plain tensor in the same memory."""
    distributed: Any = parameter
    leaf = nn.Parameter(distributed._local_tensor.detach(), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        leaf.register_post_accumulate_grad_hook(partial(_hand_over, parameter))
    setattr(parameter, _LEAF, leaf)


def leaf_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """Return the leaf on which a parameter's gradient accumulates; None if it has no leaf."""
    return getattr(parameter, _LEAF, None)


def _hand_over(parameter: Any, leaf: torch.Tensor) -> None:
    """Move the leaf's gradient to the parameter, and call the parameter's hooks."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None:
        if parameter.grad is None:
            # `DTensor.__init__` does nothing, and takes the host longer than `__new__`, which makes
            # the tensor.
            distributed: Any = type(parameter)
            parameter.grad = distributed.__new__(
                distributed, gradient, parameter._spec, requires_grad=False
            )
        else:
            parameter.grad._local_tensor.add_(gradient)
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
