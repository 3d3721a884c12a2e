"""Plots of what was measured, from the tables beside this file; docs/results.md has the same figures with the commands
that gave them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

TABLES = Path(__file__).parent / "tables"
NETWORK_WAYS: Mapping[str, str] = {
    "data=N": "#4c8bf5",
    "data=N compress=bf16": "#a8c7fa",
    "servers=1 workers=N": "#b06000",
    "servers=N workers=N colocate=yes": "#f29900",
    "staleness=inf": "#d93025",
    "data=N local=10 outer=diloco": "#34a853",
    "data=N local=100 outer=diloco compress=int8": "#137333",
}

# Where a label stands beside its point, and how many points higher.
LABELS: Mapping[str, tuple[str, int]] = {
    "data=4": ("right", 0),
    "compress=bf16": ("middle", 9),
    "compress=int8": ("left", -6),
    "staleness=1": ("left", 0),
    "staleness=inf": ("left", 0),
    "staleness=inf, no momentum": ("left", 0),
    "local=100 outer=diloco compress=int8": ("right", -9),
}


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table by column."""
    with (TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def network() -> Figure:
    """What hosts keep of their speed, by number of hosts and by speed of links."""
    rows = table("network")
    figure, (by_hosts, by_link) = pyplot.subplots(
        1, 2, figsize=(9, 4.2), sharey=True, layout="constrained"
    )
    for way, colour in NETWORK_WAYS.items():
        hosts = [
            (int(row["hosts"]), float(row["percent"]))
            for row in rows
            if row["way"] == way and row["mbit_s"] == "400"
        ]
        links = sorted(
            (int(row["mbit_s"]), float(row["percent"]))
            for row in rows
            if row["way"] == way and row["hosts"] == "8"
        )
        if hosts:
            by_hosts.plot(*zip(*hosts, strict=True), marker="o", color=colour)
        by_link.plot(*zip(*links, strict=True), marker="o", color=colour, label=way)
    by_hosts.set(
        xlabel="hosts, links of 400 Mbit/s",
        ylabel="% of the speed without a network",
        ylim=(0, 105),
        xticks=[1, 2, 4, 8],
    )
    by_link.set(xlabel="Mbit/s of each link, 8 hosts", xscale="log")
    by_link.set_xticks([100, 400, 1000], ["100", "400", "1000"])
    by_link.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def uneven() -> Figure:
    """What eight hosts keep if one is slow, or if hosts pause."""
    rows = table("uneven")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
    for number, (disturbance, colour) in enumerate(
        [("one host 3x slower", "#f29900"), ("pauses", "#4c8bf5")]
    ):
        bars = [
            (ways.index(row["way"]) + 0.36 * number, float(row["percent"]))
            for row in rows
            if row["disturbance"] == disturbance
        ]
        drawn = axes.barh(
            [place for place, _ in bars],
            [percent for _, percent in bars],
            height=0.34,
            color=colour,
            label=disturbance,
        )
        axes.bar_label(drawn, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set_yticks([place + 0.18 for place in range(len(ways))], ways)
    axes.invert_yaxis()
    axes.set(xlabel="% of what the hosts can do, each at its own speed", xlim=(0, 112))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def loss() -> Figure:
    """Validation loss against the bytes that a rank sends."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    rows = table("loss")
    exact = float(rows[0]["validation"])
    axes.axhline(exact, color="#bdc1c6", linewidth=1)
    for row in rows:
        x, y = float(row["megabytes"]), float(row["validation"])
        is_late = row["way"].startswith("staleness")
        axes.plot(x, y, marker="s" if is_late else "o", color="#d93025" if is_late else "#4c8bf5")
        side, lift = LABELS.get(row["way"], ("right", 0))
        shift, anchor = {"left": (-6, "right"), "right": (6, "left"), "middle": (0, "center")}[side]
        axes.annotate(
            row["way"],
            (x, y),
            xytext=(shift, lift),
            textcoords="offset points",
            fontsize=8,
            ha=anchor,
            va="center",
        )
    axes.set(
        xscale="log",
        xlabel="MB that a rank sends in 1,500 steps",
        ylabel="validation loss",
        ylim=(1.5, 1.76),
        xlim=(8, 20000),
    )
    return figure


def memory() -> Figure:
    """Memory of the fullest rank, measured and predicted."""
    rows = table("memory")
    figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    for number, (column, colour) in enumerate(
        [("measured_mib", "#4c8bf5"), ("predicted_mib", "#bdc1c6")]
    ):
        drawn = axes.barh(
            [place + 0.36 * number for place in range(len(rows))],
            [float(row[column]) for row in rows],
            height=0.34,
            color=colour,
            label=column.removesuffix("_mib"),
        )
        axes.bar_label(drawn, padding=3, fontsize=8)
    axes.set_yticks([place + 0.18 for place in range(len(rows))], [row["plan"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="MiB of the fullest rank", xlim=(0, 420))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _speedup(name: str, x: str, xlabel: str, *, logarithmic: bool) -> Figure:
    """A ratio with its interval."""
    rows = table(name)
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    middle = [float(row["speedup"]) for row in rows]
    below = [float(row["speedup"]) - float(row["low"]) for row in rows]
    over = [float(row["high"]) - float(row["speedup"]) for row in rows]
    places = [float(row[x]) for row in rows]
    axes.axhline(1, color="#bdc1c6", linewidth=1)
    axes.errorbar(places, middle, yerr=[below, over], marker="o", capsize=3, color="#4c8bf5")
    axes.set(xlabel=xlabel, ylabel="times as fast as one", ylim=(0, 2.1))
    if logarithmic:
        axes.set_xscale("log")
    return figure


def towers() -> Figure:
    """Two towers on two parts."""
    return _speedup("towers", "batch", "samples in a batch", logarithmic=False)


def break_even() -> Figure:
    """How much faster two replicas are than one device, by how long the step takes on one."""
    rows = table("break_even")
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    axes.axhline(1, color="#bdc1c6", linewidth=1)
    for series, colour in (("more samples", "#4c8bf5"), ("wider layers", "#f29900")):
        places, middle, low, high = zip(
            *(
                [float(row[column]) for column in ("single_ms", "speedup", "low", "high")]
                for row in rows
                if row["series"] == series
            ),
            strict=True,
        )
        errors = [
            [m - end for m, end in zip(middle, low, strict=True)],
            [end - m for m, end in zip(middle, high, strict=True)],
        ]
        axes.errorbar(
            places, middle, yerr=errors, marker="o", capsize=3, color=colour, label=series
        )
    axes.set(
        xlabel="ms of a step on one device",
        ylabel="times as fast on two",
        xscale="log",
        ylim=(0, 2.1),
    )
    axes.set_xticks([4, 10, 20, 40, 60], labels=["4", "10", "20", "40", "60"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    return figure


PLOTS: Mapping[str, Callable[[], Figure]] = {
    "network": network,
    "uneven": uneven,
    "loss": loss,
    "memory": memory,
    "towers": towers,
    "break_even": break_even,
}
