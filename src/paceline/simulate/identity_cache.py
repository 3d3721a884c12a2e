"""Results that are kept for the very same object: a search asks for them thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")
MOST_KEPT = 10_000


class IdentityCache(Generic[Key, Result]):
    """A function of an object, whose contents would take long to hash, and of a small value."""

    def __init__(self, function: Callable[[Any, Key], Result]) -> None:
        self.function = function
        self._kept: dict[
            tuple[int, Key], tuple[Any, Result]
        ] = {}  # with the object, so that its number stays its own

    def __call__(self, value: Any, key: Key) -> Result:
        kept = self._kept.get((id(value), key))
        if kept is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            kept = self._kept[id(value), key] = value, self.function(value, key)
        return kept[1]
