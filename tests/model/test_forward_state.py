"""A snapshot of what a forward changes: objects stay the same when it is restored, and other ones are used when the
forward runs again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.base.streams import kept_streams, stream_states
from paceline.model.forward_state import ForwardState, function_kept, state_kept


class Sharing(nn.Module):
    """Draws from a generator that two modules have."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator, self.inner = generator, nn.Identity()
        self.inner.generator = generator

    def draws(self) -> list[float]:
        return [_drawn(self.generator), _drawn(self.inner.generator)]


def _drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


@pytest.mark.parametrize(
    "make", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState]
)
def test_modules_share_a_generator_again(make: Any):
    """It draws on where it was after a second forward, and from the start after it was restored."""
    generator = make()
    model = Sharing(generator)
    before = ForwardState(model).now()
    drawn = model.draws()
    further = ForwardState(model).now()

    with before.again():
        assert model.draws() == drawn and model.generator is not generator
    assert model.generator is model.inner.generator is generator
    later = model.draws()
    further.restore()
    assert model.draws() == later
    before.restore()
    assert model.draws() == drawn


def test_a_function_gets_its_variables_back():
    """The same objects with their former values, also tensors of a closure."""
    total, calls = torch.zeros(2), [0]
    number = 0

    class Meter:
        def __init__(self) -> None:
            self.sum, self.seen = torch.zeros(2), {"last": 0}

        def __call__(self, output: Tensor) -> Tensor:
            self.sum += output
            self.seen["last"] += 1
            return output

    meter = Meter()

    def loss(output: Tensor) -> Tensor:
        nonlocal number
        number += 1
        calls.append(number)
        total.add_(output)
        return meter(output)

    seen, mean = meter.seen, meter.sum
    with function_kept(loss, nn.Identity()), function_kept(meter, nn.Identity()):
        loss(torch.ones(2))
        assert total.tolist() == [1, 1]

    assert (number, calls, total.tolist()) == (0, [0], [0, 0])
    assert meter.seen is seen and seen == {"last": 0}
    assert meter.sum is mean and mean.tolist() == [0, 0]


def test_a_scripted_model_is_restored():
    """Its buffers are no dict."""
    model = torch.jit.script(nn.BatchNorm1d(3))  # type: ignore[no-untyped-call]
    with state_kept(model) as before:
        model(torch.rand(4, 3))
        assert set(before.tensors.changed()) == {
            "running_mean",
            "running_var",
            "num_batches_tracked",
        }
    assert before.tensors.changed() == [] and model.running_mean.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_streams_of_every_bit_generator_are_kept(kind: Any):
    """Also of one that NumPy doesn't begin with."""
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(kind(3))  # type: ignore[attr-defined]
    try:
        before = stream_states()
        with kept_streams():
            drawn = np.random.rand(), random.random()
            assert stream_states()[:2] != before[:2]
        assert stream_states()[:2] == before[:2]
        assert (np.random.rand(), random.random()) == drawn
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]
