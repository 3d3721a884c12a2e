"""Output of ranks: rank 0 shows INFO, warnings of all ranks are shown once, and each rank's file
has all its output.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.base.errors import printable

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger("paceline")


@logger.addFilter
def _as_printable(record: logging.LogRecord) -> bool:
    """Make a message safe to print, because it may have names from jobs and from folders of other
    people's runs.
    """
    record.msg, record.args = printable(record.getMessage()), ()
    return True


@cache
def tell_once(text: str) -> None:
    """Log an INFO message once in this process, however often this is called."""
    logger.info(text)


@contextmanager
def without_notes() -> Iterator[None]:
    """Drop INFO messages while the block runs; a proof's ranks would only repeat those of a run."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


class Tee(io.TextIOBase):
    """A stream that writes to a terminal and to a file, as far as there are any.

    If one of them can't be written, because the disk is full or the terminal is closed, the run
    goes on. Later writes are tried again.
    """

    def __init__(self, terminal: TextIO | None, file: TextIO | None) -> None:
        # The terminal may be exchanged while something is drawn on it, such as a live line. The
        # file gets nothing of the drawing.
        self.terminal: Any = terminal
        self.file = file
        self._has_told = False

    def write(self, text: str) -> int:
        self._each(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._each(lambda stream: stream.flush())

    def _each(self, act: Callable[[Any], Any]) -> None:
        for stream in (self.file, self.terminal):
            if stream is None:
                continue
            try:
                act(stream)
            except (OSError, ValueError) as error:  # ValueError: somebody closed the object
                if stream is self.file and not self._has_told:
                    self._has_told = True
                    logger.warning(
                        "can't write %s: %s; the run goes on without what it would hold",
                        getattr(stream, "name", "its log"),
                        getattr(error, "strerror", error),
                    )

    def isatty(self) -> bool:
        return self.terminal is not None and bool(self.terminal.isatty())

    def fileno(self) -> int:
        stream: Any = self.terminal or self.file
        return int(stream.fileno())


def leave_live_line(descriptor: int = 2) -> None:
    """Begin a new line where another process may draw a live line, which clears it, and show the
    cursor, which that process hides: it may have been killed. Do nothing without a terminal.
    """
    if os.isatty(descriptor):
        os.write(descriptor, b"\r\x1b[2K\x1b[?25h")


@contextmanager
def unbroken() -> Iterator[None]:
    """Let this process and its forks go on while the block runs, even if stderr is closed or can't
    be written.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # the next file that is opened would take the place of a closed stream, and get its lines
    os.close(number)
    stdout, stderr = (
        stream or open(number, "w", closefd=False)  # noqa: SIM115  # as long as the process lives
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    with redirect_stdout(stdout), redirect_stderr(Tee(stderr, None)):
        yield


class _Once(logging.Handler):
    """A handler that shows a warning once if several ranks give it; the store remembers which were
    shown.

    A warning that is not shown goes to `log`.
    """

    def __init__(
        self, terminal: TextIO | Tee, rank: int, store: Store | None, log: TextIO | None
    ) -> None:
        super().__init__(logging.WARNING)
        self.terminal, self.rank, self.store, self.log = terminal, rank, store, log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        first = True
        if self.store is not None:
            try:
                digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
                first = self.store.add("warned/" + digest[:16], 1) == 1
            except RuntimeError:  # the store's host is gone; better twice than never
                first = True
        stream = self.terminal if first else self.log
        if stream is not None:
            with suppress(OSError):  # a full disk, a closed terminal
                stream.write(f"[rank {self.rank}] {record.levelname.lower()}: {text}\n")
                stream.flush()


@contextmanager
def own_log(run_dir: Path | None, rank: int) -> Iterator[tuple[TextIO, Path | None]]:
    """Send this rank's output to its file while the block runs, and rank 0's to the terminal too.
    Gives the terminal and the file.

    Without a run folder only rank 0 is heard. Nothing goes to stdout, which is for the result.
    """
    streams, stdout = (sys.stdout, sys.stderr), os.dup(1)
    terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    path = run_dir / "logs" / f"rank-{rank}.log" if run_dir is not None else None
    file = None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", buffering=1, errors="backslashreplace")  # noqa: SIM115  # as long as the process lives
    if rank == 0:
        sys.stdout = sys.stderr = Tee(terminal, file)
    else:
        file = file or open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115
        _take_over(file, file)
        sys.stdout = sys.stderr = Tee(None, file)
    try:
        yield terminal, path
    finally:
        with open(stdout, "w") as before:
            _take_over(before, terminal)
        sys.stdout, sys.stderr = streams


def redirect(path: Path | None) -> TextIO:
    """Send all that this process prints to a file from now on; without a path, drop it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path or os.devnull, "a", buffering=1, errors="backslashreplace")  # noqa: SIM115  # until the next one takes its place
    _take_over(file, file)
    sys.stdout = sys.stderr = file
    return file


def _take_over(stdout: TextIO, stderr: TextIO) -> None:
    """Let all that this process prints go to files, also what libraries print by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)


def set_up_logging(terminal: TextIO, *, rank: int, store: Store | None) -> None:
    """Route Python's logging and warnings: all to this rank's output, WARNING once over all
    ranks.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    logging.captureWarnings(True)
    plain = logging.StreamHandler(sys.stderr)
    plain.setLevel(logging.INFO)
    plain.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(plain)
    if isinstance(sys.stderr, Tee) and sys.stderr.terminal is not None:
        plain.addFilter(lambda record: record.levelno < logging.WARNING)
        root.addHandler(_Once(sys.stderr, rank, store, log=sys.stderr.file))
    else:
        root.addHandler(_Once(terminal, rank, store, log=None))
    logger.setLevel(logging.INFO)
