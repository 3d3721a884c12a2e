"""A rank of a training on Ray: it runs `train` in a separate process, with torchrun's variables.

    python -m paceline.ray.node_rank '{"job": ..., "options": ...}' PARENT

It prints how it ended as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys

from paceline.api.train import train
from paceline.base.errors import PacelineError
from paceline.base.fork import described, die_with
from paceline.job.file import JobFile
from paceline.launch.process.failure import RankFailed


def main() -> None:
    """Train, and print how it ended."""
    order, parent_pid = json.loads(sys.argv[1]), int(sys.argv[2])
    die_with(parent_pid)
    out = os.dup(1)
    os.dup2(2, 1)  # what the job prints is for people
    answer: dict[str, str | None] = {}
    code = 0
    try:
        train(JobFile.from_dict(order["job"]), table=False, **order["options"])
    except RankFailed as failed:
        answer = {
            "failure": failed.failure.to_json(),
            "log": str(failed.log) if failed.log else None,
        }
        code = failed.exit_code
    except PacelineError as error:
        answer, code = described(error), error.exit_code
    os.write(out, json.dumps(answer).encode())
    sys.exit(code)


if __name__ == "__main__":
    main()
