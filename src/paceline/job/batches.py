"""Making a batch from samples: the model's input, and the target with which its output is
compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from paceline.base.errors import PacelineError, TrainingError, in_words
from paceline.base.nested import items_of

Collate = Callable[[list[Any]], Any]
_PAIR_HINT = (
    "a data set's item is (input, target), or an input alone: a tensor, a mapping or a dataclass; several "
    "inputs go into a tuple or mapping, ((a, b), target), and collate= makes a batch of anything else"
)


def collated(
    items: Sequence[Any], collate: Collate | None = None, *, names: Sequence[Any] | None = None
) -> tuple[Any, Any]:
    """Return (input, target) of a batch. If the samples have no target, the target is the input
    itself.

    Args:
        collate: Makes a batch of a list of samples: (input, target), or an input alone. By default
            each sample is a pair or an input alone, and they are stacked along dim 0.
        names: The names of the samples in errors; by default their numbers.

    Raises:
        TrainingError: a sample is neither a pair nor an input, samples don't stack, or `collate`
            failed.
    """
    names = range(len(items)) if names is None else names
    if collate is not None:
        return as_pair(_made(collate, list(items), names))
    pairs = list(map(_is_pair, items))
    for item, is_pair, name in zip(items, pairs, names, strict=True):
        if not is_pair and (any(pairs) or not _is_input(item)):
            kind = (
                f"{type(item).__name__} of {len(item)}"
                if isinstance(item, tuple | list)
                else type(item).__name__
            )
            raise TrainingError(
                f"sample {name} is a {kind} and not (input, target)", hint=_PAIR_HINT
            )
    try:
        return as_pair(
            default_collate(
                [
                    tuple(_plain(item)) if is_pair else _plain(item)
                    for item, is_pair in zip(items, pairs, strict=True)
                ]
            )
        )
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise _unstacked(items, names, error) from error


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2


def is_sample(item: Any) -> bool:
    """Whether a sample is (input, target), or may be an input alone."""
    return _is_pair(item) or _is_input(item)


def _is_input(item: Any) -> bool:
    return (
        hasattr(item, "shape")
        or isinstance(item, Mapping)
        or _is_record(item)
        or (isinstance(item, tuple | list) and len(item) == 1 and _is_input(item[0]))
    )


def _is_record(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _plain(item: Any) -> Any:
    """Return a sample in a form that `default_collate` stacks: a dataclass becomes the mapping of
    its fields.
    """
    if _is_record(item):
        return {name: _plain(value) for name, value in items_of(item) or ()}
    if type(item) in (tuple, list):
        return type(item)(map(_plain, item))
    return item


def _fields(value: Any) -> Any:
    """Return a dataclass as the mapping of its fields, which stay as they are; other values are
    returned unchanged.
    """
    return dict(items_of(value) or ()) if _is_record(value) else value


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch as (input, target).

    A batch that is no pair is an input alone, which is its own target. A sequence of one item
    stands for that item.
    """
    if _is_pair(batch):
        return batch[0], batch[1]
    alone = batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch
    return alone, alone


def of_stacked(collate: Collate | None) -> Callable[[Any], tuple[Any, Any]] | None:
    """Return what makes (input, target) of a batch that torch has stacked, if a collate function
    needs nothing else of the samples: its attribute `of_stacked`.
    """
    return as_pair if collate is None else getattr(collate, "of_stacked", None)


def _made(collate: Collate, items: list[Any], names: Sequence[Any]) -> Any:
    try:
        batch = collate(items)
    except PacelineError:
        raise
    except Exception as error:
        guilty = [
            name for name, item in zip(names, items, strict=True) if not _collates(collate, item)
        ]
        if not 0 < len(guilty) < len(names):
            guilty = list(names)
        shown = f"the samples {in_short(guilty)}" if len(guilty) > 1 else f"sample {guilty[0]}"
        raise TrainingError(f"collate failed on {shown}: {in_words(error)}") from error
    batch = (
        type(batch)(map(_fields, batch))
        if type(batch) in (tuple, list) and len(batch) < 3
        else _fields(batch)
    )
    if batch is None or (isinstance(batch, tuple | list) and len(batch) not in (1, 2)):
        kind = type(batch).__name__ + (
            f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        )
        raise TrainingError(
            f"collate returned a {kind} and not (input, target)",
            hint="return (input, target), or an input alone: a tensor or a mapping",
        )
    return batch


def _collates(collate: Collate, item: Any) -> bool:
    try:
        collate([item])
    except Exception:
        return False
    return True


def in_short(names: Sequence[Any]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(map(str, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def _unstacked(items: Sequence[Any], names: Sequence[Any], error: Exception) -> TrainingError:
    """Return an error that names the first sample with another shape than most."""
    shapes = [describe(item) for item in items]
    usual = max(
        shapes, key=shapes.count
    )  # the first of equally many: not left to the order of a set
    for shape, name in zip(shapes, names, strict=True):
        if shape != usual:
            return TrainingError(
                f"sample {name} is {shape} and others are {usual}: they can't be stacked",
                hint="samples of one batch must have equal shapes: pad them in collate=, or pad or "
                "crop in the data set",
            )
    return TrainingError(
        f"samples can't be stacked: {error}", hint="collate= makes a batch of a list of samples"
    )


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of the model. A tuple or list input is passed as *args, a
    mapping as **kwargs.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def describe(value: Any) -> str:
    """Return the shapes and types of a sample as one line.

    >>> import torch
    >>> describe((torch.zeros(3, 2), 1))
    '(3x2, int)'
    """
    if hasattr(value, "shape"):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__
