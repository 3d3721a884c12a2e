"""Server 0: hands out steps, decides when an update is made, and speaks for the run."""

from __future__ import annotations

import math
import os
import queue
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from paceline.base.errors import CallbackError, JobError, PeerLost, Preempted
from paceline.base.waiting import waiting
from paceline.checkpoint.prune import later_saves, prune
from paceline.checkpoint.read import newest_saved_step
from paceline.job.callback import Requests
from paceline.job.metrics import OfAllSamples
from paceline.job.order import split
from paceline.runs.folder import EVENTS, checkpoint_of
from paceline.servers.clock import LEASES, Clock
from paceline.servers.meetings import Meetings, Sums
from paceline.servers.membership import MembershipLog, staleness_of, updates_after
from paceline.servers.messages import checked
from paceline.servers.roles import RankTask, Roles, rank_of_worker, servers_of
from paceline.servers.serve import listen_to
from paceline.servers.server import LOOK_S, Server
from paceline.servers.wire import Connection, Peer, Role, WireError
from paceline.strategies.server.shards import Shard
from paceline.training import state
from paceline.training.control import RunControl
from paceline.training.evaluate import quotients
from paceline.training.optimizers.schedule import check_monitored, waits_for_evaluations
from paceline.training.refusals import check_loss, check_used
from paceline.training.run_log import RunLog, learning_rate, recorded_loss

_MOST_ALSO = 64  # updates that a copy may have beside whole steps from the first on: a line of the journal lists them


@dataclass
class _Worker:
    """What the coordinator knows of a worker.

    orders: that it has yet to answer; it is given none before it has said that it is ready.
    heard_s: when it last gave a sign of life.
    """

    connection: Connection
    incarnation: int
    orders: int = 1
    heard_s: float = field(default_factory=time.monotonic)


@dataclass
class _Evaluation:
    """Sums that come in from the workers, by name; begun anew if one of them is gone."""

    number: int
    awaited: set[int]
    sums: dict[str, torch.Tensor]


@dataclass
class _Step:
    """What is known of a step of which some updates are made and others are not."""

    missing: int
    loss: float = 0.0
    count: float = 0.0


class Coordinator(Server):
    """See the module. Everything happens on the thread that calls `run`, as messages come in.

    passed_over: saves of checkpoints that the run could not go on from. saw_unused: whether some update used only a
        part of the parameters.
    """

    passed_over: frozenset[str] = frozenset()
    saw_unused = False

    def __init__(
        self, task: RankTask, *, number: int, model: torch.nn.Module, shards: tuple[Shard, ...]
    ) -> None:
        self.workers: dict[int, _Worker] = {}
        self.joined: set[Peer] = set()  # every worker that ever was
        self.lost_early: dict[
            int, tuple[int, WireError]
        ] = {}  # whose gradients were at fault before they had joined
        self.followers: dict[int, Connection] = {}
        self.followers_heard_s: dict[int, float] = {}
        self.alive_s = 0.0  # when workers last heard of this server
        self.reports: dict[int, dict[int, dict[str, Any]]] = {}  # of updates, by worker
        self.opened: int | None = None
        self.squares: dict[int, float] = {}
        self.begun: dict[int, _Step] = {}
        self.evaluation: _Evaluation | None = None
        self.num_evaluations = 0
        self.evaluated_step = -1
        self.saved_step = -1
        self.stop_asked, self.stopped_rank = False, 0
        self.requests = Requests()
        self.told_epoch = -1
        self.epoch = 0
        self.copying: set[int] = set()  # followers that have yet to copy what they were told to
        self.exported: set[int] = set()  # followers that have written their part of the weights
        self.num_exports = 0
        self.over = False
        self.deserted_s: float | None = None  # since when there is no worker
        self.staleness: Counter[int] = Counter()
        self.final_figures: dict[int, dict[str, Any]] = {}
        self.followers_left: dict[int, dict[str, Any]] = {}
        self.log = RunLog(task.settings, task.context.device, writes=True, shows=True)
        self.display, self.journal = self.log.display, self.log.journal
        self.update_s = time.monotonic()
        super().__init__(task, number=number, model=model, shards=shards)
        self.log.memory = self.memory
        context, job, plan, settings = task.context, task.job, task.plan, task.settings
        self.membership_log = MembershipLog(
            settings.run_dir / EVENTS if settings.run_dir is not None else None,
            goes_on=context.num_starts > 1,
        )
        if context.num_starts > 1:
            self._note_restart()
        self.completed = self.first_step = self.step  # steps; not always the first ones
        self.samples = (
            int(self.checkpoint.document["samples"]) if self.checkpoint is not None else 0
        )
        if settings.resume:
            self._note_resume()
        if self.is_copied:
            self._take_figures()
        self._begin_journal()
        assert job.total_steps is not None
        self.total_steps = job.total_steps
        sync = servers_of(plan)
        self.control = None
        if settings.controller is not None:
            self.control = RunControl(
                replace(context, world_size=1),
                settings.controller,
                self._obey_callbacks,
                self.keep_alive,
            )
        self.meetings = (
            Meetings.of(job.optimizers, shards, num_workers=sync.workers, number=self.version)
            if job.models
            else None
        )
        self.clock = self._begin_clock()

    def _begin_clock(self) -> Clock:
        sync = servers_of(self.plan)
        end = self.turns.before(self._next_stop())
        if (
            self.is_copied
            and self.version
            and self.history.is_exactly(self.turns.before(self.step))
        ):
            end = self.version  # what the coordinator before this one had not ended here
        # What servers hold of a step of the job's own is known when each of its updates is made.
        return Clock(
            num_workers=sync.workers,
            num_servers=0 if self.job.models else sync.server,
            first=self.history.first,
            later=self.history.later,
            end=end,
            staleness=None if sync.staleness == "inf" else sync.staleness,
        )

    def _note_resume(self) -> None:
        """The run goes on; what was recorded after the checkpoint is made again."""
        self.display.say(
            "; ".join([f"resumed from {self.checkpoint.path.name}", *self.restore_notes])
            if self.checkpoint is not None
            else "no checkpoint to resume from: starting at step 0"
        )
        if (metrics := self.log.metrics) is not None:
            self.passed_over = later_saves(metrics.parent, after=self.step)
            if self.is_copied:
                os.truncate(metrics, min(self._figures["metrics_bytes"], metrics.stat().st_size))
                self.log.loss = recorded_loss(metrics)
            else:
                self.log.go_on(self.step)
            self.staleness.update(staleness_of(metrics))

    @property
    def _figures(self) -> dict[str, Any]:
        """What a coordinator that goes on from a copy knows beside its state."""
        assert self.checkpoint is not None
        figures: dict[str, Any] = self.checkpoint.document["figures"]
        return figures

    def _take_figures(self) -> None:
        """Know what a coordinator knew at its last copy. A save that was begun then and did not end is made again."""
        figures = self._figures
        (
            self.completed,
            self.log.loss,
            self.epoch,
            self.told_epoch,
            self.log.evaluated,
            self.evaluated_step,
        ) = (
            figures[name]
            for name in ("completed", "loss", "epoch", "told_epoch", "evaluated", "evaluated_step")
        )
        self.begun = {step: _Step(*values) for step, *values in figures["begun"]}
        assert self.settings.run_dir is not None
        if newest_saved_step(self.settings.run_dir) == self.step:
            self.saved_step = self.step

    def _copy(self) -> None:
        """Have all servers copy their parts, if it is time, right after an update: nothing is applied yet that comes
        later. Two copies of each are kept, so the last one is waited for: all servers then have one of the same
        version."""
        copier, is_due = (
            self.copier,
            self.copier is not None and self.version >= self.copier.next_step,
        )
        if (
            copier is None
            or not is_due
            or self.copying
            or self.log.metrics is None
            or (self.version - self.turns.before(self.turns.steps(self.history.first)) > _MOST_ALSO)
        ):
            return
        if not copier.set_pace(
            state.pieces(self.shelf), self.log.speed.latest_s, steps=self.turns.width
        ):
            self.copier = None
            self.display.say(
                "this host's memory has no room for copies of the state: if a server is lost, the run goes on "
                "from the last checkpoint"
            )
            return
        self.copying = set(self.followers)
        for connection in self.followers.values():
            connection.send_message({"copy": self.version})
        self.context.beat("copy")
        self.copy(
            {
                "samples": self.samples,
                "completed": self.completed,
                "loss": self.log.loss,
                "epoch": self.epoch,
                "told_epoch": self.told_epoch,
                "evaluated": self.log.evaluated,
                "evaluated_step": self.evaluated_step,
                "begun": [(step, *astuple(begun)) for step, begun in self.begun.items()],
                "metrics_bytes": self.log.metrics.stat().st_size,
            }
        )

    def _begin_journal(self) -> None:
        first, later = self.history.first, self.history.later
        after = self.turns.steps(first)
        places = [
            self.turns.place(turn)
            for turn in (*range(self.turns.before(after), first), *sorted(later))
        ]
        self.journal.begin(
            self.job,
            plan=str(self.plan),
            world_size=self.context.world_size,
            after=after,
            also=[(step + 1, part) for step, part in places],
        )

    def _note_restart(self) -> None:
        """All ranks started again, as one of them died; what was made since what they go on from is made again."""
        for rank, deaths in enumerate(self.context.deaths):
            if (server := Roles.of(self.plan, rank).server) is not None:
                self.membership_log.note_deaths("server", server, deaths)
        metrics = self.log.metrics
        assert metrics is not None
        updates = (
            updates_after(metrics, -1, offset=self._figures["metrics_bytes"])
            if self.is_copied
            else updates_after(metrics, self.step)
        )
        self.membership_log.note("rolled_back", step=self.step, updates=updates)
        lost = (
            "1 update was lost and is" if updates == 1 else f"{updates} updates were lost and are"
        )
        self.display.say(f"{lost} made again")

    @property
    def _is_complete(self) -> bool:
        """Whether all workers are here that the run needs: else it could end before one of them has come."""
        return self._is_stale or len(self.workers) == servers_of(self.plan).workers

    @property
    def _lacks_followers(self) -> bool:
        """Whether some other server has yet to join."""
        return len(self.followers) < servers_of(self.plan).server - 1

    @property
    def _is_stale(self) -> bool:
        """Whether a part of a step is an update of its own."""
        return servers_of(self.plan).staleness != 0

    def tell(self, message: dict[str, Any]) -> None:
        self.inbox.put((Peer(Role.SERVER, self.number, 0), message))

    def check(self, peer: Peer) -> None:
        if peer.role != Role.SERVER:
            super().check(replace(peer, role=Role.DATA))
            return
        num_servers = servers_of(self.plan).server
        if not 0 < peer.number < num_servers or peer.number in self.followers_heard_s:
            raise WireError(
                f"a peer says that it is server {peer.number}, which is here already or none of "
                f"server={num_servers}"
            )

    def welcome(self, connection: Connection, peer: Peer) -> None:
        if peer.role == Role.DATA:
            super().welcome(connection, peer)
            return

        def note(sender: Peer) -> None:
            if sender.role == Role.SERVER:  # as it comes: the main thread may be busy for long
                self.followers_heard_s[sender.number] = time.monotonic()

        def hear(sender: Peer, message: dict[str, Any]) -> None:
            note(sender)
            self.inbox.put((sender, checked(sender.role, message)))

        note(peer)
        self.inbox.put((peer, {"joined": connection}))
        listen_to(
            connection,
            peer,
            tell=hear,
            on_lost=lambda sender, error: self.inbox.put((sender, error)),
        )

    def run(self) -> dict[str, Any]:
        """Coordinate until the last step. Returns the summary.

        Raises:
            Preempted: the run was asked to stop; it saved a checkpoint.
            WireError: a peer that the others need is gone.
        """
        try:
            if self.control is not None:
                while self._lacks_followers:  # callbacks may want all weights
                    self._hear(self.inbox, timeout_s=LOOK_S)
                document = self.checkpoint.document if self.checkpoint is not None else {}
                self._ask("start", callbacks=document.get("callbacks"), keeps=self.is_copied)
            while not self.over:
                self._hear(self.inbox, timeout_s=LOOK_S)
                self.stop_asked |= self.context.stop_signal is not None
                self._give_up_silent()
                self._tell_alive()
                self._advance()
            self._part()
            return self._finish()
        finally:
            self.display.close()
            self.close()

    def close(self) -> None:
        super().close()
        self.journal.close()
        for connection in (
            *(worker.connection for worker in self.workers.values()),
            *self.followers.values(),
        ):
            connection.close()  # the process may live on, as a worker

    # --- What comes in -------------------------------------------------------------------------------------------

    def _hear(self, inbox: queue.SimpleQueue[Any], *, timeout_s: float) -> None:
        try:
            with waiting:
                peer, message = inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(message, WireError):
            self._lose(peer, message)
        elif isinstance(message, Exception):
            raise message
        elif "joined" in message:
            self._join(peer, message["joined"])
        elif peer.role == Role.SERVER:
            self._hear_server(peer, message)
        elif self._is_current(peer.number, peer.incarnation):
            if (fault := self._fault(peer.number, message)) is not None:
                self._lose(peer, WireError(fault))
            else:
                self._hear_worker(peer.number, message)

    def _is_current(self, worker: int, incarnation: int) -> bool:
        return worker in self.workers and self.workers[worker].incarnation == incarnation

    def _join(self, peer: Peer, connection: Connection) -> None:
        if peer.role == Role.SERVER:
            self.followers[peer.number] = connection
            return
        if self.over:
            connection.close()
            return
        if peer.number in self.workers:  # started again before its connection's end was heard of
            self._lose(
                Peer(Role.CONTROL, peer.number, self.workers[peer.number].incarnation),
                WireError("it was started again"),
            )
        self.joined.add(peer)
        self.workers[peer.number] = _Worker(connection, peer.incarnation)
        self.clock.join(peer.number)
        self.deserted_s = None
        incarnation, error = self.lost_early.pop(peer.number, (None, None))
        if error is not None and incarnation == peer.incarnation:
            self._lose(peer, error)

    def _hear_server(self, peer: Peer, message: dict[str, Any]) -> None:
        if "held" in message and self.meetings is not None:
            self.meetings.hold(peer.number, message["held"], message["squares"])
            self._end_meeting()
        elif "held" in message:
            update = message["held"]
            if update in self.clock.updates:  # else it was dropped, or a worker made it up
                self.squares[update] = self.squares.get(update, 0.0) + message["squares"]
                self.clock.gradient_complete(peer.number, update)
        elif "lost" in message and not self.over:
            self._lose(
                Peer(Role.CONTROL, message["lost"], message["incarnation"]),
                WireError(message["why"]),
            )
        elif "copied" in message:
            self.copying.discard(peer.number)
        elif "exported" in message:
            self.exported.add(peer.number)
        elif "stop" in message:
            self.stop_asked, self.stopped_rank = True, peer.number  # servers are the first ranks
        elif "left" in message:
            self.followers_left[peer.number] = message["left"]

    def _fault(self, worker: int, message: dict[str, Any]) -> str | None:
        """What is wrong with a worker's message, given what it was asked."""
        leased = self.clock.workers[worker].leased
        for kind, has_told in (("told", False), ("finished", True)):
            if (update := message.get(kind)) is not None and (
                leased[:1] != [update] or (worker in self.reports.get(update, {})) != has_told
            ):
                return f"it said '{kind}' of update {update}, and has to say something else of {leased or 'none'} first"
        if self.meetings is None and message.keys() & {"figures", "update"}:
            return f"it said '{next(iter(message))}', which is for steps of a job's own"
        if self.meetings is not None and message.keys() & {"figures", "update"}:
            return (
                self.meetings.fault(worker, message)
                if leased
                else "it works at a step that it was not given"
            )
        if "finished" in message and not message["version"] <= self.clock.version + 1:
            return f"it used weights of version {message['version']} when there were {self.clock.version}"
        if "sums" in message and (problem := self._wrong_sums(message)):
            return problem
        if (
            "idle" in message
            and message["deaths"] > sum(self.context.deaths) + self.context.restarts
        ):
            return f"it says that it died {message['deaths']} times"
        if "left" in message and not self.over:
            return "it left before the run was over"
        if message.keys() & {"finished", "sums", "idle"} and not self.workers[worker].orders:
            return f"it said '{next(iter(message))}' and was not asked"
        return None

    def _wrong_sums(self, message: dict[str, Any]) -> str | None:
        """What is wrong with the figures of a worker's evaluation."""
        names = message["names"]
        if len(set(names)) != len(names) or len(names) != len(message["values"]):
            return f"it evaluated {len(message['values'])} figures of {len(set(names))}"
        due = (
            ["loss", *self.job.metrics]
            if self.meetings is None
            else (list(self.evaluation.sums) if self.evaluation is not None else [])
        )
        if due and names != due:
            return f"it evaluated {', '.join(names)[:200]} where {', '.join(due)} are due"
        return None

    def _hear_worker(self, worker: int, message: dict[str, Any]) -> None:
        self.workers[worker].heard_s = time.monotonic()
        self.context.beat("reduce")
        if "alive" in message:  # a step may be long: servers that wait for it are not stuck
            for connection in self.followers.values():
                with suppress(
                    WireError
                ):  # its end is in the inbox, and at the run's end it is none to tell of
                    connection.send_message(message)
            return
        if message.keys() & {"figures", "update"}:
            assert self.meetings is not None
            self.meetings.bring(worker, message)
            self._end_meeting()
            return
        if message.get("stop"):
            self.stop_asked, self.stopped_rank = True, rank_of_worker(self.plan, worker)
        if "told" in message:
            self.reports.setdefault(message["told"], {})[worker] = message
            return
        if "left" in message:
            self.final_figures[worker] = message["left"]
            return
        self.workers[
            worker
        ].orders -= 1  # now: while callbacks hear of an evaluation, it may be lost and come back
        if "finished" in message:
            self.clock.finished(worker, message["finished"])
            self.reports[message["finished"]][worker].update(message)
        elif "sums" in message:
            self._add_sums(worker, message)
        elif "idle" in message:
            if self.job.models and not self.settings.is_trial:
                check_monitored(self.shelf.schedule, self.job, message["measured"])
            self.membership_log.note_deaths("worker", worker, message["deaths"])
            if self.membership_log.note_rejoined(worker, self.step):
                self.display.say(f"worker {worker} is back")

    def _end_meeting(self) -> None:
        """Do what comes of what all workers brought to a meeting within a step, once all is there."""
        assert self.meetings is not None
        result = self.meetings.take_result()
        if isinstance(result, Sums):
            for worker in self.workers.values():
                with suppress(WireError):  # its end is in the inbox
                    worker.connection.send_message({"met": result.number, "values": result.values})
        elif result is not None:
            self._order(
                {
                    "update": result.number,
                    "optimizer": result.optimizer,
                    "clip": result.clip,
                    "unused": sorted(result.unused),
                }
            )

    def _lose(self, peer: Peer, error: WireError) -> None:
        """A peer is gone. Workers can be, under staleness; what they left behind is dropped everywhere."""
        if peer.role == Role.SERVER:
            if peer.number not in self.followers_left:
                raise WireError(f"server {peer.number} is gone: {error}") from error
            return
        if not self._is_current(peer.number, peer.incarnation):
            # It may be about to join, on its other connection; nobody does when the run is over.
            if not self.over and replace(peer, role=Role.CONTROL) not in self.joined:
                self.lost_early[peer.number] = peer.incarnation, error
                self._order({"gone": peer.number, "incarnation": peer.incarnation, "keeps": []})
            return
        if self.over:  # its work is done
            self.workers.pop(peer.number)
            return
        if not self._is_stale:
            raise WireError(
                f"worker {peer.number} is gone: {error}",
                hint="--resume goes on from the last checkpoint",
            )
        self.workers.pop(peer.number).connection.close()
        self.membership_log.note("worker_lost", worker=peer.number, step=self.step, why=str(error))
        keeps = [
            number
            for number in self.clock.ready()
            if peer.number in self.clock.updates[number].workers.values()
        ]
        self._order({"gone": peer.number, "incarnation": peer.incarnation, "keeps": keeps})
        for update in self.clock.leave(peer.number):
            self.reports.pop(update, None)
            self.squares.pop(update, None)
            self._order({"drop": update})
        self.display.say(f"worker {peer.number} is gone ({error}); its samples go to others")
        self.evaluation = None  # to be begun anew
        if not self.workers:
            self.deserted_s = time.monotonic()

    def _give_up_silent(self) -> None:
        """Under staleness a worker that stalls is as good as gone, before those who wait for it give up.

        Raises:
            WireError: all workers are gone, and none came, or came back.
            PeerLost: a server stalls, which all wait for.
        """
        if not self._is_stale:
            return
        patience_s = self.context.timeout_s / 2
        for number in self.followers:
            if time.monotonic() - self.followers_heard_s[number] > patience_s / 2:
                raise PeerLost(
                    f"server {number} has said nothing for {patience_s / 2:g} s",
                    rank=number,
                    hint="--patience SECONDS allows longer pauses",
                )
        may_come = (
            self.context.restarts
            or len({peer.number for peer in self.joined}) < servers_of(self.plan).workers
        )
        if self.deserted_s is not None and (
            not may_come or time.monotonic() - self.deserted_s > patience_s
        ):
            raise WireError(
                "all workers are gone", hint="--resume goes on from the last checkpoint"
            )
        for number, worker in list(self.workers.items()):
            if worker.orders and time.monotonic() - worker.heard_s > patience_s:
                self._lose(
                    Peer(Role.CONTROL, number, worker.incarnation),
                    WireError(f"it has said nothing for {patience_s:g} s"),
                )

    # --- What is done about it -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Make what is complete, stop where something is due, and give idle workers something to do."""
        if self._lacks_followers:
            return
        ready = self.clock.ready()
        for update in ready:
            self._make_update(update)
        if self._is_asked_to_stop or (self.control is not None and self.control.wants_attention):
            begun = self.turns.begun(max(self.clock.cursor, self.clock.version))
            self.clock.end = min(self.clock.end, self.turns.before(begun))
        if self.clock.is_drained and self.evaluation is None and self._is_complete:
            self._stop_here()
        if ready and not self.clock.is_drained:
            self._copy()
        self._open_next()
        if self.evaluation is None and not self.over:
            for _ in range(LEASES):  # everybody's first, then the next ones
                for number, worker in list(self.workers.items()):
                    if worker.orders < LEASES and (lease := self.clock.lease(number)) is not None:
                        step, place = self.turns.place(lease.turn)
                        self._say(
                            number,
                            {
                                "lease": lease.update,
                                "step": step,
                                "part": place if self._is_stale else lease.part,
                                "version": max(lease.version, self.clock.version),
                            },
                        )

    def _open_next(self) -> None:
        """Let servers update slice by slice, if the loss of the next update is known and nothing is due before it.

        In a run's first step nothing is updated before it is known what the model uses.
        """
        update = next(iter(self.clock.updates), None)
        if update is None or update == self.opened or self._is_stale or self.clock.version == 0:
            return
        reports = self.reports.get(update, {})
        if len(reports) == servers_of(self.plan).workers and self.shelf.takes_slices:
            self.opened = update
            loss, count, scale = self._sums(update)
            check_loss(loss, count, [], self.step)
            self._order({"open": update, "scale": scale})

    def _sums(self, update: int) -> tuple[float, float, float]:
        """The loss, the count of an update, and what its gradient is to be scaled by."""
        reports = self.reports[update].values()
        loss, count = sum(r["loss"] for r in reports), sum(r["count"] for r in reports)
        if all(r["is_mean"] for r in reports) or not count:
            return loss, count, 1.0
        return loss, count, self.turns.part(self.clock.updates[update].turn) / count

    def _make_update(self, update: int) -> None:
        version, turn = self.clock.version, self.clock.updates[update].turn
        part = self.turns.part(turn)
        loss, count, scale = self._sums(update)
        check_loss(loss, count, [], self.step)
        reports = self.reports.pop(update).values()
        unused = set.intersection(*(set(r["unused"]) for r in reports))
        if unused and not self.saw_unused:
            self.saw_unused = True
            check_used(
                {name: float(name not in unused) for name in self.shelf.trainable}, self.step
            )
        norm = (
            math.sqrt(self.squares.pop(update, 0.0)) * scale / part
        )  # of the mean over the update's own samples
        clip = (
            1.0 if self.job.clip is None else min(1.0, self.job.clip / (norm + 1e-6))
        )  # as clip_grad_norm_
        stale = version - min(r["version"] for r in reports)
        rate = (
            1.0 / max(1.0, stale / self.turns.width)
            if servers_of(self.plan).damping == "inverse"
            else 1.0
        )
        self.staleness[stale] += 1
        self._order(
            {"end": turn, "loss": loss / count}
            if self.meetings is not None
            else {
                "make": update,
                "turn": turn,
                "scale": scale,
                "clip": clip,
                "rate": rate,
                "unused": sorted(unused),
                "loss": loss / count,
            }
        )
        self.clock.made(update)
        if self.settings.observer is not None and self.meetings is None:
            for worker in self.workers.values():
                worker.connection.send_message({"made": turn, "loss": loss / count})
        self._write_down(turn, sum(r["digest"] for r in reports))
        self._record(self.turns.place(turn)[0], loss, count, norm, stale)

    def _write_down(self, turn: int, digest: int) -> None:
        """Which samples the update of a turn was made of, in the journal."""
        step, place = self.turns.place(turn)
        window = self.order.window(step)
        if self._is_stale:
            part = split(window.count, self.settings.shares)[place]
            window = replace(window, start=window.start + part.start, count=len(part))
        self.journal.note(step + 1, window, part=place if self._is_stale else None)
        self.journal.settle(digest)

    def _record(self, step: int, loss: float, count: float, norm: float, stale: int) -> None:
        """An update of this step was made. The line of the one that completes a step has the step's figures."""
        figures = {} if self.job.clip is None else {"gradient_norm": norm}
        if self._is_stale:
            figures["staleness"] = stale
        window = self.order.window(step)
        begun = self.begun.setdefault(
            step, _Step(self.turns.before(step + 1) - self.turns.before(step))
        )
        begun.missing, begun.loss, begun.count = (
            begun.missing - 1,
            begun.loss + loss,
            begun.count + count,
        )
        if begun.missing:
            self.log.note(self.completed + 1, **figures)
            return
        del self.begun[step]
        self.completed += 1
        now_s = time.monotonic()
        step_s, self.update_s = now_s - self.update_s, now_s
        self.samples += window.count
        self.epoch = window.epoch
        self.log.speed.add(window.count, step_s)
        self.log.loss = begun.loss / begun.count
        self.log.note(
            self.completed,
            epoch=window.epoch,
            samples=self.samples,
            loss=self.log.loss,
            lr=learning_rate(self.shelf.optimizer),
            step_s=step_s,
            **figures,
        )
        if self.control is not None:
            self.control.tell()
        self.log.show(self.completed, self.total_steps, window.epoch)

    def _next_stop(self) -> int:
        """The next step at which all that was given out must be done: to save, to evaluate, or as the last."""
        stops = [self.total_steps]
        if self.settings.save_every:
            stops.append((self.step // self.settings.save_every + 1) * self.settings.save_every)
        if self.job.validation is not None:
            stops.append(self.order.epoch_end(self.step))
        return min(stops)

    def _stop_here(self) -> None:
        """Nothing is on its way: evaluate and save if it is time, and let callbacks hear of it; then go on or end."""
        if self.control is not None and self.control.wants_attention:
            self.requests.add(self.control.take())
        every, is_last = (
            self.settings.save_every,
            self.step >= self.total_steps or self._is_asked_to_stop,
        )
        ends_epoch = self.order.ends_epoch(self.step)
        evaluates = (
            (ends_epoch and not self._leaves_at_once)
            or self.step >= self.total_steps
            or self.requests.evaluate
            or self.requests.stop
        )
        if (
            evaluates
            and self.job.validation is not None
            and self.evaluated_step != self.step
            and self.step > 0
        ):
            if self.workers:
                self._begin_evaluation()
            return
        self.requests.evaluate = False
        if ends_epoch and self.told_epoch != self.step:
            self.told_epoch = self.step
            self._ask(
                "epoch",
                hook="on_epoch",
                epoch=self.order.window(self.step - 1).epoch,
                samples=self.samples,
            )
            self._stop_here()  # again, as callbacks may have asked for something
            return
        saves = is_last or self.requests.save or (every and self.step % every == 0)
        self.requests.save = False
        if saves and self.step != self.saved_step and self.step:
            self._save(last=is_last)
        if self.requests.evaluate and self.evaluated_step != self.step:
            self._stop_here()
            return
        if is_last or self._is_asked_to_stop:
            self.over = True
        else:
            self.clock.end = self.turns.before(self._next_stop())
        self.update_s = time.monotonic()

    def _save(self, *, last: bool) -> None:
        self.saved_step = self.step
        self.callback_states = self._ask("state", hook="state_dict")
        self.journal.sync()
        blocked_s = self._order({"save": self.samples, "last": last})
        self._excuse_silence()
        if self.writer is not None:
            self.log.blocked_s += blocked_s
            self._prune()
            self.log.note(self.step, saved=True, blocked_s=blocked_s)
            if self.control is not None and self.control.has("on_save"):
                self.writer.wait()
                self._ask(
                    "save", hook="on_save", path=str(self.writer.folder / f"step-{self.step}")
                )

    def _prune(self) -> None:
        if self.settings.keep_checkpoints and self.settings.run_dir is not None:
            prune(
                self.settings.run_dir,
                newest=self.settings.keep_checkpoints,
                passed_over=self.passed_over,
            )

    # --- Callbacks -----------------------------------------------------------------------------------------------

    @property
    def _is_asked_to_stop(self) -> bool:
        return self.stop_asked or self.requests.stop is not None or self.requests.failed is not None

    @property
    def _leaves_at_once(self) -> bool:
        """Whether a signal asked to stop, and neither callbacks nor the schedule need the evaluation of this epoch."""
        return (
            self.stop_asked
            and self.control is None
            and not waits_for_evaluations(self.shelf.schedule, self.job)
        )

    def _ask(self, event: str, hook: str | None = None, **values: Any) -> Any:
        """Let callbacks hear of an event, if one has the hook, and note what they ask for. Returns their state, where
        that is the event."""
        if self.control is None or (hook is not None and not self.control.has(hook)):
            return None
        answer = self.control.ask({"event": event, "step": self.step, **values})
        self._excuse_silence()
        self.requests.add(answer)
        return answer.get("callbacks")

    def _excuse_silence(self) -> None:
        """Nobody was heard for a while: what workers said is in the inbox."""
        for worker in self.workers.values():
            worker.heard_s = time.monotonic()

    def _obey_callbacks(self, order: dict[str, Any]) -> dict[str, Any]:
        """What callbacks need while all wait: the weights as they are now, in a checkpoint of servers' parts."""
        run_dir = self.settings.run_dir
        assert order["do"] == "weights" and run_dir is not None and self.writer is not None
        if self.saved_step == self.step:
            self.writer.wait()
            return {"path": str(checkpoint_of(run_dir, self.step)), "is_temporary": False}
        self.num_exports += 1
        folder = run_dir / f".weights-{self.context.attempt}-{self.num_exports}"
        self.exported.clear()
        self._order({"export": str(folder)})
        while len(self.exported) < len(self.followers):
            self._hear(self.inbox, timeout_s=LOOK_S)
        return {"path": str(checkpoint_of(folder, self.step)), "is_temporary": True}

    def keep_alive(self) -> None:
        """While callbacks or a save are waited for, those who wait with this server know that it lives. Called
        on another thread where callbacks run in this process, while peers come and go."""
        self._tell_alive()
        for connection in list(self.followers.values()):
            with suppress(WireError):
                connection.send_message({"alive": True})

    def _order(self, order: dict[str, Any]) -> float:
        """Have every server do something, this one last. Returns the seconds it took here."""
        for connection in self.followers.values():
            connection.send_message(order)
        began_s = time.monotonic()
        self.obey(order)
        return time.monotonic() - began_s

    def _tell_alive(self) -> None:
        """Let workers know that they wait for good reason."""
        if time.monotonic() - self.alive_s > self.context.timeout_s / 8:
            self.alive_s = time.monotonic()
            for worker in list(self.workers.values()):
                with suppress(WireError):  # its end is in the inbox
                    worker.connection.send_message({"alive": True})

    def _say(self, worker: int, message: dict[str, Any]) -> None:
        """Tell a worker something. If it is gone, its connection's end is in the inbox."""
        member = self.workers[worker]
        if not member.orders:
            member.heard_s = time.monotonic()
        member.orders += 1
        try:
            member.connection.send_message(message)
        except WireError as error:
            self.inbox.put((Peer(Role.CONTROL, worker, member.incarnation), error))

    # --- Evaluation and the end ----------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        """Give every worker its part of the validation data, once it is idle; all have the same weights. One has all
        of it if a metric needs that."""
        self.num_evaluations += 1
        workers = sorted(self.workers)
        if any(isinstance(metric, OfAllSamples) for metric in self.job.metrics.values()):
            workers = workers[:1]
        self.evaluation = _Evaluation(self.num_evaluations, set(workers), {})
        for part, number in enumerate(workers):
            self._say(
                number,
                {
                    "evaluate": self.evaluation.number,
                    "part": part,
                    "of": len(workers),
                    "version": self.clock.version,
                },
            )

    def _add_sums(self, worker: int, message: dict[str, Any]) -> None:
        evaluation = self.evaluation
        if (
            evaluation is None
            or message["sums"] != evaluation.number
            or worker not in evaluation.awaited
        ):
            return
        if message["refused"]:
            self._save(last=True)  # what was trained is not lost with a metric
            if self.writer is not None:
                self.writer.wait()
            raise JobError(message["refused"][0])
        evaluation.awaited.discard(worker)
        for name, value in zip(message["names"], message["values"], strict=True):
            evaluation.sums[name] = torch.tensor(value, dtype=torch.float64) + evaluation.sums.get(
                name, 0.0
            )
        if evaluation.awaited:
            return
        self.evaluation, self.evaluated_step = None, self.step
        figures = quotients(evaluation.sums, torch.stack(list(evaluation.sums.values())))
        self.log.note_evaluation(self.step, figures)
        if (
            waits_for_evaluations(self.shelf.schedule, self.job)
            and self.order.ends_epoch(self.step)
            and not (self.settings.is_trial or self.step == self.first_step)
        ):
            self._order({"metrics": self.log.evaluated})
        self._ask(
            "evaluation",
            hook="on_evaluation",
            epoch=self.epoch,
            metrics={name: value for name, value in figures.items() if name != "loss"},
            validation_loss=figures["loss"],
        )

    def _part(self) -> None:
        """Send everybody home and hear what they have counted."""
        for number in list(self.workers):
            self._say(number, {"over": True, "version": self.clock.version})
        while not all(number in self.final_figures for number in self.workers):
            self._hear(self.inbox, timeout_s=LOOK_S)
            self._give_up_silent()
        self.check_history(self.version)
        for connection in self.followers.values():
            connection.send_message({"over": True, "version": self.version})
        if self.writer is not None:
            self.writer.wait()
            self._prune()
        while len(self.followers_left) < len(self.followers):
            self._hear(self.inbox, timeout_s=LOOK_S)
        if self.requests.failed is not None:
            raise CallbackError(self.requests.failed)
        if self.step < self.total_steps and self.requests.stop is None:
            sent = self.context.stop_signal
            why = signal.Signals(sent).name if sent else f"a signal to rank {self.stopped_rank}"
            saved = self.settings.run_dir is not None
            raise Preempted(
                f"stopped by {why} after step {self.step}"
                + ("; a checkpoint is saved" if saved else ""),
                hint=f"the same command with --run {self.settings.run_dir} --resume goes on from here"
                if saved
                else None,
            )

    def _finish(self) -> dict[str, Any]:
        if self.step == 0:
            raise JobError("there was nothing to train on: no step was taken")
        stopped = self.requests.stop if self.step < self.total_steps else None
        if stopped is not None:
            self.display.say(f"stopped after step {self.step}: {stopped}")
        self._ask("end")
        if self.requests.failed is not None:
            raise CallbackError(self.requests.failed)
        self.context.beat("save")
        if self.settings.run_dir is not None:
            state.export(self.shelf.model, self.settings.run_dir, step=self.step)
        self.context.beat("end")
        reports = [
            {"peak_memory_bytes": self.memory.bytes(), "core_wait_s": self.core_wait.seconds},
            *self.final_figures.values(),
            *self.followers_left.values(),
        ]
        core_wait_s = max(figures["core_wait_s"] for figures in reports)
        if any(
            device.kind == "cuda" for device in self.settings.devices
        ):  # what servers hold is no GPU's
            reports = list(self.final_figures.values()) or reports
        return {
            "plan": str(self.plan),
            "world_size": self.context.world_size,
            "steps": self.step,
            "samples": self.samples,
            **self.log.summary(),
            "core_wait_s": core_wait_s,
            "peak_memory_bytes": max(figures["peak_memory_bytes"] for figures in reports),
            "staleness": {str(stale): count for stale, count in sorted(self.staleness.items())},
            "workers": {
                str(number): {
                    key: value
                    for key, value in sorted(figures.items())
                    if key != "peak_memory_bytes"
                }
                for number, figures in sorted(self.final_figures.items())
            },
            **self.membership_log.summary(),
            **({"stopped": stopped} if stopped is not None else {}),
        }
