"""Keeps state that forwards change, beside parameters, equal on all replicas: buffers and plain
attributes of modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.logs import logger
from paceline.launch.collectives.values import names_of_all
from paceline.model.attributes import OF_TORCH, is_plain, plain_attributes
from paceline.model.copy_on_write import TensorSnapshot
from paceline.model.forward_state import ForwardState, MappingSnapshot

# The most elements of a tensor that a forward puts into a new attribute. A larger one is taken for
# an activation that is kept for inspection, and not for state.
_MOST_ELEMENTS = 2**20


class ChangingBuffers:
    """Finds the buffers and attributes that steps change, in any step, and synchronises them after
    every step.

    Floating-point tensors and numbers that differ become their mean weighted by samples.
    Whole-number buffers and numbers become their maximum, so a count continues from the replica
    that counted most. Other attributes must be equal; those that differ are named in a warning.

    This keeps replicas, evaluation and checkpoints well defined. It doesn't turn a BatchNorm over
    micro-batches into one over the whole batch.

    Args:
        with_frozen: Whether frozen parameters are treated as buffers.
    """

    def __init__(self, model: torch.nn.Module, *, with_frozen: bool = False) -> None:
        self._model, self._with_frozen = model, with_frozen
        self.names: list[str] = []  # buffers and parameters that have changed in some step
        self.attributes: list[str] = []  # attributes that have changed in some step
        self._warned: set[str] = set()
        # Kinds of the synchronised buffers when the replicas last compared them.
        self._kinds: dict[str, float] = {}
        # Buffers whose shapes differ between replicas, such as a cache that grows with its inputs.
        # They are not synchronised.
        self.unlike: set[str] = set()
        self.look()

    def look(self) -> None:
        """Take the present values as those that nothing has changed yet."""
        self._seen = ForwardState(self._model).now()
        self._frozen = {
            name: TensorSnapshot(p)
            for name, p in self._model.named_parameters()
            if self._with_frozen and not p.requires_grad
        }

    def put_back(self) -> None:
        """Restore all values of the last look, in the same objects."""
        self._seen.attributes.restore()
        self._seen.tensors.restore()

    def unsynced(self) -> list[str]:
        """Return names of what has changed and is not synchronised yet. Names of attributes begin
        with a mark.

        No values are read of tensors to which nothing has written.
        """
        names = set(self.names)
        unsynced = [
            name for name, seen in self._frozen.items() if name not in names and seen.is_written()
        ]
        if names:
            now = self._tensors()
            unsynced += [
                name for name in self.names if _kind(now.get(name)) != self._kinds.get(name)
            ]
        for buffers in self._seen.tensors.written():
            unsynced += [
                name
                for key, buffer in buffers.mapping.items()
                if (name := buffers.prefix + key) not in names
                and buffer is not None
                and _is_written(buffer, buffers.copies.get(key))
            ]
        for attributes in self._seen.attributes.written():
            unsynced += [
                f"{_ATTRIBUTE}{name}"
                for key, value in attributes.mapping.items()
                if (name := attributes.prefix + key) not in self.attributes
                and key not in OF_TORCH
                and is_plain(value)
                and _has_changed(key, value, attributes)
            ]
        return unsynced

    @torch.no_grad()
    def meet(
        self, weight: float, group: dist.ProcessGroup, *, has_unsynced: bool | None = None
    ) -> None:
        """Synchronise the changed values over the replicas, a group. Collective over it.

        Args:
            weight: This rank's fraction of the window's samples.
            has_unsynced: Whether `unsynced` is not empty on some rank. If it is None, the ranks
                agree on it here.
        """
        if has_unsynced is None and not any(part.values for part in self._seen.tensors.parts):
            return
        if has_unsynced is None:
            has_unsynced = bool(_greatest([float(bool(self.unsynced()))], group)[0])
        if has_unsynced:
            self._learn(names_of_all(self.unsynced(), group), group)
        if not self.names and not self.attributes:
            return
        named = self._tensors()  # looked up again, because a model may have replaced the tensors
        tensors = [named[name].detach() for name in self.names if name not in self.unlike]
        floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        attributes = self._agreed(group)
        integers = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
        floats += [value for _, _, value in attributes if isinstance(value, torch.Tensor)]
        numbers = [
            (
                module,
                key,
                torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else torch.int64
                ),
            )
            for module, key, value in attributes
            if not isinstance(value, torch.Tensor)
        ]
        for _, _, number in numbers:
            (floats if number.is_floating_point() else integers).append(number)
        _meet(
            [torch.view_as_real(t) if t.is_complex() else t for t in floats],
            integers,
            weight,
            group,
        )
        for module, key, number in numbers:
            setattr(module, key, number.item())

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = dict(self._model.named_buffers())
        if self._with_frozen:
            named |= {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        return named

    def _learn(self, names: Iterable[str], group: dist.ProcessGroup) -> None:
        """Synchronise these names from now on, if they have one shape on all replicas. Collective."""
        for name in names:
            if name.startswith(_ATTRIBUTE):
                self.attributes.append(name.removeprefix(_ATTRIBUTE))
            elif name not in self.names:
                self.names.append(name)
        if self.names:
            now = self._tensors()
            self._kinds = {name: _kind(now.get(name)) for name in self.names}
            ends = _greatest([end for kind in self._kinds.values() for end in (kind, -kind)], group)
            self.unlike = {
                name
                for name, most, least in zip(self.names, ends[::2], ends[1::2], strict=True)
                if most != -least or name not in now
            }

    def _agreed(self, group: dist.ProcessGroup) -> list[tuple[torch.nn.Module, str, Any]]:
        """Return the changing attributes to synchronise: floating-point tensors of one shape on all
        replicas, and numbers that differ.

        Collective if there are any attributes.
        """
        if not self.attributes:
            return []
        present = {
            name: (module, key, value) for name, module, key, value in plain_attributes(self._model)
        }
        values = [present[name][2] if name in present else None for name in self.attributes]
        kinds, figures = [_kind(value) for value in values], [_figure(value) for value in values]
        least_and_most = _greatest(
            [x for figure in (*kinds, *figures) for x in (figure, -figure)], group
        )
        equal = [
            most == -least
            for most, least in zip(least_and_most[::2], least_and_most[1::2], strict=True)
        ]
        agreed = []
        for name, value, same_kind, same in zip(
            self.attributes, values, equal[: len(values)], equal[len(values) :], strict=True
        ):
            is_tensor = (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and not value.requires_grad
            )
            if same_kind and (is_tensor or (_is_number(value) and not same)):
                agreed.append(present[name])
            if (
                not (same_kind and same)
                and not isinstance(value, float)
                and name not in self._warned
            ):
                self._warned.add(name)
                consequence = (
                    "all go on with the greatest"
                    if same_kind and _is_number(value)
                    else "each goes on with its own"
                )
                logger.warning(
                    "replicas hold different values of the attribute '%s', which forwards change: %s; "
                    "a buffer (register_buffer) of floats becomes the mean of all",
                    name,
                    consequence,
                )
        return agreed


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


_ATTRIBUTE = "="  # prefix of an attribute's name; no name of a module or buffer begins like that


def _is_written(tensor: torch.Tensor, seen: TensorSnapshot | None) -> bool:
    return seen is None or tensor is not seen.tensor or seen.is_written()


def _has_changed(key: str, value: Any, before: MappingSnapshot) -> bool:
    """Whether an attribute holds another value that may be state."""
    seen = before.copies.get(key)
    # A tensor with a graph is not state, but for example an auxiliary loss.
    if isinstance(value, torch.Tensor):
        return (
            not value.requires_grad
            and _is_written(value, seen)
            and (isinstance(seen, TensorSnapshot) or value.numel() <= _MOST_ELEMENTS)
        )
    return not before.had(key, value)


def _kind(value: Any) -> float:
    """Return a number that differs between values that can't be synchronised: other types, shapes,
    or dtypes.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_kind(tuple(value.shape), value.dtype, value.requires_grad)
    return _hashed(type(value).__name__)


@lru_cache(maxsize=1024)  # called for each changing buffer in each step
def _tensor_kind(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> float:
    return _hashed(f"{shape} {dtype} {requires_grad}")


def _figure(value: Any) -> float:
    """Return a number that differs if values differ. It is 0 for tensors of floats, which are
    synchronised.
    """
    if isinstance(value, float) and value == value:
        return value
    if isinstance(value, torch.Tensor):
        return 0.0 if value.is_floating_point() else _hashed(str(value.tolist()))
    return _hashed(repr(value))


def _hashed(text: str) -> float:
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))


def _greatest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX, group)
    return [float(value) for value in together.tolist()]


def _meet(
    floats: Sequence[torch.Tensor],
    integers: Sequence[torch.Tensor],
    weight: float,
    group: dist.ProcessGroup,
) -> None:
    """Synchronise all tensors together, because a model has many small ones and each collective
    waits for all ranks.

    Values that are equal on all ranks stay unchanged, to the bit: a mean would round a counter to
    something below it. Whether anything differs is checked on CPUs only. On other devices an
    all-reduce takes less time than the host's wait for the device.
    """
    if not floats and not integers:
        return
    device = max(
        (tensor.device for tensor in (*floats, *integers)), key=lambda device: device.type != "cpu"
    )
    values, numbers = (
        _together(floats, torch.float64, device),
        _together(integers, torch.int64, device),
    )
    bits = values.view(torch.int64)
    ends = torch.cat([numbers, bits, ~bits])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    numbers, most, least = ends.split([len(numbers), len(bits), len(bits)])
    differs = most != ~least
    if device.type != "cpu" or bool(differs.any()):
        shares = (
            values * weight if weight else torch.zeros_like(values)
        )  # an infinity times a share of 0 would be NaN
        dist.all_reduce(shares, group=group)
        values = torch.where(differs, shares, values)
    for tensors, mixed in ((floats, values), (integers, numbers)):
        for tensor, part in zip(
            tensors, mixed.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))


def _together(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.cat(
        [
            torch.empty(0, dtype=dtype, device=device),
            *(tensor.to(device, dtype).flatten() for tensor in tensors),
        ]
    )
