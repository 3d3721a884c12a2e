"""What a rank's state is made of, found once: whether it still is takes some 20 us to tell, and to find it again 2 ms.

What is looked at: which objects stand where `state.pieces` looks, and where tensors have their memory. What a tensor
holds is not looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch

from paceline.model.attributes import copied, is_same
from paceline.training import state

if TYPE_CHECKING:
    from paceline.training.stepper import Stepper

_UNCHANGING = type(None), bool, int, float, complex, str, bytes
_PART, _ADDRESS = attrgetter("_local_tensor"), torch.Tensor.data_ptr


class Structure:
    """What this rank holds, at one moment.

    pieces: all of it, as `state.pieces` gives it. fixed_document: as `state.fixed_document`. Both may be used while
    `is_current()`.
    """

    def __init__(self, stepper: Stepper, *, host_ranks: int | None = None) -> None:
        """host_ranks: see `state.pieces`."""
        self.pieces = list(state.pieces(stepper, of_others=True, host_ranks=host_ranks))
        self.fixed_document = state.fixed_document(stepper)
        self._optimizer, modules = stepper.optimizer, list(stepper.model.modules())
        groups, by_parameter = self._optimizer.param_groups, self._optimizer.state
        self._dicts = [
            stepper.local_parameters,
            *(module._buffers for module in modules),
            *by_parameter.values(),
        ]
        self._places = [] if stepper.attributes is None else list(stepper.attributes.places())
        holders = {id(holder): holder for holder, _ in self._places}.values()
        self._sized: list[Collection[Any]] = [
            groups,
            by_parameter,
            *self._dicts,
            *(group["params"] for group in groups),
            *holders,
            *chain.from_iterable(
                (vars(module), module._modules, module._non_persistent_buffers_set)
                for module in modules
            ),
        ]
        self._job_state, self._job_tensors = stepper.job_state, stepper.job_state.stored()
        self._is_known = (
            stepper.optimizer_state.is_in_state
            and not list(stepper.kept())
            and all(
                isinstance(entry, dict)
                and all(
                    isinstance(value, torch.Tensor) or _is_unchanging(value)
                    for value in entry.values()
                )
                for entry in by_parameter.values()
            )
        )
        if self._is_known:
            self._objects, self._sizes = list(self._objects_now()), list(map(len, self._sized))
            tensors = [each for each in self._objects if isinstance(each, torch.Tensor)]
            self._whole = [tensor for tensor in tensors if not hasattr(tensor, "_local_tensor")]
            self._cut = [tensor for tensor in tensors if hasattr(tensor, "_local_tensor")]
            self._addresses = self._addresses_now()
            self._contents = [
                (value, copied(value))
                for value in (holder[key] for holder, key in self._places)
                if not _is_unchanging(value)
            ]

    def is_current(self) -> bool:
        """Whether the state is still made of these pieces. False where that can't be told: where an optimizer or a room
        of the plan keeps state elsewhere, or in lists and objects."""
        return (
            self._is_known
            and self._sizes == list(map(len, self._sized))
            and all(map(is_, self._objects, self._objects_now()))
            and self._addresses == self._addresses_now()
            and all(is_same(value, before) for value, before in self._contents)
            and self._has_same_job_state()
        )

    def _has_same_job_state(self) -> bool:
        now, before = self._job_state.stored(), self._job_tensors
        return now.keys() == before.keys() and all(
            tensor is before[name] or is_same(tensor, before[name]) for name, tensor in now.items()
        )

    def _objects_now(self) -> Iterable[Any]:
        """As many as before, as long as the sizes are the same."""
        by_parameter = self._optimizer.state
        return chain(
            (by_parameter,),
            by_parameter.values(),
            chain.from_iterable([each.values() for each in self._dicts]),
            [holder.get(key) for holder, key in self._places],
        )

    def _addresses_now(self) -> list[int]:
        return [*map(_ADDRESS, self._whole), *map(_ADDRESS, map(_PART, self._cut))]


def _is_unchanging(value: Any) -> bool:
    """Whether it holds the same as long as it is the same object."""
    return isinstance(value, _UNCHANGING) or (
        isinstance(value, tuple) and all(map(_is_unchanging, value))
    )
