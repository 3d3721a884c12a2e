"""One server of a run: applies what the coordinator orders, in its order, and writes its part of checkpoints."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import JobError, TrainingError
from paceline.base.logs import logger
from paceline.base.waiting import waiting
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.write import Writer, without_snapshots
from paceline.job.order import Order
from paceline.job.own_step import spec
from paceline.launch.hosts.tls import Identity
from paceline.launch.process.memory_use import PeakMemory
from paceline.servers.history import History
from paceline.servers.roles import RankTask, servers_of
from paceline.servers.serve import Acceptor, ShardEvents, ShardService, ShardTerms, listen_to
from paceline.servers.server_state import ServerState
from paceline.servers.update_order import UpdateOrder
from paceline.servers.wire import Connection, Peer, Role, WireError, connect, listen
from paceline.strategies.server.shards import Shard, fingerprint
from paceline.training import state
from paceline.training.cores import CoreWait
from paceline.training.optimizers.schedule import check_monitored, step_by_metrics
from paceline.training.own_step.followers import follow
from paceline.training.parts.copied_state import open_newest
from paceline.training.parts.memory_checkpoint import Copier
from paceline.training.restore import choose_checkpoint, mismatch, restore

LOOK_S = 0.5  # between looks for a request to stop

_LAST = 2**62  # version of a run whose steps make as many updates as they like
Event = tuple[
    Peer, "dict[str, Any] | Exception"
]  # what a peer said, why it says no more, or what went wrong here


class Server(ABC):
    """What every server does. It says whatever happens to it through `tell`, which the kinds of servers fill in.

    inbox: what peers said.
    """

    def __init__(
        self, task: RankTask, *, number: int, model: torch.nn.Module, shards: tuple[Shard, ...]
    ) -> None:
        context, job, plan, settings = task.context, task.job, task.plan, task.settings
        sync = servers_of(plan)
        if job.num_samples is None:
            raise JobError(
                "the data is a stream, and servers hand out samples by their place",
                hint="a data set with __len__ and __getitem__, or a data=N plan",
            )
        assert job.total_steps is not None
        self.order = Order.of(job)
        self.turns = UpdateOrder(self.order, sync)
        self.context, self.job, self.plan, self.settings, self.number = (
            context,
            job,
            plan,
            settings,
            number,
        )
        self.callback_states: list[dict[str, Any]] | None = (
            None  # of a checkpoint, where this server knows them
        )
        self.memory, self.core_wait = PeakMemory(context.device), CoreWait()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.layout = fingerprint(shards)
        end = _LAST if job.models else self.turns.before(job.total_steps)
        measures = job.clip is not None or any(
            spec(each).clip is not None for each in job.optimizers.values()
        )
        terms = ShardTerms(
            sync.workers if sync.staleness == 0 else 1,
            end,
            keeps_sending=sync.staleness != 0,
            measures=measures,
            compress=plan.modifiers.compress,
        )
        events = ShardEvents(
            complete=self._complete, ready=self._ready, lost=self._lost, failed=self._failed
        )
        self.exchange = ShardService(shards[number], terms, events, task.uplink)
        self.shelf = ServerState(job, plan, number, shards, model, self.exchange)
        if not settings.is_trial and not job.models:
            check_monitored(self.shelf.schedule, job)
        self.writer = None
        if settings.run_dir is not None:
            self.writer = Writer(
                settings.run_dir,
                rank=number,
                world_size=sync.server,
                attempt=context.attempt,
                num_ranks=min(sync.server, context.local_world_size),
                meanwhile=self.keep_alive,
            )
            state.refuse_unsaveable(self.shelf)  # now, not after an hour
        self.copier: Copier | None = None
        if context.copies is not None:
            self.copier = Copier(
                context,
                context.copies,
                sync.server,
                (number, sync.server),
            )
        self.history = self._restore()
        self.version = self.history.num_updates
        self.exchange.begin_at(self.version)
        self.gradients: dict[
            str, torch.Tensor
        ] = {}  # of a step of the job's own so far, for whoever looks on
        self.door = Acceptor(
            listen(context.host),
            self.welcome,
            secret=context.secret,
            layout=self.layout,
            check=self.check,
            identity=Identity.make() if context.encrypts else None,
        )
        task.rendezvous.announce(number, self.door.address)
        if settings.observer is not None:
            settings.observer.initial(self.shelf)

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
        num_workers = servers_of(self.plan).workers
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
        self.exchange.serve(connection, peer)

    def obey(self, order: dict[str, Any]) -> None:
        """Do what the coordinator says."""
        if "make" in order:
            self._make(order)
        elif "update" in order:
            self._step_optimizer(order)
        elif "end" in order:
            self._end_step(order)
        elif "open" in order:
            self.exchange.open(order["open"], order["scale"])
        elif "drop" in order:
            self.exchange.drop(order["drop"])
        elif "gone" in order:
            self.exchange.dismiss(order["gone"], order["incarnation"], keeps=order["keeps"])
        elif "metrics" in order:
            step_by_metrics(self.shelf.schedule, self.job, order["metrics"])
        elif "save" in order:
            self.save(order["save"], last=order["last"])
        elif "copy" in order:
            self.copy()
            self.tell({"copied": order["copy"]})
        elif "export" in order:
            self._export(Path(order["export"]))

    def save(self, samples: int, *, last: bool) -> float:
        """Begin this server's part of a checkpoint: from a copy, or from the tensors themselves if nothing changes them
        any more. Returns the seconds it took from the updates."""
        self.check_history(self.version)
        if self.writer is None:
            return 0.0
        self.context.beat("save")
        pieces = list(state.pieces(self.shelf))
        if not last and self.writer.takes_snapshots is not False:
            self.writer.takes_snapshots = self.writer.has_memory_for(pieces)
            if not self.writer.takes_snapshots:
                logger.warning(without_snapshots(pieces))
        document = state.document(self.shelf, step=self.step, samples=samples)
        if self.callback_states is not None:
            document["callbacks"] = self.callback_states
        return self.writer.save(self.step, pieces, document, snapshot=not last)

    def copy(self, figures: Mapping[str, Any] | None = None) -> None:
        """Leave a copy of this server's part where the next ranks find it if one of these is lost. figures: what server
        0 knows of the run beside its state."""
        assert self.copier is not None
        document = None
        if figures is not None:
            document = state.document(self.shelf, step=self.step, samples=figures["samples"]) | {
                "figures": figures,
                "history": [self.history.first, sorted(self.history.later)],
            }
        self.copier.copy(self.version, state.pieces(self.shelf), document)

    def _export(self, folder: Path) -> None:
        """Write this server's part of the weights alone, and say so when all parts are there."""
        num_ranks = servers_of(self.plan).server
        state.save_weights(self.shelf, folder, self.context, step=self.step, num_ranks=num_ranks)
        if self.number:
            self.tell({"exported": self.step})

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

    def _make(self, order: dict[str, Any]) -> None:
        self.context.step = self.step + 1
        self.context.beat("optimizer")
        self.history.add(order["turn"])
        observer, shelf = self.settings.observer, self.shelf
        step, _ = self.turns.place(order["turn"])
        shelf.take_gradient(
            order["make"],
            scale=order["scale"],
            unused=frozenset(order["unused"]).union(
                shelf.freezing.at(step, self.order.window(step).epoch)
            ),
        )
        if observer is not None:
            observer.samples(self.version, [])
            observer.gradients(self.version, shelf)
        with self.exchange.making:
            shelf.update(
                clip=order["clip"],
                rate=order["rate"],
                ends_step=self.turns.steps(self.version + 1) > self.step,
            )
            self.exchange.made(order["make"])
        if observer is not None:
            observer.weights(self.version, shelf, order["loss"])
        self.version += 1
        if self.writer is not None:
            self.writer.poll()
        self.context.beat("input")  # gradients of the next update come in

    def _step_optimizer(self, order: dict[str, Any]) -> None:
        """An update within a step of the job's own."""
        self.context.step = self.step + 1
        self.context.beat("optimizer")
        shelf = self.shelf
        shelf.take_gradient(order["update"], scale=1.0, unused=order["unused"])
        if self.settings.observer is not None:
            for name, p in shelf.parameters.items():
                if p.grad is not None:
                    self.gradients[name] = (
                        p.grad + self.gradients[name] if name in self.gradients else p.grad.clone()
                    )
        with self.exchange.making:
            shelf.step_optimizer(order["optimizer"], clip=order["clip"])
            self.exchange.made(order["update"], version=order["update"] + 1)
        self.context.beat("input")  # gradients of the next update come in

    def _end_step(self, order: dict[str, Any]) -> None:
        """A step of the job's own is over: its updates are made, and followers move."""
        self.context.step = self.step + 1
        self.history.add(order["end"])
        observer, shelf = self.settings.observer, self.shelf
        follow(self.job.followers, shelf.local_parameters, {}, self.step + 1)
        if observer is not None:
            for name, gradient in self.gradients.items():
                shelf.parameters[name].grad = gradient
            observer.samples(self.version, [])
            observer.gradients(self.version, shelf)
            observer.weights(self.version, shelf, order["loss"])
            shelf.drop_gradients()
            self.gradients = {}
        self.version += 1
        if self.writer is not None:
            self.writer.poll()
        self.context.beat("input")  # gradients of the next update come in

    def _restore(self) -> History:
        """Where the run goes on: from a copy, a checkpoint, or the begin. is_copied: whether from a copy."""
        self.checkpoint: Checkpoint | None = None
        self.restore_notes: list[str] = []
        self.is_copied = False
        if self.settings.resume and self.settings.run_dir is not None:
            self.context.beat("restore")
            place = self.context, self.settings.run_dir, partial(mismatch, self.shelf)
            self.checkpoint = open_newest(*place, before=self.turns.before)
            self.is_copied = self.checkpoint is not None
            if not self.is_copied:
                self.checkpoint = choose_checkpoint(*place)
        if self.checkpoint is None:
            history = History(0)
        else:
            self.restore_notes = restore(self.shelf, self.checkpoint)
            history = (
                History(*self.checkpoint.document["history"])
                if self.is_copied
                else History(self.turns.before(int(self.checkpoint.document["step"])))
            )
        if self.copier is not None:
            self.copier.begin(history.num_updates, is_copied=self.is_copied)
        return history

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
        timeout_s: float = 60.0,
    ) -> None:
        self.coordinator: Connection | None = None
        self.has_told_stop = False
        super().__init__(task, number=number, model=model, shards=shards)
        this_server = Peer(Role.SERVER, number, 0)
        self.coordinator = connect(
            task.rendezvous.address(0),
            this_server,
            secret=self.context.secret,
            layout=self.layout,
            timeout_s=timeout_s,
            encrypts=self.context.encrypts,
        )
        self.is_over = threading.Event()
        threading.Thread(target=self._tell_alive, name="paceline-alive", daemon=True).start()
        listen_to(
            self.coordinator,
            this_server,
            tell=lambda peer, message: self.inbox.put((peer, message)),
            on_lost=lambda peer, error: self.inbox.put((peer, error)),
        )

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

    def _next_order(self) -> Any:
        """What comes next from the coordinator, or the error that ended its connection. It hears of a signal to stop
        that reached this rank alone."""
        while True:
            if self.context.stop_signal is not None and not self.has_told_stop:
                self.has_told_stop = True
                self.tell({"stop": True})
            with waiting, suppress(queue.Empty):
                return self.inbox.get(timeout=LOOK_S)[1]

    def run(self) -> dict[str, Any] | None:
        """Obey until the run is over."""
        assert self.coordinator is not None
        try:
            while True:
                order = self._next_order()
                if isinstance(order, Exception):
                    raise order
                self.context.beat("reduce")
                if "over" in order:
                    break
                self.obey(order)
            self.check_history(order["version"])
            if self.writer is not None:
                self.writer.wait()
            self.tell(
                {
                    "left": {
                        "peak_memory_bytes": self.memory.bytes(),
                        "core_wait_s": self.core_wait.seconds,
                    }
                }
            )
            return None
        finally:
            self.is_over.set()
            self.close()
            self.coordinator.close()  # the process may live on, as a worker
