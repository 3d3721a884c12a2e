"""Functions of Keras and torch that are replaced while a model computes parts of batches, and put back after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Patch = tuple[Any, str, Any]  # owner, name, replacement


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[list[Patch]]:
    """With these replacements in place; gives those that bring back what was there."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield originals
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def with_subclasses(kind: type[Any]) -> list[type[Any]]:
    """A class and all that are derived from it, each once."""
    kinds: list[type[Any]] = [kind]
    for derived in kind.__subclasses__():
        kinds += with_subclasses(derived)
    return list(dict.fromkeys(kinds))
