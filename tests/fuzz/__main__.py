"""`python -m tests.fuzz --minutes 60`: give damaged inputs to everything that reads what others may have made.

With atheris (`pip install atheris`) the inputs follow what they reach of Paceline's code; without it hypothesis draws
them. What crashes, hangs for 20 s or takes 4 GiB is kept under --to, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def main() -> int:
    """Fuzz each reader for its part of the time, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--readers", nargs="+", help="of tests/fuzz/readers.py; default: all")
    parser.add_argument(
        "--to", type=Path, default=Path("fuzz"), help="where inputs that crash are written"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return _fuzz_one(args.one, args.run, 60 * args.minutes, args.to)

    from .readers import make_run, readers

    with tempfile.TemporaryDirectory() as scratch:
        run = make_run(Path(scratch), proved=True)
        names = args.readers or sorted(readers(run))
        failed = []
        for name in names:
            began_s = time.monotonic()
            kept = args.to / name.replace("/", "-")
            kept.mkdir(parents=True, exist_ok=True)
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.fuzz",
                    "--one",
                    name,
                    "--run",
                    str(run),
                    "--to",
                    str(kept),
                    "--minutes",
                    str(args.minutes / len(names)),
                ],
                capture_output=True,
                text=True,
                errors="replace",
            )
            (kept / "log.txt").write_text(done.stdout + done.stderr)
            runs = [match[1] for match in re.finditer(r"^#(\d+)\t", done.stderr, re.M)]
            print(
                f"{name:55} {time.monotonic() - began_s:6.0f} s {runs[-1] if runs else '':>10} "
                f"{'passed' if done.returncode == 0 else f'FAILED: {kept}/log.txt'}",
                flush=True,
            )
            failed += [name] * (done.returncode != 0)
    return 1 if failed else 0


def _fuzz_one(name: str, run: Path, seconds: float, kept: Path) -> int:
    try:
        import atheris
    except ModuleNotFoundError:
        atheris = None
    else:
        with atheris.instrument_imports(include=["paceline"]):
            from .readers import readers
    import logging

    from hypothesis import HealthCheck, given, settings

    from .damage import damaged
    from .readers import readers, try_reader

    logging.disable()
    reader = readers(run)[name]

    @settings(
        deadline=None, database=None, max_examples=10**9, suppress_health_check=list(HealthCheck)
    )
    @given(data=damaged(reader.seeds))
    def try_input(data: bytes) -> None:
        if atheris is None and time.monotonic() > end_s:
            raise KeyboardInterrupt
        try:
            try_reader(reader, run, data)
        except BaseException:
            (kept / "input").write_bytes(data)
            raise

    end_s = time.monotonic() + seconds
    if atheris is None:
        try:
            try_input()
        except KeyboardInterrupt:
            return 0
        return 0
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={max(1, int(seconds))}",
            "-timeout=20",
            "-rss_limit_mb=4096",
            f"-artifact_prefix={kept}/",
            "-max_len=8192",
        ],
        try_input.hypothesis.fuzz_one_input,
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
