"""The parameters of functions, read from their source, and parameters that change their names.

Nothing is imported, so that a command line is read before torch is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = re.compile(r"    (\w+(?:, \w+)*): ")


@dataclass(frozen=True)
class Declaration:
    """A parameter of a function, a field of a class, or a key of a mapping."""

    name: str
    # as they are written, or the value of a constant that they name; a default may be missing
    annotation: str
    default: str | None
    text: str  # what the docstring says about it, in one line

    @property
    def summary(self) -> str:
        """The first sentence about it, as plain text without a full stop."""
        return re.split(r"\.(?: |$)", self.text)[0].replace("`", "")


def parameters(place: str) -> list[Declaration]:
    """Read the parameters of a function, without those behind `**`.

    Args:
        place: "MODULE:NAME". A class has its fields as parameters. A mapping of texts has its keys
            as repeatable parameters, and the texts say what they mean.
    """
    module, _, name = place.partition(":")
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
            texts = ast.literal_eval(node.value or node)
            return [
                Declaration(key, "Sequence[str]", "()", text[:1].upper() + text[1:])
                for key, text in texts.items()
            ]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            told = _told(ast.get_docstring(node) or "")
            return [
                Declaration(
                    each,
                    _resolved(annotation, tree) if annotation is not None else "",
                    _resolved(default, tree) if default is not None else None,
                    told.get(each, ""),
                )
                for each, annotation, default in _declared(node)
            ]
    raise LookupError(place)


@cache
def _tree(module: str) -> ast.Module:
    origin = str(getattr(importlib.util.find_spec(module), "origin", None))
    return ast.parse(Path(origin).read_text(encoding="utf-8"))


def _declared(
    node: ast.FunctionDef | ast.ClassDef,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id, field.annotation, field.value
        return
    inside = node.args
    required: Sequence[Any] = [None] * (len(inside.args) - len(inside.defaults))
    for each, default in zip(
        [*inside.args, *inside.kwonlyargs],
        [*required, *inside.defaults, *inside.kw_defaults],
        strict=True,
    ):
        yield each.arg, each.annotation, default


def _resolved(node: ast.expr, tree: ast.Module) -> str:
    """Return an expression as it is written; if it is a constant, the value of this constant."""
    name = ast.unparse(node)
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
            return ast.unparse(each.value)
        if isinstance(each, ast.ImportFrom) and name.isupper() and name in ast.unparse(each):
            return _resolved(node, _tree(str(each.module)))
    return name


def _told(docstring: str) -> dict[str, str]:
    """Return what the section "Args" of a docstring says about each parameter."""
    section = re.split(r"\n(?=\S)", inspect.cleandoc(docstring).partition("Args:\n")[2])[0]
    told: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", f"\n{section}"):
        if match := _NAMES.match(entry):
            text = " ".join(entry[match.end() :].split())
            told.update(dict.fromkeys(match[1].split(", "), text))
    return told


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take keywords by their former names until the next version, with a warning.

    Args:
        names: The present name of each former one.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            for name in names.keys() & given.keys():
                warnings.warn(f"{name}= is now {names[name]}=", DeprecationWarning, stacklevel=2)
                given[names[name]] = given.pop(name)
            return function(*args, **given)

        return call

    return wrap
