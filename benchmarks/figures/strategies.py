"""Pictures of strategies: what each rank holds, and what it does in a step."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from paceline.strategies.stages.keys import ScheduleName
from paceline.strategies.stages.schedule import Action, schedule

COLOURS = {
    "forward": "#4c8bf5",
    "backward": "#f29900",
    "message": "#9aa0a6",
    "optimizer": "#34a853",
    "compiling": "#b39ddb",
    "again": "#a8c7fa",
    "step": "#4c8bf5",
    "weight gradients": "#b06000",
}
HELD = {"samples": "#d7aefb", "weights": "#4c8bf5", "gradients": "#f29900", "optimizer": "#34a853"}
PAIRED = {
    "F": ("forward", 1.0),
    "B": ("backward", 2.0),
    "I": ("backward", 1.0),
    "W": ("weight gradients", 1.0),
}
INCHES_A_LANE, WIDTH_INCHES = 0.34, 9.0


def draw_strategies() -> dict[str, Figure]:
    """All pictures by name."""
    described = tomllib.loads(
        (Path(__file__).parent / "strategies.toml").read_text(encoding="utf-8")
    )
    return {name: _picture(**entry) for name, entry in described.items()} | {
        "pipeline": _schedules()
    }


def _picture(
    lanes: Sequence[str],
    boxes: Sequence[tuple[int, float, float, str, str]],
    holds: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """
    Args:
        lanes: A row of the timeline each.
        boxes: (row, start, end, kind, label).
        holds: For what a rank may hold, the part of the whole that each rank has: (from, to) in 0..1.
    """
    size = (WIDTH_INCHES, 0.8 + INCHES_A_LANE * max(len(lanes), 4))
    if holds:
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=size, width_ratios=[2, 5], layout="constrained"
        )
        _draw_held(left, holds)
    else:
        figure, right = pyplot.subplots(figsize=size, layout="constrained")
    _draw_timeline(right, lanes, boxes)
    return figure


def _draw_held(axes: Axes, holds: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """A column a rank, a row a quantity: the coloured part is what the rank has of the whole."""
    num_ranks = max(map(len, holds.values()))
    for row, (quantity, parts) in enumerate(holds.items()):
        for rank, (begin, end) in enumerate(parts):
            axes.add_patch(
                Rectangle((rank + 0.08, row + 0.12), 0.84, 0.76, fill=False, edgecolor="#bdc1c6")
            )
            axes.add_patch(
                Rectangle(
                    (rank + 0.08 + 0.84 * begin, row + 0.12),
                    0.84 * (end - begin),
                    0.76,
                    facecolor=HELD[quantity],
                )
            )
    axes.set(xlim=(0, num_ranks), ylim=(len(holds), 0), title="what a rank holds")
    axes.set_xticks(
        [rank + 0.5 for rank in range(num_ranks)], [str(rank) for rank in range(num_ranks)]
    )
    axes.set_yticks([row + 0.5 for row in range(len(holds))], list(holds))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_timeline(
    axes: Axes, lanes: Sequence[str], boxes: Sequence[Sequence[Any]], title: str = "in time"
) -> None:
    for row, begin, end, kind, label in boxes:
        axes.add_patch(
            Rectangle(
                (begin, row + 0.12), end - begin, 0.76, facecolor=COLOURS[kind], edgecolor="white"
            )
        )
        axes.text(
            (begin + end) / 2,
            row + 0.52,
            label,
            ha="center",
            va="center",
            fontsize=7,
            color="black" if kind in ("again", "compiling") else "white",
        )
    axes.set(xlim=(0, max(box[2] for box in boxes)), ylim=(len(lanes), 0), title=title, xticks=[])
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], lanes)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    kinds = dict.fromkeys(box[3] for box in boxes)
    axes.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        ncols=len(kinds),
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        fontsize=8,
    )


def _schedules(num_ranks: int = 4, num_microbatches: int = 8) -> Figure:
    """Two schedules as ranks carry them out, with forwards of one unit of time."""
    names: tuple[ScheduleName, ...] = ("1f1b", "zero-bubble")
    figure, panels = pyplot.subplots(
        len(names), 1, figsize=(WIDTH_INCHES, 4.4), sharex=True, layout="constrained"
    )
    ends = []
    for axes, name in zip(panels, names, strict=True):
        orders = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        boxes = _played(orders, num_stages=num_ranks)
        ends.append(max(end for _, _, end, _, _ in boxes))
        _draw_timeline(
            axes, [f"rank {rank}" for rank in range(num_ranks)], boxes, title=f"schedule={name}"
        )
    panels[0].set_xlim(0, max(ends))
    return figure


def _played(
    orders: Sequence[Sequence[Action]], *, num_stages: int
) -> list[tuple[int, float, float, str, str]]:
    """When each action runs if ranks wait only for what an action needs."""
    ended: dict[Action, float] = {}
    free, boxes = [0.0] * len(orders), []
    left = [list(reversed(order)) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order and all(needed in ended for needed in order[-1].needs(num_stages)):
                action = order.pop()
                kind, takes = PAIRED[action.kind]
                begin = max([free[rank], *(ended[needed] for needed in action.needs(num_stages))])
                ended[action] = free[rank] = begin + takes
                boxes.append((rank, begin, begin + takes, kind, str(action.microbatch)))
    return boxes
