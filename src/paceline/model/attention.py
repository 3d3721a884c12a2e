"""Selective recomputation: values between attention's two products are not kept for backward, but computed again.

The operators of a forward are watched below autograd. The inside of an attention is what elementwise operators and a
softmax make of a product of two activations, if autograd then keeps it: scores, normalised scores, and scores after
dropout. Instead, autograd gets the operators that make it again from queries, keys and masks, which are kept anyway.
The user's code does not run a second time, and drawn numbers are kept. Fused attention keeps no scores, and nothing
changes.
Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
_COPIES = {aten._to_copy.default, aten.clone.default}


@dataclass(frozen=True)
class _View:
    """How a tensor lies in its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Given:
    """A tensor that an operator took and that is kept."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "what an attention computes its scores from was changed in place before its backward, "
                "and recompute=selective needs it again: leave out recompute=selective, or x = x + y in "
                "place of x += y"
            )
        return self.tensor


@dataclass(frozen=True)
class Made:
    """A tensor that an operator took and that is made again."""

    step: AttentionStep
    view: _View


@dataclass(eq=False)
class AttentionStep:
    """The operator that filled a piece of memory last.

    after_softmax: whether a softmax is behind it. is_changing: whether it changes its first argument in place.
    times: how often autograd keeps what it gave. result: made again already, for the next that asks.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after_softmax: bool
    is_changing: bool
    times: int = 0
    result: torch.Tensor | None = field(default=None, repr=False)

    def value(self) -> torch.Tensor:
        """Made again, unless it was made for another one that came before."""
        if self.result is not None:
            result, self.result = self.result, None
            return result
        args, kwargs = pytree.tree_map_only((_Given, Made), _taken, (self.args, self.kwargs))
        made: torch.Tensor = self.target(*args, **kwargs)
        return args[0].as_strided(*_whole(args[0])) if self.is_changing else made


def _whole(part: torch.Tensor) -> tuple[tuple[int], tuple[int], int]:
    return (part.untyped_storage().nbytes() // part.element_size(),), (1,), 0


def _taken(argument: _Given | Made) -> torch.Tensor:
    if isinstance(argument, _Given):
        return argument.value()
    value = argument.step.value()
    if argument.step.times:
        argument.step.result = value  # autograd asks for it next
    return argument.view(value)


@dataclass(frozen=True)
class _Kept:
    """In the place of a tensor that autograd keeps."""

    step: AttentionStep
    view: _View

    def value(self) -> torch.Tensor:
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
        with (
            torch.no_grad(),
            torch.autocast(kind, enabled=False),
            torch.autocast("cpu", enabled=False),
        ):
            return self.view(self.step.value())


class Selective(TorchDispatchMode):
    """Watches the forward that runs inside, and what autograd keeps of it.

    kept_as_is: told of every tensor that autograd goes on to keep.
    """

    def __init__(self, *, kept_as_is: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self._kept_as_is = kept_as_is
        self._steps: dict[int, tuple[AttentionStep, weakref.ref[Any]]] = {}  # by memory
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Selective:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        self._steps.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        known = [step for tensor in tensors if (step := self._step_of(tensor)) is not None]
        if func is aten.native_dropout.default and known and result[1].numel():
            self._add(result[0], _drop, (args[0], result[1], 1 / (1 - args[1])), {}, known)
        elif func in _PRODUCTS and not any(step.after_softmax for step in known):
            self._add(result, func, args, kwargs, [])
        elif known and isinstance(result, torch.Tensor):
            if (
                _may_be_again(func)
                and not func._schema.is_mutable
                and self._step_of(result) is None
            ):
                self._add(result, func, args, kwargs, known)
            elif func._schema.is_mutable:
                self._change(result, func, args, kwargs, known)
        return result

    def _add(
        self,
        output: torch.Tensor,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        known: list[AttentionStep],
        *,
        is_changing: bool = False,
    ) -> None:
        original_args = args
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._argument, (tuple(args), kwargs))
        after = func in _SOFTMAX or any(step.after_softmax for step in known)
        storage, key = output.untyped_storage(), output.untyped_storage()._cdata

        def gone(_: Any) -> None:
            self._steps.pop(key, None)

        step = AttentionStep(func, args, kwargs, after, is_changing)
        self._steps[key] = step, weakref.ref(storage, gone)
        self.noted(step, func, original_args, output)

    def noted(
        self, step: AttentionStep, func: Callable[..., Any], args: Any, output: torch.Tensor
    ) -> None:
        """A step that may have to be made again."""

    def _change(
        self, output: torch.Tensor, func: Any, args: Any, kwargs: Any, known: list[AttentionStep]
    ) -> None:
        """An operator that changes the memory of a step: that can be made again with it, or not at all."""
        before = self._step_of(args[0])
        if before is None:
            return
        if _may_be_again(func) and args[0] is output and not before.times:
            self._add(output, func, args, kwargs, known, is_changing=True)
        else:
            self._steps.pop(output.untyped_storage()._cdata, None)

    def _step_of(self, tensor: torch.Tensor) -> AttentionStep | None:
        if tensor.layout is not torch.strided:
            return None
        known = self._steps.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _argument(self, tensor: torch.Tensor) -> _Given | Made:
        step = self._step_of(tensor)
        return _Given(tensor, tensor._version) if step is None else Made(step, _View.of(tensor))

    def _pack(self, tensor: torch.Tensor) -> Any:
        step = self._step_of(tensor)
        if step is None or not step.after_softmax:
            if self._kept_as_is is not None:
                self._kept_as_is(tensor)
            return tensor
        return self.spare(step, tensor)

    def spare(self, step: AttentionStep, tensor: torch.Tensor) -> Any:
        """What autograd keeps in the place of a tensor that a step can make again."""
        step.times += 1
        return _Kept(step, _View.of(tensor))


def _unpack(kept: Any) -> torch.Tensor:
    return kept.value() if isinstance(kept, _Kept) else kept


def _may_be_again(func: Any) -> bool:
    """Whether an operator gives the same once more: those that compute a value from values."""
    return (
        (torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags)
        or func in _SOFTMAX
        or func in _COPIES
    )


def _drop(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """What `native_dropout` gave, by the mask that it drew."""
    return x * mask * scale
