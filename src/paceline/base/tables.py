"""Text tables and wrapped sentences, as wide as the terminal; 100 columns where there is none."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from io import StringIO

WIDTH = 100


def width() -> int:
    """Return the number of columns of printed text: the terminal's, or `WIDTH` if stdout is no
    terminal.
    """
    return shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a text table. The first and the last column are words, which wrap; the others are
    figures.

    >>> print(aligned(["plan", "s/step", "why not"], [["data=2", "0.5", "chosen"], ["single", "0.75", "slower"]]))
    plan    s/step  why not
    data=2     0.5  chosen
    single    0.75  slower
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        is_words = number in (0, len(columns) - 1)
        drawn.add_column(
            Text(column),
            justify="left" if is_words else "right",
            no_wrap=not is_words,
            overflow="fold",
        )
    for row in rows:
        drawn.add_row(*map(Text, row))
    text = StringIO()
    Console(file=text, width=width(), color_system=None, legacy_windows=False).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def wrapped(text: str) -> str:
    """Return a sentence as lines, of which those after the first are indented."""
    return textwrap.fill(text, width(), subsequent_indent="    ", break_on_hyphens=False)
