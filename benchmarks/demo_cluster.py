"""Four hosts with slow links, one of which is killed in mid-run; the others go on by themselves.

    make demo-cluster              (Linux, as root: hosts are network namespaces)

The hosts are asked what is between them first. In the end the weights are held against those of one device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from safetensors.torch import load_file

from benchmarks.lab.hosts import Host, NoLab, hosts

DIGITS = Path(__file__).parents[1] / "examples" / "01_digits.py"
CHECK_HOSTS = Path(__file__).parents[1] / "scripts" / "check-hosts"
PACELINE = [sys.executable, "-P", "-m", "paceline"]
NUM_HOSTS, MBIT_S, PORT = 4, 50, 29500
STEPS, SAVE_EVERY, KILLED_AFTER = 120, 20, 40


def main() -> None:
    """Show it, in about a minute on two idle cores."""
    try:
        with (
            hosts(NUM_HOSTS, mbit_s=MBIT_S) as made,
            tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder,
        ):
            show(made, Path(folder))
    except NoLab as error:
        sys.exit(f"demo-cluster can't make hosts here: {error}")


def show(made: Sequence[Host], folder: Path) -> None:
    """The demonstration, its runs in a folder."""
    run, began_s = folder / "run", time.monotonic()
    tell(
        f"{NUM_HOSTS} hosts, {MBIT_S} Mbit/s each way; what is between them (scripts/check-hosts):"
    )
    ended(start(made, sys.executable, "-P", str(CHECK_HOSTS)))
    train = [
        "train",
        str(DIGITS),
        "--set",
        "width=8",
        "--steps",
        str(STEPS),
        "--save-every",
        str(SAVE_EVERY),
    ]
    plan, may_be = f"data={NUM_HOSTS}", f"{NUM_HOSTS - 1}:{NUM_HOSTS}"
    tell(
        f"the same command on each host: paceline train 01_digits.py --plan {plan} --hosts {may_be} --run DIR"
    )
    started = start(
        made,
        *PACELINE,
        *train,
        "--plan",
        plan,
        "--hosts",
        may_be,
        "--timeout",
        "10",
        "--run",
        str(run),
    )
    wait_for(run / "checkpoints" / f"step-{KILLED_AFTER}" / "COMMIT", started)
    os.killpg(started[-1].pid, signal.SIGKILL)
    tell(f"host {NUM_HOSTS - 1} is killed; the others go on without it")
    ended(started[:-1])
    tell("was any sample lost or counted twice (paceline audit)? what does one device compute?")
    subprocess.run([*PACELINE, "audit", str(run)], check=True)
    subprocess.run(
        [*PACELINE, *train, "--plan", "single", "--run", str(folder / "one")],
        check=True,
        capture_output=True,
    )
    weights, expected = (load_file(each / "model.safetensors") for each in (run, folder / "one"))
    differ = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    tell(
        f"the largest difference of a weight from one device's: {differ:.1e} (float32); "
        f"{time.monotonic() - began_s:.0f} s in all"
    )


def start(made: Sequence[Host], *command: str) -> list[subprocess.Popen[str]]:
    """The same command on each host, which is told its place. What the first one prints is shown."""
    place = {
        "PET_NNODES": str(len(made)),
        "PET_MASTER_ADDR": made[0].address,
        "PET_MASTER_PORT": str(PORT),
        "PET_NPROC_PER_NODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        host.start(command, {**place, "PET_NODE_RANK": str(number)})
        for number, host in enumerate(made)
    ]
    for number, process in enumerate(started):
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            threading.Thread(
                target=read,
                args=(stream, sys.stdout if number == 0 else None),
                name=f"{process.pid}",
                daemon=True,
            ).start()
    return started


def read(stream: TextIO, to: TextIO | None) -> None:
    """All lines, shown or not. torch warns of names that hosts here don't have."""
    for line in stream:
        if to is not None and not line.startswith(("[W", "W1", "E1", "\n")):
            to.write(f"    {line}")
            to.flush()


def wait_for(
    path: Path, started: Sequence[subprocess.Popen[str]], *, timeout_s: float = 120
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if any(process.poll() is not None for process in started) or time.monotonic() > deadline_s:
            sys.exit(f"the run did not come to {path.name}")
        time.sleep(0.05)


def ended(started: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for all, and for what they printed."""
    codes = [process.wait(timeout=180) for process in started]
    names = {str(process.pid) for process in started}
    for reader in [thread for thread in threading.enumerate() if thread.name in names]:
        reader.join(timeout=5)
    if any(codes):
        sys.exit(f"a host ended with exit code {max(codes)}")


def tell(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
