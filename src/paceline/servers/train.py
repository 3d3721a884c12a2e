"""A rank's training run under a plan with servers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from paceline.base.fork import cuda_left_alone
from paceline.base.waiting import waiting
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.servers.coordinator import Coordinator
from paceline.servers.roles import RankTask, Rendezvous, Roles
from paceline.servers.server import Follower
from paceline.servers.server_state import ServerState, build
from paceline.servers.wire import Uplink, WireError
from paceline.servers.worker import Worker
from paceline.strategies.plan import Plan
from paceline.training.feed import MicroBatch
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
            return _server(task, roles.server).run()
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
    context, observer = task.context, task.settings.observer
    # Its slot stays: that is also where its copies are kept.
    serving, working = (
        replace(task, context=replace(context, board=HeartbeatTable(context.slot + 1))),
        task,
    )
    if observer is not None:
        serving = replace(
            serving, settings=replace(task.settings, observer=_OfServer(observer, roles.worker))
        )
    # Built first and here, as the worker builds its model from the same random streams.
    server = _server(serving, roles.server)
    if observer is not None:
        working = replace(
            task, settings=replace(task.settings, observer=_OfWorker(observer, server.shelf))
        )
    summaries: list[dict[str, Any] | None] = []
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            summaries.append(server.run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=serve, name="paceline-server", daemon=True)
    thread.start()
    try:
        _work(working, roles.worker)
    except WireError:
        thread.join(timeout=_REASON_S)  # what the worker ran into may be that its own server failed
        if failed:
            raise failed[0] from None
        raise
    while thread.is_alive():
        context.beat("save")
        thread.join(timeout=1.0)
    if failed:
        raise failed[0]
    return summaries[0]


class _OfServer:
    """What an observer sees of a server whose process also works: complete gradients, as that worker's."""

    def __init__(self, observer: Observer, replica: int) -> None:
        self.observer, self.replica = observer, replica

    def initial(self, stepper: StateOwner) -> None:
        self.observer.initial(stepper)

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        """The worker tells of its own."""

    def gradients(self, step: int, stepper: StateOwner) -> None:
        stepper.replica = self.replica  # type: ignore[misc]
        self.observer.gradients(step, stepper)

    def weights(self, step: int, stepper: StateOwner, loss: float) -> None:
        """The worker has all of them."""


class _OfWorker:
    """What an observer sees of a worker whose process also serves: all but gradients, and the server's tables."""

    def __init__(self, observer: Observer, shelf: ServerState) -> None:
        self.observer, self.shelf = observer, shelf
        self.initial, self.samples = observer.initial, observer.samples

    def gradients(self, step: int, stepper: StateOwner) -> None:
        """The server has those that are complete."""

    def weights(self, step: int, stepper: StateOwner, loss: float) -> None:
        exchange = self.shelf.exchange
        if exchange.tables:
            with waiting, exchange.changed:  # layers are there before the update is complete
                exchange.changed.wait_for(lambda: exchange.version > step)
        self.observer.weights(step, _WithTables(stepper, self.shelf), loss)  # type: ignore[arg-type]


class _WithTables:
    """What a worker and the server in its process hold together."""

    def __init__(self, stepper: StateOwner, shelf: ServerState) -> None:
        tables = shelf.parameters.keys() - stepper.parameters.keys()
        self.replica = stepper.replica
        self.parameters = {
            **stepper.parameters,
            **{name: shelf.parameters[name] for name in tables},
        }
        self.local_parameters = {**stepper.local_parameters, **self.parameters}
        self.layout = replace(
            shelf.layout, extents={name: shelf.layout.extents[name] for name in tables}
        )
