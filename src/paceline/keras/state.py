"""What a Keras model is at a moment: its variables, and all else that a callback may change between two steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator

from paceline.keras.tensors import PLAIN
from paceline.torch_private.autograd import version_of
from paceline.training.parts.drift import fingerprint

# What Keras's own loop writes between steps, and no step reads.
_OF_THE_LOOP = frozenset({"training", "stop_training", "stop_evaluating", "stop_predicting"})


def optimizers(model: Any) -> list[Any]:
    """The compiled one, and those that a model with a training step of its own keeps in attributes."""
    values = [getattr(model, "optimizer", None)]  # which a model that is not compiled lacks
    for value in vars(model).values():
        values += (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
    return _distinct(value for value in values if isinstance(value, BaseOptimizer))


def variables(model: Any) -> list[Any]:
    """Of the layers, the metrics, the optimizers and Keras's global seed, in an order that is equal on every rank."""
    return _distinct(
        variable
        for variable in [
            *model.variables,
            *model.metrics_variables,
            *(variable for optimizer in optimizers(model) for variable in optimizer.variables),
            global_seed_generator().state,
        ]
        if variable._value is not None
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def versions(model_variables: Iterable[Any]) -> list[int]:
    """Of the variables' tensors; torch counts each change."""
    return [version_of(variable._value) for variable in model_variables]


def structure(model: Any, model_variables: Iterable[Any]) -> list[Any]:
    """All but the values of variables: which there are, which train, and plain attributes of layers and optimizers."""
    return [
        [(id(variable._value), variable.trainable) for variable in model_variables],
        *(
            sorted(_attributes(part))
            for part in [model, *model._flatten_layers(), *optimizers(model)]
        ),
    ]


def _attributes(part: Any) -> Iterator[tuple[str, str]]:
    for name, value in vars(part).items():
        if isinstance(value, PLAIN) and name not in _OF_THE_LOOP:
            yield name, repr(value)


def fingerprints(model_variables: Iterable[Any]) -> torch.Tensor:
    """A row of numbers, one a variable; equal for equal bits."""
    return torch.tensor([[int(fingerprint(variable._value)) for variable in model_variables]])


def random_state(device: str) -> dict[str, Any]:
    """Of the global generators of torch, of this device's, of numpy and of Python, as `set_random_state` takes it.

    Python seeds its own anew in every fork.
    """
    version, words, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": [version, torch.tensor(words), next_gauss],
        "cuda": torch.cuda.get_rng_state(device) if device.startswith("cuda") else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], torch.cuda.current_device())
    np.random.set_state(state["numpy"])
