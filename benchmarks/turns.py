"""Comparing contenders on a machine that is never quite quiet: run them in turns, compare within a round.

A slow minute slows the neighbours in a round alike, so the ratio of a pair is steadier than either of its times.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIDENCE = 0.95
ROOT = Path(__file__).parents[1]
Result = TypeVar("Result")
Run = TypeVar("Run", bound="DataclassInstance")  # the figures of one turn


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of pair ratios with its interval; the ends are None if there are too few pairs for one."""

    median: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.median:.3f}" + (
            "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        )


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The numerators by the denominators, pair by pair: the median and its 95 % interval.

    The interval is that of the sign test: the k-th smallest and k-th greatest ratio, with the greatest k that covers
    the median in at least 95 % of experiments. It supposes nothing about the noise but that pairs are independent,
    and needs 6 of them; up to 8 it is the smallest and the greatest ratio.

    >>> ratio([2.0] * 5, [1.0] * 5)
    Ratio(median=2.0, low=None, high=None)
    >>> ratio([1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 9)
    Ratio(median=5.0, low=2.0, high=8.0)
    """
    pairs = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    outside = _outside(len(pairs))
    low, high = (None, None) if outside is None else (pairs[outside], pairs[-1 - outside])
    return Ratio(float(statistics.median(pairs)), low, high)


def _outside(num_pairs: int) -> int | None:
    """How many of the sorted pairs may be left out at each end; None if even all of them are not enough."""
    missed, num_left_out = 0.0, None
    for k in range(num_pairs // 2):
        missed += 2 * math.comb(num_pairs, k) / 2**num_pairs
        if missed > 1 - CONFIDENCE:
            break
        num_left_out = k
    return num_left_out


class ContenderFailed(Exception):
    """A contender that could not be run; the message is the end of what it printed."""


def take_turns(
    contenders: Mapping[str, Callable[[], Result]], *, rounds: int
) -> Iterator[tuple[int, str, Result | ContenderFailed]]:
    """Run each contender once a round, A B C A B C.

    One that fails is run once more in its turn; if that fails too it is reported once and left out from then on.
    """
    failed: set[str] = set()
    for number in range(rounds):
        for name, run in contenders.items():
            if name in failed:
                continue
            try:
                yield number, name, _again(run)
            except ContenderFailed as error:
                failed.add(name)
                yield number, name, error


def _again(run: Callable[[], Result]) -> Result:
    """Its result; a process of torch's is lost now and then as it ends."""
    try:
        return run()
    except ContenderFailed as error:
        print(f"run once more, it failed: {error}", file=sys.stderr)
        return run()


@dataclass(slots=True)
class Record(Generic[Run]):
    """All runs of a contender, or why there are none."""

    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None

    def all(self, figure: str) -> list[float]:
        """One figure of every run, in the order of rounds."""
        return [getattr(run, figure) for run in self.runs]

    def median(self, figure: str) -> float:
        return statistics.median(self.all(figure))


def measure(
    contenders: Mapping[str, tuple[str, Callable[[], Run]]],
    *,
    rounds: int,
    say: Callable[[Run], str],
) -> dict[str, Record[Run]]:
    """Each contender once a round; those whose package is missing and those that fail are skipped with the reason.

    Args:
        contenders: by name, the package that it needs and a turn of it.
        say: what stderr shows of a turn.
    """
    records: dict[str, Record[Run]] = {name: Record() for name in contenders}
    present: dict[str, Callable[[], Run]] = {}
    for name, (package, run) in contenders.items():
        if importlib.util.find_spec(package) is None:
            records[name].skipped = f"{package} is not installed (pip install -e '.[bench]')"
        else:
            present[name] = run
    for number, name, result in take_turns(present, rounds=rounds):
        if isinstance(result, ContenderFailed):
            records[name] = Record(skipped=f"failed in round {number + 1}: {result}")
            print(f"round {number + 1}: {name} failed: {result}", file=sys.stderr)
        else:
            records[name].runs.append(result)
            print(f"round {number + 1}: {name} {say(result)}", file=sys.stderr)
    return records


def document(records: Mapping[str, Record[Run]], ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    """The result for programs: the median of each figure, every run, and the ratios."""
    return {
        "contenders": {
            name: {"skipped": record.skipped} if record.skipped else _figures(record)
            for name, record in records.items()
        },
        "ratios": {name: asdict(value) for name, value in ratios.items()},
        "interval": f"{100 * CONFIDENCE:.0f} %, sign test",
    }


def _figures(record: Record[Run]) -> dict[str, Any]:
    return {
        **{figure: record.median(figure) for figure in asdict(record.runs[0])},
        "runs": list(map(asdict, record.runs)),
    }


def run_command(
    command: Sequence[str], *, timeout_s: float = 600.0, threads: int | None = 1
) -> str:
    """Run a command from the root of the project and return its stdout.

    Args:
        threads: Of each process; None leaves that to the command.

    Raises:
        ContenderFailed: it failed or took too long; nothing of it is left running.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ContenderFailed(f"took longer than {timeout_s:.0f} s") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise ContenderFailed(_first_error(errors) or f"exit code {process.returncode}")
    return output


def torchrun(module: str, *arguments: str) -> list[str]:
    """The command that starts a module as two ranks on this machine."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return [*launcher, "-m", module, *arguments]


def paceline(*arguments: str) -> list[str]:
    """The public command, from the environment that this runs in."""
    return [str(Path(sys.executable).with_name("paceline")), *arguments]


def warn_if_busy() -> None:
    """Say so if other processes are using the cores: what follows would measure them too."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.25 * cores:
        print(
            f"warning: the machine is busy (load {load:.1f} on {cores} cores); expect noise",
            file=sys.stderr,
        )


def _first_error(text: str) -> str:
    """The first line that names an error: what follows is often the launcher's own complaint."""
    lines = text.strip().splitlines()
    named = [
        line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)
    ]
    return (named[0] if named else " ".join(lines[-3:])).strip()[:200]
