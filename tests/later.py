"""Modules that few tests use, imported by the first of them.

Every process of the suite loads every file of tests, and forks ranks all the time: with Keras and Transformers it has
260 MB more, and a fork takes a seventh longer.
"""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Stands for a module, which is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest_")):  # what pytest looks for in every value of a file
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
