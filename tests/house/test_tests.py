"""What the tree of tests promises: the package's folders, and named jobs that stand once in `tests/jobs/`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "paceline"
# Folders that are no folder of the package, as what they test lies across it.
ACROSS = {"corpus", "devices", "fuzz", "house", "jobs", "multihost", "precision", "scripts"}
FEW = 3  # files that write a model in the same way, or need a module of `jobs`


def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}


def test_tests_have_the_folders_of_the_package():
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    names = {str(folder.relative_to(TESTS)) for folder in folders - {TESTS}}
    assert {
        name
        for name in names
        if name.partition("/")[0] not in ACROSS and not (PACKAGE / name).is_dir()
    } == set()


def test_several_files_need_what_stands_in_jobs():
    """What one or two need stands beside them."""
    written = texts()
    needed = {
        path.stem: sum(
            bool(re.search(rf"^ *(from|import) jobs\.{path.stem}\b", text, re.MULTILINE))
            for text in written.values()
        )
        for path in (TESTS / "jobs").glob("[!_]*.py")
    }
    assert needed
    assert {name: count for name, count in needed.items() if count < FEW} == {}


def test_no_model_is_written_in_several_files():
    """Two models are the same if only their own names and docstrings tell them apart. Ports of scripts repeat them."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path, text in texts().items():
        if "Module)" in text and TESTS / "scripts" not in path.parents:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and any(
                    ast.unparse(base).endswith("Module") for base in node.bases
                ):
                    body = node.body[1:] if ast.get_docstring(node) else node.body
                    homes[ast.unparse(body)].add(str(path.relative_to(TESTS)))
    assert [sorted(paths) for paths in homes.values() if len(paths) >= FEW] == []
