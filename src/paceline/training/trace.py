"""Records what every rank did when, on one clock: as a Chrome trace (for Perfetto) and a picture
with one row per rank.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

TRACE, PICTURE = "trace.json", "schedule.svg"
# Of each kind of work, in light and in dark mode: those that reports give to these parts of a step.
COLOURS = {
    "forward": ("#1f5fa8", "#6fa8e8"),
    "backward": ("#5a91cf", "#3d74b5"),
    "input gradients": ("#5a91cf", "#3d74b5"),
    "weight gradients": ("#8fb6e2", "#2b5689"),
    "reduce": ("#c4601a", "#f0995a"),
    "optimizer": ("#2f8f5b", "#6cc796"),
    "input": ("#8a55a5", "#c79be0"),
}
# The phases among a rank's signs of life that are separate work.
PHASES = ("input", "reduce", "optimizer")
_WIDTH, _ROW, _LEFT = 1000, 28, 60  # pixels
_MOST_TICKS = 10


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One piece of work of a rank."""

    rank: int
    what: str
    label: str
    # In seconds since the epoch, by the host's clock.
    start_s: float
    end_s: float


class TraceRecorder:
    """Records what one rank does in some steps. Time in which nothing is recorded is idle: the rank
    waits for others.
    """

    def __init__(self, rank: int, steps: range) -> None:
        self.rank, self.steps, self.step = rank, steps, -1
        self.spans: list[TraceSpan] = []
        self._offset_s = time.time() - time.perf_counter()
        self._phase: tuple[str, float] | None = None

    def begin(self, step: int) -> None:
        """Note that the step of this number, from 0, is next."""
        self.step = step

    def phase(self, name: str) -> None:
        """Note that a phase of the step begins and the previous one ends."""
        now_s = time.perf_counter()
        if self._phase is not None and self._phase[0] in PHASES:
            self.add(self._phase[0], "", self._phase[1], now_s)
        self._phase = (name, now_s)

    def add(self, kind: str, label: str, start_s: float, end_s: float) -> None:
        """Record a span. Times are those of `time.perf_counter`."""
        if self.step in self.steps:
            self.spans.append(
                TraceSpan(self.rank, kind, label, start_s + self._offset_s, end_s + self._offset_s)
            )


def write(spans: Sequence[TraceSpan], run_dir: Path, *, world_size: int) -> None:
    """Write the trace and the picture of all ranks' spans."""
    (run_dir / TRACE).write_text(json.dumps(chrome_trace(spans)))
    (run_dir / PICTURE).write_text(picture(spans, world_size=world_size))


def chrome_trace(spans: Sequence[TraceSpan]) -> dict[str, object]:
    """Return the spans in the Trace Event Format, as complete events in microseconds. Perfetto and
    chrome://tracing open it.
    """
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    first_s = min((span.start_s for span in spans), default=0.0)
    return {
        "traceEvents": [
            *names,
            *(
                {
                    "ph": "X",
                    "name": f"{span.what} {span.label}".strip(),
                    "cat": span.what,
                    "pid": span.rank,
                    "tid": 0,
                    "ts": 1e6 * (span.start_s - first_s),
                    "dur": 1e6 * (span.end_s - span.start_s),
                }
                for span in spans
            ),
        ],
        "displayTimeUnit": "ms",
    }


def idle_fraction(spans: Sequence[TraceSpan], *, world_size: int) -> float:
    """Return the fraction of all ranks' time, from the first span to the last, in which nothing was
    recorded.
    """
    if not spans:
        return 0.0
    total_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return 1.0 - sum(span.end_s - span.start_s for span in spans) / (total_s * world_size)


def picture(spans: Sequence[TraceSpan], *, world_size: int) -> str:
    """Return an SVG with one row per rank, a box for each piece of work, and the time below. Idle time
    is left empty.
    """
    first_s = min((span.start_s for span in spans), default=0.0)
    total_s = max((span.end_s for span in spans), default=1.0) - first_s
    scale = _WIDTH / max(total_s, 1e-9)
    used = [kind for kind in COLOURS if any(span.what == kind for span in spans)]
    below = _ROW * world_size
    height = below + 2.5 * _ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{height}" '
        f'font-family="sans-serif" font-size="13"><style>{_style(used)}</style>',
        '<rect width="100%" height="100%"/>',
    ]
    every_s = _tick_s(total_s)
    for tick in range(int(total_s / every_s) + 1):
        x = _LEFT + scale * every_s * tick
        lines.append(
            f'<path d="M{x:.2f} 0V{below + 4}"/><text x="{x:.2f}" y="{below + 18}" text-anchor="middle">'
            f"{1e3 * every_s * tick:g}{' ms' * (tick == 0)}</text>"
        )
    lines += [
        f'<text x="4" y="{_ROW * rank + 19}">rank {rank}</text>' for rank in range(world_size)
    ]
    for span in spans:
        x, width = (
            _LEFT + scale * (span.start_s - first_s),
            max(scale * (span.end_s - span.start_s), 0.5),
        )
        y = _ROW * span.rank + 3
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}" class="k{used.index(span.what)}">'
            f"<title>{escape(f'{span.what} {span.label}')} "
            f"{1e3 * (span.end_s - span.start_s):.2f} ms</title></rect>"
        )
        if width > 9 * len(span.label) and span.label:
            lines.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 16}" class="on" text-anchor="middle">'
                f"{escape(span.label)}</text>"
            )
    for place, kind in enumerate(used):
        x, y = _LEFT + 130 * place, below + 34
        lines.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" class="k{place}"/>'
            f'<text x="{x + 18}" y="{y + 11}">{kind}</text>'
        )
    idle = idle_fraction(spans, world_size=world_size)
    lines.append(
        f'<text x="{_LEFT + _WIDTH}" y="{below + 45}" text-anchor="end">{1e3 * total_s:.1f} ms, '
        f"idle {100 * idle:.1f} %</text></svg>"
    )
    return "\n".join(lines)


def _style(used: Sequence[str]) -> str:
    """Return the style of a picture in the reader's light or dark mode."""

    def mode(place: int, page: str, ink: str, grid: str) -> str:
        kinds = "".join(f".k{at}{{fill:{COLOURS[kind][place]}}}" for at, kind in enumerate(used))
        return (
            f"rect{{fill:{page}}}text{{fill:{ink}}}.on{{fill:{page}}}path{{stroke:{grid}}}{kinds}"
        )

    light = mode(0, "#f6f7f9", "#1c2430", "#d3d9e1")
    dark = mode(1, "#1b212a", "#e3e8ee", "#36404c")
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _tick_s(total_s: float) -> float:
    """Return a round time between ticks, so that there are at most `_MOST_TICKS`.

    >>> _tick_s(0.073)
    0.01
    """
    power = 10.0 ** math.floor(math.log10(max(total_s, 1e-9) / _MOST_TICKS))
    return next(power * each for each in (1, 2, 5, 10) if total_s <= power * each * _MOST_TICKS)
