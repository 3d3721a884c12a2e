"""What `import paceline` offers, and that it loads nothing heavy."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import subprocess
import sys
import types

import pytest

import paceline

PUBLIC = [
    "Callback",
    "Cluster",
    "Device",
    "EarlyStopping",
    "Job",
    "KeepBest",
    "Log",
    "Optimizer",
    "PacelineError",
    "Plan",
    "Range",
    "RunPart",
    "Shards",
    "StepContext",
    "attach",
    "audit",
    "by_epoch",
    "by_step",
    "choice",
    "compare",
    "copy_every",
    "ema",
    "evaluate",
    "from_lightning",
    "frozen",
    "like_torch",
    "load",
    "monitored",
    "open",
    "plan",
    "predict",
    "pretrained",
    "rehearse",
    "replay",
    "report",
    "scale",
    "search",
    "total",
    "train",
    "verify",
    "whole",
]


def test_the_public_names_are_these_and_no_others():
    """Adding or dropping a public name is a decision, made here too."""
    assert dir(paceline) == sorted([*PUBLIC, "__version__", "keras"])
    assert sorted(paceline._HOMES) == PUBLIC


def test_a_star_brings_all_but_what_is_pythons():
    """`from paceline import *` must not replace `open`."""
    assert sorted({*paceline.__all__, "open"}) == PUBLIC
    assert not set(paceline.__all__) & set(dir(builtins))


def test_an_earlier_name_is_noted():
    with pytest.warns(FutureWarning, match=r"pl\.weights is now pl\.pretrained") as noted:
        assert paceline.weights is paceline.pretrained
    assert [each.filename for each in noted] == [__file__]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_used(name: str):
    """Each name is there and is a class or a function, not the module of the same name."""
    value = getattr(paceline, name)
    assert callable(value) and not isinstance(value, types.ModuleType)


def test_no_module_takes_the_place_of_a_public_name():
    """Importing a submodule sets it on the package: one called `train` would replace the function."""
    modules = {module.name for module in pkgutil.iter_modules(paceline.__path__)}
    assert not modules & set(PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    """A misspelled name fails as in any module."""
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'trian'"):
        _ = paceline.trian


@pytest.mark.parametrize(
    "module",
    [
        "paceline",
        "paceline.strategies.plan",
        "paceline.cluster.cluster",
        "paceline.job.file",
        "paceline.doctor.machine",
        "paceline.cli",
    ],
)
def test_imports_stay_light(module: str):
    """Planning and reading a command line need no torch."""
    heavy = ["torch", "numpy", "rich", "psutil", "msgspec"]
    code = f"import sys, {module}; print(*[name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (ran.stdout.split(), ran.stderr) == ([], "")


def test_every_public_name_has_a_docstring():
    """help() says something about each."""
    for name, home in paceline._HOMES.items():
        assert getattr(importlib.import_module(home), name).__doc__
