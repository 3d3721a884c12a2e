"""This module reads what peers say to server 0."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.base.waiting import waiting
from paceline.servers.clock import Clock
from paceline.servers.evaluation import WorkersEvaluator
from paceline.servers.meetings import Meetings, Sums
from paceline.servers.membership import MembershipLog
from paceline.servers.peers import Peers
from paceline.servers.roles import rank_of_worker
from paceline.servers.server import LOOK_S, Server
from paceline.servers.wire import Connection, Peer, Role, WireError
from paceline.training.optimizers.schedule import check_monitored


class Reception:
    """Hears peers, keeps what they report, and lets go of those that are gone with what they left behind.

    Attributes:
        reports: Of updates, by worker.
        squares: Of the gradients of updates.
        copying: Other servers that have yet to copy what they were told to.
        exporting: Likewise to write their part of the weights.
        over: Whether the run is over, so that peers may leave; set by the coordinator.
        left: The last figures of workers that left.
        followers_left: Those of other servers.

    Args:
        order: Has every server do something; see `Server.orders`.
    """

    def __init__(
        self,
        server: Server,
        peers: Peers,
        *,
        clock: Clock,
        meetings: Meetings | None,
        evaluator: WorkersEvaluator,
        membership: MembershipLog,
        order: Callable[..., None],
    ) -> None:
        self.server, self.peers, self.clock, self.meetings = server, peers, clock, meetings
        self.evaluator, self.membership, self.order = evaluator, membership, order
        # Whose gradients were at fault before they had joined.
        self.lost_early: dict[int, tuple[int, WireError]] = {}
        self.reports: dict[int, dict[int, dict[str, Any]]] = {}
        self.squares: dict[int, float] = {}
        self.copying, self.exporting = set[int](), set[int]()
        self.stop_asked, self.stopped_rank, self.over = False, 0, False
        self.left: dict[int, dict[str, Any]] = {}
        self.followers_left: dict[int, dict[str, Any]] = {}

    def attend(self) -> None:
        """Hear what comes in, or look up after a moment; don't wait for those who are silent."""
        self.hear()
        self.stop_asked |= self.server.context.stop_signal is not None
        self.give_up_silent()
        self.peers.tell_workers_alive()

    def hear(self) -> None:
        try:
            with waiting:
                peer, message = self.server.inbox.get(timeout=LOOK_S)
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
        elif self.peers.is_current(peer.number, peer.incarnation):
            if (fault := self._fault(peer.number, message)) is not None:
                self._lose(peer, WireError(fault))
            else:
                self._hear_worker(peer.number, message)

    def _join(self, peer: Peer, connection: Connection) -> None:
        if peer.role == Role.SERVER:
            self.peers.followers[peer.number] = connection
            return
        if self.over:
            connection.close()
            return
        if (
            before := self.peers.workers.get(peer.number)
        ) is not None:  # its end was not yet heard of
            self._lose(
                replace(peer, incarnation=before.incarnation), WireError("it was started again")
            )
        self.peers.add_worker(peer, connection)
        self.clock.join(peer.number)
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
            self.exporting.discard(peer.number)
        elif "stop" in message:
            self.stop_asked, self.stopped_rank = True, peer.number  # servers are the first ranks
        elif "left" in message:
            self.followers_left[peer.number] = message["left"]

    def _fault(self, worker: int, message: dict[str, Any]) -> str | None:
        """Return what is wrong with a worker's message, given what it was asked."""
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
        if "sums" in message and (problem := self.evaluator.fault(message)):
            return problem
        if (
            "idle" in message
            and message["deaths"] > sum(self.server.context.deaths) + self.server.context.restarts
        ):
            return f"it says that it died {message['deaths']} times"
        if "left" in message and not self.over:
            return "it left before the run was over"
        if message.keys() & {"finished", "sums", "idle"} and not self.peers.workers[worker].orders:
            return f"it said '{next(iter(message))}' and was not asked"
        return None

    def _hear_worker(self, worker: int, message: dict[str, Any]) -> None:
        self.peers.workers[worker].heard_s = time.monotonic()
        self.server.context.beat("reduce")
        if "alive" in message:  # a step may be long: servers that wait for it are not stuck
            self.peers.tell_followers_alive()
            return
        if message.keys() & {"figures", "update"}:
            assert self.meetings is not None
            self.meetings.bring(worker, message)
            self._end_meeting()
            return
        if message.get("stop"):
            self.stop_asked, self.stopped_rank = True, rank_of_worker(self.server.plan, worker)
        if "told" in message:
            self.reports.setdefault(message["told"], {})[worker] = message
            return
        if "left" in message:
            self.left[worker] = message["left"]
            return
        self.peers.workers[
            worker
        ].orders -= 1  # now: while callbacks hear of an evaluation, it may be lost and come back
        if "finished" in message:
            self.clock.finished(worker, message["finished"])
            self.reports[message["finished"]][worker].update(message)
        elif "sums" in message:
            self.evaluator.add(worker, message)
        elif "idle" in message:
            if self.server.job.own_validate is not None and not self.server.settings.is_trial:
                check_monitored(self.server.shelf.schedule, self.server.job, message["measured"])
            self.membership.note_deaths("worker", worker, message["deaths"])
            if self.membership.note_rejoined(worker, self.server.step):
                self.server.log.display.say(f"worker {worker} is back")

    def _end_meeting(self) -> None:
        """Do what comes of what all workers brought to a meeting within a step, once all is there."""
        assert self.meetings is not None
        result = self.meetings.take_result()
        if isinstance(result, Sums):
            self.peers.tell_workers({"met": result.number, "values": result.values})
        elif result is not None:
            self.order(
                "update",
                update=result.number,
                optimizer=result.optimizer,
                clip=result.clip,
                unused=sorted(result.unused),
            )

    def _lose(self, peer: Peer, error: WireError) -> None:
        """A peer is gone. Workers can be, under staleness; what they left behind is dropped everywhere."""
        if peer.role == Role.SERVER:
            if peer.number not in self.followers_left:
                raise WireError(f"server {peer.number} is gone: {error}") from error
            return
        if not self.peers.is_current(peer.number, peer.incarnation):
            # It may be about to join, on its other connection; nobody does when the run is over.
            if not self.over and replace(peer, role=Role.CONTROL) not in self.peers.joined:
                self.lost_early[peer.number] = peer.incarnation, error
                self._dismiss(peer, keeps=[])
            return
        if self.over:  # its work is done
            self.peers.workers.pop(peer.number)
            return
        if not self.server.turns.is_stale:
            raise WireError(
                f"worker {peer.number} is gone: {error}",
                hint="--resume goes on from the last checkpoint",
            )
        self.peers.remove_worker(peer.number)
        self.membership.note(
            "worker_lost", worker=peer.number, step=self.server.step, why=str(error)
        )
        keeps = [
            number
            for number in self.clock.ready()
            if peer.number in self.clock.updates[number].workers.values()
        ]
        self._dismiss(peer, keeps=keeps)
        for update in self.clock.leave(peer.number):
            self.reports.pop(update, None)
            self.squares.pop(update, None)
            self.order("drop", update=update)
        self.server.log.display.say(
            f"worker {peer.number} is gone ({error}); its samples go to others"
        )
        self.evaluator.lose_worker()

    def _dismiss(self, peer: Peer, *, keeps: list[int]) -> None:
        self.order("dismiss", worker=peer.number, incarnation=peer.incarnation, keeps=keeps)

    def give_up_silent(self) -> None:
        """Under staleness the others go on without a worker that stalls; see `Peers.silent`."""
        if self.server.turns.is_stale:
            for peer, error in self.peers.silent():
                self._lose(peer, error)
