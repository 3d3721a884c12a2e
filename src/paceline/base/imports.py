"""Imports, and other work that makes many objects and few cycles, without Python's cycle collector.

The collector would go through all modules again and again during such work.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.torch_private.late_imports import OF_OPTIMIZERS

# The modules that every run needs.
OF_RUNS = ("paceline.api.train", "paceline.training.drivers", *OF_OPTIMIZERS)


def load_modules(names: Sequence[str]) -> None:
    """Import modules, and exempt all objects that exist then from the cycle collector, here and in
    forks.

    torch makes a million objects when it is imported, and hardly one of them is ever freed. The
    collector's look at them takes an eighth of the import's time.
    """
    with exempt_from_collector():
        for name in names:
            importlib.import_module(name)


@contextmanager
def exempt_from_collector() -> Iterator[None]:
    """Switch the cycle collector off while the block runs, and exempt all objects that exist then:
    for a process that ends soon, or keeps them."""
    with without_collector():
        try:
            yield
        finally:
            gc.freeze()


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the cycle collector off while the block runs; objects that refer to themselves stay in
    memory.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
