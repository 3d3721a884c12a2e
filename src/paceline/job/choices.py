"""Choices inside a model: `choice("block3.op", ["conv", "pool"])` is a hyperparameter without a
function parameter.

Outside a search it returns its default, or the value of `--set block3.op=pool`. In a search each
rank asks the controller, so all ranks of a trial build the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.base.errors import JobError, nearest

Option = str | int | float | bool | None
Chooser = Callable[[str, Sequence[Option]], Option]

_UNSET: Any = object()
_chooser: Chooser | None = None  # of this process; a model can be built on any thread of it


def choice(name: str, options: Sequence[Option], *, default: Option = _UNSET) -> Any:
    """Return one of the options: the choice of the search that builds this model, or of the
    settings, or the default.

    Args:
        name: A name with a dot, such as "block3.op", so that it can't be taken for a parameter of
            the job.
        options: At least one; texts, numbers, booleans or None, each once.
        default: By default the first option.

    Raises:
        JobError: the name or the options are not as described.
    """
    options = list(options)
    _check(name, options)
    if default is not _UNSET and default not in options:
        raise JobError(f"choice '{name}': the default {default!r} is not one of {_listed(options)}")
    if _chooser is None:
        return options[0] if default is _UNSET else default
    if default is not _UNSET:  # a chooser that knows nothing of this name takes the first
        options = [default, *(option for option in options if option != default)]
    return _chooser(name, options)


def _check(name: str, options: list[Option]) -> None:
    if "." not in name.strip(".") or any(character in name for character in " =,"):
        raise JobError(
            f"choice '{name}' must have a dot in its name, and no space, '=' or ','",
            hint=f"pl.choice('{'net.' + name.strip('.') if name else 'block1.op'}', [...])",
        )
    if not options:
        raise JobError(f"choice '{name}' has no options")
    if strange := [
        option for option in options if not isinstance(option, str | int | float | bool | None)
    ]:
        raise JobError(
            f"choice '{name}' has the option {strange[0]!r}; options are texts, numbers, booleans or None",
            hint="choose a name, and look up what it stands for: OPS[pl.choice(...)]",
        )
    if len(set(map(str, options))) < len(options):
        raise JobError(f"choice '{name}' has an option twice: {_listed(options)}")


@contextmanager
def choosing(chooser: Chooser) -> Iterator[None]:
    """Let `choice` return the result of `chooser(name, options)` while the block runs."""
    global _chooser
    before, _chooser = _chooser, chooser
    try:
        yield
    finally:
        _chooser = before


def chosen(model: Callable[[], Any], settings: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that builds the model with these options. Text stands for the option that
    is written so.

    Raises, when the model is built:
        JobError: a setting is no choice of the model, or none of its options.
    """

    def build() -> Any:
        met: list[str] = []

        def choose(name: str, options: Sequence[Option]) -> Option:
            met.append(name)
            return pick(name, options, settings[name]) if name in settings else options[0]

        with choosing(choose):
            built = model()
        if unknown := [name for name in settings if name not in met]:
            raise JobError(f"the model makes no choice '{unknown[0]}', {nearest(unknown[0], met)}")
        return built

    return build


def pick(name: str, options: Sequence[Option], value: Any) -> Option:
    """Return the option that a value means.

    >>> pick("block.kernel", [3, 5], "5")
    5

    Raises:
        JobError: there is none.
    """
    for option in options:
        if option == value and type(option) is type(value):
            return option
    for option in options:
        if str(option).lower() == str(value).lower():
            return option
    raise JobError(f"{name}={value} must be {_listed(options)}")


def _listed(options: Sequence[Option]) -> str:
    return " or ".join(map(str, options))
