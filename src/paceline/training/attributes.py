"""Keeps Python state of a model that training changes in checkpoints: counters, temperatures, plain
tensors.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.base.codec import unpack
from paceline.base.errors import CheckpointError
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.values import from_text_tensor, stored_values
from paceline.model.attributes import OF_TORCH, is_like_a_buffer, plain_attributes
from paceline.model.forward_state import MappingSnapshot

PREFIX, _VALUES = "attributes/", "attributes/.values/"
_NUMBERS = (type(None), bool, int, float, str)
_NO_OBJECTS = (
    nn.Module,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
)


class ChangingAttributes:
    """Records the plain attributes of a model's modules, and the attributes of objects that these
    attributes hold.

    Of such an object (a meter, a schedule) only its numbers and text are recorded, and nothing
    deeper.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = MappingSnapshot.of(self._values())
        self._not_the_models: frozenset[str] = frozenset()

    def disregard_new(self) -> None:
        """Ignore attributes that were added since this was made. They are not the model's own: a
        plan's strategies mark its modules.
        """
        self._not_the_models = frozenset(self.changed()) - self._before.values.keys()

    def changed(self) -> dict[str, Any]:
        """Return the values that have changed since this was made, by name."""
        return {
            name: value
            for name, value in self._values().items()
            if name not in self._not_the_models and not self._before.had(name, value)
        }

    def places(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield every place whose value may change: the dict of a module's or an object's
        attributes, and the key.
        """
        for name, attributes, key in self._all_places():
            if name not in self._not_the_models:
                yield attributes, key

    def _values(self) -> dict[str, Any]:
        return {name: attributes[key] for name, attributes, key in self._all_places()}

    def _all_places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for name, module, attribute, _ in plain_attributes(self._model):
            yield name, vars(module), attribute
        for name, holder, attribute in numbers_of_objects(self._model):
            yield name, vars(holder), attribute

    def changed_tensors(self) -> list[str]:
        """Return names of tensors that existed when this was made and hold other values now, in the
        same shape.
        """
        before = self._before.values
        return [
            name
            for name, value in self.changed().items()
            if is_like_a_buffer(before.get(name), value)
        ]

    def stored(self, place: int, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the values that have changed, as tensors for a checkpoint.

        Args:
            place: This rank's place among those that run other modules.
            buffers: The buffers for which this rank is responsible, by name. Plans that split a
                model turn some tensors in attributes into buffers. A checkpoint stores these as
                attributes again.
        """
        were_attributes = {
            name: buffer for name, buffer in buffers.items() if name in self._before.values
        }
        return stored_values(self.changed() | were_attributes, PREFIX, f"{_VALUES}{place}")


def restore_attributes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's attributes into a model. Objects to which others may refer are changed in
    place.

    Raises:
        CheckpointError: the model has no such module.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def read(name: str, like: Any) -> torch.Tensor:
        return checkpoint.read(name).to(like.device if isinstance(like, torch.Tensor) else device)

    for text in [name for name in checkpoint.tensors if name.startswith(_VALUES)]:
        for name, packed in from_text_tensor(checkpoint.read(text)).items():
            path, _, attribute = name.rpartition(".")
            holder = _holder(model, path)
            if holder is None:
                raise CheckpointError(
                    f"{checkpoint.path} has the attribute '{name}', and this model has no '{path}'",
                    hint="the checkpoint is of another model; resume with the job that wrote it",
                )
            setattr(holder, attribute, unpack(packed, read, getattr(holder, attribute, None)))


def _holder(model: nn.Module, path: str) -> Any:
    """Return the module of a path, or the object in an attribute of a module."""
    modules = dict(model.named_modules())
    if path in modules:
        return modules[path]
    parent, _, attribute = path.rpartition(".")
    return vars(modules[parent]).get(attribute) if parent in modules else None


def numbers_of_objects(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield names, objects and attributes of the numbers and texts in objects that a model's
    modules hold.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in OF_TORCH or isinstance(value, _NO_OBJECTS) or not hasattr(value, "__dict__"):
                continue
            for attribute, item in vars(value).items():
                if type(item) in _NUMBERS:
                    yield ".".join(filter(None, (path, name, attribute))), value, attribute
