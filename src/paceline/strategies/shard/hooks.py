"""Transfers the user's hooks on parameters, because FSDP2 replaces the parameters that have
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.torch_private.autograd import accumulated_hooks, gradient_hooks

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of one parameter, by the numbers that torch gave them.

    A hook that is removed disappears from its mapping.
    """

    before: Mapping[int, Callable[..., Any]]  # registered by `register_hook`
    after: Mapping[int, Callable[..., Any]]  # registered by `register_post_accumulate_grad_hook`

    def register(self, parameter: torch.Tensor) -> None:
        """Register the hooks on another tensor that replaces the parameter."""
        for hooks, register in (
            (self.before, parameter.register_hook),
            (self.after, parameter.register_post_accumulate_grad_hook),
        ):
            for number in hooks:
                register(
                    lambda tensor, hooks=hooks, number=number: (
                        hooks[number](tensor) if number in hooks else None
                    )
                )


def hooks_of(model: nn.Module) -> dict[str, Hooks]:
    """Return the hooks of every parameter that has any, by name."""
    return {
        name: Hooks(gradient_hooks(parameter), accumulated_hooks(parameter))
        for name, parameter in model.named_parameters()
        if gradient_hooks(parameter) or accumulated_hooks(parameter)
    }
