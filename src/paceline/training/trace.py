"""Records what every rank did when, on one clock: as a Chrome trace (for Perfetto) and a picture
with one row per rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

TRACE, PICTURE = "trace.json", "schedule.svg"
COLOURS = {
    "forward": "#4c8bf5",
    "backward": "#f29900",
    "input gradients": "#f29900",
    "weight gradients": "#b06000",
    "reduce": "#9aa0a6",
    "optimizer": "#34a853",
    "input": "#d7aefb",
}
# The phases among a rank's signs of life that are separate work.
PHASES = ("input", "reduce", "optimizer")
_WIDTH, _ROW, _LEFT = 1000, 26, 70  # pixels


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

    def write(self, folder: Path) -> None:
        (folder / f"trace-rank-{self.rank}.json").write_text(
            json.dumps([asdict(span) for span in self.spans])
        )


def bring_together(folder: Path, run_dir: Path, world_size: int) -> None:
    """Make the trace and the picture from the spans that all ranks wrote into `folder`."""
    paths = [folder / f"trace-rank-{rank}.json" for rank in range(world_size)]
    spans = [TraceSpan(**item) for path in paths for item in json.loads(path.read_text())]
    (run_dir / TRACE).write_text(json.dumps(chrome_trace(spans)))
    (run_dir / PICTURE).write_text(picture(spans, world_size=world_size))
    for path in paths:
        path.unlink()


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
    """Return an SVG with one row per rank and a box for each piece of work. Idle time is left
    white.
    """
    first_s = min((span.start_s for span in spans), default=0.0)
    total_s = max((span.end_s for span in spans), default=1.0) - first_s
    scale = _WIDTH / max(total_s, 1e-9)
    used = [kind for kind in COLOURS if any(span.what == kind for span in spans)]
    height = _ROW * (world_size + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    lines += [
        f'<text x="4" y="{_ROW * rank + 17}">rank {rank}</text>' for rank in range(world_size)
    ]
    for span in spans:
        x, width = (
            _LEFT + scale * (span.start_s - first_s),
            max(scale * (span.end_s - span.start_s), 0.5),
        )
        y = _ROW * span.rank + 3
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}" fill="{COLOURS[span.what]}" '
            f'stroke="white" stroke-width="0.5"><title>{escape(f"{span.what} {span.label}")} '
            f"{1e3 * (span.end_s - span.start_s):.2f} ms</title></rect>"
        )
        if width > 7 * len(span.label) and span.label:
            lines.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 14}" fill="white" text-anchor="middle">'
                f"{escape(span.label)}</text>"
            )
    for place, kind in enumerate(used):
        x, y = _LEFT + 130 * place, _ROW * world_size + 8
        lines.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>'
            f'<text x="{x + 16}" y="{y + 10}">{kind}</text>'
        )
    idle = idle_fraction(spans, world_size=world_size)
    lines.append(
        f'<text x="{_LEFT}" y="{_ROW * (world_size + 1) + 17}">{1e3 * total_s:.1f} ms, idle {100 * idle:.1f} '
        "% (white)</text></svg>"
    )
    return "\n".join(lines)
