"""Models, metrics and callbacks of Keras that the tests fit."""

from __future__ import annotations

import os
import random
from typing import Any

import keras
import torch

PID = os.getpid()


class Guided(keras.Model):
    """As in Keras's guide "Customizing what happens in fit() with PyTorch"."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        loss.backward()
        trainable_weights = list(self.trainable_weights)
        gradients = [v.value.grad for v in trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Noted(keras.callbacks.Callback):
    """What a user's own callback sees, by event."""

    def __init__(self) -> None:
        super().__init__()
        self.pid, self.events, self.sums = os.getpid(), [], []

    def on_train_batch_end(self, batch, logs=None):
        self.events.append((os.getpid() - self.pid, "batch", batch, sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.events.append((os.getpid() - self.pid, "epoch", epoch, sorted(logs)))
        self.sums.append(sum(float(abs(weight).sum()) for weight in self.model.get_weights()))


class Largest(keras.metrics.Metric):
    """A metric that is no sum: the largest probability seen."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


class Pairs(keras.utils.PyDataset):
    """Of four batches, the inputs in two."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = (array[index * 16 : index * 16 + 16] for array in (self.x, self.y))
        return {"a": x[:, :2], "b": x[:, 2:]}, y


class Contrastive(keras.Model):
    """A loss that couples samples."""

    def train_step(self, data):
        x, _ = data
        self.zero_grad()
        outputs = self(x)
        loss = torch.logsumexp(outputs @ outputs.T, dim=1).mean()
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}


class Clipped(keras.Model):
    """A loss by hand, random numbers without a seed, a clip by torch, and an optimizer of torch."""

    def train_step(self, data):
        x, y = data
        if not hasattr(self, "torch_optimizer"):
            self.torch_optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
        self.torch_optimizer.zero_grad()
        x = x + 0.1 * keras.random.normal(x.shape)
        loss = torch.nn.functional.nll_loss(self(x, training=True).log(), y.long()) * (
            1 + random.random()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.torch_optimizer.step()
        return {"loss": loss}


class Gan(keras.Model):
    """As in Keras's guide: two optimizers, batches that are joined, and noise on their labels."""

    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(6),
            ]
        )
        self.seed_generator = keras.random.SeedGenerator(7)
        self.d_optimizer, self.g_optimizer = (
            keras.optimizers.Adam(0.01),
            keras.optimizers.Adam(0.02),
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss, self.g_loss = (
            keras.metrics.Mean(name="d_loss"),
            keras.metrics.Mean(name="g_loss"),
        )
        self.built = True

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def update(self, part, optimizer, loss):
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in part.trainable_weights], part.trainable_weights)

    def train_step(self, real):
        number = real.shape[0]
        generated = self.generator(keras.random.normal((number, 4), seed=self.seed_generator))
        labels = torch.concat([torch.ones((number, 1)), torch.zeros((number, 1))], axis=0)
        labels = labels + 0.05 * keras.random.uniform(labels.shape, seed=self.seed_generator)
        guesses = self.discriminator(torch.concat([generated, real], axis=0), training=True)
        d_loss = self.loss_fn(labels, guesses)
        self.update(self.discriminator, self.d_optimizer, d_loss)
        noise = keras.random.normal((number, 4), seed=self.seed_generator)
        g_loss = self.loss_fn(
            torch.zeros((number, 1)), self.discriminator(self.generator(noise, training=True))
        )
        self.update(self.generator, self.g_optimizer, g_loss)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


class Failing(keras.Model):
    """Fails in the third step of a rank."""

    how: Any = None

    def train_step(self, data):
        if os.getpid() != PID and int(self.optimizer.iterations) == 2:
            self.how()
        return super().train_step(data)


class Squares(keras.layers.Layer):
    """Adds a loss, the mean of squares."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class TwoTowers(keras.Model):
    """A class with a `call` and no configuration, whose layers add losses of each kind."""

    def __init__(self):
        super().__init__()
        self.towers = [
            keras.layers.Dense(4, activation="tanh", activity_regularizer="l2"),
            keras.layers.Dense(4, kernel_regularizer="l1"),
        ]
        self.squares, self.head = Squares(), keras.layers.Dense(2)

    def call(self, inputs):
        first, second = self.towers
        return self.head(self.squares(first(inputs["first"]) + second(inputs["second"])))
