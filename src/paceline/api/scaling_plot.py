"""Draws throughput and efficiency over devices with matplotlib, to a file and without a screen."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from paceline.api.scaling import Scaling

# A colour and a dash that are told apart without colour too.
FOUND, IDEAL = {"color": "#1f4e8c", "marker": "o"}, {"color": "#888888", "linestyle": "--"}


def draw(scaling: Scaling, path: Path) -> Path:
    """Two panels over devices. The ideal is the speed of each of the fewest; the band is the interval of 80 %."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
