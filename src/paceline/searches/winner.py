"""Read the test data once, for the winner, after the last trial."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job import Job
from paceline.launch.local.worker_pool import WorkerPool, room
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.fault_policy import ALL_NEEDED
from paceline.launch.process.messages import Message
from paceline.runs import folder
from paceline.searches.trials import OWNER, RECORD, TEST, best_trial, counted
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from optuna.study import Study


def read_test_data(study: Study, pool: WorkerPool, job: Job, *, memory: str | None) -> None:
    """Evaluate the winner on the test data, once, with the weights that its trial has left.

    Raises:
        PacelineError: the rank that evaluated failed; it is that rank's error.
    """
    best, before = best_trial(study), study.user_attrs.get(TEST)
    if job.test is None or best is None or (before is not None and before["trial"] == best.number):
        return
    if not all(trial.state.is_finished() for trial in counted(study)):
        return  # other machines still run trials; the last one reads the data
    record, home = best.user_attrs[RECORD], best.user_attrs[OWNER]
    trial_dir = Path(home.partition(":")[2]) / "trials" / str(best.number)
    if not (trial_dir / folder.MODEL).exists():
        print(
            f"the test data was not read: the winner, trial {best.number}, is in {home}",
            file=sys.stderr,
        )
        return
    plan = Plan.parse(record["plan"]).of_forwards().with_(microbatches=1)
    while (slots := room(pool, plan.world_size)) is not None:
        payload = {
            "do": "test",
            "params": record["params"],
            "plan": str(plan),
            "memory": memory,
            "devices": [pool.names[slot] for slot in slots],
            "run_dir": str(trial_dir),
        }
        pool.start(payload, slots, fault_policy=ALL_NEEDED, log_dir=trial_dir / "logs")
        ended: list[Message] = []
        while not ended:
            ended = [event for event in pool.wait(60.0) if event.kind in ("end", "lost")]
        if ended[0].kind == "lost":
            continue  # another node reads the data
        if ended[0].failure is not None:
            raise RankFailed(ended[0].failure)
        study.set_user_attr(TEST, {"trial": best.number, **ended[0].value})
        return
    print(
        f"the test data was not read: no node with {plan.world_size} devices is left",
        file=sys.stderr,
    )
