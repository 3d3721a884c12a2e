"""`fit` under plans that split the model: it is trained as a job, and Keras's callbacks hear of its epochs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import torch

from paceline.api.train import train
from paceline.base.errors import UsageError
from paceline.base.fork import forks_can_use_cuda
from paceline.base.temporary import temporary_folder
from paceline.job.callback import EpochReport
from paceline.keras.as_job import job, load, load_weights
from paceline.keras.copies import packed
from paceline.keras.devices import on_device, refuse_other_kinds
from paceline.keras.elsewhere import TellsEpochs, train_elsewhere
from paceline.strategies.plan import Plan

_STEP_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TAKEN = (
    "batch_size",
    "epochs",
    "verbose",
    "callbacks",
    "validation_split",
    "validation_data",
    "shuffle",
)


def fit(
    model: Any, x: Any, y: Any, plan: Plan, devices: str | None, arguments: Mapping[str, Any]
) -> Any:
    """Train the model under the plan, in place; Keras's History, with the loss and the validation loss of each epoch.

    arguments: of `model.fit`.

    Raises:
        UsageError: an argument or a callback asks for what a job does not have.
        JobError: so does the model.
    """
    if unknown := sorted(
        name for name, value in arguments.items() if name not in _TAKEN and value is not None
    ):
        raise UsageError(
            f"fit under '{plan}' does not take {', '.join(unknown)}",
            hint="plan='data=N' takes them all",
        )
    refuse_other_kinds()
    epochs = arguments.get("epochs", 1)
    callbacks = keras.callbacks.CallbackList(
        arguments.get("callbacks"), add_history=True, add_progbar=False, model=model, epochs=epochs
    )
    for callback in callbacks.callbacks:
        _check(callback, plan)
    if (model.get_compile_config() or {}).get("metrics"):
        warnings.warn(
            f"under '{plan}' metrics are not computed while the model trains: evaluate(...) computes them",
            stacklevel=5,
        )
    x, y, validation = _parted(
        x, y, arguments.get("validation_data"), arguments.get("validation_split", 0.0)
    )
    listener = _Listener(model, callbacks)
    shuffles = arguments.get("shuffle", True)
    fields: dict[str, Any] = {
        "batch_size": arguments.get("batch_size") or 32,
        "epochs": epochs,
        "validation_data": validation,
        "seed": int(np.random.randint(2**31)),
        "sampler": None if shuffles else torch.utils.data.SequentialSampler(range(_size(x))),
    }
    with temporary_folder("keras") as folder:
        run = folder / "run"
        options: dict[str, Any] = {
            "devices": devices,
            "run": run,
            "table": arguments.get("verbose", 1) not in (0, "0"),
        }
        model.stop_training = False
        callbacks.on_train_begin()
        if forks_can_use_cuda():
            train(
                job(model, x, y, callbacks=[TellsEpochs(listener.hear)], **fields), plan, **options
            )
        else:
            with on_device(model, "cpu"):
                data = packed((job(model, x, y, **fields), plan, options))
            train_elsewhere(data, listener.hear)
        if not listener.has_weights:
            load(model, run)
    callbacks.on_train_end(listener.logs)
    return model.history


@dataclass
class _Listener:
    """Lets Keras's callbacks hear of epochs, with the weights of the moment in the model.

    has_weights: whether the model has those of the run's end.
    """

    model: Any
    callbacks: Any
    logs: dict[str, float] = field(default_factory=dict)
    has_weights: bool = False

    def hear(self, epoch: EpochReport, weights: Mapping[str, torch.Tensor]) -> str | None:
        """See `TellsEpochs`."""
        load_weights(self.model, weights)
        self.has_weights = True
        before = _values(self.model)
        self.callbacks.on_epoch_begin(epoch.epoch)
        self.logs = {"loss": epoch.loss} if epoch.loss is not None else {}
        if epoch.evaluation is not None:
            self.logs["val_loss"] = epoch.evaluation.validation_loss
        self.callbacks.on_epoch_end(epoch.epoch, self.logs)
        if self.model.stop_training:
            return "a callback of Keras stopped it"
        if any(
            not np.array_equal(value, other)
            for value, other in zip(_values(self.model), before, strict=True)
        ):
            raise UsageError(
                "a callback changed weights or the learning rate, which ranks do not hear of",
                hint="plan='data=N', or a schedule of keras.optimizers.schedules",
            )
        return None


def _values(model: Any) -> list[Any]:
    rate = model.optimizer.learning_rate
    return [*model.get_weights(), keras.ops.convert_to_numpy(rate)]


def _check(callback: Any, plan: Plan) -> None:
    """
    Raises:
        UsageError: the callback looks at steps.
    """
    for hook in _STEP_HOOKS:
        if not type(callback).__module__.startswith("keras.") and (
            getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)
        ):
            raise UsageError(
                f"{type(callback).__name__}.{hook}: under '{plan}' callbacks hear of epochs alone",
                hint="on_epoch_end, or plan='data=N'",
            )


def _parted(x: Any, y: Any, validation: Any, part: float) -> tuple[Any, Any, Any]:
    """Training and validation data; the latter is the last part, as Keras has it."""
    if y is None:
        raise UsageError(
            "under a plan that splits the model, x and y must be arrays, or dictionaries or lists of them",
            hint="plan='data=N' takes a PyDataset, a DataLoader or a generator",
        )
    if validation is not None or not part:
        return x, y, validation
    size = math.floor(_size(x) * (1.0 - part))
    return (
        _cut(x, slice(size)),
        _cut(y, slice(size)),
        (_cut(x, slice(size, None)), _cut(y, slice(size, None))),
    )


def _cut(value: Any, rows: slice) -> Any:
    return keras.tree.map_structure(lambda array: array[rows], value)


def _size(value: Any) -> int:
    return len(keras.tree.flatten(value)[0])
