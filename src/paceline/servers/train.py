"""A rank's training run under a plan with servers."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from paceline.base.fork import cuda_left_alone
from paceline.base.waiting import waiting
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.servers.coordinator import Coordinator
from paceline.servers.roles import RankTask, Rendezvous, Roles
from paceline.servers.server import Follower
from paceline.servers.server_state import ServerState, ShownState, build
from paceline.servers.wire import Uplink, WireError
from paceline.servers.worker import Worker
from paceline.strategies.plan import Plan
from paceline.training.settings import Observer, Settings
from paceline.training.state import StateOwner

_REASON_S = 5.0


def train_rank(
    context: RankContext, job: Job, plan: Plan, settings: Settings
) -> dict[str, Any] | None:
    """Serve or work, as the plan has it for this rank. Returns the summary on rank 0.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    context.num_trained += 1
    task = RankTask(
        context,
        job,
        plan,
        settings,
        Rendezvous(context, f"servers/{context.num_trained}"),
        Uplink(),
    )
    roles = Roles.of(plan, context.rank)
    if roles.worker is None:
        assert roles.server is not None
        with (
            context.stoppable(),
            cuda_left_alone(),
        ):  # beside workers with GPUs, whose memory is theirs
            return _server(task, roles.server).serve()
    if roles.server is None:
        _work(task, roles.worker)
        return None
    return _serve_and_work(task, roles)


def _work(task: RankTask, number: int) -> None:
    with task.context.stoppable():
        Worker(task, number=number).run()


def _server(task: RankTask, number: int) -> Coordinator | Follower:
    task.context.beat("build")
    model, shards = build(task.job, task.plan)
    kind = Coordinator if number == 0 else Follower
    return kind(task, number=number, model=model, shards=shards)


def _serve_and_work(task: RankTask, roles: Roles) -> dict[str, Any] | None:
    """Both in one process: the server on a thread. Signs of life and requests to stop are the worker's business."""
    assert roles.server is not None and roles.worker is not None
    context, observer, working = task.context, task.settings.observer, task
    # Its slot stays: that is also where its copies are kept.
    serving = replace(task, context=replace(context, board=HeartbeatTable(context.slot + 1)))
    if observer is not None:
        serving = _seen(serving, gradients=observer.gradients)
    # Built first and here, as the worker builds its model from the same random streams.
    server = _server(serving, roles.server)
    if observer is not None:
        server.shelf.replica = roles.worker
        weights = partial(_show_weights, observer, server.shelf)
        working = _seen(task, samples=observer.samples, weights=weights)
    served: Future[dict[str, Any] | None] = Future()

    def serve() -> None:
        try:
            served.set_result(server.serve())
        except BaseException as error:
            served.set_exception(error)

    thread = threading.Thread(target=serve, name="paceline-server", daemon=True)
    thread.start()
    try:
        _work(working, roles.worker)
    except WireError:
        thread.join(timeout=_REASON_S)  # what the worker ran into may be that its own server failed
        if served.done() and (error := served.exception()) is not None:
            raise error from None
        raise
    while thread.is_alive():
        context.beat("save")
        thread.join(timeout=1.0)
    return served.result()


def _seen(task: RankTask, **told: Any) -> RankTask:
    """A task whose observer hears of nothing else: gradients are complete at the server, the rest is the worker's."""
    assert task.settings.observer is not None
    untold = dict.fromkeys(("samples", "gradients", "weights"), lambda *_: None)
    observer: Any = SimpleNamespace(**{**untold, "initial": task.settings.observer.initial, **told})
    return replace(task, settings=replace(task.settings, observer=observer))


def _show_weights(
    observer: Observer, shelf: ServerState, step: int, stepper: StateOwner, loss: float
) -> None:
    """Show what a worker and the server in its process hold together: the server has the tables."""
    exchange = shelf.exchange
    if exchange.tables:
        with waiting, exchange.changed:  # layers are there before the update is complete
            exchange.changed.wait_for(lambda: exchange.version > step)
    tables = {name: p for name, p in shelf.parameters.items() if name not in stepper.parameters}
    extents = {name: shelf.layout.extents[name] for name in tables}
    parameters = {**stepper.parameters, **tables}
    together = ShownState(
        stepper.replica,
        replace(shelf.layout, extents=extents),
        parameters,
        {**stepper.local_parameters, **parameters},
    )
    observer.weights(step, together, loss)  # type: ignore[arg-type]
