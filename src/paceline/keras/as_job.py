"""A compiled Keras model as a `Job`, for plans that split the model, for `verify`, and for all that jobs can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.torch.trainer import TorchTrainer as Trainer
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from safetensors.torch import load_file
from torch import nn

from paceline.base.errors import CheckpointError, JobError
from paceline.base.nested import map_batch
from paceline.job import Job
from paceline.keras.copies import copy_of, packed
from paceline.keras.devices import on_device, where
from paceline.keras.optimizer import KerasOptimizer
from paceline.runs.folder import MODEL
from paceline.training.feed import MicroBatch

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_STEP = ("train_step", "compute_loss", "make_train_function")  # what the job's loop replaces
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
        model: Compiled. It is called once with the first sample, which makes its weights if it has none yet.
        x, y: Arrays or tensors; of several inputs or outputs a dictionary of them by name, or a list in their order.
        fields: More fields of `Job`. The job's data order is Paceline's, fixed by `seed`.

    Raises:
        JobError: the model has something that a job can't have; the message names it.
    """
    _refuse(_problems(model))
    inputs, outputs = _ports(model, x, y)
    _refuse(_loss_problems(model, outputs))
    data = Samples(inputs.named(x, "x"), outputs.named(y, "y"))
    loss, adds = KerasLoss.of(model, outputs), _adds(KerasModule(model, inputs, outputs), data)
    optimizer = model.optimizer
    validation = validation_data and Samples(
        inputs.named(validation_data[0], "x"), outputs.named(validation_data[1], "y")
    )
    weights = {
        f"{_PREFIX}{name}": value.detach().to("cpu", copy=True)
        for name, value in model.state_dict().items()
    }

    if not adds and type(model) in (Functional, keras.Sequential):
        copied = partial(keras.models.clone_model, model)
    else:
        with on_device(model, "cpu"):
            copied = partial(copy_of, packed(model))

    def built() -> KerasModule:
        with keras.device("cpu"):
            return KerasModule(copied(), inputs, outputs)

    return Job(
        model=built,
        data=data,
        loss=None if adds else loss,
        compute=LossOfLayers(loss) if adds else None,
        optimizer=lambda named: KerasOptimizer(named, optimizer),
        batch=batch_size,
        epochs=epochs,
        validation=validation,
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
        if isinstance(value, Mapping) and value.keys() >= set(self.names):
            named = {name: value[name] for name in self.names}
        elif isinstance(value, list | tuple) and len(value) == len(self.names):
            named = dict(zip(self.names, value, strict=True))
        elif len(self.names) == 1 and not isinstance(value, Mapping):
            named = {self.names[0]: value}
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
    """The graph of the model's layers; None for a class with a `call`, and for a Sequential without shapes."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def _ports(model: Any, x: Any, y: Any) -> tuple[Ports, Ports]:
    """Inputs and outputs; as the data has them where the model does not say."""
    functional = _functional(model)
    if functional is None:
        inputs, outputs = (
            Ports.of(
                value, [*map(str, range(len(value) if isinstance(value, list | tuple) else 1))]
            )
            for value in (x, y)
        )
        return inputs, outputs
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
        return map_batch(lambda tensor: tensor[index], (self.x, self.y))


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
            _by_output(given, outputs)
            for given in (model.loss, (model.get_compile_config() or {}).get("loss_weights"))
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


@dataclass(frozen=True)
class LossOfLayers:
    """(model, batch) -> the loss with what layers add to it, weighted by what a mask leaves of the samples."""

    loss: KerasLoss

    def __call__(self, module: Any, batch: Any) -> Any:
        x, y = batch
        output = MicroBatch(x, None, 1).call(module)
        with where(_leaves(output)[0]):
            loss = self.loss(output, y) + sum(map(keras.ops.sum, module.model.losses))
        module.model._clear_losses()  # a forward leaves no attributes
        mask = get_keras_mask(_leaves(output)[0])
        if mask is None:
            return loss
        count = mask.sum()
        return loss * count, count


def _adds(module: KerasModule, data: Samples) -> bool:
    """Call the model with the first sample; return whether its layers add losses, or mask its outputs.

    Raises:
        JobError: they do what a loss and its count can't tell.
    """
    x, y = data[0]
    first = MicroBatch(x, y, 1).mapped(lambda row: row[None])
    module.training = False
    with torch.no_grad(), where(_leaves(first.input)[0]):
        output = first.call(module)
    model = module.model
    masked = any(get_keras_mask(tensor) is not None for tensor in _leaves(output))
    if masked and len(_leaves(output)) > 1:
        _refuse(["one of several outputs is masked, and the losses are means over unequal counts"])
    if masked and any(layer._get_own_losses() for layer in model._flatten_layers()):
        _refuse(
            [
                "the output is masked, and a layer adds a loss of its samples, which has another count"
            ]
        )
    adds = masked or bool(model.losses) or _functional(model) is None
    model._clear_losses()
    return adds


def _refuse(problems: Iterable[str]) -> None:
    """
    Raises:
        JobError: there are some.
    """
    if listed := list(problems):
        raise JobError(
            "; ".join(listed),
            hint="pl.keras.fit with plan='data=N' trains any compiled Keras model",
        )


def _problems(model: Any) -> Iterator[str]:
    """What stands in the way, in words."""
    if not isinstance(model, Trainer) or not model.compiled:
        yield "model must be a compiled keras.Model"
        return
    yield from (
        f"{type(model).__name__} has its own {name}"
        for name in _STEP
        if getattr(type(model), name) is not getattr(Trainer, name)
    )
    if (functional := _functional(model)) is not None:
        yield from (
            f"the model's {side} are nested deeper than a dictionary or a list"
            for side in ("inputs", "outputs")
            for path, _ in keras.tree.flatten_with_path(getattr(functional, f"_{side}_struct"))
            if len(path) > 1
        )
    if (kind := type(model.optimizer).__name__) in ("LossScaleOptimizer", "MultiOptimizer"):
        yield f"the optimizer is a {kind}"
    yield from (
        f"the optimizer has {name}"
        for name in ("use_ema", "_exclude_from_weight_decay")
        if getattr(model.optimizer, name, None)
    )
    yield from (
        f"the weight {variable.path!r} has a constraint"
        for variable in model.trainable_variables
        if variable.constraint is not None
    )


def _loss_problems(model: Any, outputs: Ports) -> Iterator[str]:
    losses = _by_output(model.loss, outputs)
    if all(loss is None for loss in losses.values()):
        yield f"no output of {', '.join(losses)} has a loss"
    yield from (
        f"the loss is reduced by {_loss(loss).reduction!r} and not by a mean over the batch"
        for loss in losses.values()
        if loss is not None and _loss(loss).reduction not in _MEANS
    )
