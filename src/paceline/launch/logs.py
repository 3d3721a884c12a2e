"""Who prints what: INFO from rank 0, warnings of any rank once, everything of every rank in its own file."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger("paceline")


class _Tee(io.TextIOBase):
    """Writes to a terminal and to a file."""

    def __init__(self, terminal: TextIO, file: TextIO) -> None:
        self.terminal, self.file = terminal, file

    def write(self, text: str) -> int:
        self.file.write(text)
        return self.terminal.write(text)

    def flush(self) -> None:
        self.file.flush()
        self.terminal.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()


class _Once(logging.Handler):
    """Shows a warning that several ranks give only once; the store remembers who was first."""

    def __init__(self, terminal: TextIO, rank: int, store: Store | None) -> None:
        super().__init__(logging.WARNING)
        self.terminal, self.rank, self.store = terminal, rank, store

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        first = True
        if self.store is not None:
            try:
                first = self.store.add("warned/" + hashlib.sha256(text.encode()).hexdigest()[:16], 1) == 1
            except RuntimeError:  # the store's host is gone; better twice than never
                first = True
        if first:
            self.terminal.write(f"[rank {self.rank}] {record.levelname.lower()}: {text}\n")
            self.terminal.flush()


def open_log(run_dir: Path | None, rank: int) -> tuple[TextIO, Path | None]:
    """Send this rank's output to its file, and rank 0's to the terminal too. Returns the terminal and the file."""
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    if run_dir is None:
        sys.stdout = open(os.devnull, "w") if rank else sys.stderr  # noqa: SIM115  # stdout is for data
        return terminal, None
    path = run_dir / "logs" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process lives
    if rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
    else:
        sys.stdout = sys.stderr = _Tee(terminal, file)
    return terminal, path


def set_up_logging(terminal: TextIO, *, rank: int, store: Store | None) -> None:
    """Route Python's logging and warnings: all to this rank's output, WARNING once over all ranks."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    logging.captureWarnings(True)
    plain = logging.StreamHandler(sys.stderr)
    plain.setLevel(logging.INFO)
    if rank == 0:
        plain.addFilter(lambda record: record.levelno < logging.WARNING)
    plain.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(plain)
    root.addHandler(_Once(sys.stderr if rank == 0 else terminal, rank, store))
    logger.setLevel(logging.INFO)
