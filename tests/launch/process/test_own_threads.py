"""A thread of Paceline's that fails ends the run with its error, though nothing waits for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.launch.process.failure import RankFailed

pytestmark = [pytest.mark.usefixtures("nothing_left")]


def fail() -> None:
    raise TypeError("no such message")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thread_that_fails_ends_the_run(run_ranks: Any, ranks: int):
    """Rank, step and cause are told, and nobody waits for what the ranks do."""

    def body(context: Any) -> None:
        context.step = 7
        context.beat("input")
        if context.rank == ranks - 1:
            threading.Thread(target=fail, name="paceline-orders", daemon=True).start()
        time.sleep(1000)

    with pytest.raises(RankFailed, match="TypeError: no such message") as raised:
        run_ranks(body, ranks, timeout_s=600.0)
    assert (raised.value.failure.rank, raised.value.failure.step, raised.value.exit_code) == (
        ranks - 1,
        7,
        1,
    )


def test_threads_of_the_user_are_the_users_business(run_ranks: Any):
    """Python prints what they raise, and the ranks go on."""

    def body(context: Any) -> float:
        thread = threading.Thread(target=fail, name="collector")
        thread.start()
        thread.join()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assert run_ranks(body, 2) == [2.0, 2.0]
