"""Checks the first update of a script whose loss is a function of a batch, as a job's is checked.

Before the ranks start, a process of its own runs the script with whole batches up to its first `run.backward`. A
function with its batch is a job of one step, which is taken on one device and under the plan. A loss that is computed
can't be run again, and is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.api.checks import first_update, known, remember, unchecked
from paceline.attached.functions import some_rows
from paceline.attached.run import AttachedRun
from paceline.attached.script import run_script
from paceline.attached.session import ScriptProcess
from paceline.base.errors import PacelineError
from paceline.base.fork import forks_can_use_cuda, in_a_fork
from paceline.base.logs import redirect
from paceline.base.nested import tensors_in
from paceline.job import Job
from paceline.job.file import JobFile
from paceline.launch.hosts.environment import Environment
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.model.forward_state import state_kept
from paceline.planner.resolve import Resolved
from paceline.proof.first_update import FirstUpdate
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings

OF_TENSOR = "the script computes its loss itself, and a loop can't be run in parts"


class _Seen(BaseException):  # which no handler of the script's takes for an error
    """The script has come to its first loss, and this is what was found, or why the plan is refused."""

    def __init__(self, found: FirstUpdate | PacelineError) -> None:
        super().__init__()
        self.found = found


def check_script(
    path: Path,
    arguments: Sequence[str],
    resolved: Resolved,
    *,
    environment: Environment | None,
    timeout_s: float,
) -> FirstUpdate | None:
    """Check the first update of a script under a plan, if it gives a function. Nothing that it prints is shown.

    Returns:
        The result; None if one device runs the script as it is.

    Raises:
        PacelineError: the update is not one device's, or the plan can't run the function.
    """
    if resolved.plan.with_(deterministic="no") == Plan():
        return None
    if (reason := unchecked(resolved, environment)) is not None:
        return FirstUpdate("unchecked", reason)
    source = JobFile(path.resolve(), "__main__", {"arguments": list(arguments)})
    if (update := known(source, resolved)) is not None:
        return update

    def look() -> FirstUpdate:
        redirect(None)
        update = _looked(path, arguments, resolved, timeout_s)
        if update.verdict != "unchecked" or update.reason == OF_TENSOR:
            remember(source, resolved, verdict=update.verdict, reason=update.reason)
        return update

    try:
        update = in_a_fork(look)
    except RuntimeError as error:  # it was killed, say
        return FirstUpdate("unchecked", f"the script's process before its first loss: {error}")
    return update


def _looked(
    path: Path, arguments: Sequence[str], resolved: Resolved, timeout_s: float
) -> FirstUpdate:
    """Run the script in this process until its first loss, and check what it gives."""
    device = torch.device("cpu")
    session = ScriptProcess(
        RankContext(0, 1, 1, device, None, HeartbeatTable(1), 0, "check"),
        Plan(),
        Settings(None, (1,)),
        look=partial(_look, resolved=resolved, timeout_s=timeout_s),
    )
    try:
        run_script(session, path, arguments)
    except _Seen as seen:
        if isinstance(seen.found, PacelineError):
            raise seen.found from None
        return seen.found
    except Exception as error:  # if the run has it, too, it will report it
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return FirstUpdate("unchecked", f"the script failed before its first loss: {first_line}")
    return FirstUpdate("unchecked", "the script trains nothing")


def _look(run: AttachedRun, loss: Any, batch: Any, *, resolved: Resolved, timeout_s: float) -> None:
    """Check the update of a loss, and leave the script.

    Raises:
        PacelineError: see `check_script`. It leaves the script, too.
    """
    if isinstance(loss, str):
        raise _Seen(FirstUpdate("unchecked", f"the script calls {loss}, which needs all ranks"))
    if not callable(loss):
        raise _Seen(FirstUpdate("unchecked", OF_TENSOR))
    if run.given.is_named:
        raise _Seen(FirstUpdate("unchecked", "the script trains several models by name"))
    if not forks_can_use_cuda():
        why = "the script uses a GPU before its first update: run.device says where a rank computes"
        raise _Seen(FirstUpdate("unchecked", why))
    assert run.turn is not None
    (model,) = run.given.models.values()
    with torch.no_grad(), state_kept(model):
        loss(run.turn.batch if batch is None else batch)  # which may call such a verb
    try:
        job = _job_of(run, loss, batch)
        update = first_update(job, None, resolved, environment=None, timeout_s=timeout_s)
    except PacelineError as error:
        raise _Seen(error) from error
    raise _Seen(update or FirstUpdate("passed"))


def _job_of(run: AttachedRun, function: Callable[[Any], Any], batch: Any) -> Job:
    """Return the job of one step with this batch."""
    assert run.first is not None and run.turn is not None
    job, rows = run.first.run.job, run.turn.rows
    given = run.turn.batch if batch is None else batch
    return Job(
        model=job.model,
        compute=partial(_compute, run, function),
        data=range(rows),
        collate=partial(some_rows, given, rows),
        optimizer=job.optimizer,
        batch=rows,
        clip=job.clip,
        precision=job.precision,
        seed=job.seed,
        steps=1,
    )


def _compute(run: AttachedRun, function: Callable[[Any], Any], model: Any, batch: Any) -> Any:
    """Call the function as a rank's run does."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.ndim), None)
    assert run.turn is not None
    run.turn.rows = 1 if first is None else len(first)
    run.device = next(model.parameters()).device
    return function(batch)
