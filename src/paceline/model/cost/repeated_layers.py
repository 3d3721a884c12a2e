"""Long lists of equal blocks that hand a value on: the model without most of them costs what shows the cost of all.

A forward in which no block is computed twice shows which lists are chains, and a forward of the shortened model shows
that it does the same around them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.model.cost.blocks import BlockInputs, BlockOutput, Repeats, Run, returned
from paceline.torch_private.dispatch import OperatorMode
from paceline.torch_private.modules import own_modules, set_own_modules
from paceline.torch_private.pytree import tensor_leaves, tree_leaves

LONGEST_PERIOD = 6  # kinds of blocks that take turns
KEPT_PERIODS = 2  # beside the first blocks, which differ in what they are given
FEWEST_LEFT_OUT = 8  # blocks: below this, finding out takes longer than it spares


@dataclass(frozen=True)
class Chain:
    """A list whose last blocks are alike, or take turns, and each of which only hands on what the one before made.

    path: of the list. total, kept: its blocks, and the first of them that show what all cost. period: after so many
        blocks the next one of a kind comes.
    """

    path: str
    total: int
    kept: int
    period: int

    def unit(self, number: int) -> str:
        """The name of a block."""
        return f"{self.path}.{number}" if self.path else str(number)

    @property
    def stand_ins(self) -> dict[str, str]:
        """For each block that is left out the one in the last period kept that is like it."""
        first = self.kept - self.period
        return {
            self.unit(number): self.unit(first + (number - first) % self.period)
            for number in range(self.kept, self.total)
        }


def left_out(chains: Iterable[Chain]) -> dict[str, str]:
    """Blocks that are left out, each with one that is like it and is not."""
    return {unit: other for chain in chains for unit, other in chain.stand_ins.items()}


@contextmanager
def shortened(model: nn.Module, chains: Sequence[Chain]) -> Iterator[None]:
    """While this is entered, the lists of a model have only the blocks that are kept."""
    lists = [model.get_submodule(chain.path) for chain in chains]
    blocks = [own_modules(container) for container in lists]
    try:
        for chain, container, modules in zip(chains, lists, blocks, strict=True):
            set_own_modules(container, dict(list(modules.items())[: chain.kept]))
        yield
    finally:
        for container, modules in zip(lists, blocks, strict=True):
            set_own_modules(container, modules)


def find_chains(
    model: nn.Module,
    units_of: Callable[[nn.Module], Mapping[str, nn.Module]],
    run: Callable[[], Any],
) -> tuple[Chain, ...]:
    """
    Args:
        units_of: Finds the blocks of a model, by name.
        run: Runs the model, and what follows it, on fake tensors.
    """
    units = units_of(model)
    lists = _long_lists(model, units)
    if not lists:
        return ()
    whole = _Course.of(units, run)
    chains = tuple(
        chain for path, count in lists.items() if (chain := whole.chain(path, count)) is not None
    )
    if not chains:
        return ()
    with shortened(model, chains):
        short = _Course.of(units_of(model), run)
    return (
        chains
        if short.is_like(whole.without({unit for chain in chains for unit in chain.stand_ins}))
        else ()
    )


def _long_lists(model: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, int]:
    """Paths of lists all of whose modules are units, with their number, where some might be left out."""
    return {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > KEPT_PERIODS + FEWEST_LEFT_OUT
        and all(
            (f"{path}.{number}" if path else str(number)) in units for number in range(len(module))
        )
    }


@dataclass
class _BlockCall:
    """step: its place in the course. sources: for each tensor that a block is given, which output of the block before
    it is, or what other tensor. is_kept: whether somebody holds on to an output that the next block was done with."""

    step: int
    inputs: BlockInputs
    sources: tuple[tuple[str, int], ...]
    outputs: tuple[weakref.ref[torch.Tensor], ...] = ()
    is_kept: bool = False


@dataclass
class _Course:
    """What a forward does, in order: the blocks that it calls, and the operators around them with their shapes."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    calls: dict[str, _BlockCall] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)  # of each block that was not computed
    others: list[torch.Tensor] = field(
        default_factory=list
    )  # held, so that no other tensor gets their number
    inside: str = ""  # the block that runs

    @classmethod
    def of(cls, units: Mapping[str, nn.Module], run: Callable[[], Any]) -> _Course:
        course, repeats = cls(), Repeats(units, lambda: 0, _made_anew)
        handles = [
            handle
            for name, unit in units.items()
            for handle in (
                unit.register_forward_pre_hook(course._enter(name), with_kwargs=True),
                unit.register_forward_hook(course._leave(name)),
            )
        ]
        try:
            with torch.no_grad(), _Operators(course), repeats.standing_in():
                run()
        finally:
            for handle in handles:
                handle.remove()
        course.others.clear()
        course.kinds = dict(repeats.members)
        return course

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            *earlier, before = [None, None, *self.calls.values()][-2:]
            if earlier[0] is not None:
                earlier[0].is_kept = any(ref() is not None for ref in earlier[0].outputs)
            handed_on = [ref() for ref in before.outputs] if before is not None else []
            sources: list[tuple[str, int]] = []
            for leaf in tensor_leaves((args, kwargs)):
                place = next(
                    (number for number, tensor in enumerate(handed_on) if tensor is leaf), None
                )
                if place is None:
                    self.others.append(leaf)
                sources.append(("other", id(leaf)) if place is None else ("before", place))
            self.calls[name] = _BlockCall(
                len(self.steps), BlockInputs.of((args, kwargs)), tuple(sources)
            )
            self.steps.append(("block", name))
            self.inside = name

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            inputs = {id(leaf) for leaf in tree_leaves(args)}
            self.calls[name].outputs = tuple(
                weakref.ref(leaf) for leaf in tensor_leaves(output) if id(leaf) not in inputs
            )
            self.inside = ""

        return hook

    def chain(self, path: str, count: int) -> Chain | None:
        """With the fewest blocks kept."""
        chains = [
            Chain(path, count, kept, period)
            for period in range(1, LONGEST_PERIOD + 1)
            if count - (kept := self._kept(path, count, period)) >= FEWEST_LEFT_OUT
        ]
        return min(chains, key=lambda chain: chain.kept, default=None)

    def _kept(self, path: str, count: int, period: int) -> int:
        chain = Chain(path, count, count, period)
        start = count
        while start > period and self._goes_on(chain, start - 1):
            start -= 1
        kept = min(count, start + KEPT_PERIODS * period)
        return kept + (count - kept) % period

    def _goes_on(self, chain: Chain, number: int) -> bool:
        """Whether a block does after the one before it what the one of a period earlier did."""
        names = [chain.unit(number), chain.unit(number - 1), chain.unit(number - chain.period)]
        if not all(name in self.calls for name in names) or names[0] not in self.kinds:
            return False
        (name, call), (_, before), (earlier_name, earlier) = (
            (name, self.calls[name]) for name in names
        )
        return (
            self.kinds[name] == self.kinds.get(earlier_name, earlier_name)
            and call.step == before.step + 1
            and not before.is_kept
            and call.inputs.is_like(earlier.inputs)
            and call.sources == earlier.sources
        )

    def without(self, names: set[str]) -> _Course:
        """The course that leaves out some blocks."""
        return _Course(
            [step for step in self.steps if step[0] != "block" or step[1] not in names],
            {name: call for name, call in self.calls.items() if name not in names},
        )

    def is_like(self, other: _Course) -> bool:
        return self.steps == other.steps and all(
            call.inputs.is_like(other.calls[name].inputs) for name, call in self.calls.items()
        )


class _Operators(OperatorMode):
    """Notes the operators around blocks."""

    def __init__(self, course: _Course) -> None:
        super().__init__()
        self.course = course

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not self.course.inside:
            self.course.steps.append(
                (
                    "operator",
                    str(func),
                    tuple(tuple(leaf.shape) for leaf in tensor_leaves(result)),
                )
            )
        return result


def _made_anew(
    path: str, unit: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a computed call returned, without a gradient."""
    made = (
        torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=output.device)
        for output in run.made or ()
        if isinstance(output, BlockOutput) and output.source < 0
    )
    return returned(run, tree_leaves((args, kwargs)), made)
