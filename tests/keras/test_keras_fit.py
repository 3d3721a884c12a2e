"""Keras models on several ranks: whatever `fit`, `evaluate` and `predict` do is what they do in one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from later import Later

import paceline as pl
from paceline.base.errors import PlanError, PlanRefused, UsageError
from paceline.keras import group
from paceline.launch.process.failure import RankFailed

keras, models = map(Later, ("keras", "keras_models"))
ROUNDING = 1e-12
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras's own
    pytest.mark.usefixtures("real_float64"),
]


X = np.random.default_rng(0).normal(size=(60, 6))
Y = X[:, :3].argmax(1)


def classifier(kind: Any = None, *, optimizer: Any = "adam", **compiled: Any) -> Any:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
    model = (kind or keras.Model)(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    usual = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    model.compile(optimizer=optimizer, **usual | compiled)
    return model


def assert_same(build: Callable[[], Any], plan: str, **fitted: Any) -> None:
    """A fit under the plan leaves the weights, the optimizer and the History that one process leaves."""
    arguments = {"x": X, "y": Y, "batch_size": 16, "epochs": 2, "verbose": 0} | fitted
    runs = []
    for its in (None, plan):
        model = build()
        made = {name: value() if callable(value) else value for name, value in arguments.items()}
        history = (
            pl.keras.fit(model, **made, plan=its).history if its else model.fit(**made).history
        )
        runs.append((model, history))
    (plain, expected), (model, history) = runs
    assert list(history) == list(expected)
    for name in expected:
        np.testing.assert_allclose(
            history[name], expected[name], rtol=ROUNDING, atol=ROUNDING, err_msg=name
        )
    for variable, expected_variable in zip(
        [*model.variables, *model.optimizer.variables],
        [*plain.variables, *plain.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(
            variable.numpy(),
            expected_variable.numpy(),
            rtol=ROUNDING,
            atol=ROUNDING,
            err_msg=variable.path,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans", [("data=3",), pytest.param(("data=2", "data=3"), marks=pytest.mark.slow)]
)
def test_a_training_step_of_ones_own_on_several_ranks(plans: tuple[str, ...], tmp_path):
    """Equal weights, History and checkpoints; callbacks run once, here, with weights as they are."""
    runs = {}
    for plan in ("single", *plans):
        model, noted, path = classifier(models.Guided), models.Noted(), tmp_path / f"{plan}.keras"
        history = pl.keras.fit(
            model,
            X,
            Y,
            batch_size=16,
            epochs=6,
            verbose=0,
            validation_split=0.3,
            plan=plan,
            callbacks=[
                noted,
                keras.callbacks.EarlyStopping(
                    patience=1, restore_best_weights=True, monitor="val_accuracy"
                ),
                keras.callbacks.ModelCheckpoint(str(path), save_best_only=True),
            ],
        )
        loaded = keras.saving.load_model(path, custom_objects={"Guided": models.Guided})
        runs[plan] = (history, [*model.get_weights(), loaded.predict(X, verbose=0)], noted)
    history, arrays, noted = runs["single"]
    assert len(history.epoch) < 6, "it stopped early"
    for plan in plans:
        its_history, its_arrays, its_noted = runs[plan]
        assert its_noted.events == noted.events
        np.testing.assert_allclose(its_noted.sums, noted.sums, rtol=ROUNDING)
        for name, values in history.history.items():
            np.testing.assert_allclose(
                its_history.history[name], values, rtol=ROUNDING, err_msg=f"{plan} {name}"
            )
        for mine, other in zip(its_arrays, arrays, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-9, atol=ROUNDING)


def spread(y_true, y_pred):
    """A metric of a whole batch, one number each."""
    return keras.ops.std(y_pred)


@pytest.mark.slow
def test_metrics_weights_and_callbacks_that_change_the_model():
    """Keras's metrics, those of no sum, class weights, learning rates set by callbacks, and a layer that is frozen."""

    def build() -> Any:
        return classifier(
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
            metrics=[
                "accuracy",
                keras.metrics.SparseTopKCategoricalAccuracy(k=2),
                models.Largest(),
                spread,
            ],
        )

    class Freeze(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.layers[1].trainable = False
            if epoch == 1:
                self.model.layers[3].rate = 0.5
            self.model.layers[-1].bias.assign_add([0.1, 0.0, 0.0])

    assert_same(
        build,
        "data=3",
        epochs=3,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        validation_data=(X[:19], Y[:19]),
        callbacks=lambda: [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
            Freeze(),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5),
        ],
    )


def tokens() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(1)
    x = drawn.integers(1, 9, size=(23, 7))
    for row, length in enumerate(drawn.integers(1, 8, size=23)):
        x[row, length:] = 0
    return x, drawn.integers(0, 3, size=(23, 7))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("of_tokens", "of_size"),
    [
        ("sum", "mean_with_sample_weight"),
        ("sum_over_batch_size", "sum"),
        *(
            pytest.param(reduction, reduction, marks=pytest.mark.slow)
            for reduction in ("sum", "mean_with_sample_weight", "sum_over_batch_size")
        ),
    ],
)
def test_losses_that_are_no_means_over_samples(of_tokens: str, of_size: str):
    """Sums, means over weights, and means over what a mask leaves; two outputs with weighted losses."""

    def build() -> Any:
        keras.utils.set_random_seed(5)
        inputs = keras.Input((7,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        hidden = keras.layers.LSTM(4, return_sequences=True)(hidden)
        model = keras.Model(
            inputs,
            {
                "tokens": keras.layers.Dense(3, activation="softmax", name="tokens")(hidden),
                "size": keras.layers.Dense(1, name="size")(
                    keras.layers.GlobalAveragePooling1D()(hidden)
                ),
            },
        )
        model.compile(
            optimizer=keras.optimizers.RMSprop(0.01),
            loss={
                "tokens": keras.losses.SparseCategoricalCrossentropy(reduction=of_tokens),
                "size": keras.losses.MeanSquaredError(reduction=of_size),
            },
            loss_weights={"tokens": 1.0, "size": 0.3},
            weighted_metrics={
                "tokens": ["accuracy"],
                "size": [keras.metrics.RootMeanSquaredError()],
            },
        )
        return model

    x, y = tokens()
    weights = np.random.default_rng(2).uniform(0.1, 3, size=23)
    assert_same(
        build,
        "data=2",
        x=x,
        y={"tokens": y, "size": x.sum(1, keepdims=True) / 10.0},
        batch_size=8,
        sample_weight={"tokens": np.tile(weights[:, None], (1, 7)), "size": weights},
    )


def test_data_of_every_kind():
    """A PyDataset of dictionaries with a short last batch; a DataLoader; prediction and evaluation of both."""

    def build() -> Any:
        keras.utils.set_random_seed(3)
        a, b = keras.Input((2,), name="a"), keras.Input((4,), name="b")
        model = keras.Model(
            {"a": a, "b": b}, keras.layers.Dense(3)(keras.layers.Concatenate()([a, b]))
        )
        model.compile(
            optimizer="adamw", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        return model

    assert_same(
        build,
        "data=2",
        x=lambda: models.Pairs(X, Y),
        y=None,
        batch_size=None,
        epochs=1,
        shuffle=False,
    )
    pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(pairs, batch_size=25)
    assert_same(classifier, "data=3", x=loader, y=None, batch_size=None, epochs=1, shuffle=False)
    model = classifier()
    np.testing.assert_allclose(
        pl.keras.predict(model, X, batch_size=7, plan="data=3", verbose=0),
        model.predict(X, batch_size=7, verbose=0),
        rtol=ROUNDING,
    )
    np.testing.assert_allclose(
        pl.keras.evaluate(model, X, Y, devices="cpu:0,cpu:1", verbose=0),
        model.evaluate(X, Y, verbose=0),
        rtol=ROUNDING,
    )


@pytest.mark.slow
def test_steps_of_torch_and_steps_that_couple_samples():
    """The first are as in one process. The others are refused by name, and the model is as it was."""
    assert_same(lambda: classifier(models.Clipped), "data=2", shuffle=False)
    model = classifier(models.Contrastive)
    before = model.get_weights()
    with pytest.raises(
        PlanRefused, match=r"train step of Contrastive .* not what one process computes: the grad"
    ):
        pl.keras.fit(model, X, Y, batch_size=16, verbose=0, plan="data=2")
    for mine, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, other)
    with (
        keras.RematScope(mode="full"),
        pytest.raises(PlanRefused, match="fails, and that of one process does not"),
    ):
        pl.keras.fit(classifier(), X, Y, batch_size=16, verbose=0, plan="data=2")
    assert torch.autograd.backward.__module__ == "torch.autograd", "patches are gone"
    assert model.train_function is None


@pytest.mark.slow
def test_infinite_gradients_and_a_model_that_is_not_compiled():
    """Both are as in one process: an infinity is no difference, and predictions need no optimizer."""

    def model(scale: float) -> Any:
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(scale)),
            ]
        )

    x = np.full((8, 4), 1e200)
    predicted = pl.keras.predict(model(1e120), x, plan="data=2", verbose=0)
    assert predicted.shape == (8, 1) and np.isinf(predicted).all()
    overflowing = model(1.0)
    overflowing.compile("sgd", "mse")
    history = pl.keras.fit(overflowing, x, np.zeros((8, 1)), plan="data=2", verbose=0, epochs=1)
    assert history.history["loss"] == [np.inf]


@pytest.mark.slow
def test_a_gan_with_two_optimizers():
    """The step of Keras's guide, on ranks of unequal shares."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = models.Gan()
        model.compile(optimizer=model.d_optimizer)
        return model

    assert_same(build, "data=3", y=None)


@pytest.mark.slow
def test_a_rank_that_fails_is_named(monkeypatch):
    """An error, a death and a hang in one place begin with the same words; a request to stop is one."""

    def error() -> None:
        raise ValueError("no such sample")

    monkeypatch.setattr(group, "PATIENCE_S", 3.0)
    place = r"rank 1 on \S+ failed in step 3 \(train\)"
    for how, words in (
        (error, rf"{place}, at .*:\n.*no such sample"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), rf"{place}:\n.*SIGKILL"),
        (lambda: time.sleep(1000), rf"{place}, at .*:\nrank 1 did not go on for 3 s"),
        (
            lambda: os.kill(os.getpid(), signal.SIGTERM),
            r"rank 1 was stopped by SIGTERM in step 3 \(train\)",
        ),
    ):
        monkeypatch.setattr(models.Failing, "how", staticmethod(how))
        with pytest.raises(RankFailed, match=words):
            pl.keras.fit(classifier(models.Failing), X, Y, batch_size=16, verbose=0, plan="data=2")


def test_what_is_refused_before_a_rank_starts(monkeypatch):
    model = classifier()
    with pytest.raises(UsageError, match=r"must be a keras\.Model"):
        pl.keras.fit(torch.nn.Linear(1, 1), X, Y)
    with pytest.raises(PlanError, match="plan='data=2'"):
        pl.keras.evaluate(model, X, Y, plan="tensor=2")
    with pytest.raises(PlanError, match="one device a rank"):
        pl.keras.fit(model, X, Y, plan="data=3", devices="cpu:0,cpu:1")
    with pytest.raises(PlanError, match="'auto' is no plan"):
        pl.keras.fit(model, X, Y, plan="auto")
    with monkeypatch.context() as environment:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }.items():
            environment.setenv(name, value)
        with pytest.raises(UsageError, match="torchrun started 2 processes"):
            pl.keras.fit(model, X, Y, plan="data=2")
    with keras.device("mps"):  # Keras's own choice on a Mac
        for plan in ("data=2", "tensor=2"):
            with pytest.raises(UsageError, match=r"on 'mps'(?s:.*)KERAS_TORCH_DEVICE=cpu"):
                pl.keras.fit(model, X, Y, plan=plan)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match="KERAS_BACKEND"):
        pl.keras.fit(model, X, Y, plan="data=2")
