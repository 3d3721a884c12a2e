"""A module that computes the loss of a batch with a model, under the names of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.torch_private.modules import share_contents

_OWN = frozenset(nn.Module().__dict__) | {"forward"}


def computing(module: nn.Module) -> nn.Module:
    """Return the model with which a module computes; the module itself if it is no computation."""
    model: nn.Module = vars(module)["model"] if isinstance(module, BatchLoss) else module
    return model


class BatchLoss(nn.Module):
    """A module whose call is `compute(model, batch)`, or in evaluation mode `validate`.

    It holds the modules and tensors that the model holds, so that both have the same names, and
    what replaces one of them in the one is also in the other. Hooks are apart: those on the model
    run when `compute` calls it, and those on this module around `compute`, which may also use the
    model past its forward.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[[Any, Any], Any],
        validate: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        # As plain attributes: the model is no child, and a module that computes is not called here.
        vars(self).update(model=model, compute=compute, validate=validate or compute)
        share_contents(self, model)
        self.training = model.training

    def forward(self, batch: Any) -> Any:
        return (self.compute if self.training else self.validate)(self.model, batch)

    def train(self, mode: bool = True) -> BatchLoss:
        self.training = mode
        self.model.train(mode)
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, and the model and all that is in it under the model's names."""
        yield prefix, self
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        if (model := vars(self).get("model")) is None:  # a copy in the making
            raise AttributeError(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model if it has it, and otherwise one of this module."""
        model = vars(self).get("model")
        if model is not None and name not in _OWN and name in vars(model):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)
