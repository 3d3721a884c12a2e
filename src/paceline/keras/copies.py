"""A model on its way to a fork of another interpreter of this host: by cloudpickle, object by object.

Keras pickles a model as the file that `save` writes, which leaves out what its class has in attributes, and asks for
`get_config`. Here objects are taken as they are. A tensor of a GPU is one of the receiver's own GPU there.
"""

from __future__ import annotations

import copyreg
import io
from collections import OrderedDict
from typing import Any

import cloudpickle
import keras
import torch
from keras.src.backend.common import global_state
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils.tracking import (
    TrackedDict,
    TrackedList,
    TrackedOrderedDict,
    TrackedSet,
    Tracker,
)

from paceline.base.errors import UsageError

_TRACKED: dict[type, tuple[type, Any]] = {
    TrackedOrderedDict: (dict, OrderedDict.update),
    TrackedDict: (dict, dict.update),
    TrackedList: (list, list.extend),
    TrackedSet: (set, set.update),
}
# What Keras's own loop keeps in a model while it runs: functions of the calling process, its data and its callbacks.
_OF_THE_LOOP = frozenset(
    {"train_function", "test_function", "predict_function", "history", "_eval_epoch_iterator"}
)
# Of optimizers, by `BaseOptimizer._var_key`.
_BY_ID = frozenset(
    {
        "_trainable_variables_indices",
        "_var_to_optimizer_idx",
        "_exclude_from_weight_decay",
        "_exclude_from_weight_decay_cache",
    }
)
_GLOBAL = (GLOBAL_SEED_GENERATOR, "dtype_policy", "flash_attention")


def packed(value: Any) -> bytes:
    """What `unpacked` makes the value of, with the settings of Keras and torch that a fork would inherit.

    Raises:
        UsageError: something in it can't be sent.
    """
    settings = {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "global": {name: global_state.get_global_attribute(name) for name in _GLOBAL},
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    data = io.BytesIO()
    pickler = _Pickler(data)
    try:
        pickler.dump((settings, value, pickler.trackers, pickler.optimizers, pickler.variables))
    except Exception as error:
        raise UsageError(
            f"ranks start from a copy of the model, and something of it can't be copied: "
            f"{type(error).__name__}: {error}",
            hint="make such objects where they are used; or plan='single'",
        ) from error
    return data.getvalue()


def unpacked(data: bytes) -> Any:
    """The value, and the settings, in a process that has this process's memory as its only source."""
    settings, value = _loaded(data)
    for name in ("floatx", "epsilon", "image_data_format"):
        getattr(keras.config, f"set_{name}")(settings[name])
    for name, setting in settings["global"].items():
        global_state.set_global_attribute(name, setting)
    torch.set_default_dtype(settings["default_dtype"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    return value


def copy_of(data: bytes) -> Any:
    """A copy of what this process, or the one that it is a fork of, has packed."""
    return _loaded(data)[1]


def _loaded(data: bytes) -> tuple[dict[str, Any], Any]:
    settings, value, trackers, optimizers, by_id = cloudpickle.loads(data)
    new_ids = {before: id(its) for before, its in by_id}
    for tracker in trackers:
        tracker.stored_ids = {
            name: set(map(id, stored)) for name, (_, stored) in tracker.config.items()
        }
    for optimizer in optimizers:
        for name in _BY_ID & vars(optimizer).keys():
            known = getattr(optimizer, name)
            setattr(
                optimizer,
                name,
                {new_ids[key]: known[key] for key in known}
                if isinstance(known, dict)
                else {new_ids[key] for key in known},
            )
    return settings, value


class _Pickler(cloudpickle.Pickler):
    """trackers, optimizers: that were pickled. They know objects by their ids, which are others where they are
    unpickled. variables: with the ids by which optimizers know them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.trackers: list[Tracker] = []
        self.optimizers: list[BaseOptimizer] = []
        self.variables: list[tuple[int, keras.Variable]] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tracker):
            self.trackers.append(value)
        elif isinstance(value, BaseOptimizer):
            self.optimizers.append(value)
        elif isinstance(value, keras.Variable):
            self.variables.append((id(value), value))
        if isinstance(value, KerasSaveable):
            kept = {name: its for name, its in vars(value).items() if name not in _OF_THE_LOOP}
            return copyreg.__newobj__, (type(value),), kept  # type: ignore[attr-defined]
        if type(value) in _TRACKED:
            plain, _ = _TRACKED[type(value)]
            made = copyreg.__newobj__, (type(value),)  # type: ignore[attr-defined]
            return *made, (vars(value), plain(value)), None, None, _fill
        if type(value) is torch.Tensor and value.is_cuda:
            return _on_own_gpu, (value.detach().cpu(), value.requires_grad)
        return super().reducer_override(value)


def _fill(tracked: Any, state: tuple[dict[str, Any], Any]) -> None:
    attributes, items = state
    vars(tracked).update(attributes)
    _TRACKED[type(tracked)][1](tracked, items)


def _on_own_gpu(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.to("cuda").requires_grad_(requires_grad)
