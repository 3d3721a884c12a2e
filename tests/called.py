"""`paceline` commands in the test's own process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from paceline import cli


@dataclass(frozen=True)
class Called:
    """How a command ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str


def call(*words: object) -> Called:
    """Run a command line, whose words may be paths and numbers."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.run([str(word) for word in words])
    assert "\x1b" not in out.getvalue() + err.getvalue(), "nothing depends on colour"
    return Called(int(ended.value.code or 0), out.getvalue(), err.getvalue())
