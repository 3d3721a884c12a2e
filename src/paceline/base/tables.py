"""Text tables, wrapped sentences and figures with their units.

Text is as wide as the terminal; 100 columns where there is none and COLUMNS does not say.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

WIDTH = 100
_WHOLE: Any = {"break_on_hyphens": False, "break_long_words": False}


def width() -> int:
    """Return the number of columns of printed text."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a text table. The first and the last column are words, which wrap; the others are
    figures. The first one gets at most half of the words' width, and its further lines are indented.
    A table whose figures and longest words are wider than the terminal is as wide as they are.

    >>> print(aligned(["plan", "ms/step", "why not"], [["data=2", "0.5", "chosen"], ["single", "0.75", "slower"]]))
    plan    ms/step  why not
    data=2      0.5  chosen
    single     0.75  slower
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
            no_wrap=number < len(columns) - 1,
            overflow="fold",
        )
    rows = [*rows]
    figures = sum(2 + max(map(len, cells)) for cells in [*zip(columns, *rows, strict=True)][1:-1])
    first, last = (
        max(len(word) for cell in cells for word in ("", *cell.split()))
        for cells in (
            [columns[0], *(row[0] for row in rows)],
            [columns[-1], *(row[-1] for row in rows)],
        )
    )
    wide = max(width(), first + figures + 2 + last)
    half = max(first, (wide - figures) // 2)
    for name, *cells in rows:
        name = textwrap.fill(name, half, subsequent_indent="  ", **_WHOLE)
        drawn.add_row(*map(Text, [name, *cells]))
    text = StringIO()
    Console(file=text, width=wide, color_system=None, legacy_windows=False).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def wrapped(text: str, indent: int = 4) -> str:
    """Return a sentence as lines, of which those after the first are indented. No word is cut."""
    return textwrap.fill(text, width(), subsequent_indent=" " * indent, **_WHOLE)


def verdict(mark: str, plan: str, figures: str, remarks: Iterable[str]) -> str:
    """Return what a plan was found to be as a line, and remarks below it.

    >>> print(verdict("FAILED", "data=2", "loss 1.0e+00", ["the loss of step 1 differs"]))
    FAILED  data=2                               loss 1.0e+00
            the loss of step 1 differs
    """
    lines = [wrapped(f"{mark:<7} {plan:<36} {figures}".rstrip(), indent=8)]
    for remark in remarks:
        lines += [f"        {line}".rstrip() for line in remark.splitlines()]
    return "\n".join(lines)


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all that stand before its point.

    >>> three_digits(0.03634), three_digits(20.46), three_digits(999.7), three_digits(12345.6)
    ('0.0363', '20.5', '1,000', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def in_ms(seconds: float) -> str:
    """Return a part of a step, or a step, as text.

    >>> in_ms(0.02046)
    '20.5 ms'
    """
    return f"{three_digits(1e3 * seconds)} ms"


def in_mib(num_bytes: float) -> str:
    """Return a rank's memory as text.

    >>> in_mib(44_351_488)
    '42 MiB'
    """
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.2g} MiB"


def number(value: object) -> str:
    """Return a figure without a unit, or a word, as text.

    >>> number(0.123456), number(17920), number("data=2")
    ('0.1235', '17,920', 'data=2')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
