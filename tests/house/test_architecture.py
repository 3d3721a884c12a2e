"""What the tree promises: strategies are named in their own folders alone."""

from __future__ import annotations

import ast
import importlib
import json
import re
from bisect import bisect_left, bisect_right
from functools import cache
from pathlib import Path

import pytest

from paceline.base.imports import without_collector

from .size import BUDGETS, sizes, token_lines

SLACK = 0.01  # that a budget may be above what is there: else it goes down with the code

SRC = Path(__file__).resolve().parents[2] / "src" / "paceline"
STRATEGY_FOLDERS = sorted(path.parent.name for path in SRC.glob("strategies/*/strategy.py"))

# Tests of a strategy's value outside its folder that are left. None may be added.
VALUES_TESTED = {
    'planner/fit.py: [plan.with_(recompute="full")] if plan.modifiers.recompute == "none" else [],',
}
# Imports from a strategy's folder that are left. None may be added.
FOLDERS_IMPORTED = {
    "planner/pipelines.py: from paceline.strategies.stages.layer_cut",
    "planner/pipelines.py: from paceline.strategies.stages.schedule",
    "planner/pipelines.py: from paceline.strategies.stages.timing",
    "training/clipping.py: from paceline.strategies.data.sparse",
    "training/rank_state.py: from paceline.strategies.shard.run",
}
OF_SPLIT_MODELS = tuple(
    f"strategies.stages.{name}" for name in ("assignment", "cost", "layers", "price")
)
MOST_TOKENS, MOST_PARAMETERS = 500, 8
# Functions beyond these limits that are left, beside the commands, whose parameters are options. None may be added.
BEYOND_LIMITS = {
    "api/train.py: _train",
    "api/train.py: train",
    "attached/launch.py: run",
    "cli.py: launch",
    "job/job.py: _problems",
    "model/graph.py: __init__",
    "model/graph.py: _piece",
    "model/graph.py: read",
    "planner/estimate.py: estimate",
    "searches/begin.py: open_study",
    "searches/search.py: search",
    "servers/server.py: __init__",
    "servers/server_state.py: __init__",
    "servers/worker.py: __init__",
    "strategies/server/shards.py: assign",
    "strategies/shard/run.py: prepare",
    "strategies/stages/layout.py: __init__",
    "strategies/stages/price.py: _rank",
    "strategies/tensor/piece.py: _product",
    "strategies/tensor/rules.py: run_by_rule",
    "training/prepare.py: prepare_job",
    "training/rank_state.py: __init__",
    "training/restore.py: _restore_optimizer",
}


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(SRC.rglob("*.py"))}


@cache
def definitions() -> list[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All classes and functions, wherever they stand."""
    defined = []
    with without_collector():
        for path, text in texts().items():
            statements: list[ast.AST] = [ast.parse(text)]
            while statements:
                for child in ast.iter_child_nodes(statements.pop()):
                    if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                        defined.append((path, child))
                    if not isinstance(child, ast.expr):  # which holds no definition
                        statements.append(child)
    return defined


def lines(pattern: str, *, but: str) -> list[str]:
    """FILE: LINE of each line that matches, of files whose path doesn't."""
    return [
        f"{path.relative_to(SRC)}: {line.strip()}"
        for path, text in texts().items()
        if not re.match(but, str(path.relative_to(SRC)))
        for line in text.splitlines()
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        r"axes\.(data|shard|tensor|pipeline|parts)\b",
        r"(sizes|coordinates)(\[|\.get\()[\"'](data|shard|tensor|pipeline|parts)\b",
        r"isinstance\(.*\b(Servers|Local|AllReduce)\b",
    ],
)
def test_no_strategy_is_named_outside_strategies(pattern: str):
    """An axis or a kind of synchronisation is asked for by what it does: `paceline/strategies/axes.py`, `Strategy`."""
    assert lines(pattern, but=r"strategies/|servers/") == []


@pytest.mark.parametrize(
    ("pattern", "its_own"),
    [
        (r"schedule ==|\bschedule=\"|\"(gpipe|1f1b|interleaved|zero-bubble)\"", "stages/"),
        (r"modifiers\.recompute\b", "recompute/|stages/strategy|compile/strategy|tensor/cost"),
        (r"modifiers\.compile\b", "compile/|recompute/strategy|shard/cost"),
        (r"modifiers\.compress\b", "compress/|local/|data/|server/"),
        (r"(sync|plan|self)\.(staleness|damping|colocate)\b", "server/"),
        (r"plan\.zero\b", "shard/"),
    ],
)
def test_the_values_of_a_strategy_are_tested_in_its_folder(pattern: str, its_own: str):
    """Conflicts of two strategies stand in either's folder, and data, local and server send compressed messages."""
    own = f"strategies/({its_own}|plan(_fields)?\\.py)" + (
        "|servers/" if "server/" in its_own else ""
    )
    tested = set(lines(pattern, but=own))
    assert tested - VALUES_TESTED == set()


def test_nothing_is_left_to_be_implemented():
    """A method that kinds fill in is abstract, and a refusal is a `PacelineError`: it says which plan works."""
    assert lines(r"raise NotImplementedError|\b(TODO|FIXME)\b", but=r"(?!)") == []


def test_folders_of_strategies_are_not_imported_from():
    """Of `stages/`, all else is asked about split models, whichever strategy splits them."""
    pattern = rf"from paceline\.strategies\.({'|'.join(STRATEGY_FOLDERS)})\."
    assert {
        imported
        for line in lines(pattern, but=r"strategies/|servers/")
        if not (imported := line.partition(" import")[0]).endswith(OF_SPLIT_MODELS)
    } == FOLDERS_IMPORTED


def values_of_folders(module: str, kind: type) -> set[int]:
    """The values of a type that modules of this name define in the folders of strategies, by identity."""
    return {
        id(value)
        for name in STRATEGY_FOLDERS
        for value in vars(importlib.import_module(f"paceline.strategies.{name}.{module}")).values()
        if isinstance(value, kind)
    }


def test_each_strategy_is_in_the_registry():
    from paceline.strategies.registry import BUILT_IN
    from paceline.strategies.strategy import Strategy

    assert {id(strategy) for strategy in BUILT_IN} == values_of_folders("strategy", Strategy)
    assert len(BUILT_IN) == len({strategy.name for strategy in BUILT_IN})


def test_each_folder_with_keys_of_plans_has_them_read():
    """Plans are read by `key_registry.py`, and a strategy's value has the same keys."""
    from paceline.strategies import key_registry, modifiers, registry
    from paceline.strategies.keys import PlanKeys

    of_folders = values_of_folders("keys", PlanKeys)
    assert {id(keys) for keys in key_registry.BUILT_IN} == {*of_folders, id(modifiers.KEYS)}
    assert {id(strategy.keys) for strategy in registry.BUILT_IN} == of_folders


def test_no_public_class_name_stands_for_two_ideas():
    homes: dict[str, list[str]] = {}
    for path, node in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            homes.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_functions_are_short_and_take_few_values():
    """At most 500 tokens, some 50 lines, and 8 parameters beside `self`: more belong together in a value that means
    something."""
    lines_of = {path: token_lines(text) for path, text in texts().items()}
    beyond = set()
    for path, node in definitions():
        if not isinstance(node, ast.ClassDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            tokens = bisect_right(lines_of[path], node.end_lineno or 0) - bisect_left(
                lines_of[path], node.lineno
            )
            if tokens > MOST_TOKENS or count > MOST_PARAMETERS:
                beyond.add(f"{path.relative_to(SRC)}: {node.name}")
    assert beyond == BEYOND_LIMITS


def test_folders_keep_their_budgets():
    """A commit that raises one says why. `python tests/house/size.py --write` lowers those that are too high."""
    budgets, now = json.loads(BUDGETS.read_text()), sizes()
    assert budgets.keys() == now.keys()
    assert {folder: count for folder, count in now.items() if count > budgets[folder]} == {}
    assert {
        folder: count for folder, count in now.items() if count < (1 - SLACK) * budgets[folder] - 50
    } == {}


def test_what_counts():
    """Prose and layout don't."""
    assert token_lines(
        '"""Of a module."""\n\ndef f(x):  # why\n    """Of a function."""\n\n    return (\n        x)\n'
    ) == [3, 3, 3, 3, 3, 3, 6, 6, 7, 7]


def test_what_the_words_of_the_tour_name_is_there():
    for name in re.findall(
        r"\| `([a-z_.]+(?:\.[A-Z]\w+)?)`", (SRC.parents[1] / "docs" / "tour.md").read_text()
    ):
        *folders, last = name.split(".")
        module = SRC.joinpath(*folders) if last[0].isupper() else SRC.joinpath(*folders, last)
        file = (
            module.with_suffix(".py")
            if module.with_suffix(".py").exists()
            else module / "__init__.py"
        )
        assert file.exists() and (last[0].islower() or f"class {last}" in file.read_text()), name
