"""What a run must keep of an optimizer to go on: by parameter, by attribute, and the options of its groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.base.errors import JobError, PlanRefused
from paceline.checkpoint.values import pack, unpack
from paceline.strategies.mesh import local_part
from paceline.training.optimizers.local_shards import as_distributed
from paceline.training.optimizers.parts import Parts, SeenSlots, Slot, parts_of, unnamed_of

_SELF = "self."  # begins the key of what doesn't lie in the outermost optimizer's `state`

Read = Callable[
    [str, Any], torch.Tensor
]  # a tensor of a name; also told what stands in its place now


class OptimizerState:
    """The state of an optimizer and of those that it wraps, by names that other processes know it under.

    A key is that of the outermost optimizer's `state`; `self.PATH/KEY` for a wrapped one's; `self.PATH` for an
    attribute that maps parameters to values.

    Args:
        parameters: What the optimizer updates, by name.
        distributed: Those of which it updates this rank's own part, as ranks hold them together.
        changing: Paths of attributes that steps of a trial changed. Others are kept once they differ from what the
            job's function made.
        unnamed: Those of them that hold tensors by position and not by parameter.
        through_state_dict: Whether all of it is kept as `state_dict()` gives it, with no names.
        unkept: What goes wrong if it is kept; "" if nothing does.
        alone: Names of those that this rank alone updates for all that hold parts of the model.
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
        """Know of attributes that changed after more steps than the trial had."""
        changed = self._made.changed()
        self.changing |= changed.keys()
        self.unnamed |= unnamed_of(changed)

    def check(self, names: Collection[str]) -> None:
        """Refuse an optimizer whose state a checkpoint can't hold. names: of all that it updates on any rank.

        Raises:
            JobError: an optimizer that is built anew and given all this would not go on as this one does.
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

    @property
    def is_in_state(self) -> bool:
        """Whether all that steps could change lies in `state` and the groups of one optimizer."""
        parts = parts_of(self.optimizer)
        return not (parts.slots or self.through_state_dict or len(parts.optimizers) > 1)

    def local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer updates, as ranks hold it."""
        return {**self.parameters, **self.distributed}

    def by_parameter(self, name: str) -> Iterator[tuple[str, Any]]:
        """Keys and values of what belongs to a parameter; what is cut like it is distributed like it.

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

    def attributes(self) -> dict[str, Any]:
        """What belongs to no parameter, by path."""
        if self.through_state_dict:
            return {"": self.optimizer.state_dict()}
        return {
            slot.path: slot.value
            for slot in self._slots(parts_of(self.optimizer))
            if not slot.is_by_parameter
        }

    def wrapped_groups(self) -> dict[str, list[dict[str, Any]]]:
        """Options of the groups of wrapped optimizers by path, for those that don't share them."""
        seen = {id(group) for group in self.optimizer.param_groups}
        groups: dict[str, list[dict[str, Any]]] = {}
        for path, optimizer in parts_of(self.optimizer).optimizers.items():
            if path and not all(id(group) in seen for group in optimizer.param_groups):
                groups[path] = optimizer.param_groups
            seen |= {id(group) for group in optimizer.param_groups}
        return groups

    def place(self, name: str, key: str) -> tuple[Any, Any] | None:
        """The mapping in which the value of a parameter's key lies, and its key there; None if there is none."""
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
        """Put attributes back where they were."""
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
    """A state tensor that was read, on the device where torch's optimizers keep one of its key.

    Counts of steps stay on the CPU unless they are read on the device. The dtype stays as it was saved.
    """
    if key == "step" and not (options.get("capturable") or options.get("fused")):
        return value
    return value if hasattr(value, "device_mesh") else value.to(parameter.device)


def snapshot(state: OptimizerState) -> tuple[Any, dict[str, torch.Tensor]]:
    """Everything that would be saved: packed, with copies of its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    packed = {
        "parameters": {
            name: {
                key: pack(value, f"{name}/{key}", tensors)
                for key, value in state.by_parameter(name)
            }
            for name in state.parameters
        },
        "attributes": {
            path: pack(value, f"attributes/{path}", tensors)
            for path, value in state.attributes().items()
        },
        "groups": [
            _options(group, tensors, f"groups/{number}")
            for number, group in enumerate(state.optimizer.param_groups)
        ],
        "wrapped": {
            path: [
                _options(group, tensors, f"wrapped/{path}/{number}")
                for number, group in enumerate(groups)
            ]
            for path, groups in state.wrapped_groups().items()
        },
    }
    return packed, {name: tensor.detach().clone() for name, tensor in tensors.items()}


def load_snapshot(state: OptimizerState, packed: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put everything where it was, in an optimizer that was built anew."""

    def read(name: str, like: Any) -> torch.Tensor:
        return tensors[name].clone()

    for group, then in zip(state.optimizer.param_groups, packed["groups"], strict=True):
        group.update({key: unpack(value, read) for key, value in then.items()})
    wrapped = state.wrapped_groups()
    for path, groups in packed["wrapped"].items():
        for group, then in zip(wrapped.get(path, ()), groups, strict=True):
            group.update({key: unpack(value, read) for key, value in then.items()})
    state.load_attributes(packed["attributes"], read)
    for name, values in packed["parameters"].items():
        for key, value in values.items():
            if (place := state.place(name, key)) is not None:
                place[0][place[1]] = unpack(value, read, place[0].get(place[1]))


def _options(
    group: Mapping[str, Any], tensors: dict[str, torch.Tensor], name: str
) -> dict[str, Any]:
    return {
        key: pack(value, f"{name}/{key}", tensors)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
