"""Records the origin of a run: versions, machine, command, the job's files and the state of their
repository.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.base.errors import without_secrets
from paceline.job.file_imports import imported_by
from paceline.runs.folder import ORIGIN, read_document

GIT_TIMEOUT_S = 2.0  # the state of a repository is left out if git takes longer


def origin(source: Path | None) -> dict[str, Any]:
    """Return the content of `origin.json`.

    "git" is None if there is no repository, no git, or no answer in time.

    source: the job's file, whose repository is looked at; None for a job made in Python.
    """
    from paceline import __version__  # version of the running code; an installed copy may differ

    return {
        "paceline": __version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": without_secrets(shlex.join(sys.argv)),
        "files": {}
        if source is None
        else {str(path): _digest(path) for path in imported_by(source)},
        "git": None if source is None else _repository(source.resolve().parent),
    }


def note_edits(run_dir: Path) -> None:
    """Name on stderr the files of a run's job that have changed since the run began."""
    files = read_document(run_dir, ORIGIN).get("files") if (run_dir / ORIGIN).exists() else None
    if edited := [path for path, digest in (files or {}).items() if _digest(Path(path)) != digest]:
        print(
            f"note: {', '.join(edited)} changed since {run_dir} began: the weights are the run's, all else is what "
            "the files say now",
            file=sys.stderr,
            flush=True,
        )


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def _repository(directory: Path) -> dict[str, Any] | None:
    """Return the state of a repository, or None if git does not tell it.

    Its "commit" is that of HEAD. Its "modified" lists files that git tracks and that differ from
    HEAD.
    """
    command = [
        "git",
        "-C",
        str(directory),
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=no",
    ]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    words = [line.split(" ") for line in completed.stdout.splitlines()]
    branch = {word[1]: " ".join(word[2:]) for word in words if word[0] == "#"}
    return {
        "commit": branch.get("branch.oid"),
        "branch": branch.get("branch.head"),
        "modified": sum(word[0] != "#" for word in words),
    }
