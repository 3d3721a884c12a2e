"""Draws charts of a run as SVG text with matplotlib. The colours are the page's own, so that they
follow light and dark mode; the page writes titles and legends.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paceline.base.tables import three_digits
from paceline.reports.diagnosis import (
    COMPUTING,
    CORES,
    DATA,
    IDLE,
    MESSAGES,
    OPTIMIZER,
    SAVES,
    UNEXPLAINED,
)

MOST_POINTS = 400  # points of a line; more can't be told apart at a chart's width in pixels
_GREATEST = 1e300  # the largest value that can be drawn; beyond it sums are infinite
_SIZE_INCHES = (4.6, 2.4)  # text is readable at the width of a phone
_NAME = 44  # characters of a bar's name that fit beside its sum, and of words below an axis
_LEAST = 6  # characters of such a word
_SMOOTHED = 40  # a line of so many points gets a running median
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
# The colour of each part of a step and of memory, on every page. What is of one kind is alike.
PARTS = {
    **dict.fromkeys((COMPUTING, "activations"), SERIES[0]),
    **dict.fromkeys((MESSAGES, "communication"), SERIES[1]),
    **dict.fromkeys((OPTIMIZER, "optimizer"), SERIES[2]),
    **dict.fromkeys((DATA, "parameters"), SERIES[3]),
    **dict.fromkeys((SAVES, "gradients"), SERIES[4]),
    **dict.fromkeys((IDLE, "runtime", "context"), SERIES[5]),
    **dict.fromkeys((CORES, "unaccounted"), SERIES[6]),
    **dict.fromkeys((UNEXPLAINED, "holes", "workspaces"), SERIES[7]),
    "measured peak": INK,
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "paceline",
    "text.parse_math": False,
}  # a metric's name may hold a dollar

Line = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True)
class Chart:
    svg: str
    title: str
    keys: Mapping[str, str] = field(default_factory=dict)  # the legend: CSS colours by name


def lines(
    series: Mapping[str, Line],
    *,
    title: str,
    x: str = "step",
    log: bool = False,
    clipped: bool = False,
    band: tuple[float, float] | None = None,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> Chart:
    """Draw series over a common axis. A long one is drawn thin, with its running median over it.

    Args:
        series: x and y of each series, by name. A series of more than `MOST_POINTS` is drawn as
            medians of neighbours.
        log: Whether the y axis is logarithmic.
        clipped: Whether the axis ends where few points lie above, so that these flatten nothing.
        band: Lowest and highest predicted y.
        marks: Places on the x axis, by what happened there.
    """
    drawn = {name: thinned(*line) for name, line in series.items()}
    colours = {
        **dict(zip(drawn, SERIES, strict=False)),
        **dict(zip(marks or {}, reversed(SERIES), strict=False)),
    }

    def draw(axes: Axes) -> None:
        for name, (xs, ys) in drawn.items():
            _line(axes, xs, ys, colours[name])
        if band is not None:
            axes.axhspan(*band, color=SERIES[0], alpha=0.13, lw=0)
        for name, places in (marks or {}).items():
            for place in places[:MOST_POINTS]:
                axes.axvline(place, color=colours[name], lw=0.9, ls=":")
        ordered = sorted(y for _, ys in drawn.values() for y in ys)
        if (
            clipped
            and ordered
            and ordered[-1] > 2 * (usual := ordered[int(0.95 * (len(ordered) - 1))])
        ):
            axes.set_ylim(0, 1.15 * max(usual, *(band or (0, 0))))
            axes.text(
                1,
                1,
                f"up to {three_digits(ordered[-1])}",
                transform=axes.transAxes,
                ha="right",
                va="top",
            )
        axes.margins(x=0.01)
        _scale(axes.xaxis, is_whole=True)
        _scale(axes.yaxis, log)
        axes.set(xlabel=x)

    keys = {name: _css(colour) for name, colour in colours.items()}
    if band is not None:
        keys["predicted"] = f"color-mix(in srgb, {_css(SERIES[0])} 25%, transparent)"
    return Chart(_drawn(draw), title, keys if len(keys) > 1 else {})


def _line(axes: Axes, xs: Sequence[float], ys: Sequence[float], colour: str) -> None:
    """Draw a line; a long one thin, with its running median over it."""
    if len(xs) < _SMOOTHED:
        axes.plot(xs, ys, color=colour, lw=1.6, marker="o" if len(xs) <= 3 else None, ms=4)
        return
    axes.plot(xs, ys, color=colour, lw=0.7, alpha=0.55)
    axes.plot(xs, running_median(ys), color=colour, lw=1.8)


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    unit: str = "",
    intervals: Mapping[str, tuple[float, float]] | None = None,
    grey: Collection[str] = (),
) -> Chart:
    """Draw a horizontal bar of parts for each name, the first at the top, under its name and sum.
    A negative part, as of memory that was priced and not needed, takes from the last parts.

    Args:
        intervals: Where a bar's end may really be, as a line.
        grey: Names of bars that are drawn in grey.
    """
    parts = dict.fromkeys(part for bar in bars.values() for part in bar if bar[part] > 0)

    def draw(axes: Axes) -> None:
        for place, (name, bar) in enumerate(bars.items()):
            end, total = 0.0, sum(bar.values())
            for part in parts:
                width = min(max(bar.get(part, 0.0), 0.0), total - end)
                colour = QUIET if name in grey else part_colour(part)
                alpha = 0.6 if name in grey else 1
                axes.barh(place, width, left=end, height=0.4, color=colour, alpha=alpha)
                end += width
            if interval := (intervals or {}).get(name):
                axes.plot(interval, (place, place), color=INK, lw=1.0, marker="|", ms=5)
            across = axes.get_yaxis_transform()
            axes.text(0, place - 0.28, _cut(name, _NAME), va="bottom", transform=across)
            axes.text(
                1,
                place - 0.28,
                f"{three_digits(total)} {unit}".strip(),
                va="bottom",
                ha="right",
                transform=across,
            )
        axes.set(ylim=(len(bars) - 0.6, -0.8), yticks=[])
        axes.spines["left"].set_visible(False)
        _scale(axes.xaxis)

    keys = {part: _css(part_colour(part)) for part in parts}
    return Chart(_drawn(draw, height=0.5 * len(bars) + 0.6), title, keys if len(keys) > 1 else {})


def points(
    groups: Mapping[str, Line],
    *,
    title: str,
    x: str | None = None,
    line: Mapping[str, Line] | None = None,
    log: tuple[bool, bool] = (False, False),
) -> Chart:
    """Draw groups of points, and lines as steps.

    Args:
        groups: x, which may be words, and y, by the group's name.
        log: Whether each of both axes is logarithmic.
    """
    colours = dict(zip(groups, (SERIES[0], QUIET, SERIES[2]), strict=False))
    colours |= dict.fromkeys(line or {}, SERIES[1])

    def draw(axes: Axes) -> None:
        for name, (xs, ys) in groups.items():
            axes.scatter(xs, ys, s=26, color=colours[name], alpha=0.8, lw=0)
        for name, (xs, ys) in (line or {}).items():
            axes.step(xs, ys, where="post", color=colours[name], lw=1.6)
        axes.margins(0.06)
        chosen = dict.fromkeys(each for xs, _ in groups.values() for each in xs)
        kinds = {*map(type, chosen)}
        if str in kinds:
            room = max(_LEAST, _NAME // len(chosen))
            axes.set_xticks(range(len(chosen)), [_cut(each, room) for each in chosen])
        else:
            _scale(axes.xaxis, log[0], is_whole=kinds == {int})
        _scale(axes.yaxis, log[1])
        axes.set(xlabel=x)

    keys = {name: _css(colour) for name, colour in colours.items()}
    return Chart(_drawn(draw), title, keys if len(keys) > 1 else {})


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def part_colour(part: str) -> str:
    return PARTS.get(part, SERIES[0])


def swatch(part: str) -> str | None:
    """Return a part's colour for CSS; None if it has none of its own."""
    return _css(PARTS[part]) if part in PARTS else None


def is_wide(values: Collection[float]) -> bool:
    """Return whether values are for a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


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


def running_median(ys: Sequence[float]) -> list[float]:
    """Return the median of each value and its neighbours, a twentieth of all.

    >>> running_median([1.0, 1.0, 9.0, 1.0, 1.0])
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    half = max(2, len(ys) // 40)
    return [median(ys[max(0, place - half) : place + half + 1]) for place in range(len(ys))]


def _css(colour: str) -> str:
    return f"var({_VARIABLES[colour]})"


def _scale(axis: Axis, log: bool = False, *, is_whole: bool = False) -> None:
    """Give an axis a grid and a few plain numbers, which are integers if `is_whole`."""
    if log:
        (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
        axis.set_major_formatter("{x:g}")  # the default needs mathematical text
        axis.set_minor_formatter("")
    else:
        axis.set_major_locator(MaxNLocator(5, integer=is_whole))
    axis.grid(alpha=0.6)


def _drawn(draw: Callable[[Axes], None], *, height: float = _SIZE_INCHES[1]) -> str:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text is drawn by browsers, with their fonts
        figure = Figure(figsize=(_SIZE_INCHES[0], height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        axes.set_axisbelow(True)
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
