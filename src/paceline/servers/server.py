"""One server of a run: applies what the coordinator orders, in its order, and writes its part of checkpoints."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.base.errors import JobError, TrainingError
from paceline.base.logs import logger
from paceline.base.secure import Acceptor
from paceline.base.sockets import listen
from paceline.base.waiting import waiting
from paceline.checkpoint.read import Checkpoint
from paceline.job.order import Order
from paceline.job.own_step import spec
from paceline.servers.acceptor import listen_to, open_door
from paceline.servers.history import History
from paceline.servers.roles import RankTask, Rendezvous, servers_of
from paceline.servers.serve import ShardEvents, ShardService, ShardTerms
from paceline.servers.server_state import ServerState
from paceline.servers.session import serve
from paceline.servers.update_order import UpdateOrder
from paceline.servers.wire import Connection, Event, Peer, Role, WireError, connect
from paceline.strategies.server.shards import Shard, fingerprint
from paceline.training import state
from paceline.training.cores import CoreWait
from paceline.training.optimizers.schedule import check_monitored, step_by_metrics
from paceline.training.own_step.followers import follow
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.memory_checkpoint import Copier
from paceline.training.parts.saves import Saves
from paceline.training.resume import resume
from paceline.training.run import RankRun
from paceline.training.run_log import RunLog

LOOK_S = 0.5  # between looks for a request to stop

_LAST = 2**62  # version of a run whose steps make as many updates as they like


@dataclass
class ServerRun(RankRun):
    """A run as the parts of a server see it: each server has its own, and comes to their moments alone."""

    server: Server = field(kw_only=True)

    num_ranks = 1

    @property
    def num_writers(self) -> int:
        return self.server.sync.servers

    def warn(self, text: str) -> None:
        logger.warning(text)  # it holds for this server

    def keep_alive(self) -> None:
        self.server.keep_alive()

    def begin_save(self, *, last: bool) -> None:
        self.server.begin_save(last=last)


class Server(ABC):
    """What every server does. It says whatever happens to it through `tell`, which the kinds of servers fill in.

    inbox: what peers said. orders: what the coordinator may have servers do, by name.
    """

    history: History  # of the updates that are made
    version: int  # how many they are
    checkpoint: Checkpoint | None  # that the run goes on from
    door: Acceptor

    def __init__(
        self, task: RankTask, *, number: int, model: torch.nn.Module, shards: tuple[Shard, ...]
    ) -> None:
        context, job, plan, settings = task.context, task.job, task.plan, task.settings
        self.sync = sync = servers_of(plan)
        if job.num_samples is None:
            raise JobError(
                "the data is a stream, and servers hand out samples by their place",
                hint="a data set with __len__ and __getitem__, or a data=N plan",
            )
        assert job.total_steps is not None
        self.order = Order.of(job)
        self.turns = UpdateOrder(self.order, sync)
        self.context, self.job, self.plan = context, job, plan
        self.settings, self.number = settings, number
        self.core_wait = CoreWait()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.layout = fingerprint(shards)
        measures = job.clip is not None or any(
            spec(each).clip is not None for each in job.optimizers.values()
        )
        terms = ShardTerms(
            sync.workers if sync.staleness == 0 else 1,
            _LAST if job.own_step is not None else self.turns.before(job.total_steps),
            keeps_sending=sync.staleness != 0,
            measures=measures,
            compress=plan.modifiers.compress,
        )
        events = ShardEvents(
            complete=self._complete, ready=self._ready, lost=self._lost, failed=self._failed
        )
        self.exchange = ShardService(shards[number], terms, events, task.uplink)
        self.shelf = ServerState(job, plan, number, shards, model, self.exchange)
        if not settings.is_trial and job.own_validate is None:
            check_monitored(self.shelf.schedule, job)
        speaks = number == 0
        self.log = RunLog(settings, context.device, writes=speaks, shows=speaks)
        self.run = ServerRun(context, job, plan, settings, self.shelf, self.log, server=self)
        self.callbacks = Callbacks(self.run)
        self.saves = Saves(self.run, self.callbacks)
        self.run.parts = [self.saves]
        self.copier: Copier | None = None
        if context.copies is not None:
            self.copier = Copier(context, context.copies, sync.servers, (number, sync.servers))
        self.gradients: dict[
            str, torch.Tensor
        ] = {}  # of a step of the job's own so far, for whoever looks on
        self.orders: dict[str, Callable[..., Any]] = {
            "make": self._make,
            "update": self._step_optimizer,
            "end": self._end_step,
            "open": self.exchange.open,
            "drop": self.exchange.drop,
            "dismiss": self.exchange.dismiss,
            "metrics": partial(step_by_metrics, self.shelf.schedule, job),
        }

    def begin(self, rendezvous: Rendezvous) -> None:
        """Go on from where the run is, and let peers in."""
        run, context = self.run, self.context
        self.checkpoint = resume(run, before=self.turns.before)
        document = self.checkpoint.document if self.checkpoint is not None else {}
        self.history = History(*document.get("history", [self.turns.before(run.step)]))
        self.version = self.history.num_updates
        self.exchange.begin_at(self.version)
        if self.copier is not None:
            self.copier.begin(self.version, is_copied=run.is_copied)
        self.door = open_door(
            listen(context.host),
            self.welcome,
            secret=context.secret,
            layout=self.layout,
            check=self.check,
        )
        rendezvous.announce(self.number, self.door.address)
        if self.settings.observer is not None:
            self.settings.observer.initial(self.shelf)

    @property
    def step(self) -> int:
        """Whole steps that were made."""
        return self.turns.steps(self.version)

    @abstractmethod
    def keep_alive(self) -> None:
        """Let those who wait for this server know that it lives, where another thread does not."""

    @abstractmethod
    def tell(self, message: dict[str, Any]) -> None:
        """Say something to the coordinator."""

    def check(self, peer: Peer) -> None:
        """
        Raises:
            WireError: a peer that knows the secret has no business at this server.
        """
        num_workers = self.sync.workers
        if peer.role != Role.DATA:
            raise WireError(
                f"a {peer.role.name} connection is for server 0, and this is server {self.number}"
            )
        if peer.number >= num_workers:
            raise WireError(
                f"a peer says that it is worker {peer.number}, and workers={num_workers} count from 0"
            )

    def welcome(self, connection: Connection, peer: Peer) -> None:
        """A peer has proved itself."""
        serve(self.exchange, connection, peer)

    def begin_save(self, *, last: bool) -> None:
        """A save is next. last: whether nothing changes the tensors any more."""
        self.check_history(self.version)

    def copy(self, figures: Mapping[str, Any] | None = None) -> None:
        """Leave a copy of this server's part where the next ranks find it if one of these is lost. figures: what server
        0 knows of the run beside its state."""
        assert self.copier is not None
        document = None
        if figures is not None:
            document = self.run.document() | {
                "figures": figures,
                "history": [self.history.first, sorted(self.history.later)],
            }
        self.copier.copy(self.version, state.pieces(self.shelf), document)

    def close(self) -> None:
        self.door.close()
        self.exchange.close()

    def check_history(self, end: int) -> None:
        """
        Raises:
            TrainingError: the weights are not those of each update before `end`, once.
        """
        if not self.history.is_exactly(end):
            raise TrainingError(
                f"server {self.number} applied {self.history}, where the updates before {end} are due",
                hint="this is a bug in paceline; please report it",
            )

    def _make(
        self,
        update: int,
        turn: int,
        scale: float,
        clip: float,
        rate: float,
        unused: Collection[str],
        loss: float,
    ) -> None:
        """Make the update of a turn. loss: of its samples; see `ServerState.update` for the others."""
        self._begin_update()
        self.history.add(turn)
        shelf, (step, _) = self.shelf, self.turns.place(turn)
        frozen = shelf.freezing.at(step, self.order.window(step).epoch)
        shelf.take_gradient(update, scale=scale, unused=frozen.union(unused))
        self._show_gradients()
        with self.exchange.making:
            shelf.update(
                clip=clip,
                rate=rate,
                ends_step=self.turns.steps(self.version + 1) > self.step,
            )
            self.exchange.made(update)
        self._end_update(loss)

    def _step_optimizer(
        self, update: int, optimizer: str, clip: float, unused: Collection[str]
    ) -> None:
        """Make an update within a step of the job's own."""
        self._begin_update()
        shelf = self.shelf
        shelf.take_gradient(update, scale=1.0, unused=unused)
        if self.settings.observer is not None:
            for name, p in shelf.parameters.items():
                if p.grad is not None:
                    self.gradients[name] = (
                        p.grad + self.gradients[name] if name in self.gradients else p.grad.clone()
                    )
        with self.exchange.making:
            shelf.step_optimizer(optimizer, clip=clip)
            self.exchange.made(update, version=update + 1)
        self.context.beat("input")  # gradients of the next update come in

    def _end_step(self, turn: int, loss: float) -> None:
        """End a step of the job's own: its updates are made, and followers move."""
        self._begin_update()
        self.history.add(turn)
        shelf = self.shelf
        follow(self.job.followers, shelf.local_parameters, {}, self.step + 1)
        for name, gradient in self.gradients.items():
            shelf.parameters[name].grad = gradient
        self._show_gradients()
        self._end_update(loss)
        shelf.drop_gradients()
        self.gradients = {}

    def _begin_update(self) -> None:
        self.context.step = self.step + 1
        self.context.beat("optimizer")

    def _show_gradients(self) -> None:
        if (observer := self.settings.observer) is not None:
            observer.samples(self.version, [])
            observer.gradients(self.version, self.shelf)

    def _end_update(self, loss: float) -> None:
        """An update is in the weights."""
        if self.settings.observer is not None:
            self.settings.observer.weights(self.version, self.shelf, loss)
        self.version += 1
        if self.saves.writer is not None:
            self.saves.writer.poll()
        self.context.beat("input")  # gradients of the next update come in

    def _ready(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        self.shelf.update_slices(gradients, scale)

    def _complete(self, update: int, squares: float) -> None:
        self.tell({"held": update, "squares": squares})

    def _failed(self, error: Exception) -> None:
        self.inbox.put((Peer(Role.SERVER, self.number, 0), error))

    def _lost(self, peer: Peer, error: WireError) -> None:
        self.tell({"lost": peer.number, "incarnation": peer.incarnation, "why": str(error)})


class Follower(Server):
    """A server that another one coordinates."""

    def __init__(
        self,
        task: RankTask,
        *,
        number: int,
        model: torch.nn.Module,
        shards: tuple[Shard, ...],
    ) -> None:
        self.coordinator: Connection | None = None
        self.has_told_stop = False
        super().__init__(task, number=number, model=model, shards=shards)
        self.orders |= {"save": self._save, "copy": self._copy, "export": self._export}
        self.begin(task.rendezvous)
        this_server = Peer(Role.SERVER, number, 0)
        self.coordinator = connect(
            task.rendezvous.address(0),
            this_server,
            secret=self.context.secret,
            layout=self.layout,
            timeout_s=60.0,
        )
        self.is_over = threading.Event()
        threading.Thread(target=self._tell_alive, name="paceline-alive", daemon=True).start()
        listen_to(self.coordinator, this_server, lambda *event: self.inbox.put(event))

    def tell(self, message: dict[str, Any]) -> None:
        with suppress(WireError):  # its end is in the inbox
            if self.coordinator is not None:  # before that nobody has been given anything
                self.coordinator.send_message(message)

    def keep_alive(self) -> None:
        """A thread does so; see `_tell_alive`."""

    def _tell_alive(self) -> None:
        """Let the coordinator know that this process lives, whatever its main thread waits for."""
        while not self.is_over.wait(self.context.timeout_s / 16):
            self.tell({"alive": True})

    def _next_order(self) -> dict[str, Any]:
        """Wait for what the coordinator says next. It hears of a signal to stop that reached this rank alone.

        Raises:
            WireError: it says no more.
        """
        while True:
            if self.context.stop_signal is not None and not self.has_told_stop:
                self.has_told_stop = True
                self.tell({"stop": True})
            with waiting, suppress(queue.Empty):
                _, order = self.inbox.get(timeout=LOOK_S)
                if isinstance(order, Exception):
                    raise order
                return order

    def _save(self, step: int, samples: int, last: bool) -> None:
        self.run.step, self.run.samples = step, samples
        self.saves.save(last=last)

    def _copy(self, version: int) -> None:
        self.copy()
        self.tell({"copied": version})

    def _export(self, step: int) -> None:
        self.run.step = step
        self.saves.export_weights({"do": "weights"})
        self.tell({"exported": step})

    def serve(self) -> dict[str, Any] | None:
        """Obey until the run is over."""
        assert self.coordinator is not None
        try:
            while "over" not in (order := self._next_order()):
                self.context.beat("reduce")
                if "do" in order:  # and is no sign of life
                    self.orders[order.pop("do")](**order)
            self.check_history(order["version"])
            self.saves.end()
            self.tell(
                {
                    "left": {
                        "peak_memory_bytes": self.log.memory.bytes(),
                        "core_wait_s": self.core_wait.seconds,
                    }
                }
            )
            return None
        finally:
            self.is_over.set()
            self.close()
            self.coordinator.close()  # the process may live on, as a worker
