"""Random streams depend on their key alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from paceline.base.streams import kept_streams, key_to_seed, seed_sample, seed_streams


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_keys_give_unrelated_seeds():
    """Keys that differ in a part, in its type or in where parts begin have different seeds of 63 bits."""
    keys = [
        (0,),
        (1,),
        ("0",),
        (0, 0),
        (0, "order", 1),
        (0, "order", 2),
        (1, "order", 1),
        (0, "ord", "er1"),
        (0, "order1"),
        (1, 1),
        (0, 11),
        (-1,),
    ]
    seeds = [key_to_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert abs(np.mean([key_to_seed(i) / 2**63 for i in range(1000)]) - 0.5) < 0.04  # 4 sigma


def test_the_seed_of_a_key_never_changes():
    """A checkpoint holds keys and not states, so a later version must give them the same seeds."""
    assert key_to_seed(0, "step", 3, 1, 0) == 612883036222323911


@pytest.mark.parametrize(
    "seed",
    [lambda n: seed_streams(7, "step", n), lambda n: seed_sample(7, n)],
    ids=["seed_streams", "seed_sample"],
)
def test_a_key_decides_all_three_generators(seed):
    """Whatever was drawn before, a key gives the same numbers in torch, random and NumPy; another key others."""
    seed(1)
    first = draws()
    draws()
    seed(2)
    second = draws()
    seed(1)
    assert draws() == first
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_kept_streams_gives_the_generators_back():
    """What is drawn or seeded inside, also before an error, is not seen outside."""
    seed_streams(1)
    expected = draws()
    seed_streams(1)
    with pytest.raises(KeyError), kept_streams():
        seed_streams(2)
        draws()
        raise KeyError
    assert draws() == expected
