"""A page: one HTML file of tiles, charts and tables that needs no network, and figures as text."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError, with_extra
from paceline.base.tables import in_mib, number

if TYPE_CHECKING:
    from paceline.reports.charts import Chart

MIB = 2**20
# A command or an option in a sentence, with the values that can be told from words.
_COMMAND = re.compile(
    r"((?:paceline [a-z]+|optuna-dashboard|--(?:plan|set|run) (?:'[^']*'|\S+)|--[a-z][a-z-]*)"
    r"(?: --(?:plan|set|run) (?:'[^']*'|\S+)| --[a-z][a-z-]*| '[^']*'| [A-Z]+\b| [^\s']*[\d/=.][^\s']*(?<![.,;:]))*)"
)


@dataclass(frozen=True)
class Tile:
    """A figure at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: charts, and a table beside a single one."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    # A table. Cells of its first column that name parts of a chart have the part's colour.
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    folded: str = ""  # what to click on to see the table; without it, the table is open
    picture: str = ""  # an SVG that is not scaled, shown as an image, so that no script in it runs
    listing: str = ""  # text that is shown unchanged


@dataclass(frozen=True)
class Page:
    """A page. data: the figures for programs."""

    title: str
    subtitle: str
    verdict: Mapping[str, str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    data: Mapping[str, Any]

    def text(self) -> str:
        """Return the page's HTML. Every value is escaped."""
        from jinja2 import Environment, PackageLoader

        from paceline.reports.charts import swatch

        environment = Environment(
            loader=PackageLoader("paceline.reports", "."), autoescape=True, trim_blocks=True
        )
        environment.filters |= {
            "base64": lambda text: base64.b64encode(text.encode(errors="replace")).decode(),
            "commands": commands,
            "swatch": swatch,
        }
        return environment.get_template("page.html.j2").render(vars(self))


def prepare(to: Path) -> None:
    """Check that a page can be written, before anything takes time for it.

    Raises:
        UsageError: a package that makes pages is missing, the folder can't be written to, or a file
            of another kind would be lost.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"a report needs a package that is not here: {error.name}", hint=with_extra("report")
        ) from error
    if to.exists() and (to.is_dir() or to.suffix not in (".html", ".htm")):
        raise UsageError(
            f"can't write the page {to}: there is something else of that name",
            hint="a name in .html",
        )
    above = next(parent for parent in to.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"can't write the page {to}: {above} can't be written")


def commands(text: str) -> list[str]:
    """Return a text in pieces, of which every second one is a command.

    >>> commands("try --trace 5 first")
    ['try ', '--trace 5', ' first']
    """
    return _COMMAND.split(text)


# --- Figures as text --------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, Mapping | list) else number(value)


def figure(name: str, value: Any) -> tuple[str, str]:
    """Return a figure's name without its unit, and its value with it.

    >>> figure("bytes_sent", 290_572_800), figure("input_s", 0.0012)
    (('bytes sent', '277 MiB'), ('input time', '1.2 ms'))
    """
    label, text = name, shown(value)
    if isinstance(value, int | float):
        if name.endswith("_per_s"):
            label = f"{name.removesuffix('_per_s')}/s"
        elif name.endswith("_s"):
            label, text = f"{name.removesuffix('_s')} time", duration(value)
        elif name.endswith("_bytes") or name.startswith("bytes_"):
            label, text = name.removesuffix("_bytes"), size(value)
    return label.replace("_", " "), text


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if abs(seconds) < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 300 else f"{seconds / 60:,.0f} min"


def interval(low_s: float, high_s: float) -> str:
    """Return both ends, with the unit once if it is that of both.

    >>> interval(0.003, 0.02), interval(0.5, 2.0)
    ('3 to 20 ms', '500 ms to 2 s')
    """
    low, high = duration(low_s), duration(high_s)
    unit = high.partition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def place(path: str | Path) -> str:
    """Return the end of a path, which tells it from others."""
    return "/".join(Path(path).resolve().parts[-2:])


def day(text: str) -> str:
    """Return the day of a time in ISO 8601."""
    return f"{datetime.fromisoformat(text):%-d %b %Y}" if text else ""


def size(num_bytes: float) -> str:
    mib = num_bytes / MIB
    return f"{mib / 1024:,.1f} GiB" if mib >= 10240 else in_mib(num_bytes)
