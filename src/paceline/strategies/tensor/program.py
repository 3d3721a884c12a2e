"""The program of one rank for a split piece: operators on its own parts, and exchanges, recorded as
plain Python.

A recording runs on fake tensors, so that it computes and sends nothing. The resulting program runs
eagerly under ordinary autograd. Its host time is that of the operators.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.draws import apart
from paceline.strategies.tensor.exchange import Exchanges, Move, Placement, Sum, not_in_parts
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import OpOverload, is_composite, is_writing, schema_of
from paceline.torch_private.fake_tensors import FakeTensorMode

aten = torch.ops.aten
# Products, with the position of the multiplied input among their arguments. They and their
# gradients make new tensors, and their gradients don't need the result.
_PRODUCTS: dict[Any, int] = {
    aten.linear.default: 0,
    aten.mm.default: 0,
    aten.matmul.default: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
}
# Composite operators that make new tensors. Others, such as dropout, may return their input.
_NEW = {*_PRODUCTS, aten.layer_norm.default, aten.rms_norm.default}
Program = Callable[..., tuple[torch.Tensor, ...]]  # from inputs to outputs on this rank's parts


@dataclass(frozen=True)
class Ref:
    """A reference to the result of an instruction, or to an input."""

    number: int


@dataclass(frozen=True)
class Instruction:
    """One call. Its args and kwargs contain refs in place of tensors."""

    out: Ref
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def refs(self) -> list[Ref]:
        return [
            leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)
        ]


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor of a recording."""

    ref: Ref
    local: torch.Tensor  # this rank's part, as a fake tensor
    placement: Placement
    ranks: int  # number of ranks over which it is placed
    trained: bool  # whether it may get a gradient

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        if not isinstance(self.placement, Cut):
            return tuple(self.local.shape)
        return tuple(
            length * self.ranks if dim == self.placement.dim else length
            for dim, length in enumerate(self.local.shape)
        )

    @property
    def ndim(self) -> int:
        return self.local.ndim


class ProgramRecorder:
    """Records a program while its operators run on fake tensors."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs: list[Ref] = []
        self.weights: dict[Ref, torch.dtype] = {}  # the inputs that are weights
        self.instructions: list[Instruction] = []
        self._count = 0
        self._moved: dict[tuple[Ref, Placement], Placed] = {}
        self._summing: dict[Ref, Ref] = {}  # by whole value: the same value with a summed gradient

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def input(
        self, local: torch.Tensor, placement: Placement, *, trained: bool, is_weight: bool = False
    ) -> Placed:
        ref = self._ref()
        self.inputs.append(ref)
        if is_weight:
            self.weights[ref] = local.dtype
        return self._placed(ref, local, placement, trained=trained)

    def constant(self, tensor: torch.Tensor) -> Placed:
        """Record a tensor that is the same in every run."""
        return self._placed(
            self._add(lambda: tensor, (), {}), self.fake_of(tensor), None, trained=False
        )

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def run(
        self,
        target: Callable[..., Any],
        *args: Any,
        placement: Placement = None,
        draws: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Record an operator on each rank's parts.

        placement: of the results. draws: whether ranks draw separately.
        """
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.constant, (args, kwargs))
        with self.fake, torch.no_grad():
            result = target(*_locals(args), **_locals(kwargs))
        return self.add(target, args, kwargs, result, lambda tensor: placement, draws=draws)

    def add(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        placement_of: Callable[[torch.Tensor], Placement],
        *,
        draws: bool = False,
    ) -> Any:
        """Record an operator with these fake results. draws: whether each rank draws its own random
        numbers.

        Raises:
            PlanRefused: some of its results are whole and some are parts, so that the gradients of
                its inputs would be neither; or it makes whole results of parts.
        """
        placed = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Placed)]
        trained = any(value.trained for value in placed)
        results = pytree.tensor_leaves(result)
        whole = {
            placement_of(leaf) is None
            for leaf in results
            if leaf.is_floating_point() or leaf.is_complex()
        }
        if trained and len(whole) > 1:
            raise not_in_parts(f"{target} gives whole tensors and parts")
        if trained and False in whole:
            refs = pytree.tree_map_only(Placed, self._with_summed_gradient, (args, kwargs))
        elif (
            trained
            and any(value.placement is not None and value.trained for value in placed)
            and whole
        ):
            raise not_in_parts(f"{target} makes whole tensors of parts")
        else:
            refs = pytree.tree_map_only(Placed, lambda value: value.ref, (args, kwargs))
        if is_writing(target):
            self._moved.clear()
        if draws:
            target = drawing_apart(target, self.exchanges.rank, placed[0].local.device)
        return self._results(self._add(target, *refs), result, placement_of, trained)

    def _results(
        self,
        ref: Ref,
        result: Any,
        placement_of: Callable[[torch.Tensor], Placement],
        trained: bool,
    ) -> Any:
        if isinstance(result, torch.Tensor):
            can = result.is_floating_point() or result.is_complex()
            return self._placed(ref, result, placement_of(result), trained=trained and can)
        if isinstance(result, list | tuple):
            return type(result)(
                self._results(
                    self._add(operator.getitem, (ref, number), {}), item, placement_of, trained
                )
                if isinstance(item, torch.Tensor)
                else item
                for number, item in enumerate(result)
            )
        return result

    def moved(self, value: Placed, placement: Placement) -> Placed:
        """Record the move of a value to a placement.

        Raises:
            PlanRefused: there is no such exchange, or the dim doesn't divide.
        """
        if value.placement == placement:
            return value
        if (value.ref, placement) not in self._moved:
            size = self.exchanges.size
            if isinstance(placement, Cut) and not placement.divides(
                value.shape[placement.dim], size
            ):
                raise not_in_parts(
                    f"{tuple(value.shape)} doesn't divide by {size} along dim {placement.dim}"
                )
            move = self.exchanges.between(value.placement, placement)
            shape: Sequence[int] = value.shape
            if isinstance(placement, Cut):
                shape = placement.part_shape(shape, size)
            local = self.empty(shape, value.local)
            self._moved[value.ref, placement] = self._placed(
                self._add(move, (value.ref,), {}), local, placement, trained=value.trained
            )
        return self._moved[value.ref, placement]

    def _with_summed_gradient(self, value: Placed) -> Ref:
        """Return a value for use with parts.

        The gradient of a whole value is summed; see `exchange.py`.
        """
        if value.placement is not None or not value.trained:
            return value.ref
        if value.ref not in self._summing:
            self._summing[value.ref] = self._add(
                self.exchanges.summing_gradients(), (value.ref,), {}
            )
        return self._summing[value.ref]

    def _placed(
        self, ref: Ref, local: torch.Tensor, placement: Placement, *, trained: bool
    ) -> Placed:
        return Placed(ref, local, placement, self.exchanges.size, trained)

    def _ref(self) -> Ref:
        self._count += 1
        return Ref(self._count)

    def _add(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Ref:
        ref = self._ref()
        self.instructions.append(Instruction(ref, target, tuple(args), dict(kwargs)))
        return ref

    # --- The program ------------------------------------------------------------------------------

    def program(self, outputs: Sequence[Placed]) -> Program:
        self._scatter_gathered_gradients()
        self._sum_in_place(outputs)
        self._sum_weights_gradients_together()
        return _as_function(self.inputs, self.instructions, [output.ref for output in outputs])

    def _scatter_gathered_gradients(self) -> None:
        """Scatter the summed gradients of values that are gathered only for use with parts, in one
        exchange."""
        users = Counter(ref for instruction in self.instructions for ref in instruction.refs())
        gathered = {
            instruction.out: instruction
            for instruction in self.instructions
            if isinstance(instruction.target, Move)
            and isinstance(instruction.target.before, Cut)
            and instruction.target.after is None
            and users[instruction.out] == 1
        }
        fused = {
            ref: gathered[source] for source, ref in self._summing.items() if source in gathered
        }
        dropped = {gather.out for gather in fused.values()}
        self.instructions = [
            instruction
            if instruction.out not in fused
            else replace(
                fused[instruction.out],
                out=instruction.out,
                target=self.exchanges.gather_summing_gradients(
                    fused[instruction.out].target.before  # type: ignore[attr-defined]
                ),
            )
            for instruction in self.instructions
            if instruction.out not in dropped
        ]

    def _sum_in_place(self, outputs: Sequence[Placed]) -> None:
        """Sum in place the results of products, and the gradients of values that only products
        use."""
        made = {instruction.out: instruction for instruction in self.instructions}
        users: dict[Ref, list[Instruction | None]] = {output.ref: [None] for output in outputs}
        for instruction in self.instructions:
            for ref in instruction.refs():
                users.setdefault(ref, []).append(instruction)

        def in_place(instruction: Instruction) -> Instruction:
            target = instruction.target
            if isinstance(target, Move) and (target.before, target.after) == (Sum(), None):
                source = instruction.args[0]
                if source in made and made[source].target in _PRODUCTS and len(users[source]) == 1:
                    return replace(instruction, target=self.exchanges.sum_in_place)
            if instruction.out in summing and all(
                user is not None
                and user.target in _PRODUCTS
                and [position for position, arg in enumerate(user.args) if arg == instruction.out]
                == [_PRODUCTS[user.target]]
                for user in users.get(instruction.out, [None])
            ):
                source = instruction.args[0]
                if (
                    source in made
                    and _makes_new(made[source].target)
                    and users[source] == [instruction]
                ):
                    return replace(instruction, target=self.exchanges.hook_summing_gradients)
                return replace(instruction, target=self.exchanges.summing_gradients(in_place=True))
            return instruction

        summing = {
            ref
            for ref in self._summing.values()
            if ref in made
            and isinstance(made[ref].target, Move)
            and made[ref].target.before is None  # type: ignore[attr-defined]
        }
        self.instructions = list(map(in_place, self.instructions))

    def _sum_weights_gradients_together(self) -> None:
        """Sum the gradients of whole weights that are used with parts, in one message per dtype."""
        kinds: dict[torch.dtype, list[Ref]] = {}
        for ref in self._summing:
            if ref in self.weights:
                kinds.setdefault(self.weights[ref], []).append(ref)
        first: list[Instruction] = []
        replaced: set[Ref] = set()
        for refs in kinds.values():
            together = self._ref()
            first.append(Instruction(together, self.exchanges.sum_all_gradients, tuple(refs), {}))
            for number, ref in enumerate(refs):
                replaced.add(self._summing[ref])
                first.append(
                    Instruction(self._summing[ref], operator.getitem, (together, number), {})
                )
        self.instructions = [
            *first,
            *(made for made in self.instructions if made.out not in replaced),
        ]


def _makes_new(target: Callable[..., Any]) -> bool:
    """Whether an operator returns one new tensor, which is neither an argument nor a view of
    one."""
    if not isinstance(target, OpOverload):
        return False
    returns = schema_of(target).returns
    return (
        len(returns) == 1
        and returns[0].alias_info is None
        and (target in _NEW or not is_composite(target))
    )


def drawing_apart(
    target: Callable[..., Any], rank: int, device: torch.device
) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with apart(rank, device):
            return target(*args, **kwargs)

    return drawn


def _as_function(
    inputs: Sequence[Ref], instructions: Sequence[Instruction], outputs: Sequence[Ref]
) -> Program:
    """Return a function from inputs to outputs on this rank's parts.

    A value is freed after its last use.
    """
    used = set(outputs)
    lines: list[str] = []
    names: dict[str, Any] = {}
    for instruction in reversed(instructions):
        refs = set(instruction.refs())
        if done := sorted(ref.number for ref in refs - used):
            lines.append(f"del {', '.join(f'v{number}' for number in done)}")
        if instruction.out not in used:  # it runs only for its changes in place, if any
            lines.append(f"del v{instruction.out.number}")
        used |= refs
        function = f"f{instruction.out.number}"
        names[function] = instruction.target
        arguments = [_source(arg, names) for arg in instruction.args]
        arguments += [f"{name}={_source(arg, names)}" for name, arg in instruction.kwargs.items()]
        lines.append(f"v{instruction.out.number} = {function}({', '.join(arguments)})")
    lines = [
        f"def run({', '.join(f'v{ref.number}' for ref in inputs)}):",
        *reversed(lines),
        f"return ({''.join(f'v{ref.number}, ' for ref in outputs)})",
    ]
    exec(compile("\n    ".join(lines), "<split layer>", "exec"), names)
    run: Program = names["run"]
    return run


def _source(arg: Any, names: dict[str, Any]) -> str:
    """Return an argument as Python source.

    An argument without a short form is added to the names.
    """
    if isinstance(arg, Ref):
        return f"v{arg.number}"
    if isinstance(arg, list | tuple) and not hasattr(arg, "_fields"):
        items = "".join(f"{_source(item, names)}, " for item in arg)
        return f"[{items}]" if isinstance(arg, list) else f"({items})"
    if arg is None or type(arg) in (bool, int):
        return repr(arg)
    if any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(arg)):
        raise not_in_parts(f"an operator takes tensors in a {type(arg).__name__}")
    names[f"c{len(names)}"] = arg
    return f"c{len(names) - 1}"


def _locals(values: Any) -> Any:
    return pytree.tree_map_only(Placed, lambda value: value.local, values)
