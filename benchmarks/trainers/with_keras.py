"""A Keras model in a loop with DistributedDataParallel, as Keras's guide "Multi-GPU distributed training with PyTorch"
has it. Keras's own `fit` does not spread a model over devices on this backend.

Settings: those of `with_ddp`, and `in_training` (`training=True` in every call of the model), `synchronized`
(of BatchNormalization).
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as dist
from keras import layers
from torch import Tensor, nn

from benchmarks.trainers.jobs import CLASSES, EXPERTS, FEATURES, POSITIONS, WIDTH
from benchmarks.trainers.record import Request, read_request, save
from benchmarks.trainers.with_ddp import mean_over_ranks, train


class Experts(keras.Model):
    """The first feature of a sample says which expert it goes to; an expert without samples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = [layers.Dense(WIDTH, name=f"experts_{number}") for number in range(EXPERTS)]
        self.head = layers.Dense(CLASSES, name="head")

    def call(self, input: Tensor) -> Tensor:
        route, hidden = input[:, 0].long(), input.new_zeros(len(input), WIDTH)
        for number, expert in enumerate(self.experts):
            chosen = (route == number).nonzero().flatten()
            if len(chosen):
                hidden = hidden.index_add(0, chosen, torch.tanh(expert(input[chosen])))
        return self.head(hidden)


class InTraining(nn.Module):
    """Calls a Keras model with `training=True`, as its `fit` does."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        list(
            model.named_parameters()
        )  # Keras registers its variables with torch when they are first asked for
        self.model = model

    def forward(self, input: Tensor) -> Tensor:
        return self.model(input, training=True)


def build(name: str, setting: str) -> keras.Model:
    """The job's model in Keras's layers, named as the entries of the torch model's state."""
    if name == "idle":
        model = Experts()
        for dense in model.experts:
            dense.build((None, FEATURES))
        model.head.build((None, WIDTH))
        return model
    shape = (POSITIONS, FEATURES) if name == "ignored" else (FEATURES,)
    hidden = inputs = keras.Input(shape)
    hidden = layers.Dense(WIDTH, name="0")(hidden)
    if name == "batchnorm":
        norm = (
            layers.GroupNormalization(4, epsilon=1e-5, name="1")
            if setting == "group_norm"
            else layers.BatchNormalization(
                momentum=0.9, epsilon=1e-5, synchronized=setting == "synchronized", name="1"
            )
        )
        hidden = norm(hidden)
    hidden = layers.Activation("tanh")(hidden)
    outputs = layers.Dense(CLASSES, name="3" if name == "batchnorm" else "2")(hidden)
    return keras.Model(inputs, outputs)


def named(model: keras.Model) -> dict[str, tuple[keras.Variable, bool]]:
    """Keras's variables by the names that torch's model has for them, and whether they lie transposed."""
    entries: dict[str, tuple[keras.Variable, bool]] = {}
    for layer in model._flatten_layers(include_self=False):
        name = layer.name.replace("experts_", "experts.")  # a name in Keras has no dot
        if isinstance(layer, layers.Dense):
            entries[f"{name}.weight"], entries[f"{name}.bias"] = (
                (layer.kernel, True),
                (layer.bias, False),
            )
        elif isinstance(layer, layers.BatchNormalization | layers.GroupNormalization):
            entries[f"{name}.weight"], entries[f"{name}.bias"] = (
                (layer.gamma, False),
                (layer.beta, False),
            )
        if isinstance(layer, layers.BatchNormalization):
            entries[f"{name}.running_mean"] = layer.moving_mean, False
            entries[f"{name}.running_var"] = layer.moving_variance, False
    return entries


def built(request: Request) -> keras.Model:
    """The Keras model with the job's initial weights."""
    model = build(request.name, request.setting)
    initial = request.job.model().state_dict()
    for name, (variable, is_transposed) in named(model).items():
        variable.assign(initial[name].T if is_transposed else initial[name])
    return model


def weights(model: keras.Model) -> dict[str, Tensor]:
    return {
        name: (variable.value.T if is_transposed else variable.value)
        for name, (variable, is_transposed) in named(model).items()
    }


def main() -> None:
    request = read_request()
    dist.init_process_group("gloo")
    model = built(request)
    losses, _ = train(request, InTraining(model) if request.setting == "in_training" else model)
    save(request, mean_over_ranks(losses), weights(model), rank=dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
