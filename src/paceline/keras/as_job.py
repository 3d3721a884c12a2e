"""A compiled Keras model as a `Job`, for plans that split the model, for `verify`, and for all that jobs can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras.src.losses.losses import LossFunctionWrapper
from safetensors.torch import load_file
from torch import nn

from paceline.base.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.keras.devices import where
from paceline.keras.optimizer import KerasOptimizer
from paceline.runs.folder import MODEL

_MEANS = ("sum_over_batch_size", "mean")
_PREFIX = "model."  # of the Keras model's names in `KerasModule`


def job(
    model: Any,
    x: Any,
    y: Any,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    validation_data: Any = None,
    **fields: Any,
) -> Job:
    """What `model.fit` would train, as a job: its loss, its optimizer, its weights as they are now.

    Args:
        model: Functional or Sequential, compiled.
        x, y: Arrays or tensors; of several inputs or outputs a dictionary of them by name, or a list in their order.
        fields: More fields of `Job`. The job's data order is Paceline's, fixed by `seed`.

    Raises:
        JobError: the model has something that a job can't have; the message names it.
    """
    problems = list(_problems(model))
    if problems:
        raise JobError(
            "; ".join(problems),
            hint="pl.keras.fit with plan='data=N' trains any compiled Keras model",
        )
    inputs, outputs = _ports(model)
    optimizer = model.optimizer
    weights = {
        f"{_PREFIX}{name}": value.detach().to("cpu", copy=True)
        for name, value in model.state_dict().items()
    }

    def samples(x: Any, y: Any) -> Samples:
        return Samples(inputs.named(x, "x"), outputs.named(y, "y"))

    def built() -> KerasModule:
        with keras.device("cpu"):
            return KerasModule(keras.models.clone_model(model), inputs, outputs)

    return Job(
        model=built,
        data=samples(x, y),
        loss=KerasLoss.of(model, outputs),
        optimizer=lambda named: KerasOptimizer(named, optimizer),
        batch=batch_size,
        epochs=epochs,
        validation=None if validation_data is None else samples(*validation_data),
        init=weights,
        **fields,
    )


def load(model: Any, run: str | Path) -> None:
    """Put the weights of a run of such a job into the model, in place.

    Raises:
        CheckpointError: the run has no weights yet, or they are those of another model.
    """
    path = Path(run) / MODEL
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", hint="a run writes it when it has ended")
    weights = load_file(path)
    if {name.removeprefix(_PREFIX) for name in weights} != model.state_dict().keys():
        raise CheckpointError(f"{path} has the weights of another model than {model.name!r}")
    load_weights(model, weights)


def load_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights of a job's model into the Keras model that it was made of, in place."""
    model.load_state_dict({name.removeprefix(_PREFIX): value for name, value in weights.items()})


@dataclass(frozen=True)
class Ports:
    """A model's inputs, or its outputs.

    names: in the model's own order. container: what the model has them in; None for a single one.
    """

    names: tuple[str, ...]
    container: type | None

    @classmethod
    def of(cls, structure: Any, names: Sequence[str]) -> Ports:
        if isinstance(structure, dict):
            return cls(tuple(structure), dict)
        return cls(tuple(names), type(structure) if isinstance(structure, list | tuple) else None)

    def named(self, value: Any, description: str) -> Any:
        """Arrays by name; one that is alone as it is.

        Raises:
            JobError: names or numbers are others than the model's.
        """
        if (
            len(self.names) == 1
            and not isinstance(value, Mapping)
            and not (isinstance(value, list | tuple) and len(value) == 1)
        ):
            return value if self.container is None else {self.names[0]: value}
        if isinstance(value, Mapping) and value.keys() >= set(self.names):
            named = {name: value[name] for name in self.names}
        elif isinstance(value, list | tuple) and len(value) == len(self.names):
            named = dict(zip(self.names, value, strict=True))
        else:
            given = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise JobError(
                f"{description} is {given}, and the model has {', '.join(self.names)}",
                hint="a dictionary with these names, or a list in this order",
            )
        return named if self.container is not None else named[self.names[0]]

    def packed(self, named: Mapping[str, Any]) -> Any:
        """As the model takes or gives them."""
        assert self.container is not None
        return (
            dict(named)
            if self.container is dict
            else self.container(named[name] for name in self.names)
        )


def _functional(model: Any) -> Any:
    return model._functional if isinstance(model, keras.Sequential) else model


def _ports(model: Any) -> tuple[Ports, Ports]:
    """Inputs and outputs."""
    functional = _functional(model)
    return (
        Ports.of(functional._inputs_struct, [tensor.name for tensor in functional.inputs]),
        Ports.of(functional._outputs_struct, functional.output_names),
    )


class KerasModule(nn.Module):
    """A Keras model that trains where torch's modules do: Keras asks for that with each call. It is called with its
    inputs by name, and returns its outputs by name, unless there is but one."""

    def __init__(self, model: Any, inputs: Ports, outputs: Ports) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *alone: torch.Tensor, **named: torch.Tensor) -> Any:
        with where(next(iter(alone or named.values()))):
            output = self.model(
                alone[0] if alone else self.inputs.packed(named), training=self.training
            )
        return (
            output if self.outputs.container is None else self.outputs.named(output, "the output")
        )


class Samples(torch.utils.data.Dataset[Any]):
    """Arrays as samples: pairs of rows, or of rows by name. Floats are of Keras's own float type."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = _tensors(x), _tensors(y)
        sizes = {len(tensor) for value in (self.x, self.y) for tensor in _leaves(value)}
        if len(sizes) > 1:
            raise JobError(
                f"x and y have unequal numbers of samples: {', '.join(map(str, sorted(sizes)))}"
            )
        (self.size,) = sizes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return tuple(
            {name: tensor[index] for name, tensor in value.items()}
            if isinstance(value, dict)
            else value[index]
            for value in (self.x, self.y)
        )


def _leaves(value: Any) -> list[torch.Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensors(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value)
    return torch.as_tensor(
        np.asarray(array, dtype=keras.config.floatx() if array.dtype.kind == "f" else None)
    )


@dataclass(frozen=True)
class KerasLoss:
    """(output, target) -> the weighted sum of the losses of all outputs.

    weighted: of each output that has a loss, its name (None where there is but one), the loss and its weight.
    """

    weighted: tuple[tuple[str | None, Any, float], ...]

    @classmethod
    def of(cls, model: Any, outputs: Ports) -> KerasLoss:
        losses, weights = (
            _by_output(given, outputs) for given in (model.loss, _loss_weights(model))
        )
        return cls(
            tuple(
                (
                    name if outputs.container is not None else None,
                    _loss(losses[name]),
                    1.0 if weights[name] is None else float(weights[name]),
                )
                for name in outputs.names
                if losses[name] is not None
            )
        )

    def __call__(self, output: Any, target: Any) -> Any:
        with where(_leaves(output)[0]):
            return sum(
                weight
                * (loss(target, output) if name is None else loss(target[name], output[name]))
                for name, loss, weight in self.weighted
            )


def _loss_weights(model: Any) -> Any:
    return (model.get_compile_config() or {}).get("loss_weights")


def _by_output(value: Any, outputs: Ports) -> dict[str, Any]:
    """What `compile` was given for each output: one for all, or a list or dictionary of them; None where nothing."""
    if isinstance(value, Mapping):
        return {name: value.get(name) for name in outputs.names}
    if isinstance(value, list | tuple):
        return dict(zip(outputs.names, value, strict=True))
    return dict.fromkeys(outputs.names, value)


def _loss(loss: Any) -> Any:
    known = keras.losses.get(loss)
    return known if isinstance(known, keras.Loss) else LossFunctionWrapper(known)


def _problems(model: Any) -> Iterator[str]:
    """What stands in the way, in words."""
    if not isinstance(model, keras.Model) or not model.compiled:
        yield "model must be a compiled keras.Model"
        return
    if not isinstance(model, keras.Sequential) and type(model).__name__ != "Functional":
        yield f"{type(model).__name__} is a class of its own and may have a training step of its own"
        return
    functional = _functional(model)
    if functional is None:
        yield "the model has no shapes yet: begin it with keras.Input, or call it once"
        return
    for side, structure in (
        ("inputs", functional._inputs_struct),
        ("outputs", functional._outputs_struct),
    ):
        if any(
            isinstance(item, dict | list | tuple)
            for item in (
                structure.values()
                if isinstance(structure, dict)
                else structure
                if isinstance(structure, list | tuple)
                else ()
            )
        ):
            yield f"the model's {side} are nested deeper than a dictionary or a list"
            return
    if model.losses:
        yield "the model adds losses or regularises weights, which a job's loss does not see"
    losses = _by_output(model.loss, _ports(model)[1])
    if all(loss is None for loss in losses.values()):
        yield f"no output of {', '.join(losses)} has a loss"
    yield from (
        f"the loss is reduced by {_loss(loss).reduction!r} and not by a mean over the batch"
        for loss in losses.values()
        if loss is not None and _loss(loss).reduction not in _MEANS
    )
    masking = [
        layer.name
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
    ]
    if masking:
        yield f"the layer {masking[0]!r} masks a part of the samples, and the loss is the mean over the rest"
    if (kind := type(model.optimizer).__name__) in ("LossScaleOptimizer", "MultiOptimizer"):
        yield f"the optimizer is a {kind}"
    yield from (
        f"the optimizer has {name}"
        for name in ("use_ema", "gradient_accumulation_steps")
        if getattr(model.optimizer, name, None)
    )
