"""How many lines of a script its port changes."""

from __future__ import annotations

import ast
import difflib


def changed_lines(original: str, port: str) -> list[str]:
    """Return the lines of the port that the original does not have at their place: added and edited ones.

    Blank lines, comments and docstrings are left out of both. Lines that the port only leaves out don't count.

    >>> changed_lines("a = 1  # one\\nb = 2\\nc = 3\\n", "a = 1\\n# two\\nb = 4\\n\\nd = 5\\n")
    ['b = 4', 'd = 5']
    """
    matcher = difflib.SequenceMatcher(a=_code(original), b=_code(port), autojunk=False)
    return [
        line
        for kind, _, _, first, last in matcher.get_opcodes()
        if kind in ("insert", "replace")
        for line in matcher.b[first:last]
    ]


def _code(text: str) -> list[str]:
    """Return the lines with code, without comments at their ends."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = (
        line.partition("  # ")[0].rstrip()
        for number, line in enumerate(text.splitlines(), 1)
        if number not in documented
    )
    return [line for line in lines if line and not line.lstrip().startswith("#")]
