"""docs/tour.md says which way imports may go; this reads the table and holds the modules to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent
TOUR = PACKAGE.parent.parent / "docs" / "tour.md"
# Imports from a later row that are left. None may be added.
EXCEPTIONS = {
    ("profile/trace.py", "strategies.units"), ("profile/attention.py", "strategies.recompute.attention"),
}
ABOVE_ALL = {"__init__", "__main__", "pytest_plugin"}


def rows() -> dict[str, int]:
    """The number of each module's or folder's row, from the lowest."""
    row_numbers: dict[str, int] = {}
    for number, line in enumerate(line for line in TOUR.read_text().splitlines() if line.startswith("| `")):
        for pattern in re.findall(r"`([^`]+)`", line.split("|")[1]):
            for name in [str(path.relative_to(PACKAGE)) for path in PACKAGE.glob(pattern)] or [pattern]:
                row_numbers[name.removesuffix("/").removesuffix(".py").replace("/", ".")] = number
    return row_numbers


def row_of(module: str, row: dict[str, int]) -> int:
    """Of the longest part of its name that has one; modules of a folder may stand lower than the folder."""
    while module not in row:
        module, _, last = module.rpartition(".")
        assert last, "docs/tour.md does not list a module that is imported"
    return row[module]


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported with a module: not in its functions, nor for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("paceline."):
            folder = PACKAGE.parent / Path(*str(child.module).split("."))
            yield from (f"{child.module}.{name.name}".removeprefix("paceline.") if (folder / f"{name.name}.py").exists()
                        else str(child.module).removeprefix("paceline.") for name in child.names)
        elif isinstance(child, ast.Import):
            names = (name.name for name in child.names)
            yield from (name.removeprefix("paceline.") for name in names if name.startswith("paceline."))
        yield from imports(child)


def test_imports_go_to_earlier_rows():
    """Every module is in the table, and what it imports is in its row or an earlier one, but for what is listed."""
    row, upward = rows(), set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        module_name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if path.parts[0].removesuffix(".py") in ABOVE_ALL:
            continue
        assert module_name.partition(".")[0] in row, f"docs/tour.md does not list {module_name}"
        for module in imports(ast.parse(file.read_text())):
            if row_of(module, row) > row_of(module_name, row):
                upward.add((str(path), module))

    assert upward == EXCEPTIONS
