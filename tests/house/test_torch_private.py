"""What `paceline/torch_private/` promises: torch's private names are used there alone, and each file says which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline

PACKAGE = Path(paceline.__file__).parent
FOLDER = PACKAGE / "torch_private"
TESTS = Path(__file__).parents[1] / "torch_private"
# Private names outside of the folder that are left, each with its reason. None may be added.
LEFT = set[tuple[str, str]]()


@cache
def names_of_objects() -> frozenset[str]:
    """Private attributes of the objects of torch that this package handles."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
    from torch.distributed.tensor import DTensor

    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    kinds: list[Any] = [
        parameter,
        parameter.untyped_storage(),
        torch.nn.BatchNorm1d(1),
        torch.nn.modules.module,
        optimizer,
        torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer)], []
        ),
        torch.ops.aten.add.Tensor,
        torch.fx.symbolic_trace(torch.nn.Identity()),
        torch.fx.Graph(),
        torch.utils.data.DataLoader([1]),
        torch.autograd.Function,
        torch.distributed.ProcessGroup,
        torch.distributed.ProcessGroupGloo,
        DTensor,
        DeviceMesh,
        FSDPModule,
        _fsdp_state.FSDPState(),
        _fsdp_param.FSDPParam,
        _fsdp_param_group.FSDPParamGroup,
        DynamicRendezvousHandler,
        SimpleElasticAgent,
    ]
    # What these set in their constructors, which can't be called here.
    later = {"_local_tensor", "_spec", "_fsdp_param_group", "_fsdp_param_groups"}
    later |= {"_unsharded_param", "_opt_called", "_worker_group"}
    others = {"_addmm_activation", "_name"}  # an operator, and a name that other objects have, too
    return frozenset({name for kind in kinds for name in dir(kind) if is_private(name)} | later) - (
        others
    )


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


def of_torch(tree: ast.AST) -> dict[str, str]:
    """The paths of what a file imports from torch, by the file's names for it."""
    paths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torch":
                    paths[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return paths


def own_names(tree: ast.AST) -> set[str]:
    """What a file defines, or sets on `self`."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        or (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        )
    }


def private_names(text: str) -> Iterator[str]:
    """The private names of torch that a file uses: by imports, by attributes, and in strings."""
    tree = ast.parse(text)
    paths, own = of_torch(tree), own_names(tree)
    yield from (name for path in paths.values() for name in path.split(".") if is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if base.partition(".")[0] in paths:
                if not hasattr(torch.ops.aten, node.attr):  # operators are not private
                    yield node.attr
            elif node.attr in names_of_objects() and not (
                base in ("self", "cls") and node.attr in own
            ):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in names_of_objects():
                yield node.value
            elif re.fullmatch(r"torch(\.\w+)+", node.value):
                yield from filter(is_private, node.value.split("."))


FILES = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")


def test_private_names_of_torch_are_used_in_one_folder():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path.parent != FOLDER
        for name in private_names(path.read_text())
    }
    assert found == LEFT


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch._C._data_address(x)", {"_C", "_data_address"}),
        ("from torch.utils import _pytree as pytree", {"_pytree"}),
        ("import torch.distributed as dist\ndist._x.y", {"_x"}),
        ("tensor._version", {"_version"}),
        ("getattr(tensor, '_version')", {"_version"}),
        ("NAMES = ('torch._dynamo.exc',)", {"_dynamo"}),
        ("import torch\ntorch._foreach_add_(xs, 1)\naten._softmax(x)\npair._replace(a=1)", set()),
        ("class A:\n def f(self):\n  self._version = 1\n  return self._version", set()),
    ],
)
def test_private_names_are_found(text: str, names: set[str]):
    """However they are written. Operators and a file's own names are none."""
    assert {*private_names(text)} == names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_what_it_uses_and_is_tested(path: Path):
    """In its docstring: the names, the versions, and what to do when torch changes them."""
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    listed = {*re.findall(r"\b_\w+", docstring.partition("Tested with")[0])}
    if path.stem != "late_imports":  # which is nothing but a list
        assert {*private_names(text)} - listed == set()
    assert re.search(r"Tested\s+with\s+torch\s+2\.11\s+and\s+2\.13", docstring)
    assert len(docstring.split("\n\n")) >= 3, "the last part says what to do"
    assert any(
        re.search(rf"torch_private(\.| import .*\b){path.stem}\b", test.read_text())
        for test in TESTS.glob("test_*.py")
    )
