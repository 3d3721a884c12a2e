"""Keras models as jobs, with Keras's own optimizers under any plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from later import Later
from torch import nn

import paceline as pl
from paceline.base.errors import JobError, UsageError

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras's own
keras, models = map(Later, ("keras", "keras_models"))
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "clipnorm": 0.5},
    "Adam": {"amsgrad": True},
    "AdamW": {"learning_rate": 0.05, "weight_decay": 0.1},
    "Adamax": {"learning_rate": 0.05},
    "Nadam": {"learning_rate": 0.05},
    "Adagrad": {"learning_rate": 0.05},
    "Adadelta": {"learning_rate": 0.5},
    "RMSprop": {"learning_rate": 0.05, "centered": True},
    "Ftrl": {"learning_rate": 0.05},
    "Lion": {"learning_rate": 0.05},
    "Adafactor": {"learning_rate": 0.05},
    "Lamb": {"learning_rate": 0.05},
    "SGD of a global norm": {"learning_rate": 0.1, "global_clipnorm": 0.5},
    "SGD of several steps": {"learning_rate": 0.1, "gradient_accumulation_steps": 3},
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rule_is_that_of_keras_also_after_a_reload(name: str):
    """Four steps by Keras are two steps by torch's interface and two more of another that took its state."""
    from paceline.keras.optimizer import KerasOptimizer

    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)  # where none is given
    optimizer = getattr(keras.optimizers, name.split()[0])(
        **{"learning_rate": rate, **OPTIMIZERS[name]}
    )
    drawn = torch.Generator().manual_seed(0)
    weights = {"a": torch.randn(4, 3, generator=drawn), "b": torch.randn(3, generator=drawn)}
    gradients = [
        {name: torch.randn(its.shape, generator=drawn) for name, its in weights.items()}
        for _ in range(4)
    ]
    plain = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(weight.clone()) for weight in weights.values()]
    for each in gradients:
        plain.apply(list(each.values()), variables)

    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    first = KerasOptimizer(parameters.items(), optimizer)
    _step(first, parameters, gradients[:2])
    second = KerasOptimizer(parameters.items(), optimizer)
    second.load_state_dict(first.state_dict())
    _step(second, parameters, gradients[2:])
    for parameter, variable in zip(parameters.values(), variables, strict=True):
        torch.testing.assert_close(parameter.detach(), variable.value.detach(), rtol=0, atol=0)


def _step(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], gradients: list[Any]
) -> None:
    for each in gradients:
        for name, parameter in parameters.items():
            parameter.grad = each[name].clone()
        optimizer.step()


def classifier(**compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *(keras.layers.Dense(8, activation="tanh") for _ in range(2)),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": loss} | compiled)
    return model


X = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
Y = X[:, :3].argmax(1)


@pytest.mark.slow
def test_a_run_gives_its_weights_back(tmp_path):
    """They are other weights than before, and evaluate to the run's validation loss."""
    model = classifier()
    before = model.get_weights()
    job = pl.keras.job(model, X, Y, batch_size=16, epochs=1, validation_data=(X, Y))
    summary = pl.train(job, "data=2", run=tmp_path)
    for mine, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    pl.keras.load(model, tmp_path)
    assert any(
        bool((mine != other).any()) for mine, other in zip(model.get_weights(), before, strict=True)
    )
    np.testing.assert_allclose(
        model.evaluate(X, Y, verbose=0), summary["validation_loss"], rtol=1e-5
    )


def two_of_each(container: type) -> Any:
    """A model with two inputs and two outputs, by name or in order."""
    keras.utils.set_random_seed(3)
    first, second = keras.Input((6,), name="first"), keras.Input((2,), name="second")
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Concatenate()([first, second]))
    kind, size = (
        keras.layers.Dense(3, name="kind")(hidden),
        keras.layers.Dense(1, name="size")(hidden),
    )
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    if container is dict:
        model = keras.Model({"first": first, "second": second}, {"kind": kind, "size": size})
        model.compile(keras.optimizers.Adam(0.05), losses, loss_weights={"kind": 1.0, "size": 0.3})
    else:
        model = keras.Model([first, second], [kind, size])
        model.compile(keras.optimizers.Adam(0.05), list(losses.values()), loss_weights=[1.0, 0.3])
    return model


BY_NAME: tuple[Any, Any] = (
    {"first": X, "second": X[:, :2]},
    {"kind": Y % 3, "size": X[:, :1] - X[:, 1:2]},
)


@pytest.mark.parametrize("container", [dict, list])
def test_several_inputs_and_outputs_have_the_loss_that_keras_computes(container: type):
    """Given by name or, where the model has them in order, as a list."""
    model = two_of_each(container)
    given = BY_NAME if container is dict else tuple(list(value.values()) for value in BY_NAME)
    job = pl.keras.job(model, *given, batch_size=60)
    samples, module = [job.data[index] for index in range(60)], job.model().eval()
    module.load_state_dict(job.init)
    x, y = (
        {name: torch.stack([sample[part][name] for sample in samples]) for name in samples[0][part]}
        for part in (0, 1)
    )
    loss = float(job.loss(module(**x), y).detach())
    assert loss == pytest.approx(
        model.evaluate(*given, batch_size=60, verbose=0, return_dict=True)["loss"], rel=1e-6
    )
    with pytest.raises(JobError, match="the model has first, second"):
        pl.keras.job(model, {"third": X}, given[1])


def test_a_plan_that_splits_the_model_gives_keras_s_history():
    """Also to callbacks, which stop the run and have the weights of the moment."""

    class Notes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(
                (epoch, sorted(logs), sum(float(value.sum()) for value in self.model.get_weights()))
            )

    trained: list[Any] = []
    for plan in (None, "shard=2"):
        model, seen = two_of_each(dict), list[Any]()
        stops = keras.callbacks.EarlyStopping(patience=1, min_delta=0.2, restore_best_weights=True)
        options: dict[str, Any] = {
            "batch_size": 16,
            "epochs": 8,
            "shuffle": False,
            "verbose": 0,
            "validation_split": 0.2,
            "callbacks": [Notes(), stops],
        }
        history = (
            model.fit(*BY_NAME, **options)
            if plan is None
            else pl.keras.fit(model, *BY_NAME, plan=plan, **options)
        )
        trained.append((history.history, seen, model.get_weights()))
    (plain, plain_seen, plain_weights), (figures, seen, weights) = trained
    assert 1 < len(figures["loss"]) == len(plain["loss"]) < 8
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(figures[name], plain[name], rtol=1e-4)
    assert [each[0] for each in seen] == [each[0] for each in plain_seen]
    np.testing.assert_allclose(
        [each[2] for each in seen], [each[2] for each in plain_seen], rtol=1e-3, atol=1e-3
    )
    for mine, other in zip(weights, plain_weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_what_a_split_plan_can_not_tell_callbacks_is_refused():
    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise AssertionError

    with pytest.raises(UsageError, match=r"Looks\.on_train_batch_end"):
        pl.keras.fit(classifier(), X, Y, plan="shard=2", callbacks=[Looks()])
    with pytest.raises(UsageError, match="does not take class_weight"):
        pl.keras.fit(classifier(), X, Y, plan="shard=2", class_weight={0: 2.0})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_plans_that_split_a_keras_model_are_exact():
    certificates = pl.verify(
        pl.keras.job(classifier(), X, Y, batch_size=16),
        ["data=2", "shard=2", "tensor=2", "pipeline=2"],
        steps=4,
    )
    assert [certificate.passed for certificate in certificates] == [True] * 4


def of_layers() -> Any:
    """Losses of weights, of activities and of a layer's own, in a class with a `call`, of inputs by name."""
    return models.TwoTowers(), BY_NAME[0], X[:, :2]


def masked() -> Any:
    """A mean over the tokens that a mask leaves, and a loss of weights."""
    x = np.where(
        np.arange(7) < np.arange(60)[:, None] % 7 + 1, np.arange(420).reshape(60, 7) % 8 + 1, 0
    )
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.LSTM(4, return_sequences=True, kernel_regularizer="l2"),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers), x, np.cumsum(x, 1)[..., None] / 10.0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=3"])
@pytest.mark.parametrize("made", [of_layers, masked])
def test_losses_of_layers_and_masks_are_those_of_keras(
    made: Callable[[], Any], plan: str, real_float64: None, tmp_path
):
    """The weights after two epochs are those of `fit`, and so is the loss of an evaluation."""
    trained = []
    for is_planned in (False, True):
        keras.utils.set_random_seed(3)
        model, x, y = made()
        model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2), "mse")
        if is_planned:
            order = torch.utils.data.SequentialSampler(range(60))
            job = pl.keras.job(
                model, x, y, batch_size=16, epochs=2, sampler=order, validation_data=(x, y)
            )
            loss = pl.train(job, plan, run=tmp_path)["validation_loss"]
            pl.keras.load(model, tmp_path)
        else:
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
            loss = model.evaluate(x, y, batch_size=60, verbose=0)
        trained.append([*model.get_weights(), np.asarray(loss)])
    for value, expected in zip(*trained, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (lambda: {"loss": keras.losses.MeanSquaredError(reduction="sum")}, "reduced by 'sum'"),
        (lambda: {"optimizer": keras.optimizers.Adam(use_ema=True)}, "use_ema"),
    ],
)
def test_what_a_job_can_not_have_is_named(compiled: Callable[[], dict[str, Any]], words: str):
    with pytest.raises(JobError, match=words):
        pl.keras.job(classifier(**compiled()), X, Y)


def test_a_class_with_a_training_step_of_its_own_is_refused():
    plain = classifier()
    model = models.Guided(plain.inputs, plain.outputs)
    model.compile("adam", "mse")
    with pytest.raises(JobError, match="Guided has its own train_step"):
        pl.keras.job(model, X, Y)
