"""Operands for operators that are timed: parts of one memory, near or far as in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.model.cost.op_calls import FAR, MIB, Operand, OperatorCall

if TYPE_CHECKING:
    import torch

LARGEST_BYTES = 2**30  # of an operator's operands
MOST_COPIES = 64
MADE_BYTES = (
    32 * MIB
)  # of results that are held, so that further ones come into memory that was not used for long


class Arena:
    """Memory that operands are parts of, all of it touched before. Values are positive and differ: kernels take other
    ways for what is equal, as pooling does, and for what has no root. An operand with zeros has memory of its own: a
    square root of zero takes five times as long as another one."""

    def __init__(self) -> None:
        self._values: dict[torch.dtype, torch.Tensor] = {}
        self._with_zeros: dict[tuple[Operand, int], torch.Tensor] = {}

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, as numbers of a type."""
        import torch

        if dtype not in self._values:
            block = torch.rand(MIB // dtype.itemsize).add_(0.1).to(dtype)
            self._values[dtype] = block.repeat(2 * FAR // MIB)
        return self._values[dtype]

    def mend(self) -> None:
        """After operators have written into it: what is neither huge nor tiny takes as long as ordinary numbers."""
        self._with_zeros.clear()
        for values in self._values.values():
            sample = values[::4097].abs()
            if not bool(((sample > 1e-6) & (sample < 1e6)).all()):
                values.uniform_(0.1, 1.1)

    def operand(self, operand: Operand, begin: int) -> torch.Tensor:
        """begin: in bytes, of where the operand is; in memory of its own if it doesn't fit there."""
        import torch

        dtype = getattr(torch, operand.dtype)
        if not dtype.is_floating_point:
            return torch.ones(operand.shape, dtype=dtype)
        values, needed = self.of(dtype), _needed(operand)
        first = begin // dtype.itemsize
        if operand.zero_part:
            if (operand, begin) not in self._with_zeros:
                block = self._with_zeros[operand, begin] = torch.full((needed,), 0.5, dtype=dtype)
                block[: round(operand.zero_part * needed)] = 0
            values, first = self._with_zeros[operand, begin], 0
        if first + needed > len(values):
            values, first = torch.full((needed,), 0.5, dtype=dtype), 0
        return values.as_strided(operand.shape, operand.stride, first)


def _needed(operand: Operand) -> int:
    """Values between an operand's first and its last."""
    return (
        1
        + sum(
            (size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True)
        )
        if all(operand.shape)
        else 0
    )


def _num_bytes(operand: Operand) -> int:
    import torch

    return _needed(operand) * int(getattr(torch, operand.dtype).itemsize)


def prepared(call: OperatorCall, arena: Arena) -> tuple[Callable[[], object], int]:
    """What calls it, each time with other copies of those operands that are far away; and bytes of the results that it
    holds.

    Raises:
        Exception: it can't be called so.
    """
    import torch

    namespace, name, overload = call.operator.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    operands = list(call.operands())
    if sum(map(_num_bytes, operands)) > LARGEST_BYTES:
        raise MemoryError(call.operator)
    sizes = [-(-_num_bytes(operand) // 64) * 64 for operand in operands]
    near_bytes = sum(
        size for operand, size in zip(operands, sizes, strict=True) if not operand.window
    )
    far_bytes = max(
        64, sum(size for operand, size in zip(operands, sizes, strict=True) if operand.window)
    )
    places, ends = (
        [],
        {True: 0, False: near_bytes},
    )  # near operands come first, then copies of all others together
    for operand, size in zip(operands, sizes, strict=True):
        places.append(ends[not operand.window])
        ends[not operand.window] += size
    spread = [
        max(1, min(MOST_COPIES, operand.window // far_bytes, (2 * FAR - near_bytes) // far_bytes))
        for operand in operands
    ]
    strides = [max(far_bytes, operand.window // MOST_COPIES // 64 * 64) for operand in operands]
    most = _most_index(name, call)
    fixed = {
        k: torch.randint(most, operand.shape, dtype=getattr(torch, operand.dtype))
        for k, operand in enumerate(operands)
        if operand.dtype in ("int64", "int32")
    }

    def made(copy: int) -> tuple[list[Any], dict[str, Any]]:
        tensors = iter(
            [
                fixed[k]
                if k in fixed
                else arena.operand(operand, places[k] + copy % spread[k] * strides[k])
                for k, operand in enumerate(operands)
            ]
        )
        return [_given(a, tensors) for a in call.arguments], {
            key: _given(a, tensors) for key, a in call.options
        }

    if name == "mkldnn_rnn_layer_backward":
        return _layer_backward(made(0)[0]), 0
    copies = deque(made(copy) for copy in range(max(spread, default=1)))
    results: deque[Any] = deque(maxlen=1)

    def again() -> None:
        copies.rotate(-1)
        arguments, options = copies[0]
        results.append(operator(*arguments, **options))

    again()
    made_bytes = _made_bytes(results[0])
    window = Operand((), (), "", call.made_distance_bytes).window
    if kept := min(MOST_COPIES, min(window, MADE_BYTES) // made_bytes if made_bytes else 0):
        results = deque((torch.full((made_bytes // 4 + 1,), 0.5) for _ in range(kept)), maxlen=kept)
    return again, max(1, kept) * made_bytes


def _layer_backward(arguments: list[Any]) -> Callable[[], object]:
    """Of a recurrent layer: it needs what its forward left behind."""
    import torch

    (x, *weights), (hx, cx) = arguments[:5], arguments[5:7]
    *gradients, reverse, mode, size, layers, biases, train, two_ways, sizes, batch_first, _ = (
        arguments[10:]
    )
    with torch.enable_grad():  # else it leaves nothing
        y, hy, cy, left = torch.ops.aten.mkldnn_rnn_layer.default(
            x,
            *weights,
            hx,
            cx,
            reverse,
            sizes,
            mode,
            size,
            layers,
            biases,
            two_ways,
            batch_first,
            train,
        )
    return lambda: torch.ops.aten.mkldnn_rnn_layer_backward.default(
        x,
        *weights,
        hx,
        cx,
        y,
        hy,
        cy,
        *gradients,
        reverse,
        mode,
        size,
        layers,
        biases,
        train,
        two_ways,
        sizes,
        batch_first,
        left,
    )


def _made_bytes(result: Any) -> int:
    import torch

    if isinstance(result, torch.Tensor):
        return result.nbytes
    return sum(map(_made_bytes, result)) if isinstance(result, tuple | list) else 0


def _given(value: Any, tensors: Any) -> Any:
    import torch

    if isinstance(value, Operand):
        return next(tensors)
    if isinstance(value, tuple):
        return [_given(part, tensors) for part in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _most_index(name: str, call: OperatorCall) -> int:
    """Above the numbers in tensors of whole numbers: rows of a table, or classes. 0 fits everywhere."""
    operands = list(call.operands())
    if name == "embedding":
        return operands[0].shape[0]
    if name == "embedding_dense_backward":
        return int(call.arguments[2])
    if name in ("nll_loss_forward", "nll_loss_backward"):
        return operands[name == "nll_loss_backward"].shape[1]
    return 1
