"""Equal blocks of a model: while a step is traced, one of each kind runs, and later calls return stand-ins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from paceline.model.attributes import OF_TORCH
from paceline.model.cost.layer_index import numbers, watched
from paceline.torch_private.modules import has_hooks, own_tensors
from paceline.torch_private.pytree import (
    TreeSpec,
    tensor_leaves,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from paceline.torch_private.storage import key_of, storage_key

_SCALARS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)
DEEPEST = (
    4  # levels of objects in objects that are compared; below them only the same object is alike
)
FEWEST = 3  # blocks of a kind, from which on some are not run


def alike_blocks(units: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each unit the first one of the same kind.

    Units are of one kind that have the same class, and so have the modules inside, parameters of the same shapes, and
    equal attributes. A module's whole number may grow along with the unit's place in its list, as the number of a layer
    does, and so may the part of a path, also one that an adapter keeps in a dict.
    Units with hooks are of no other's kind. A kind with fewer than three units is none.
    """
    known: list[tuple[str, list[tuple[Any, ...]]]] = []
    first_of: dict[str, str] = {}
    for name, unit in units.items():
        description = _description(unit)
        same = next(
            (
                first
                for first, other in known
                if _is_alike(description, _place(name), other, _place(first))
            ),
            name,
        )
        if same == name:
            known.append((name, description))
        first_of[name] = same
    sizes = {first: sum(other == first for other in first_of.values()) for first, _ in known}
    return {name: first if sizes[first] >= FEWEST else name for name, first in first_of.items()}


def unit_of(name: str, units: Container[str]) -> str:
    """The unit in whose module a parameter is; "" for the root.

    >>> unit_of("layers.10.norm.weight", ["layers.1", "layers.10"]), unit_of("head.weight", ["layers.1"])
    ('layers.10', '')
    """
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name


def _place(name: str) -> int:
    last = name.rpartition(".")[2]
    return int(last) if last.isdigit() else 0


def _description(unit: nn.Module) -> list[tuple[Any, ...]]:
    facts: list[tuple[Any, ...]] = []
    for path, module in unit.named_modules(remove_duplicate=False):
        facts.append((path, type(module), module.training))
        if has_hooks(module):
            facts.append((path, "hooks", id(module)))
        facts += [
            (path, name, tuple(t.shape), t.dtype, t.requires_grad, type(t))
            for _, name, t in own_tensors(module)
        ]
        facts += [
            (path, name, value) for name, value in vars(module).items() if name not in OF_TORCH
        ]
    return facts


def _is_alike(
    facts: Sequence[tuple[Any, ...]], place: int, other: Sequence[tuple[Any, ...]], other_place: int
) -> bool:
    return len(facts) == len(other) and all(
        len(fact) == len(other_fact)
        and all(_is_same(a, place, b, other_place) for a, b in zip(fact, other_fact, strict=True))
        for fact, other_fact in zip(facts, other, strict=True)
    )


def _is_same(value: Any, place: int, other: Any, other_place: int, depth: int = 0) -> bool:
    """Whether two attributes are equal, or whole numbers that differ as their units' places do."""
    if value is other:
        return True
    if type(value) is not type(other) or depth > DEEPEST:
        return False

    def inside(a: Any, b: Any) -> bool:
        return _is_same(a, place, b, other_place, depth + 1)

    if type(value) is int:
        return bool(value == other or (depth == 0 and value - place == other - other_place))
    if type(value) is str and value != other:  # the path of a module, maybe
        parts, others = value.split("."), other.split(".")
        return len(parts) == len(others) and all(
            part == other_part or (part, other_part) == (str(place), str(other_place))
            for part, other_part in zip(parts, others, strict=True)
        )
    if isinstance(value, _SCALARS):
        return bool(value == other)
    if isinstance(value, torch.Tensor):
        return (
            value.shape == other.shape
            and value.dtype == other.dtype
            and value.requires_grad == other.requires_grad
        )
    if isinstance(value, Mapping):
        return list(value) == list(other) and all(inside(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(inside, value, other))
    if isinstance(value, set | frozenset):
        return bool(value == other)
    if isinstance(value, MethodType):
        return value.__func__ is other.__func__ and (
            isinstance(value.__self__, nn.Module) or inside(value.__self__, other.__self__)
        )
    if isinstance(value, partial):
        return all(
            map(
                inside,
                (value.func, value.args, value.keywords),
                (other.func, other.args, other.keywords),
            )
        )
    if isinstance(value, FunctionType | type | nn.Module) or not hasattr(value, "__dict__"):
        return False
    return inside(vars(value), vars(other))


@dataclass(frozen=True)
class BlockInputs:
    """What a block was called with, apart from values."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    modes: tuple[Any, ...]

    @classmethod
    def of(cls, values: Any) -> BlockInputs:
        leaves, spec = tree_flatten(values)
        seen: dict[int, int] = {}
        described = tuple(
            (
                tuple(leaf.shape),
                leaf.stride(),
                leaf.dtype,
                leaf.device,
                leaf.requires_grad,
                seen.setdefault(id(leaf), number),
            )
            if isinstance(leaf, torch.Tensor)
            else leaf
            for number, leaf in enumerate(leaves)
        )
        return cls(spec, described, (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    def is_like(self, other: BlockInputs) -> bool:
        return (
            self.modes == other.modes
            and self.spec == other.spec
            and all(
                leaf is other_leaf
                or (
                    type(leaf) is type(other_leaf)
                    and isinstance(leaf, (*_SCALARS, tuple))
                    and leaf == other_leaf
                )
                for leaf, other_leaf in zip(self.leaves, other.leaves, strict=True)
            )
        )


@dataclass(frozen=True)
class BlockOutput:
    """A tensor that a block returned. source: which of its inputs it is; -1 if it is new."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool
    source: int


@dataclass
class Run:
    """A call that was traced.

    made: None where a call like it can't be stood in for. storages: of its inputs.
    """

    module: nn.Module
    inputs: BlockInputs
    segment: int
    made: tuple[Any, ...] | None
    spec: TreeSpec
    storages: tuple[weakref.ref[Any] | None, ...]
    holds: tuple[bool, ...] | None = None


class CalledAgain(RuntimeError):
    """A block that others are like is called more than once in a step: none of its calls stands for a whole block."""


class NotStoodFor(RuntimeError):
    """A block was traced that others which were left out of the model should be like."""


@dataclass
class Repeats:
    """Calls of blocks that were not traced, in one step of a model.

    units: by name; without any nothing is stood in for. segment: tells which segment of the step runs.
    stand_in: makes what a call like a traced one returns. is_once: whether a second call of a block is an error; else
        it is traced.
    traced_of: for each segment that a stand-in took, the traced one. members: for each unit that was stood in for, the
        traced one.
    """

    units: Mapping[str, nn.Module]
    segment: Callable[[], int]
    stand_in: Callable[[str, nn.Module, Run, tuple[Any, ...], dict[str, Any]], Any] = field(
        default_factory=lambda: _stand_in
    )
    is_once: bool = True
    traced_of: dict[int, int] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)
    _first_of: dict[str, str] = field(init=False)
    _called: set[str] = field(default_factory=set)
    _runs: dict[str, list[Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._first_of = alike_blocks(self.units)

    @property
    def kinds(self) -> dict[str, list[str]]:
        """For each traced unit those that were not run."""
        kinds: dict[str, list[str]] = {}
        for name, traced in self.members.items():
            kinds.setdefault(traced, []).append(name)
        return kinds

    def traced(self, parameter: str) -> str:
        """The parameter of a traced unit that stands for this one; itself if it was there."""
        unit = unit_of(parameter, self.members)
        return f"{self.members[unit]}{parameter.removeprefix(unit)}" if unit else parameter

    def stand_for(self, units: Mapping[str, str]) -> None:
        """Count units as stood in for that were left out of the model. units: for each one that was stood in for.

        Raises:
            NotStoodFor: that one was traced.
        """
        if traced := [unit for unit in units.values() if unit not in self.members]:
            raise NotStoodFor(traced[0])
        self.members |= {unit: self.members[other] for unit, other in units.items()}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """While this is entered, blocks that are alike run once for each kind of inputs."""
        names = {id(unit): name for name, unit in self.units.items()}
        repeated = {first for name, first in self._first_of.items() if first != name}
        folded = [(name, first) for name, first in self._first_of.items() if first in repeated]
        numbers_of = {
            first: numbers(
                self.units[first], [self.units[name] for name, other in folded if other == first]
            )
            for first in repeated
        }
        before = {name: vars(self.units[name]).get("forward") for name, _ in folded}
        for known in (self.traced_of, self.members, self._called, self._runs):
            known.clear()
        for name, first in folded:
            self.units[name].forward = self._forward(
                self.units[name], name, first, names, numbers_of[first]
            )
        try:
            yield
        finally:
            for name, forward in before.items():
                if forward is None:
                    del self.units[name].forward
                else:
                    self.units[name].forward = forward

    def _forward(
        self,
        unit: nn.Module,
        name: str,
        first: str,
        names: Mapping[int, str],
        numbers: Sequence[tuple[str, str]],
    ) -> Callable[..., Any]:
        """numbers: see `watched`."""
        forward = unit.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            if name in self._called:
                if self.is_once:
                    raise CalledAgain(name)
                return forward(*args, **kwargs)
            self._called.add(name)
            inputs, runs = BlockInputs.of((args, kwargs)), self._runs.setdefault(first, [])
            for run in runs:
                if run.module is not unit and run.made is not None and run.inputs.is_like(inputs):
                    self.traced_of[self.segment()] = run.segment
                    self.members[name] = names[id(run.module)]
                    return self.stand_in(name, unit, run, args, kwargs)
            segment, attributes = self.segment(), _attributes(unit)
            with watched(unit, numbers) as seen:
                returned = forward(*args, **kwargs)
            runs.append(
                _traced(
                    unit,
                    inputs,
                    segment,
                    tree_leaves((args, kwargs)),
                    returned,
                    is_alone=bool(seen) or attributes != _attributes(unit),
                )
            )
            return returned

        return called


def _attributes(unit: nn.Module) -> list[tuple[str, int]]:
    """What is in the attributes of its modules: a block that leaves something there is read by others."""
    return [
        (name, id(value))
        for module in unit.modules()
        for name, value in vars(module).items()
        if name not in OF_TORCH
    ]


def _traced(
    unit: nn.Module,
    inputs: BlockInputs,
    segment: int,
    arguments: Sequence[Any],
    returned: Any,
    *,
    is_alone: bool,
) -> Run:
    """is_alone: whether others that are called so may do something else, or something is known of it alone."""
    leaves, spec = tree_flatten(returned)
    memory = set(map(storage_key, tensor_leaves(arguments)))
    made: list[Any] | None = [] if not is_alone else None
    for leaf in leaves:
        if made is None or not isinstance(leaf, (torch.Tensor, *_SCALARS)):
            made = None
            break
        if not isinstance(leaf, torch.Tensor):
            made.append(leaf)
            continue
        source = next((number for number, other in enumerate(arguments) if other is leaf), -1)
        if source < 0 and storage_key(leaf) in memory:  # a view of what it was given
            made = None
            break
        made.append(
            BlockOutput(
                tuple(leaf.shape),
                leaf.stride(),
                leaf.dtype,
                leaf.device,
                leaf.requires_grad,
                source,
            )
        )
    storages = tuple(
        weakref.ref(leaf.untyped_storage()) if isinstance(leaf, torch.Tensor) else None
        for leaf in arguments
    )
    return Run(unit, inputs, segment, None if made is None else tuple(made), spec, storages)


def _stand_in(
    path: str, unit: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a traced call returned, made anew without computing."""
    assert run.made is not None
    input_leaves = tree_leaves((args, kwargs))
    taken = tensor_leaves(input_leaves)
    input_storages = set(map(storage_key, taken))
    if (
        run.holds is None
    ):  # an input that is still alive, though the model has gone on to the next one, is kept
        run.holds = tuple(
            ref is not None
            and (storage := ref()) is not None
            and key_of(storage) not in input_storages
            for ref in run.storages
        )
    fresh = [output for output in run.made if isinstance(output, BlockOutput) and output.source < 0]
    is_kept = [
        keeps
        for keeps, leaf in zip(run.holds, input_leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    weight = torch.empty(0, requires_grad=any(output.differentiable for output in fresh))
    made = iter(_Repeated.apply(fresh, is_kept, weight, *taken) if fresh else ())
    return returned(run, input_leaves, made)


def returned(run: Run, input_leaves: Sequence[Any], made: Iterator[torch.Tensor]) -> Any:
    """What a call like a traced one returns. input_leaves: its inputs, flat. made: its new tensors."""
    assert run.made is not None
    leaves = [
        (next(made) if leaf.source < 0 else input_leaves[leaf.source])
        if isinstance(leaf, BlockOutput)
        else leaf
        for leaf in run.made
    ]
    return tree_unflatten(leaves, run.spec)


class _Repeated(torch.autograd.Function):
    """Stands for a block in autograd's graph: keeps of its inputs what the block keeps, and gives gradients of them.

    weight: stands for its parameters, so that a gradient comes back though no input has one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        made: Sequence[BlockOutput],
        is_kept: Sequence[bool],
        weight: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.save_for_backward(
            *(tensor for tensor, keeps in zip(inputs, is_kept, strict=True) if keeps)
        )
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        outputs = tuple(
            torch.empty_strided(
                output.shape, output.stride, dtype=output.dtype, device=output.device
            )
            for output in made
        )
        ctx.mark_non_differentiable(
            *(
                tensor
                for tensor, output in zip(outputs, made, strict=True)
                if not output.differentiable
            )
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (
            None,
            None,
            None,
            *(
                torch.empty(shape, dtype=dtype, device=device) if needs else None
                for (shape, dtype, device), needs in zip(
                    ctx.shapes, ctx.needs_input_grad[3:], strict=True
                )
            ),
        )
