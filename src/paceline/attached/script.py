"""Runs a script in this process, which is a rank."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.attached.session import ScriptProcess
from paceline.base.errors import JobError


def run_script(session: ScriptProcess, path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script as `__main__` in this process, which is a rank. Returns the figures of its run.

    Raises:
        JobError: it has trained nothing.
    """
    with session.active(), _as_started(path, arguments, session.precision):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise JobError(f"the script ended with sys.exit({end.code!r})") from end
    if session.summary is None:
        raise JobError(
            f"{path} ended without a run of its own",
            hint="run = pl.attach(model, optimizer, loader), then `for epoch in run.epochs(N)`; a file "
            "with a function job() is for paceline train",
        )
    return session.summary


@contextmanager
def _as_started(path: Path, arguments: Sequence[str], precision: str) -> Iterator[None]:
    """Let a script see the command line and the import path that Python gives it, and make tensors in
    the precision of a proof."""
    argv, paths, dtype = sys.argv, sys.path[:], torch.get_default_dtype()
    if precision == "float64":
        torch.set_default_dtype(torch.float64)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, paths
        torch.set_default_dtype(dtype)
