"""Tests that hold however busy the machine is: they wait for conditions, and count work rather than time it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.base import signals

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


def until_asked_to_stop(begun: Callable[[], object]) -> None:
    """Return once this process has heard a request to stop, with the handlers that it has; a signal without one takes
    its default course. begun: called when nothing that comes from now on is missed."""
    handlers, heard = {number: signal.getsignal(number) for number in signals.STOPPING}, list[int]()

    def hear(number: int, frame: Any) -> None:
        handlers[number](number, frame)  # type: ignore[operator, misc]
        heard.append(number)

    handled = [number for number, handler in handlers.items() if callable(handler)]
    for number in handled:
        signal.signal(number, hear)
    begun()
    until(lambda: heard)
    for number in handled:
        signal.signal(number, handlers[number])


def calls_of(work: Callable[[], object]) -> int:
    """How many functions of Python are called while the work is done: its cost, whatever else the machine does."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
