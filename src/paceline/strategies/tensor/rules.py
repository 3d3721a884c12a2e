"""Records how DTensor would run an operator on parts: what it moves first, what it runs, and the
resulting placements.

DTensor runs on fake tensors, so that nothing is computed or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.strategies.tensor.cut import Cut, cut_of_placement
from paceline.strategies.tensor.exchange import Placement, Sum, not_in_parts
from paceline.strategies.tensor.program import Placed, ProgramRecorder
from paceline.torch_private import pytree
from paceline.torch_private.dispatch import TorchDispatchMode
from paceline.torch_private.dtensor import part_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def run_by_rule(
    recorder: ProgramRecorder, mesh: DeviceMesh, target: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Record an operator as DTensor runs it.

    Raises:
        Exception: DTensor has no rule for the operator, or one that can't be recorded.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    watch = _Watch(recorder)
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) and any(
        isinstance(leaf, Placed) and isinstance(leaf.placement, Cut)
        for leaf in pytree.tree_leaves((args, kwargs))
    )

    def distributed(value: Placed) -> Any:
        placement = value.placement
        kind = (
            Replicate()
            if placement is None
            else Partial("avg" if placement.mean else "sum")
            if isinstance(placement, Sum)
            else placement.placement()
        )
        result = DTensor.from_local(value.local, mesh, [kind], run_check=False)
        part = part_of(result)
        watch.known[id(part)], values[id(part)] = part, value
        return result

    values: dict[int, Placed] = {}
    with torch.no_grad():  # outside of the fake mode, in which DTensor could not read its mesh
        arguments = pytree.tree_map_only(Placed, distributed, (args, kwargs))
        with watch, watch.moves():
            result = target(*arguments[0], **arguments[1])
        parts = pytree.tree_map_only(DTensor, part_of, result)
        moves = any(isinstance(step, _Moved) for step in watch.steps)
        results = None if moves else _alone(target, args, kwargs, watch)
    if results is not None:
        kinds = {
            id(leaf): watch.placement(part)
            for leaf, part in zip(
                pytree.tree_leaves(results), pytree.tree_leaves(parts), strict=True
            )
            if isinstance(leaf, torch.Tensor)
        }
        return recorder.add(
            target, args, kwargs, results, lambda tensor: kinds[id(tensor)], draws=draws
        )
    for step in watch.steps:
        if isinstance(step, _Moved):
            values[id(step.after)] = recorder.moved(values[id(step.before)], step.placement)
        else:
            called, options = pytree.tree_map_only(
                torch.Tensor, lambda tensor: values[id(tensor)], (step.args, step.kwargs)
            )
            made = recorder.add(
                step.target, called, options, step.result, watch.placement, draws=draws
            )
            for tensor, value in zip(
                pytree.tree_leaves(step.result), pytree.tree_leaves(made), strict=True
            ):
                if isinstance(tensor, torch.Tensor):
                    values[id(tensor)] = value
    return pytree.tree_map_only(torch.Tensor, lambda tensor: values[id(tensor)], parts)


def _alone(target: Callable[..., Any], args: Any, kwargs: Any, watch: _Watch) -> Any:
    """Return an operator's result on plain parts if it runs there as it does under DTensor;
    otherwise None."""
    alone = _Watch(watch.recorder)
    arguments = pytree.tree_map_only(
        Placed, lambda value: value.local.view_as(value.local), (args, kwargs)
    )
    alone.known |= {id(leaf): leaf for leaf in pytree.tensor_leaves(arguments)}
    try:
        with alone:
            result = target(*arguments[0], **arguments[1])
    except Exception:  # its arguments contain sizes of the whole
        return None
    same = [step.shown() for step in watch.steps if isinstance(step, _Ran)] == [
        step.shown() for step in alone.steps if isinstance(step, _Ran)
    ]
    return result if same else None


@dataclass(frozen=True, eq=False)
class _Moved:
    before: torch.Tensor
    after: torch.Tensor
    placement: Placement


@dataclass(frozen=True, eq=False)
class _Ran:
    target: Any
    args: Any
    kwargs: Any
    result: Any

    def shown(self) -> tuple[Any, str]:
        """Return the operator and its arguments, with shapes in place of tensors."""
        return self.target, str(
            pytree.tree_map_only(
                torch.Tensor, lambda tensor: tuple(tensor.shape), (self.args, self.kwargs)
            )
        )


class _Watch(TorchDispatchMode):
    """Records the operators that run on known parts below autograd, and the tensors that DTensor
    moves."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.known: dict[int, torch.Tensor] = {}  # parts by id; the entry keeps the part alive
        self.steps: list[_Moved | _Ran] = []
        self._placements: dict[int, Placement] = {}
        self._inside = False

    def placement(self, part: torch.Tensor) -> Placement:
        if id(part) not in self._placements:
            raise not_in_parts("DTensor runs several operators for one")
        return self._placements[id(part)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            if self._inside:
                return NotImplemented  # DTensor's own turn
            self._inside = True
            try:
                with self:
                    result = func(*args, **kwargs)
            finally:
                self._inside = False
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, DTensor):
                    part = part_of(leaf)
                    self._note(part)
                    self._placements[id(part)] = _as_placement(leaf.placements[0])
            return result
        result = func(*args, **kwargs)
        inputs = pytree.tensor_leaves((args, kwargs))
        made = pytree.tensor_leaves(result)
        if inputs and made and all(id(leaf) in self.known for leaf in inputs):
            self.steps.append(_Ran(func, args, kwargs, result))
            for leaf in made:
                self._note(leaf)
        return result

    def _note(self, part: torch.Tensor) -> None:
        self.known[id(part)] = part

    @contextmanager
    def moves(self) -> Iterator[None]:
        """Let DTensor record the tensors that it would move, instead of moving them, while the
        context is entered."""
        from paceline.torch_private.placements import local_shape, replaced_moves

        def moved(local: torch.Tensor, before: Any, after: Any, **options: Any) -> torch.Tensor:
            shape = local_shape(before.shape, after.mesh, after.placements)
            part = self.recorder.empty(shape, local)
            self._note(part)
            self.steps.append(_Moved(local, part, _as_placement(after.placements[0])))
            return part

        with replaced_moves(moved):
            yield


def _as_placement(placement: Any) -> Placement:
    from torch.distributed.tensor import Partial, Replicate

    if isinstance(placement, Replicate):
        return None
    if type(placement) is Partial and placement.reduce_op in ("sum", "avg"):
        return Sum(mean=placement.reduce_op == "avg")
    if (cut := cut_of_placement(placement)) is not None:
        return cut
    raise not_in_parts(f"{placement} can't be recorded")
