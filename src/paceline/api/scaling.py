"""`scale`: find the best plan on each number of devices, its speed, and how efficiently it uses
each device.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import ClusterError, MissingPackage, PacelineError, UsageError, with_extra
from paceline.base.tables import aligned, three_digits
from paceline.cluster.cluster import Cluster
from paceline.cluster.gpu_use import apart_from_cuda
from paceline.job.file import AnyJob, open_job
from paceline.planner.problem import PlanningProblem
from paceline.planner.search import Candidate, amount

MOST_DEVICES = 1_000_000
# Cuts of the model whose schedules are all tried on each number of devices; `plan` tries more.
REFINED = 4
SUFFIXES = (".png", ".svg")


# A colour and a dash, so that the lines also differ without colour.
FOUND, IDEAL = {"color": "#1f4e8c", "marker": "o"}, {"color": "#888888", "linestyle": "--"}


@dataclass(frozen=True, slots=True)
class Point:
    """One number of devices."""

    num_devices: int
    best: Candidate | None = None  # None if there is no plan
    problem: str = ""  # why there is no plan


@dataclass(frozen=True)
class Scaling:
    """The answer of `scale`: the same global batch on every number of devices (strong scaling)."""

    cluster: str
    batch: int  # samples per step
    points: tuple[Point, ...]  # in order of devices

    @property
    def first(self) -> Point | None:
        """The point with the fewest devices that anything fits on; efficiency is relative to it."""
        return next((point for point in self.points if point.best is not None), None)

    def samples_per_s(self, point: Point) -> float | None:
        return None if point.best is None else self.batch / point.best.estimate.step_s

    def efficiency(self, point: Point) -> float | None:
        """Return samples per second and device, relative to the fewest devices that anything fits
        on.
        """
        speed, first = self.samples_per_s(point), self.first
        if speed is None or first is None:
            return None
        least = self.samples_per_s(first)
        assert least is not None
        return speed / point.num_devices / (least / first.num_devices)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return {
            "cluster": self.cluster,
            "batch": self.batch,
            "points": [self._row(point) for point in self.points],
        }

    def _row(self, point: Point) -> dict[str, Any]:
        estimate = None if point.best is None else point.best.estimate
        return {
            "devices": point.num_devices,
            "plan": None if point.best is None else str(point.best.plan),
            "step_s": estimate and estimate.step_s,
            "step_s_low": estimate and estimate.low_s,
            "step_s_high": estimate and estimate.high_s,
            "samples_per_s": self.samples_per_s(point),
            "efficiency": self.efficiency(point),
            "memory_bytes": estimate and estimate.peak_memory_bytes,
            "problem": point.problem or None,
        }

    def describe(self) -> str:
        """Return the answer as text for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"a global batch of {self.batch} samples on {self.cluster}, resized (strong scaling)"
        if self.first is not None:
            yield f"efficiency: of each device, against {self.first.num_devices} of them"
        yield ""
        yield aligned(
            ["devices", "ms/step", "samples/s", "efficiency", "plan"], map(self._cells, self.points)
        )

    def _cells(self, point: Point) -> list[str]:
        speed, part = self.samples_per_s(point), self.efficiency(point)
        if point.best is None or speed is None or part is None:
            return [str(point.num_devices), "", "", "", point.problem]
        return [
            str(point.num_devices),
            three_digits(1e3 * point.best.estimate.step_s),
            three_digits(speed),
            f"{100 * part:.0f} %",
            str(point.best.plan),
        ]

    def plot(self, path: str | Path) -> Path:
        """Draw throughput and efficiency over devices.

        Raises:
            UsageError: the file is no .png or .svg or can't be written, or matplotlib is missing.
            PacelineError: nothing fits anywhere.
        """
        check_plot(path)
        if self.first is None:
            raise PacelineError(
                "nothing fits on any number of devices, so there is nothing to draw"
            )
        return _draw(self, Path(path))


def _draw(scaling: Scaling, path: Path) -> Path:
    """Draw two panels over devices.

    The ideal line is the speed per device on the fewest devices; the band is the interval of 80 %.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [
        (point.num_devices, point.best.estimate, scaling.efficiency(point))
        for point in scaling.points
        if point.best is not None
    ]
    devices = [count for count, _, _ in points]
    speed = [scaling.batch / estimate.step_s for _, estimate, _ in points]
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(devices, speed, label="predicted", **FOUND)
    left.fill_between(
        devices,
        [scaling.batch / estimate.high_s for _, estimate, _ in points],
        [scaling.batch / estimate.low_s for _, estimate, _ in points],
        alpha=0.2,
        color=FOUND["color"],
    )
    left.plot(devices, [speed[0] * count / devices[0] for count in devices], label="ideal", **IDEAL)
    left.set(
        yscale="log",
        xlabel="devices",
        ylabel="samples a second",
        title=f"batch of {scaling.batch}, devices of {scaling.cluster}",
    )
    left.legend()
    right.plot(devices, [100 * (part or 0.0) for _, _, part in points], **FOUND)
    right.axhline(100, **IDEAL)
    right.set(
        ylim=(0, None),
        xlabel="devices",
        ylabel="efficiency, %",
        title=f"against {devices[0]} device{'s' if devices[0] > 1 else ''}",
    )
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xticks(devices, [str(count) for count in devices], rotation=45)
        panel.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"can't draw to {path}: {error.strerror}") from error
    return path


def scale(
    job: AnyJob, cluster: Cluster | str, counts: str = "1..1024", *, relaxed: bool = False
) -> Scaling:
    """Find the best plan on each of several numbers of devices, with the global batch of the job.

    Args:
        cluster: The cluster that provides devices, links and nodes: a word such as "8xH100", or a
            TOML file with equal nodes.
        counts: "1..4096" means both numbers, and the powers of two between them.
        relaxed: Whether a relaxed plan may be chosen.

    Raises:
        UsageError: counts can't be read.
        JobError: the job makes no sense.
        ClusterError: the cluster can't be read, or not be resized.
    """
    numbers = parse_counts(counts)
    target = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    target.resized(1)
    _, loaded = open_job(job)

    def points() -> tuple[Point, ...]:
        problem = PlanningProblem.of(loaded, device=target.first_here)
        return tuple(_point(problem, target, count, relaxed=relaxed) for count in numbers)

    return Scaling(
        cluster if isinstance(cluster, str) else "the cluster",
        loaded.batch,
        apart_from_cuda(points),
    )


def parse_counts(text: str) -> list[int]:
    """Return the numbers of devices in a range.

    Raises:
        UsageError: it is no range of devices.

    >>> parse_counts("3..20")
    [3, 4, 8, 16, 20]
    """
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= MOST_DEVICES:
        raise UsageError(
            f"can't read the numbers of devices '{text}'",
            hint=f"FIRST..LAST, such as 1..4096, from 1 to {MOST_DEVICES:,}",
        )
    powers = [2**k for k in range(last.bit_length()) if first < 2**k < last]
    return sorted({first, *powers, last})


def check_plot(path: str | Path) -> None:
    """Check that a plot can be drawn to a file, before the work is done.

    Raises:
        UsageError: the file is no .png or .svg, or matplotlib is missing.
    """
    if Path(path).suffix not in SUFFIXES:
        raise UsageError(
            f"can't draw to {path}", hint=f"a file that ends in {' or '.join(SUFFIXES)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage("drawing", "matplotlib", install=with_extra("plot"))


def _point(problem: PlanningProblem, cluster: Cluster, count: int, *, relaxed: bool) -> Point:
    try:
        ranking = problem.search(cluster.resized(count), may_relax=relaxed, most_refined=REFINED)
    except ClusterError as error:
        return Point(count, problem=str(error).partition("\n")[0])
    if ranking.chosen is not None:
        return Point(count, ranking.chosen)
    if ranking.too_large:
        nearest = ranking.too_large[0]
        return Point(
            count,
            problem=f"nothing fits: {nearest.plan} needs {amount(nearest.missing_bytes)} more",
        )
    why = "; ".join(dict.fromkeys(ranking.refused.values()))
    return Point(
        count,
        problem=why
        or f"no plan: the batch of {problem.job.batch} samples is smaller than the "
        "replicas, and the model is cut no further",
    )
