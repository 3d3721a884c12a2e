"""A compiled Keras model as a `Job`, for plans that split the model, for `verify`, and for all that jobs can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras.src.losses.losses import LossFunctionWrapper
from safetensors.torch import load_file
from torch import nn

from paceline.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.keras.optimizer import KerasOptimizer
from paceline.runtime.folder import MODEL

_MEANS = ("sum_over_batch_size", "mean")
_PREFIX = "model."  # of the Keras model's names in `KerasModule`


def job(model: Any, x: Any, y: Any, *, batch_size: int = 32, epochs: int = 1, validation_data: Any = None,
        **fields: Any) -> Job:
    """What `model.fit` would train, as a job: its loss, its optimizer, its weights as they are now.

    Args:
        model: Functional or Sequential, compiled, with one input and one output.
        x, y: Arrays or tensors.
        fields: More fields of `Job`. The job's data order is Paceline's, fixed by `seed`.

    Raises:
        JobError: the model has something that a job can't have; the message names it.
    """
    problems = list(_problems(model))
    if problems:
        raise JobError("; ".join(problems), hint="pl.keras.fit with plan='data=N' trains any compiled Keras model")
    loss, optimizer = _loss(model.loss), model.optimizer
    weights = {f"{_PREFIX}{name}": value.detach().clone() for name, value in model.state_dict().items()}
    return Job(model=lambda: KerasModule(keras.models.clone_model(model)), data=_pairs(x, y),
               loss=lambda output, target: loss(target, output),
               optimizer=lambda named: KerasOptimizer(named, optimizer), batch=batch_size, epochs=epochs,
               validation=None if validation_data is None else _pairs(*validation_data),
               init=weights, **fields)


def load(model: Any, run: str | Path) -> None:
    """Put the weights of a run of such a job into the model, in place.

    Raises:
        CheckpointError: the run has no weights yet, or they are those of another model.
    """
    path = Path(run) / MODEL
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", hint="a run writes it when it has ended")
    weights = {name.removeprefix(_PREFIX): value for name, value in load_file(path).items()}
    if weights.keys() != model.state_dict().keys():
        raise CheckpointError(f"{path} has the weights of another model than {model.name!r}")
    model.load_state_dict(weights)


class KerasModule(nn.Module):
    """A Keras model that trains where torch's modules do: Keras asks for that with each call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, training=self.training)


def _pairs(x: Any, y: Any) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*(value if isinstance(value, torch.Tensor) else torch.as_tensor(
        np.asarray(value, dtype=keras.config.floatx() if np.asarray(value).dtype.kind == "f" else None))
        for value in (x, y)))


def _loss(loss: Any) -> Any:
    found = keras.losses.get(loss)
    return found if isinstance(found, keras.Loss) else LossFunctionWrapper(found)


def _problems(model: Any) -> Iterator[str]:
    """What stands in the way, in words."""
    if not isinstance(model, keras.Model) or not model.compiled:
        yield "model must be a compiled keras.Model"
        return
    if not isinstance(model, keras.Sequential) and type(model).__name__ != "Functional":
        yield f"{type(model).__name__} is a class of its own and may have a training step of its own"
        return
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        yield f"the model has {len(model.inputs)} inputs and {len(model.outputs)} outputs, and a job's has one each"
    if model.losses:
        yield "the model adds losses or regularises weights, which a job's loss does not see"
    if isinstance(model.loss, dict | list | tuple):
        yield "the loss is one of several outputs"
    elif _loss(model.loss).reduction not in _MEANS:
        yield f"the loss is reduced by {_loss(model.loss).reduction!r} and not by a mean over the batch"
    masking = [layer.name for layer in model._flatten_layers()
               if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)]
    if masking:
        yield f"the layer {masking[0]!r} masks a part of the samples, and the loss is the mean over the rest"
    if (kind := type(model.optimizer).__name__) in ("LossScaleOptimizer", "MultiOptimizer"):
        yield f"the optimizer is a {kind}"
    yield from (f"the optimizer has {name}" for name in ("use_ema", "gradient_accumulation_steps")
                if getattr(model.optimizer, name, None))
