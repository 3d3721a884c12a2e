"""A module that computes the loss of a batch with a model, under the names of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from paceline.torch_private.modules import share_contents

_OWN = frozenset(nn.Module().__dict__) | {"forward"}
# Plain attributes, as the model is no child, and under names that no model has for a child or value.
_MODEL, _COMPUTE, _VALIDATE = "_paceline_model", "_paceline_compute", "_paceline_validate"


def computing(module: nn.Module) -> nn.Module:
    """Return the model with which a module computes; the module itself if it is no computation."""
    model: nn.Module = vars(module)[_MODEL] if isinstance(module, BatchLoss) else module
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
        vars(self).update({_MODEL: model, _COMPUTE: compute, _VALIDATE: validate or compute})
        share_contents(self, model)
        self.training = model.training

    def forward(self, batch: Any) -> Any:
        return vars(self)[_COMPUTE if self.training else _VALIDATE](computing(self), batch)

    def train(self, mode: bool = True) -> BatchLoss:
        self.training = mode
        computing(self).train(mode)
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, and the model and all that is in it under the model's names."""
        yield prefix, self
        yield from computing(self).named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return computing(self).named_parameters(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        if _MODEL not in vars(self):  # a copy in the making
            raise AttributeError(name)
        return getattr(computing(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model if it has it, and otherwise one of this module."""
        is_made = _MODEL in vars(self) and name not in _OWN
        if is_made and name in vars(computing(self)):
            setattr(computing(self), name, value)
        else:
            super().__setattr__(name, value)
