"""Imports, and other work that makes many objects and few cycles, without Python's cycle collector: it would go through
all modules again and again meanwhile."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# What every run needs. torch's optimizers import `torch._dynamo` when they are built; it takes a second.
OF_RUNS = ("paceline.api.train", "paceline.training.drivers", "torch._dynamo")


def load_modules(names: Sequence[str]) -> None:
    """Import modules. What there is then is never looked at by the collector again, here and in forks of this process.

    torch makes a million objects when it is imported, and hardly one of them is ever freed. Looking at them takes an
    eighth of the import's time.
    """
    with without_collector():
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            gc.freeze()


@contextmanager
def without_collector() -> Iterator[None]:
    """While this is entered, what refers to itself stays in memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
