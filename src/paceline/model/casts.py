"""The precision of forwards, and the parameters that a model uses only in autocast's precision: a
cast of these before the forward changes no bit of results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from paceline.job import AUTOCAST, Job
from paceline.torch_private.pytree import tensor_leaves

_CPU = torch.device("cpu")
# What autocast runs in low precision on CPUs and GPUs alike, casting all it is given (the lists in
# torch's docs/source/amp.rst and aten/src/ATen/autocast_mode.h).
_LOWERED = frozenset(
    (
        F.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.addmm,
        torch.Tensor.addmm,
        torch.baddbmm,
        torch.Tensor.baddbmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        torch.conv_transpose2d,
        torch.conv_transpose3d,
    )
)
# What tells nothing of a tensor's precision.
_OF_SHAPES = frozenset(
    (
        "torch.Tensor.shape.__get__",
        "torch.Tensor.size",
        "torch.Tensor.dim",
        "torch.Tensor.numel",
        "torch.Tensor.ndim.__get__",
        "torch.Tensor.device.__get__",
    )
)


def autocast(job: Job, device: torch.device = _CPU) -> AbstractContextManager[Any]:
    """Return the numeric context of the job's forward passes."""
    if (name := AUTOCAST.get(job.precision)) is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, name))


def cast_alone(model: nn.Module, loss: Callable[[], Any], dtype: torch.dtype) -> frozenset[str]:
    """Return the names of float32 parameters that autocast casts to this dtype before anything
    computes with them.

    Only autocast's operators use these parameters, in training and in an evaluation. A trainable
    one is used only once in training. With two uses the gradients would be added in the precision
    of the cast, but in float32 if autocast casts twice.

    Args:
        loss: Runs the model under autocast and returns the loss, or (sum, count). It is called
            twice. The model is left in evaluation mode and can't be used any more.
    """
    uses = _Uses(model, dtype)
    model.train()
    with uses, torch.enable_grad():
        value = loss()
    once = _cast_once(value[0] if isinstance(value, tuple | list) else value)
    model.eval()
    with uses, torch.no_grad():
        loss()
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.dtype == torch.float32
        and name in uses.lowered
        and name not in uses.others
        and (not p.requires_grad or id(p) in once)
    )


class _Uses(TorchFunctionMode):
    """A mode that notes which parameters are given to torch's functions.

    `lowered` has the names of those that autocast's operators use, `others` of those that any other
    code uses or asks for.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.dtype, self.lowered, self.others = dtype, set[str](), set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tensor_leaves((args, kwargs)):
            name = self.names.get(id(leaf))
            if name is not None and resolve_name(func) not in _OF_SHAPES:
                (self.lowered if func in _LOWERED and self._is_cast(leaf) else self.others).add(
                    name
                )
        return func(*args, **kwargs)

    def _is_cast(self, parameter: torch.Tensor) -> bool:
        kind = parameter.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype


def _cast_once(loss: torch.Tensor) -> set[int]:
    """Return the ids of parameters with one edge in autograd's graph, which comes from a cast with
    one edge to it.
    """
    edges: Counter[Any] = Counter()
    takers: dict[int, list[Any]] = {}
    waiting, known = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        for after, _ in node.next_functions:
            edges[after] += 1
            if (variable := getattr(after, "variable", None)) is not None:
                takers.setdefault(id(variable), []).append(node)
            waiting.append(after)
    return {
        parameter
        for parameter, nodes in takers.items()
        if len(nodes) == 1 and nodes[0].name() == "ToCopyBackward0" and edges[nodes[0]] == 1
    }
