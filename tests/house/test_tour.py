"""docs/tour.md says which way imports may go; this reads the table and holds the modules to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent
TOUR = PACKAGE.parent.parent / "docs" / "tour.md"
# Imports from a later row, with the reason. They stand in functions, and run only where somebody asked for it.
LAZY = {
    (
        "api.train",
        "ray.training",
    ): '`on="ray"` gives the whole run to Ray, which an extra of its own installs',
}
ABOVE_ALL = {"", "__main__", "cli", "pytest_plugin"}


def rows() -> list[str]:
    """The folders of the table, from the lowest."""
    return re.findall(r"^\| `([a-z_]+)/` \|", TOUR.read_text(), re.MULTILINE)


def module_of(file: Path) -> str:
    """The name of a module inside the package, such as `job.phases`; "" of the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").rstrip(".")


def imports(node: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported: with a module, in its functions, and for types alone."""
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "paceline":
            folder = PACKAGE.parent / Path(*str(child.module).split("."))
            yield from (
                f"{child.module}.{name.name}"
                if (folder / f"{name.name}.py").exists() or (folder / name.name).is_dir()
                else str(child.module)
                for name in child.names
            )
        elif isinstance(child, ast.Import):
            yield from (name.name for name in child.names if name.name.startswith("paceline."))


def test_imports_go_to_earlier_rows():
    """Of every kind: every module is in a folder of the table, and imports from that and earlier ones alone."""
    order, upward = rows(), set()
    assert len(order) == len({*order}) and {*order} == {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))
    }
    for file in PACKAGE.rglob("*.py"):
        module = module_of(file)
        if module in ABOVE_ALL:
            continue
        own = order.index(module.split(".")[0])
        for imported in {
            name.partition(".")[2] for name in imports(ast.parse(file.read_text()))
        } - {""}:
            if imported.split(".")[0] not in order or order.index(imported.split(".")[0]) > own:
                upward.add((module, imported))

    assert upward == LAZY.keys()


def test_no_files_import_each_other():
    """Of every kind: files can be read in an order in which each one needs earlier ones alone."""
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    needed: dict[str, set[str]] = {}
    for module, file in files.items():
        names = {name.partition(".")[2] for name in imports(ast.parse(file.read_text()))}
        needed[module] = (names & files.keys()) - {module, ""}

    TopologicalSorter(needed).prepare()  # raises CycleError with the circle
