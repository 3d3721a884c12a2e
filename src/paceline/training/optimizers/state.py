"""The state of an optimizer that a run must save to continue: by parameter, by attribute, and the
options of its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.base.codec import unpack
from paceline.base.errors import JobError, PlanRefused
from paceline.checkpoint.values import pack
from paceline.strategies.mesh import local_part
from paceline.torch_private.dispatch import is_traceable_wrapper_subclass
from paceline.training.optimizers.local_shards import as_distributed
from paceline.training.optimizers.parts import Parts, SeenSlots, Slot, parts_of, unnamed_of

_SELF = "self."  # prefix of the key of a value that isn't in the outermost optimizer's `state`

Read = Callable[
    [str, Any], torch.Tensor
]  # gives the tensor of a name; the second argument is the value that is in its place now


class OptimizerState:
    """The state of an optimizer and of those that it wraps, by names under which other processes
    know it.

    The key of a value is its key in the outermost optimizer's `state`, `self.PATH/KEY` for a
    wrapped optimizer's, or `self.PATH` for an attribute that maps parameters to values.

    Args:
        parameters: The parameters that the optimizer updates, by name.
        distributed: Parameters of which it updates only this rank's part, in the distributed form.
        changing: Paths of attributes that steps of a trial changed. Other attributes are saved once
            they differ from what the job's function made.
        unnamed: Those of `changing` that hold tensors by position and not by parameter.
        through_state_dict: Whether all of it is saved as `state_dict()` gives it, without names.
        unkept: What goes wrong if it is saved; "" if nothing does.
        alone: Names of parameters that only this rank updates, for all ranks that hold parts of the
            model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        changing: Collection[str] = (),
        *,
        unnamed: Collection[str] = (),
        through_state_dict: bool = False,
        unkept: str = "",
        distributed: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
        alone: Collection[str] = (),
    ) -> None:
        self.optimizer, self.parameters, self.changing = optimizer, dict(parameters), set(changing)
        self.distributed, self.alone, self._made = (
            distributed,
            frozenset(alone),
            SeenSlots(optimizer, besides=changing),
        )
        self.unnamed, self.through_state_dict, self.unkept = (
            set(unnamed),
            through_state_dict,
            unkept,
        )

    def look(self) -> None:
        """Find attributes that changed only after more steps than the trial had."""
        changed = self._made.changed()
        self.changing |= changed.keys()
        self.unnamed |= unnamed_of(changed)

    def check(self, names: Collection[str]) -> None:
        """Refuse an optimizer whose state a checkpoint can't hold.

        names: names of all parameters that it updates on any rank.

        Raises:
            JobError: an optimizer that is built anew and given all this state would not continue as
                this one does.
            PlanRefused: its state has no names, and this rank has a part of it.
        """
        kind = type(self.optimizer).__name__
        if self.unkept:
            raise JobError(
                f"{kind} keeps state where a checkpoint can't find it: built anew and given its groups, "
                f"state and attributes, {self.unkept}",
                hint="keep it in self.state[parameter] or in attributes that are numbers, tensors or dicts "
                "from parameters to these, or implement state_dict and load_state_dict",
            )
        self.look()
        has_part = len(self.parameters) < len(names) or any(
            hasattr(p, "device_mesh") for p in self.local_parameters().values()
        )
        where = (
            "its state_dict" if self.through_state_dict else f"'{min(self.unnamed, default='')}'"
        )
        if has_part and (self.through_state_dict or self.unnamed):
            raise PlanRefused(
                f"{kind} keeps tensors in {where} by position, and this rank has some of the parameters "
                "alone: a checkpoint can't say which tensor is whose",
                hint="use a data=N plan, or keep them in self.state[parameter] or a dict by parameter",
            )

    def local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the optimizer updates, in the form in which ranks hold them."""
        return {**self.parameters, **self.distributed}

    def by_parameter(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield keys and values of the state that belongs to a parameter. Values that are cut like
        it are distributed like it.

        Raises:
            JobError: a value is a tensor that consists of others, such as a quantized one.
        """
        for key, value in self._by_parameter(name):
            if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(
                plain := local_part(value)
            ):
                raise JobError(
                    f"{type(self.optimizer).__name__} keeps '{key}' of '{name}' as {type(plain).__name__}, "
                    "which consists of several tensors; checkpoints and comparisons of replicas hold plain "
                    "ones",
                    hint="an optimizer whose state is plain tensors, such as torch.optim.AdamW or "
                    "Adafactor; a shard=N plan divides its state over the ranks",
                )
            yield (
                key,
                as_distributed(value, self.distributed[name])
                if name in self.distributed
                else value,
            )

    def _by_parameter(self, name: str) -> Iterator[tuple[str, Any]]:
        if self.through_state_dict:
            return
        parts, parameter, seen = parts_of(self.optimizer), self.parameters[name], set()
        for path, optimizer in parts.optimizers.items():
            if id(optimizer.state) in seen:
                continue
            seen.add(id(optimizer.state))
            entry = optimizer.state.get(parameter, {})
            yield from (
                (f"{_SELF}{path}/{key}" if path else str(key), value)
                for key, value in entry.items()
            )
        for slot in self._slots(parts):
            if slot.is_by_parameter and parameter in slot.value:
                yield f"{_SELF}{slot.path}", slot.value[parameter]

    def attributes(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return the values that belong to no parameter by path, as JSON holds them. Their tensors are
        added to `tensors`, by their stored names.
        """
        values = {
            slot.path: slot.value
            for slot in self._slots(parts_of(self.optimizer))
            if not slot.is_by_parameter
        }
        if self.through_state_dict:
            values = {"": self.optimizer.state_dict()}
        return {
            path: pack(value, f"optimizer-attributes/{path}", tensors)
            for path, value in values.items()
        }

    def wrapped_groups(self) -> dict[str, list[dict[str, Any]]]:
        """Return options of the groups of wrapped optimizers by path, for those that don't share
        the outermost optimizer's groups.
        """
        seen = {id(group) for group in self.optimizer.param_groups}
        groups: dict[str, list[dict[str, Any]]] = {}
        for path, optimizer in parts_of(self.optimizer).optimizers.items():
            if path and not all(id(group) in seen for group in optimizer.param_groups):
                groups[path] = optimizer.param_groups
            seen |= {id(group) for group in optimizer.param_groups}
        return groups

    def place(self, name: str, key: str) -> tuple[Any, Any] | None:
        """Return the mapping that holds the value of a parameter's key, and its key there; None if
        there is none.
        """
        parts, parameter = parts_of(self.optimizer), self.parameters[name]
        path, is_state, inner = (
            key.removeprefix(_SELF).rpartition("/") if key.startswith(_SELF) else ("", "/", key)
        )
        if is_state:
            optimizer = parts.optimizers.get(path)
            return None if optimizer is None else (optimizer.state[parameter], inner)
        slot = parts.slot(inner)
        if slot is None:
            return None
        if not slot.is_there:
            slot.put({})
        return slot.value, parameter

    def load_attributes(self, packed: Mapping[str, Any], read: Read) -> None:
        """Put saved attributes back into their slots."""
        if self.through_state_dict:
            self.optimizer.load_state_dict(unpack(packed[""], read))
            return
        parts = parts_of(self.optimizer)
        for path, value in packed.items():
            slot = parts.slot(path)
            if slot is not None:
                slot.put(unpack(value, read, slot.value if slot.is_there else None))

    def _slots(self, parts: Parts) -> Iterator[Slot]:
        return (parts.slots[path] for path in sorted(self.changing) if path in parts.slots)


def placed(
    value: torch.Tensor, parameter: torch.nn.Parameter, key: str, options: Mapping[str, Any]
) -> torch.Tensor:
    """Move a state tensor that was read to the device on which torch's optimizers keep one of its
    key.

    Counts of steps stay on the CPU unless they are read on the device. The dtype stays as it was
    saved.
    """
    if key == "step" and not (options.get("capturable") or options.get("fused")):
        return value
    return value if hasattr(value, "device_mesh") else value.to(parameter.device)


def snapshot(state: OptimizerState) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return everything that would be saved: the packed values, and copies of the tensors."""
    tensors: dict[str, torch.Tensor] = {}
    packed = {
        "parameters": {
            name: {
                key: pack(value, f"{name}/{key}", tensors)
                for key, value in state.by_parameter(name)
            }
            for name in state.parameters
        },
        "attributes": state.attributes(tensors),
        "groups": {
            path: [
                {
                    key: pack(value, f"groups/{path}/{number}/{key}", tensors)
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                }
                for number, group in enumerate(groups)
            ]
            for path, groups in _all_groups(state).items()
        },
    }
    return packed, {name: tensor.detach().clone() for name, tensor in tensors.items()}


def load_snapshot(state: OptimizerState, packed: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put everything that was saved into an optimizer that was built anew."""

    def read(name: str, like: Any) -> torch.Tensor:
        return tensors[name].clone()

    groups_now = _all_groups(state)
    for path, groups in packed["groups"].items():
        for group, then in zip(groups_now.get(path, ()), groups, strict=True):
            group.update({key: unpack(value, read) for key, value in then.items()})
    state.load_attributes(packed["attributes"], read)
    for name, values in packed["parameters"].items():
        for key, value in values.items():
            if (place := state.place(name, key)) is not None:
                place[0][place[1]] = unpack(value, read, place[0].get(place[1]))


def _all_groups(state: OptimizerState) -> dict[str, list[dict[str, Any]]]:
    return {"": state.optimizer.param_groups, **state.wrapped_groups()}
