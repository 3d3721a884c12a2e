"""How many trials samplers need to find a good architecture, where all architectures are known.

    python -m benchmarks.architectures table [--run DIR]
    python -m benchmarks.architectures compare [--seeds 20] [--trials 192] [--plot FILE.svg] [--json]

`table` trains all 192 nets of `net.py` with 3 seeds each and writes `table.csv`. It is a search over a grid and goes on
where it was stopped. `compare` looks up in the table what a trial would have reached, with one of the seeds at random,
and counts trials until one is of a net among the best 5 % by mean validation loss.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.architectures.net import SPACE

HERE = Path(__file__).parent
TABLE = HERE / "table.csv"
SEEDS = (0, 1, 2)
BEST_PART = 0.05

Net = tuple[str, ...]  # options in the order of SPACE, as texts


def fill(run: Path) -> None:
    """Train all nets, and write the table."""
    from optuna.samplers import GridSampler

    import paceline as pl

    grid = {**{name: list(options) for name, options in SPACE.items()}, "seed": list(SEEDS)}
    count = len(list(itertools.product(*grid.values())))
    study = pl.search(
        str(HERE / "net.py"),
        count,
        sampler=GridSampler(grid, seed=0),
        pruner="none",
        procs=2,
        run=run,
        resume=True,
    )
    trained = {
        tuple(trial["params"][name] for name in grid): trial["figures"]
        for trial in study["trials"]
        if trial["state"] == "complete"
    }
    with open(TABLE, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [*SPACE, *(f"{name}_{seed}" for name in ("loss", "accuracy") for seed in SEEDS)]
        )
        for net in itertools.product(*SPACE.values()):
            of_seeds = [trained[*net, seed] for seed in SEEDS]
            writer.writerow(
                [
                    *net,
                    *(
                        f"{figures[name]:.5f}"
                        for name in ("validation_loss", "accuracy")
                        for figures in of_seeds
                    ),
                ]
            )


# --- Comparing ----------------------------------------------------------------------------------------------------


def losses() -> dict[Net, list[float]]:
    """The validation loss of each net with each seed."""
    with open(TABLE, newline="") as file:
        return {
            tuple(row[name] for name in SPACE): [float(row[f"loss_{seed}"]) for seed in SEEDS]
            for row in csv.DictReader(file)
        }


def best_nets(table: dict[Net, list[float]]) -> set[Net]:
    """The best 5 % by mean loss."""
    by_mean = sorted(table, key=lambda net: statistics.fmean(table[net]))
    return set(by_mean[: int(BEST_PART * len(by_mean))])


def samplers() -> dict[str, Callable[[int], Any]]:
    """By a seed: those of `paceline search` as they are."""
    from paceline.searches.samplers import make_sampler

    return {
        name: (lambda seed, name=name: make_sampler(name, num_objectives=1, seed=seed))
        for name in ("random", "tpe")
    }


def trials_needed(sampler: Any, seed: int, table: dict[Net, list[float]], most: int) -> int:
    """Trials until one is of a net among the best; `most` + 1 if none is. One trial runs at a time, and none is pruned.

    seed: of which of a net's losses a trial comes to.
    """
    import optuna

    rng, best = random.Random(seed), best_nets(table)
    study = optuna.create_study(sampler=sampler)
    for number in range(1, most + 1):
        trial = study.ask()
        net = tuple(
            str(trial.suggest_categorical(name, options)) for name, options in SPACE.items()
        )
        if net in best:
            return number
        study.tell(trial, rng.choice(table[net]))
    return most + 1


def compare(seeds: int, most: int) -> dict[str, Any]:
    """Trials needed by sampler, and what the table is like."""
    table = losses()
    means = sorted(map(statistics.fmean, table.values()))
    return {
        "nets": len(table),
        "best_nets": len(best_nets(table)),
        "best_loss": means[0],
        "best_part_loss": means[len(best_nets(table)) - 1],
        "median_loss": statistics.median(means),
        "seed_spread": statistics.median(map(statistics.stdev, table.values())),
        "seed_spread_of_best": statistics.median(
            statistics.stdev(table[net]) for net in best_nets(table)
        ),
        "trials": {
            name: [trials_needed(make(seed), seed, table, most) for seed in range(seeds)]
            for name, make in samplers().items()
        },
    }


def draw(trials: dict[str, Sequence[int]], path: str) -> None:
    """The part of the seeds that has found one of the best, by number of trials."""
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for name, needed in trials.items():
        axes.step(
            [0, *sorted(needed)],
            [100 * count / len(needed) for count in range(len(needed) + 1)],
            where="post",
            label=f"{name} (median {statistics.median(needed):g})",
        )
    axes.set(
        xlabel="trials",
        ylabel="seeds that found a net of the best 5 % (%)",
        xlim=(0, None),
        ylim=(0, 100),
    )
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=["table", "compare"])
    parser.add_argument(
        "--run", type=Path, default=Path("runs/architectures"), help="folder of the search"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=192, help="after which a sampler is given up")
    parser.add_argument("--plot", metavar="FILE", help="draw the distributions (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    if options.what == "table":
        fill(options.run)
        return
    comparison = compare(options.seeds, options.trials)
    if options.plot:
        draw(comparison["trials"], options.plot)
    if options.json:
        print(json.dumps(comparison, indent=2))
        return
    print(
        f"{comparison['best_nets']} of {comparison['nets']} nets are the best 5 %, "
        f"with a loss of {comparison['best_loss']:.3f} to "
        f"{comparison['best_part_loss']:.3f}; the median net has {comparison['median_loss']:.3f}"
    )
    print(
        f"a net's loss differs by {comparison['seed_spread']:.3f} from seed to seed (standard deviation, "
        f"median of all nets), by {comparison['seed_spread_of_best']:.3f} among the best"
    )
    for name, needed in comparison["trials"].items():
        low, middle, high = statistics.quantiles(needed, n=4)
        print(
            f"{name:<20} {middle:5.1f} trials (median), quartiles {low:.1f} and {high:.1f}, most {max(needed)}"
        )


if __name__ == "__main__":
    main()
