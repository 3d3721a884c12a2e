"""Modules and optimizers of torch's own test tables give no wrong numbers under a plan, no hang and no raw error."""

from __future__ import annotations

import subprocess
import sys

import pytest
from later import needed

from .page import ROOT

needed("expecttest")  # torch's tables import it
SMALL = (
    "--only",
    "Bilinear 0",
    "GaussianNLLLoss 0",
    "LSTM 0",
    "Adagrad 3",
    "--plans",
    "data=2",
    "tensor=2",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "words", [SMALL, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_cell_is_wrong(words: tuple[str, ...]):
    """Some rows under two plans, or all of them under all plans. In a process of its own: torch's tables let nobody
    change the switches of its backends any more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.corpus.torch_tables", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "'exact': " in done.stdout
