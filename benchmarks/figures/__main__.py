"""Draws the pictures of the documentation: what a strategy does, and what was measured.

    python -m benchmarks.figures [FOLDER]          # docs/figures by default

`strategies.toml` says what the pictures of strategies show, and `tables/*.csv` has the figures of docs/results.md. The
same versions of Paceline and matplotlib draw the same files, byte by byte.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from benchmarks.figures.measured import PLOTS
from benchmarks.figures.strategies import draw_strategies

ROOT = Path(__file__).resolve().parents[2]
# Text stays text; equal names of clips and markers in each run.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "figures")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.use("svg")
    with matplotlib.rc_context(STYLE):
        figures = draw_strategies() | {name: plot() for name, plot in PLOTS.items()}
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
