"""Waits of tests for what other threads and processes do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 240.0  # a wait in vain fails before pytest's limit of 300 s for a test


def until(
    condition: Callable[[], T],
    *,
    patience_s: float = PATIENCE_S,
    tell: Callable[[], object] = lambda: "",
) -> T:
    """Return what the condition gives, once that is true; fail with what `tell` says if it never is."""
    deadline_s = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain {tell()}"
        time.sleep(0.005)
    return value
