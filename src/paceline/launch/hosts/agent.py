"""torch's agent, which starts and watches the ranks of one of several hosts, with the exit code of its ranks.

`python -m paceline.launch.hosts.agent` takes the arguments of `python -m torch.distributed.run`,
which ends with exit code 1 whatever its ranks ended with. A cluster's scheduler starts a run again
by that code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline.base.errors import PeerLost, Preempted


def main(arguments: Sequence[str]) -> int:
    """Run the agent until its ranks have ended; the command's exit code.

    SIGTERM changes nothing from then on. While Python ends it would kill the process, with 143 in place of the code: a
    cluster that stops all hosts stops each one a moment after the first host's signal has ended the ranks of all.
    """
    try:
        run.main(list(arguments))
        code = 0
    except ChildFailedError as error:
        code = exit_code(failure.exitcode for failure in error.failures.values())
    except SignalException:  # passed on to the ranks, which save
        code = Preempted.exit_code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


def exit_code(of_ranks: Iterable[int]) -> int:
    """Of a host, from those of its ranks: a culprit's before `PeerLost`, with which its followers end. A negative code
    is the signal that ended a rank, and counts as `PeerLost`."""
    codes = [code for code in of_ranks if code > 0]
    return next(
        (code for code in codes if code != PeerLost.exit_code),
        codes[0] if codes else PeerLost.exit_code,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
