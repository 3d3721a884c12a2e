"""Modules that few tests use, imported by the first of them, and those that not every machine has.

Every process of the suite loads every file of tests, and forks ranks all the time: with Keras and Transformers it has
260 MB more, and a fork takes a seventh longer.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest


class Later:
    """Stands for a module, which is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest_")):  # what pytest looks for in every value of a file
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def needed(module: str, install: str | None = None) -> Any:
    """A module that not every machine has; without it the test is skipped. install: what follows 'pip install'."""
    __tracebackhide__ = True  # the skip is told of at the test's line
    return pytest.importorskip(module, reason=not_installed(module, install))


def not_installed(module: str, install: str | None = None) -> str:
    """Why a test is skipped, and what to do about it."""
    return f"{module} is not installed: pip install {install or module}"
