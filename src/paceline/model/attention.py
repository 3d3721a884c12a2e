"""Selective recomputation: values between attention's two products are not kept for backward, but
computed again.

The operators of a forward are watched below autograd. The inside of an attention consists of the
values that elementwise operators and a softmax make from a product of two activations, and that
autograd would keep: scores, normalised scores, and scores after dropout. Instead, autograd keeps
the operators that compute such a value again from queries, keys and masks, which are kept anyway.
The user's code does not run a second time, and random numbers that were drawn are kept. Fused
attention keeps no scores, so nothing changes there.
Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
    section 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.torch_private import pytree
from paceline.torch_private.autograd import version_of
from paceline.torch_private.dispatch import OperatorMode, is_writing
from paceline.torch_private.storage import storage_key

aten = torch.ops.aten
_PRODUCTS = {aten.bmm.default, aten.baddbmm.default}
_SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
_COPIES = {aten._to_copy.default, aten.clone.default}


@dataclass(frozen=True)
class _View:
    """The layout of a tensor in its memory."""

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
    """An argument of an operator that is kept as it is."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "what an attention computes its scores from was changed in place before its backward, "
                "and recompute=selective needs it again: leave out recompute=selective, or x = x + y in "
                "place of x += y"
            )
        return self.tensor


@dataclass(frozen=True)
class Made:
    """An argument of an operator that is computed again."""

    step: AttentionStep
    view: _View


@dataclass(eq=False)
class AttentionStep:
    """The operator that last filled a piece of memory."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after_softmax: bool  # whether this operator or one before it is a softmax
    is_changing: bool  # whether it changes its first argument in place
    times: int = 0  # how often autograd keeps its result
    # The result if it was computed again already, for the next one that asks for it.
    result: torch.Tensor | None = field(default=None, repr=False)

    def value(self) -> torch.Tensor:
        """Compute the result again, unless an earlier request has done so already."""
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
    """The object that autograd keeps in place of a tensor."""

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


class Selective(OperatorMode):
    """A mode that watches the forward inside it, and the tensors that autograd keeps of that
    forward.

    `kept_as_is` is called with every tensor that autograd still keeps itself.
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

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        tensors = pytree.tensor_leaves((args, kwargs))
        known = [step for tensor in tensors if (step := self._step_of(tensor)) is not None]
        if func is aten.native_dropout.default and known and result[1].numel():
            self._add(result[0], _drop, (args[0], result[1], 1 / (1 - args[1])), {}, known)
        elif func in _PRODUCTS and not any(step.after_softmax for step in known):
            self._add(result, func, args, kwargs, [])
        elif known and isinstance(result, torch.Tensor):
            if _may_be_again(func) and not is_writing(func) and self._step_of(result) is None:
                self._add(result, func, args, kwargs, known)
            elif is_writing(func):
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
        storage, key = output.untyped_storage(), storage_key(output)

        def gone(_: Any) -> None:
            self._steps.pop(key, None)

        step = AttentionStep(func, args, kwargs, after, is_changing)
        self._steps[key] = step, weakref.ref(storage, gone)
        self.noted(step, func, original_args, output)

    def noted(
        self, step: AttentionStep, func: Callable[..., Any], args: Any, output: torch.Tensor
    ) -> None:
        """Note a step that may have to be computed again."""

    def _change(
        self, output: torch.Tensor, func: Any, args: Any, kwargs: Any, known: list[AttentionStep]
    ) -> None:
        """Note an operator that changes the memory of a step.

        The step can then be computed again only together with this operator, or not at all.
        """
        before = self._step_of(args[0])
        if before is None:
            return
        if _may_be_again(func) and args[0] is output and not before.times:
            self._add(output, func, args, kwargs, known, is_changing=True)
        else:
            self._steps.pop(storage_key(output), None)

    def _step_of(self, tensor: torch.Tensor) -> AttentionStep | None:
        if tensor.layout is not torch.strided:
            return None
        known = self._steps.get(storage_key(tensor))
        return None if known is None else known[0]

    def _argument(self, tensor: torch.Tensor) -> _Given | Made:
        step = self._step_of(tensor)
        return _Given(tensor, version_of(tensor)) if step is None else Made(step, _View.of(tensor))

    def _pack(self, tensor: torch.Tensor) -> Any:
        step = self._step_of(tensor)
        if step is None or not step.after_softmax:
            if self._kept_as_is is not None:
                self._kept_as_is(tensor)
            return tensor
        return self.spare(step, tensor)

    def spare(self, step: AttentionStep, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps in place of a tensor that a step can compute
        again.
        """
        step.times += 1
        return _Kept(step, _View.of(tensor))


def _unpack(kept: Any) -> torch.Tensor:
    return kept.value() if isinstance(kept, _Kept) else kept


def _may_be_again(func: Any) -> bool:
    """Whether an operator gives the same result again, because it only computes values from
    values.
    """
    return (
        (torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags)
        or func in _SOFTMAX
        or func in _COPIES
    )


def _drop(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the result of `native_dropout` from the mask that it drew."""
    return x * mask * scale
