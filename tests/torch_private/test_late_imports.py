"""`torch_private/late_imports.py`: modules that a forking process imports for its ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.torch_private.late_imports import OF_CAPTURING, OF_COMPILING, OF_OPTIMIZERS

OPTIMIZER = "torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])"
EXPORT = "torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))"


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("names", "does"),
    [(OF_OPTIMIZERS, OPTIMIZER), (OF_CAPTURING[:-3], EXPORT), (OF_COMPILING[:1], EXPORT)],
)
def test_torch_imports_these_modules_late(names: tuple[str, ...], does: str):
    """Not when it is imported itself, and once it does this."""
    code = (
        f"import sys, torch\nprint(*[name in sys.modules for name in {names}])\n{does}\n"
        f"print(*[name in sys.modules for name in {names}])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    before, after = ran.stdout.splitlines()
    assert "True" not in before and "False" not in after, ran.stderr


def test_the_names_are_imported_without_torch():
    code = (
        "import sys, paceline.torch_private.late_imports, paceline.torch_private.data_loaders\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
