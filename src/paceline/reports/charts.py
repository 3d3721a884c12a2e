"""Draws charts of a run as SVG text with matplotlib. The colours are the page's own, so that they
follow light and dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MOST_POINTS = 400  # points of a line; more can't be told apart at a chart's width in pixels
_GREATEST = 1e300  # the largest value that can be drawn; beyond it sums are infinite
_SIZE_INCHES = (4.6, 2.6)  # text is readable at the width of a phone
# Colours that represent the page's style variables: matplotlib draws them, and `_styled` replaces
# them.
INK, GRID, QUIET = "#010203", "#010204", "#01020d"
SERIES = ("#010205", "#010206", "#010207", "#010208", "#010209", "#01020a", "#01020b", "#01020c")
_VARIABLES = {
    INK: "--ink",
    GRID: "--grid",
    QUIET: "--quiet",
    **{colour: f"--series-{place}" for place, colour in enumerate(SERIES)},
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "paceline",
    "text.parse_math": False,
}  # a metric's name may hold a dollar

Line = tuple[Sequence[float], Sequence[float | None]]


def lines(
    series: Mapping[str, Line],
    *,
    x: str,
    y: str,
    log: bool = False,
    band: tuple[float, float] | None = None,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Draw series over a common axis.

    Args:
        series: x and y of each series, by name. A series of more than `MOST_POINTS` is drawn as
            medians of neighbours.
        log: Whether the y axis is logarithmic.
        band: Lowest and highest predicted y.
        marks: Places on the x axis, by what happened there.
    """

    def draw(axes: Axes) -> None:
        for colour, (name, (xs, ys)) in zip(SERIES, series.items(), strict=False):
            shown_x, shown_y = thinned(xs, ys)
            axes.plot(
                shown_x,
                shown_y,
                label=name,
                color=colour,
                linewidth=1.4,
                marker="o" if len(shown_x) <= 3 else None,
                markersize=3,
            )
        if band is not None:
            axes.axhspan(*band, color=SERIES[0], alpha=0.13, linewidth=0, label="predicted")
        for colour, (name, places) in zip(reversed(SERIES), (marks or {}).items(), strict=False):
            for nth, place in enumerate(places[:MOST_POINTS]):
                axes.axvline(
                    place, color=colour, linewidth=0.8, linestyle=":", label=None if nth else name
                )
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")  # the default needs mathematical text
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.6)
        if len(series) + len(marks or {}) + (band is not None) > 1:
            axes.legend()

    return _drawn(draw)


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    *,
    x: str,
    intervals: Mapping[str, tuple[float, float]] | None = None,
    grey: Collection[str] = (),
) -> str:
    """Draw a horizontal bar of parts for each name, the first at the top.

    Args:
        intervals: Where a bar's end may really be, as a line.
        grey: Names of bars that are drawn in grey.
    """

    def draw(axes: Axes) -> None:
        parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
        ends = dict.fromkeys(bars, 0.0)
        for place, part in enumerate(parts):
            widths = [bar.get(part, 0.0) for bar in bars.values()]
            patches = axes.barh(
                list(bars),
                widths,
                left=list(ends.values()),
                label=part,
                height=0.6,
                color=SERIES[place % len(SERIES)],
                hatch=None if place < len(SERIES) else "//",
            )
            for name, patch in zip(bars, patches, strict=True):
                if name in grey:
                    patch.set(facecolor=QUIET, alpha=0.8 / (1 + place))
            ends = {
                name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)
            }
        for name, interval in (intervals or {}).items():
            axes.plot(interval, (name, name), color=INK, linewidth=1.0, marker="|", markersize=5)
        axes.invert_yaxis()
        axes.set(xlabel=x)
        axes.grid(alpha=0.6, axis="x")
        axes.set_axisbelow(True)
        axes.figure.legend(loc="outside lower right", ncols=2)

    return _drawn(draw, height=_height(len(bars)))


def points(
    xs: Sequence[float], ys: Sequence[float], best: Sequence[float], *, x: str, y: str
) -> str:
    """Draw the values of trials, and the best so far as a step line."""

    def draw(axes: Axes) -> None:
        axes.scatter(xs, ys, s=14, color=SERIES[0], label="a trial")
        axes.step(xs, best, where="post", color=SERIES[1], linewidth=1.4, label="the best so far")
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.6)
        axes.legend()

    return _drawn(draw)


def thinned(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return at most `MOST_POINTS` points: medians of as many groups of neighbours. Values that are
    no numbers are left out.

    >>> thinned([1, 2, 3], [5.0, None, float("nan")])
    ([1], [5.0])
    """
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and abs(y) < _GREATEST]
    size = -(-len(kept) // MOST_POINTS) or 1
    groups = [kept[start : start + size] for start in range(0, len(kept), size)]
    return [median(x for x, _ in group) for group in groups], [
        median(y for _, y in group) for group in groups
    ]


def _height(num_bars: int) -> float:
    """Return the height of a chart with so many bars, in inches."""
    return max(2.4, 0.35 * num_bars + 1.7)


def _drawn(draw: Callable[[Axes], None], *, height: float = _SIZE_INCHES[1]) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_SIZE_INCHES[0], height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        draw(axes)
        written = io.StringIO()
        figure.savefig(
            written, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return _styled(written.getvalue())


def _styled(svg: str) -> str:
    """Return only the picture, as wide as its place, in the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'font: ([\d.]+)px [^;"]*', r"font: \1px var(--font)", svg)
    head, _, rest = svg.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img">{rest}'
