"""How fast one server's wire is beside others on the loopback link, and what processor time it takes.

Each client pushes 25 MB and pulls 25 MB a round, as workers of a parameter server do without staleness. A wire's speed
is all that it moves in both directions; its CPU time is that of all its processes.

    python -m benchmarks.transports [--clients 8] [--rounds 7] [--gigabytes 4] [--wires NAME...] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from benchmarks.contenders.wires.rounds import ELEMENTS
from benchmarks.turns import ContenderFailed, Ratio, ratio, run_command, take_turns, warn_if_busy

BESIDE = "sockets"  # what the others are compared with


@dataclass(frozen=True, slots=True)
class Wire:
    """package: what it needs. command: its module and arguments."""

    package: str
    command: tuple[str, ...]

    def run(self, clients: int, rounds: int) -> Run:
        module, *arguments = self.command
        command = [sys.executable, "-m", f"benchmarks.contenders.wires.{module}", *arguments,
                   "--clients", str(clients), "--rounds", str(rounds)]
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


@dataclass(slots=True)
class Record:
    """All runs of a wire, or why there are none."""

    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None

    @property
    def mb_per_s(self) -> float:
        return statistics.median(run.bytes_per_s for run in self.runs) / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(run.cpu_s_per_gb for run in self.runs)


def measure(*, clients: int, rounds: int, gigabytes: float, wires: Sequence[str] = tuple(WIRES)) -> dict[str, Record]:
    """Every wire once a round, in the same order; those that are missing or fail are skipped with the reason."""
    records = {name: Record() for name in wires}
    contenders: dict[str, Callable[[], Run]] = {}
    pushes = max(1, round(gigabytes * 1e9 / (2 * 4 * ELEMENTS * clients)))
    for name in wires:
        if importlib.util.find_spec(WIRES[name].package) is None:
            records[name].skipped = f"{WIRES[name].package} is not installed (pip install '.[bench]')"
        else:
            contenders[name] = partial(WIRES[name].run, clients, pushes)
    for number, name, result in take_turns(contenders, rounds=rounds):
        if isinstance(result, ContenderFailed):
            records[name] = Record(skipped=f"failed in round {number + 1}: {result}")
            print(f"round {number + 1}: {name} failed: {result}", file=sys.stderr)
        else:
            records[name].runs.append(result)
            print(f"round {number + 1}: {name} {result.bytes_per_s / 1e6:.0f} MB/s, {result.cpu_s_per_gb:.2f} s/GB",
                  file=sys.stderr)
    return records


def compare(records: dict[str, Record]) -> dict[str, Ratio]:
    """Each wire's speed by that of plain sockets, pair by pair."""
    if BESIDE not in records or records[BESIDE].skipped:
        return {}
    speeds = {name: [run.bytes_per_s for run in record.runs] for name, record in records.items()}
    return {name: ratio(speeds[name], speeds[BESIDE])
            for name, record in records.items() if name != BESIDE and not record.skipped}


def table(records: dict[str, Record], ratios: dict[str, Ratio], clients: int) -> str:
    """The result for people."""
    rows = [f"{f'{clients} clients':<18} {'MB/s':>6} {'CPU s/GB':>9}   "
            "by plain sockets, median of pairs [95 % interval, sign test]"]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<18} skipped: {record.skipped}")
        else:
            rows.append(f"{name:<18} {record.mb_per_s:>6.0f} {record.cpu_s_per_gb:>9.2f}   {ratios.get(name, '')}")
    return "\n".join(rows)


def document(records: dict[str, Record], ratios: dict[str, Ratio], clients: int) -> dict[str, Any]:
    """The result for programs."""
    return {
        "clients": clients,
        "wires": {
            name: {"skipped": record.skipped} if record.skipped else
            {"bytes_per_s": record.mb_per_s * 1e6, "cpu_s_per_gb": record.cpu_s_per_gb,
             "runs": list(map(asdict, record.runs))}
            for name, record in records.items()
        },
        "ratios": {name: asdict(value) for name, value in ratios.items()},
        "interval": "95 %, sign test",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[8], help="of the one server, at the same time")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each wire; an interval needs 6")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="moved in a turn")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="which; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    found = []
    for clients in options.clients:
        records = measure(clients=clients, rounds=options.rounds, gigabytes=options.gigabytes, wires=options.wires)
        ratios = compare(records)
        found.append(document(records, ratios, clients))
        if not options.json:
            print(table(records, ratios, clients), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
