"""Random layers switched off, and a note of randomness that can't be."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
             torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}
_DRAWS = {torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm,
          torch.bernoulli, torch.multinomial, torch.normal, torch.Tensor.bernoulli_, torch.Tensor.normal_,
          torch.Tensor.uniform_, torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.multinomial,
          torch.Tensor.bernoulli}


class WithoutDropout(TorchFunctionMode):
    """Dropout in any form passes its input through while this is entered.

    draws: names of random functions that were called and left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**kwargs}
            kwargs.pop("dropout_p", None)
        elif func in _DRAWS:
            self.draws.add(getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


def silence(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with the dropout inside recurrent layers at zero; functions can't reach it."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
    return model
