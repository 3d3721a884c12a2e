"""How fast one server's wire is beside others on the loopback link, and what processor time it takes.

Each client pushes 25 MB and pulls 25 MB a round, as workers of a parameter server do without staleness. A wire's speed
is all that it moves in both directions; its CPU time is that of all its processes.

    python -m benchmarks.transports [--clients 8] [--rounds 7] [--gigabytes 4] [--wires NAME...] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.contenders.wires.rounds import ELEMENTS
from benchmarks.turns import Ratio, Record, document, measure, ratio, run_command, warn_if_busy

BESIDE = "sockets"  # what the others are compared with


@dataclass(frozen=True, slots=True)
class Wire:
    """package: what it needs. command: its module and arguments."""

    package: str
    command: tuple[str, ...]

    def run(self, clients: int, rounds: int) -> Run:
        module, *arguments = self.command
        command = [
            sys.executable,
            "-m",
            f"benchmarks.contenders.wires.{module}",
            *arguments,
            "--clients",
            str(clients),
            "--rounds",
            str(rounds),
        ]
        return Run(**json.loads(run_command(command).strip().splitlines()[-1]))


WIRES = {
    "paceline": Wire("paceline", ("with_paceline",)),
    "paceline, summing": Wire("paceline", ("with_paceline", "--variant", "sum")),
    BESIDE: Wire("torch", ("with_sockets",)),
    "gloo pairs": Wire("torch", ("with_gloo",)),
    "zeromq": Wire("zmq", ("with_zeromq",)),
    "zeromq, curve": Wire("zmq", ("with_zeromq", "--variant", "curve")),
    "torch rpc": Wire("torch", ("with_rpc",)),
    "torch rpc, tcp": Wire("torch", ("with_rpc", "--variant", "tcp")),
    "ray": Wire("ray", ("with_ray",)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one wire did in one turn."""

    bytes_per_s: float
    cpu_s_per_gb: float


def contenders(
    clients: int, gigabytes: float, wires: Sequence[str]
) -> dict[str, tuple[str, Callable[[], Run]]]:
    """A turn moves so many gigabytes, pushes and pulls together."""
    rounds = max(1, round(gigabytes * 1e9 / (2 * 4 * ELEMENTS * clients)))
    return {
        name: (WIRES[name].package, partial(WIRES[name].run, clients, rounds)) for name in wires
    }


def compare(records: Mapping[str, Record[Run]]) -> dict[str, Ratio]:
    """Each wire's speed by that of plain sockets, pair by pair."""
    if BESIDE not in records or records[BESIDE].skipped:
        return {}
    return {
        name: ratio(record.all("bytes_per_s"), records[BESIDE].all("bytes_per_s"))
        for name, record in records.items()
        if name != BESIDE and not record.skipped
    }


def table(records: Mapping[str, Record[Run]], ratios: Mapping[str, Ratio], clients: int) -> str:
    """The result for people."""
    rows = [
        f"{f'{clients} clients':<18} {'MB/s':>6} {'CPU s/GB':>9}   "
        "by plain sockets, median of pairs [95 % interval, sign test]"
    ]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<18} skipped: {record.skipped}")
        else:
            rows.append(
                f"{name:<18} {record.median('bytes_per_s') / 1e6:>6.0f} "
                f"{record.median('cpu_s_per_gb'):>9.2f}   {ratios.get(name, '')}"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transports", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[8], help="of the one server, at the same time"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each wire; an interval needs 6"
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="moved in a turn")
    parser.add_argument(
        "--wires", nargs="+", choices=WIRES, default=list(WIRES), help="which; all by default"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    rows = []
    for clients in options.clients:
        records = measure(
            contenders(clients, options.gigabytes, options.wires),
            rounds=options.rounds,
            say=lambda run: f"{run.bytes_per_s / 1e6:.0f} MB/s, {run.cpu_s_per_gb:.2f} s/GB",
        )
        ratios = compare(records)
        rows.append({"clients": clients, **document(records, ratios)})
        if not options.json:
            print(table(records, ratios, clients), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
