"""Operators as a job calls them, with shapes in place of tensors: values that a device can time later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

MIB = 2**20
# Bytes that others touch before an operand is touched again, and over how many its copies are spread while the operator
# is timed: a core's own cache has what is near, the cache of all cores what is not far.
WINDOWS = ((MIB, 0), (4 * MIB, 4 * MIB), (16 * MIB, 16 * MIB))
FAR = 64 * MIB
UNKNOWN = ""  # of an operator that can't be called from what was noted
# Operators that wait for memory on every device.
PLAIN = frozenset(
    (
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "addcmul",
        "addcdiv",
        "lerp",
        "sqrt",
        "relu",
        "threshold_backward",
        "copy",
        "clone",
        "cat",
        "stack",
        "fill",
        "zero",
        "zeros_like",
        "ones_like",
        "new_zeros",
        "full_like",
        "_to_copy",
        "sum",
        "_foreach_add",
        "_foreach_mul",
        "_foreach_div",
        "_foreach_lerp",
        "_foreach_addcmul",
        "_foreach_addcdiv",
        "_foreach_sqrt",
        "_foreach_norm",
        "linalg_vector_norm",
        "_fused_adamw",
        "_fused_adam",
        "_fused_sgd",
    )
)


def is_plain(name: str) -> bool:
    """Whether an operator, by its name in aten, waits for memory on every device.

    >>> is_plain("add_"), is_plain("gelu")
    (True, False)
    """
    return name.rstrip("_") in PLAIN


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator is given.

    distance_bytes: that others touched since it was last touched; None in another pass, where the whole step lies
        between.
    zero_part: of its values that are zero, as far as is known; some kernels are slower for them.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    distance_bytes: float | None = None
    zero_part: float = 0.0

    @property
    def window(self) -> int:
        """Over how many bytes copies are spread."""
        return next((spread for most, spread in WINDOWS if (self.distance_bytes or 0) <= most), FAR)


@dataclass(frozen=True)
class OperatorCall:
    """One operator. arguments, options: with an `Operand` where a tensor was.

    flops, num_bytes: what it computes, and moves; by which it is priced where it can't be timed.
    made_distance_bytes: the same as an operand's, of the memory that its results come into.
    """

    operator: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    flops: float = 0.0
    num_bytes: float = 0.0
    made_distance_bytes: float | None = 0.0

    @cached_property
    def key(self) -> str:
        """What says how long it takes: shapes, and how far away memory is, roughly."""
        made = Operand((), (), "", self.made_distance_bytes).window
        return f"{self.operator}{_text(self.arguments)}{_text(self.options)}>{made >> 20}"

    def operands(self) -> Iterable[Operand]:
        return _operands((self.arguments, self.options))

    @property
    def name(self) -> str:
        """Of an operator `aten.add.Tensor`: add."""
        return self.operator.split(".")[1] if self.operator != UNKNOWN else UNKNOWN

    @property
    def is_plain(self) -> bool:
        """Whether it waits for memory."""
        return is_plain(self.name)

    def across(self, step_bytes: float) -> OperatorCall:
        """With the bytes that a step touches for what is last touched in another pass."""
        made = step_bytes if self.made_distance_bytes is None else self.made_distance_bytes
        return replace(
            self,
            arguments=_across(self.arguments, step_bytes),
            options=_across(self.options, step_bytes),
            made_distance_bytes=made,
        )


def _operands(value: Any) -> Iterable[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _operands(part)


def _across(value: Any, step_bytes: float) -> Any:
    if isinstance(value, Operand):
        return replace(value, distance_bytes=step_bytes) if value.distance_bytes is None else value
    return tuple(_across(part, step_bytes) for part in value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, Operand):
        zeros = f"z{value.zero_part}" if value.zero_part else ""
        return f"{value.dtype}{list(value.shape)}{list(value.stride)}@{value.window >> 20}{zeros}"
    return f"({','.join(map(_text, value))})" if isinstance(value, tuple) else str(value)


class NoLine(ValueError):
    """Two calls that differ in more than numbers that grow with the samples."""


def between(first: Any, second: Any, part: float) -> Any:
    """What lies on the line through two calls, or parts of them. part: 0 at the first, 1 at the second.

    Raises:
        NoLine: there is none, or it has no whole number there.

    >>> between((2, "x", Operand((2, 8), (8, 1), "float32")), (4, "x", Operand((4, 8), (8, 1), "float32")), 0.5)
    (3, 'x', Operand(shape=(3, 8), stride=(8, 1), dtype='float32', distance_bytes=None, zero_part=0.0))
    """
    if type(first) is type(second):
        if isinstance(first, Operand | OperatorCall):
            return replace(
                first,
                **{
                    f.name: between(getattr(first, f.name), getattr(second, f.name), part)
                    for f in fields(first)
                },
            )
        if isinstance(first, tuple) and len(first) == len(second):
            return tuple(
                between(begin, end, part) for begin, end in zip(first, second, strict=True)
            )
        if first == second:
            return first
        if isinstance(first, float):
            return first + part * (second - first)
        if isinstance(first, int) and not isinstance(first, bool):
            value = first + part * (second - first)
            if abs(value - round(value)) < 1e-6:
                return round(value)
    raise NoLine(f"{first} and {second}")


@dataclass(frozen=True)
class OperatorCalls:
    """Operators of some work, in their order.

    first, second: with two numbers of samples; no second where there is one number alone, whatever is asked for.
    counts: how often each is called.
    """

    first: tuple[OperatorCall, ...]
    second: tuple[OperatorCall, ...] | None = None
    samples: tuple[int, int] = (1, 1)
    counts: tuple[float, ...] = ()

    def at(self, samples: float) -> tuple[tuple[OperatorCall, float], ...]:
        """With so many samples, and how often; empty where that is not known."""
        counts = self.counts or (1.0,) * len(self.first)
        if self.second is None:
            return tuple(zip(self.first, counts, strict=True))
        part = (samples - self.samples[0]) / (self.samples[1] - self.samples[0])
        if len(self.first) != len(self.second):
            return ()
        try:
            made = [
                between(call, other, part)
                for call, other in zip(self.first, self.second, strict=True)
            ]
        except NoLine:
            return ()
        return tuple(zip(made, counts, strict=True))

    def times(self, factor: float) -> OperatorCalls:
        """As often, times a factor."""
        return replace(
            self, counts=tuple(factor * count for count in self.counts or (1.0,) * len(self.first))
        )


NO_CALLS = OperatorCalls(())
