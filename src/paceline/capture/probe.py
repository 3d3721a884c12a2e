"""Which parameters a model's own forward writes to, learned by running it once before it is laid out."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.capture.written import Seen, address

# Calls of operators that write to a tensor, such as `q.lerp_(p, 0.1)`, and `q.data`. Initial values are no edits.
_WRITES = re.compile(r"(?<!init)\.(?!requires_grad_|register_)[a-z]\w*[a-z0-9]_\(|\.data\b|no_grad|\.detach\(")
_LIBRARIES = ("torch", "transformers", "keras", "torchvision")  # whose forwards write to no parameter but by `max_norm`


def limited_by_norm(model: nn.Module) -> frozenset[str]:
    """Names of embeddings that are scaled down in a forward, where their rows are too long."""
    modules = {id(module.weight) for module in model.modules()
               if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None}
    return frozenset(name for name, p in model.named_parameters() if id(p) in modules)


def may_write(model: nn.Module) -> bool:
    """Whether code of the model's own, in the files of its classes or in hooks, might write to a parameter."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            text = inspect.getsource(sys.modules[kind.__module__])
        except (OSError, TypeError, KeyError):
            return True
        if _WRITES.search(text):
            return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def written_by(forward: Callable[[], Any], model: nn.Module,
               is_elsewhere: Callable[[torch.Tensor], bool] = lambda tensor: False) -> frozenset[str]:
    """Names of the parameters that hold other values after a forward of the model. The model is not fit for use then.

    is_elsewhere: whether a tensor lies in a file; of those, version counters alone tell.
    """
    named = dict(model.named_parameters())
    before = {name: (p._version, address(p)) for name, p in named.items()}
    seen = {name: Seen(p) for name, p in named.items() if not is_elsewhere(p)}
    forward()
    return frozenset(name for name, p in named.items()
                     if (seen[name].is_changed() if name in seen else before[name] != (p._version, address(p))))
