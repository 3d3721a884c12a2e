"""What the nodes of a run have in common: the version of Paceline, the job's file, and the run folder.

Whoever starts nodes leaves a mark in the run folder while they start. A node that reads the mark sees the same folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.base.errors import UsageError
from paceline.job.file import JobFile

_MARK = "nodes.mark"


@dataclass(frozen=True)
class SharedFiles:
    """What a node is told of them.

    digest: Of the job's file. mark: What the mark in the run folder says.
    """

    version: str
    job: Mapping[str, Any]
    digest: str
    run_dir: str
    mark: str

    def check(self) -> JobFile:
        """The job's file, if this node sees the same.

        Raises:
            UsageError: this node has another Paceline, another job, or another run folder.
        """
        if self.version != paceline.__version__:
            raise UsageError(
                f"it has Paceline {paceline.__version__}, and this one is {self.version}",
                hint="install the same version on all nodes",
            )
        source, mark = JobFile.from_dict(self.job), Path(self.run_dir) / _MARK
        shared = "the job's file and the run folder must be on a filesystem that all nodes see under the same path"
        if not source.path.is_file() or _digest(source.path) != self.digest:
            is_there = "is another file there" if source.path.is_file() else "is not there"
            raise UsageError(f"the job's file {source.path} {is_there}", hint=shared)
        if (
            not mark.is_file()
            or mark.read_text() != self.mark
            or not os.access(self.run_dir, os.W_OK)
        ):
            raise UsageError(
                f"the run folder {self.run_dir} is not there, or can't be written",
                hint=f"{shared}: --run DIR",
            )
        return source


@contextmanager
def marked(source: JobFile, run_dir: Path) -> Iterator[SharedFiles]:
    """What nodes are to check while the block runs, in which the run folder is marked."""
    text = os.urandom(8).hex()
    (run_dir / _MARK).write_text(text)
    try:
        yield SharedFiles(
            paceline.__version__,
            source.to_dict(),
            _digest(source.path),
            str(run_dir.resolve()),
            text,
        )
    finally:
        (run_dir / _MARK).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    """By which a file is known to be the same on all nodes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
