"""Whether `paceline.verify` sees a bug that is planted in the sources: what `scripts/mutate` runs.

`python -m tests.corpus.mutation` verifies the short form, job by job, under verify's own plans and settings, and prints
a line of JSON for each job. With the lines of a run without a bug it stops at the first plan that shows a difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOBS = (
    "combined_regression",
    "combined_tokens",
    "combined_statistics",
    "combined_experts",
    "causal_attention",
    "combined_norms",
    "augmentation",
    "post_accumulate_hook",
)
SOUND = ("passed", "coupled", "inconclusive")
# Of each plan what its certificate comes to, and its reason.
Verdicts = dict[str, tuple[str, str]]


def main() -> int:
    """Print the verdicts."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.corpus.mutation", description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument(
        "--sound", type=Path, help="what this printed for the sources without a bug"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    sound = read(given.sound) if given.sound else {}
    for name in given.jobs:
        plan_verdicts = verdicts(name, sound.get(name))
        print(json.dumps({"job": name, "plans": plan_verdicts}), flush=True)
        if difference(sound.get(name, {}), plan_verdicts):
            break
    return 0


class _Seen(Exception):
    """A difference; the plans after it need not be tried."""


def verdicts(name: str, sound: Verdicts | None) -> Verdicts:
    """What verify says of a job, by plan, up to the first that differs from `sound`."""
    import paceline
    from paceline.base.errors import PacelineError

    from .registry import entries

    plan_verdicts: Verdicts = {}
    verb: Any = importlib.import_module("paceline.api.verify")
    certify = verb._certify

    def noted(*args: Any, **options: Any) -> Any:
        certificate = certify(*args, **options)
        plan_verdicts[certificate.plan] = (certificate.verdict, certificate.reason or "")
        if difference(sound or {}, plan_verdicts):
            raise _Seen
        return certificate

    verb._certify = noted
    (job,) = (entry.make() for entry in entries(name))
    try:
        for certificate in paceline.verify(job):
            plan_verdicts.setdefault(
                certificate.plan, (certificate.verdict, certificate.reason or "")
            )
    except _Seen:
        pass
    except PacelineError as error:
        plan_verdicts["one device"] = ("failed", str(error))
    finally:
        verb._certify = certify
    return plan_verdicts


def read(path: Path) -> dict[str, Verdicts]:
    """The lines that this printed, by job."""
    return {line["job"]: line["plans"] for line in map(json.loads, path.read_text().splitlines())}


def difference(
    sound: Mapping[str, Sequence[str]], mutated: Mapping[str, Sequence[str]]
) -> tuple[str, str] | None:
    """The first plan that is in order without the bug and not with it, and why; None if there is none."""
    if not sound:
        return None
    for plan, (verdict, why) in mutated.items():
        if verdict not in SOUND and sound.get(plan, SOUND)[0] in SOUND:
            return plan, why or verdict
    return None


def caught_by(
    sound: Mapping[str, Verdicts], lines: Sequence[Mapping[str, Any]]
) -> tuple[str, str, str] | None:
    """The job, the plan and the reason by which a bug was caught; None if it survived."""
    for line in lines:
        seen = difference(sound.get(line["job"], {}), line["plans"])
        if seen is not None:
            return (line["job"], *seen)
    return None


if __name__ == "__main__":
    sys.exit(main())
