"""Random streams that are seeded by a key, so that none has to be saved and none depends on earlier
draws.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


def key_to_seed(*key: int | str) -> int:
    """Return a 63-bit seed for a key; different keys give unrelated seeds.

    >>> key_to_seed(0, "order", 1) == key_to_seed(0, "order", 1) != key_to_seed(0, "order", 2)
    True
    """
    text = "\0".join([f"{type(part).__name__}:{part}" for part in key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_streams(*key: int | str) -> None:
    """Seed Python's, NumPy's and torch's global generators (of every device) for a key."""
    import numpy as np
    import torch

    seed = key_to_seed(*key)
    # torch.manual_seed would note the caller's stack for each kind of device that isn't there (300
    # us of a step), or look for one.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_model(seed: int) -> None:
    """Prepare for a job's function that builds its model, so that it gets the same initial weights
    and names each time.

    Names need this because Keras numbers layers that are given no name, and counts on with the next
    model of the process.
    """
    seed_streams(seed, "model")
    if "keras" in sys.modules:
        with suppress(
            ImportError
        ):  # of another layout of its sources: names are then as it counts them
            importlib.import_module("keras.src.utils.naming").reset_uids()


def seed_sample(seed: int, position: int) -> None:
    """Seed the generators that a dataset may use for one sample.

    This takes about 10 us; augmentation needs it once a sample.

    Args:
        seed: `key_to_seed` of the key that all samples of the epoch share.
        position: The sample's place in the epoch.
    """
    import numpy as np
    import torch

    mixed = (seed + position * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)


def used_gpus() -> list[int]:
    """Return the number of this rank's GPU, or none if CUDA is not in use: to ask for GPUs would
    start its use.
    """
    import torch

    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


@contextmanager
def seeded_for_epoch(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """Let a sampler draw an epoch in the block in the order that the seed determines.

    This seeds the global generators of torch, numpy and random, and the sampler's own `generator`
    if it has one. It also calls the sampler's `set_epoch`.
    """
    with kept_streams(), drawing():
        seed_streams(seed, "sampler", epoch)
        generator = getattr(sampler, "generator", None)
        if generator is not None and hasattr(generator, "manual_seed"):
            generator.manual_seed(key_to_seed(seed, "sampler", epoch))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        yield


def stream_states() -> tuple[Any, ...]:
    """Return the states of the global generators of Python, NumPy and torch's CPU. Those of
    the first two can be compared.
    """
    import numpy as np
    import torch

    numbers: Any = np.random.get_state(legacy=False)
    if "key" in numbers["state"]:  # NumPy takes a list ten times faster than an array
        numbers["state"]["key"] = numbers["state"]["key"].tolist()
    return random.getstate(), numbers, torch.default_generator.get_state()


def set_streams(states: tuple[Any, ...]) -> None:
    """Give the global generators the states that `stream_states` has returned."""
    import numpy as np
    import torch

    python, numbers, of_torch = states
    random.setstate(python)
    np.random.set_state(numbers)
    torch.default_generator.set_state(of_torch)


@contextmanager
def kept_streams(gpus: list[Any] | None = None) -> Iterator[None]:
    """Restore the states of the caller's generators after the block.

    Args:
        gpus: The GPUs whose generators are restored; by default this rank's if it is in use.
    """
    import torch

    states = stream_states()
    with torch.random.fork_rng(used_gpus() if gpus is None else gpus):
        try:
            yield
        finally:
            set_streams(states)


_open_drawing = 0  # blocks of `drawing` that are entered


@contextmanager
def drawing() -> Iterator[None]:
    """Let random operators draw in the block, even if drawing is switched off outside.

    This is for code that is no part of a forward.
    """
    global _open_drawing
    _open_drawing += 1
    try:
        yield
    finally:
        _open_drawing -= 1


def is_drawing() -> bool:
    """Whether a block of `drawing` is entered."""
    return _open_drawing > 0
