"""A rank of a training on Ray: it runs `train` in a separate process, with torchrun's variables.

    python -m paceline.ray.node_rank '{"job": ..., "options": ...}' PARENT

It prints why it ended, if it failed, as a `Message` of one line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from paceline.api.train import train
from paceline.base.errors import PacelineError
from paceline.base.fork import described, die_with
from paceline.job.file import JobFile
from paceline.launch.hosts.nodes import write_line
from paceline.launch.process import host_context
from paceline.launch.process.failure import Failure, RankFailed
from paceline.launch.process.messages import Message


def main() -> None:
    """Train, and print why it ended."""
    order, parent_pid = json.loads(sys.argv[1]), int(sys.argv[2])
    die_with(parent_pid)
    out, rank = os.dup(1), int(os.environ["RANK"])
    os.dup2(2, 1)  # what the job prints is for people

    def tell(failure: Failure | None, refusal: Any = None) -> None:
        write_line(out, Message(0, "end", rank, refusal, failure).encode())

    host_context.begin(host_context.HostContext(tell))
    try:
        train(JobFile.from_dict(order["job"]), table=False, **order["options"])
    except PacelineError as error:
        if isinstance(error, RankFailed):
            tell(error.failure)
        else:
            tell(None, described(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
