"""A rank's training run under a plan with servers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from paceline.job import Job
from paceline.launch.context import RankContext
from paceline.launch.fork import cuda_left_alone
from paceline.launch.heartbeats import HeartbeatTable
from paceline.plans import Plan
from paceline.runtime.feed import MicroBatch
from paceline.runtime.loop import Observer, Settings
from paceline.runtime.state import StateOwner
from paceline.strategies.server.exchange.wire import Uplink, WireError
from paceline.strategies.server.ranks.coordinator import Coordinator
from paceline.strategies.server.ranks.roles import Rendezvous, Roles
from paceline.strategies.server.ranks.server import Follower
from paceline.strategies.server.ranks.server_state import ServerState, build
from paceline.strategies.server.ranks.worker import Worker
from paceline.waiting import waiting

_REASON_S = 5.0


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> dict[str, Any] | None:
    """Serve or work, as the plan has it for this rank. Returns the summary on rank 0.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    context.num_trained += 1
    meeting = Rendezvous(context, f"servers/{context.num_trained}")
    uplink = Uplink()
    roles = Roles.of(plan, context.rank)
    if roles.worker is None:
        assert roles.server is not None
        with context.stoppable(), cuda_left_alone():  # beside workers with GPUs, whose memory is theirs
            return _server(context, job, plan, settings, number=roles.server, meeting=meeting, uplink=uplink).run()
    if roles.server is None:
        _work(context, job, plan, settings, number=roles.worker, meeting=meeting, uplink=uplink)
        return None
    return _serve_and_work(context, job, plan, settings, roles=roles, meeting=meeting, uplink=uplink)


def _work(context: RankContext, job: Job, plan: Plan, settings: Settings, *, number: int, meeting: Rendezvous,
          uplink: Uplink) -> None:
    with context.stoppable():
        Worker(context, job, plan, settings, number=number, meeting=meeting, uplink=uplink).run()


def _server(context: RankContext, job: Job, plan: Plan, settings: Settings, *, number: int,
            meeting: Rendezvous, uplink: Uplink) -> Coordinator | Follower:
    context.beat("build")
    model, shards = build(job, plan)
    kind = Coordinator if number == 0 else Follower
    return kind(context, job, plan, settings, number=number, model=model, shards=shards, meeting=meeting, uplink=uplink)


def _serve_and_work(context: RankContext, job: Job, plan: Plan, settings: Settings, *, roles: Roles,
                    meeting: Rendezvous, uplink: Uplink) -> dict[str, Any] | None:
    """Both in one process: the server on a thread. Signs of life and requests to stop are the worker's business."""
    assert roles.server is not None and roles.worker is not None
    observer = settings.observer
    beside = replace(context, board=HeartbeatTable(1), slot=0)
    serving, working = settings, settings
    if observer is not None:
        serving = replace(settings, observer=_OfServer(observer, roles.worker))
    # Built first and here, as the worker builds its model from the same random streams.
    server = _server(beside, job, plan, serving, number=roles.server, meeting=meeting, uplink=uplink)
    if observer is not None:
        working = replace(settings, observer=_OfWorker(observer, server.shelf))
    found: list[dict[str, Any] | None] = []
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            found.append(server.run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=serve, name="paceline-server", daemon=True)
    thread.start()
    try:
        _work(context, job, plan, working, number=roles.worker, meeting=meeting, uplink=uplink)
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
    return found[0]


class _OfServer:
    """What an observer sees of a server whose process also works: complete gradients, as that worker's."""

    def __init__(self, observer: Observer, replica: int) -> None:
        self.observer, self.replica = observer, replica

    def initial(self, stepper: StateOwner) -> None:
        """Weights change in updates alone; those before the first one are looked at with its gradients."""

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
        with waiting, exchange.changed:  # layers are there before the update is complete
            exchange.changed.wait_for(lambda: exchange.version > step)
        self.observer.weights(step, _WithTables(stepper, self.shelf), loss)  # type: ignore[arg-type]


class _WithTables:
    """What a worker and the server in its process hold together."""

    def __init__(self, stepper: StateOwner, shelf: ServerState) -> None:
        tables = shelf.parameters.keys() - stepper.parameters.keys()
        self.replica = stepper.replica
        self.parameters = {**stepper.parameters, **{name: shelf.parameters[name] for name in tables}}
        self.layout = replace(shelf.layout, extents={name: shelf.layout.extents[name] for name in tables})
