"""Keras models on pretended GPUs, in a process that has used CUDA because it has imported Keras: as on one CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from later import not_installed
from pretended_cuda.client import Workshop, Workshops

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("keras") is None, reason=not_installed("keras")),
]
_SCRIPT = """
import json, os, sys
import keras, numpy as np, torch
import paceline as pl

PID, SEEN = os.getpid(), []
X = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
Y = X[:, :3].argmax(1)

class Guided(keras.Model):
    def train_step(self, data):
        x, y = data
        assert x.device == self.layers[1].kernel.value.device, (x.device, self.layers[1].kernel.value.device)
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return self.compute_metrics(x, y, self(x, training=True))

def made():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = keras.layers.Dropout(rate, seed=1)(keras.layers.BatchNormalization()(hidden))
    model = kind(inputs, keras.layers.Dense(3, activation="softmax")(hidden))
    model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1), metrics=["accuracy"],
                  loss="sparse_categorical_crossentropy")
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    return model

def of_job():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
                              keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    return model

class Notes(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert os.getpid() == PID
        SEEN.append([float(abs(weight).sum()) for weight in self.model.get_weights()])
        if epoch == 1 and freezes:
            self.model.layers[1].trainable = False

def run(planned, plan, devices):
    model = of_job() if plan.startswith("tensor") else made()
    SEEN.clear()
    how = dict(batch_size=16, epochs=epochs, verbose=0, validation_split=0.3, shuffle=False, callbacks=[Notes()])
    of = lambda name: (lambda *given, **options: getattr(pl.keras, name)(model, *given, plan=plan, devices=devices,
                       **options)) if planned else getattr(model, name)
    logs = of("fit")(X, Y, **how).history
    logs.pop("accuracy", None), logs.pop("val_accuracy", None)
    more = [of("predict")(X[:5], verbose=0).tolist(), of("evaluate")(X, Y, verbose=0)] if evaluates else []
    return [logs, SEEN[:], [weight.tolist() for weight in model.get_weights()], more,
            sorted({str(variable.value.device) for variable in model.variables})]

plan, devices, how = sys.argv[1:]
kind = Guided if how == "own step" else keras.Model
rate, freezes, evaluates = 0.3 if how == "dropout" else 0.0, how == "frozen", how == "evaluated"
epochs = 3 if freezes else 2
runs = [run(True, plan, devices or None), run(False, plan, None)]
if how != "dropout":  # which a CPU draws otherwise
    with keras.device("cpu"):
        runs.append(run(False, plan, None))
print(json.dumps(runs))
"""


@pytest.fixture(scope="module")
def num_gpus() -> int:
    return 3


def _near(value: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        value, expected = list(value.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(value) == len(expected)
        for item, other in zip(value, expected, strict=True):
            _near(item, other)
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "devices", "how"),
    [
        ("data=2", "cuda:1-2", "own step"),
        pytest.param("data=3", "", "frozen", marks=pytest.mark.slow),
        pytest.param("data=2", "cuda:0,cuda:0", "dropout", marks=pytest.mark.slow),
        pytest.param("data=2", "cpu:0-1", "evaluated", marks=pytest.mark.slow),
        pytest.param("data=2", "cuda:0-1", "evaluated", marks=pytest.mark.slow),
        pytest.param("tensor=2", "cuda:0-1", "job", marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_on_gpus_as_on_one_cpu(
    shop: Workshop, plan: str, devices: str, how: str, tmp_path: Path
):
    """Weights, figures and outputs; callbacks of this process see the weights of the moment; the model comes back."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    printed = shop.script(tmp_path / "script.py", plan, devices, how)
    planned, *plain = json.loads(printed.splitlines()[-1])
    *figures, devices_of_model = planned
    assert devices_of_model == ["cuda:0"]
    for expected in plain:
        _near(figures, expected[:-1])


@pytest.mark.slow
def test_the_example_runs_with_one_gpu(workshops: Workshops, tmp_path: Path):
    """Its two ranks are on CPUs, and so is what they are compared with."""
    with workshops.open(tmp_path, devices=1) as shop:
        single, distributed = shop.script(
            Path(__file__).parents[2] / "examples" / "07_keras.py"
        ).splitlines()
    assert single.removeprefix("data=1: ") == distributed.removeprefix("data=2: ")
