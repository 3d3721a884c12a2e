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

from paceline.torch_private.autograd import accumulated_hooks
from paceline.torch_private.dtensor import part_of, spec_of, with_spec

_LEAF = "_paceline_leaf"


def give_leaf(parameter: nn.Parameter) -> None:
    """Let forwards read this rank's part of a DTensor as a plain tensor in the same memory."""
    leaf = nn.Parameter(part_of(parameter).detach(), requires_grad=parameter.requires_grad)
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
            parameter.grad = with_spec(type(parameter), gradient, spec_of(parameter))
        else:
            part_of(parameter.grad).add_(gradient)
    for hook in tuple(accumulated_hooks(parameter).values()):
        hook(parameter)
