"""Server 0: hands out steps, decides when an update is made, and speaks for the run."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from paceline.base.errors import CallbackError, PacelineError, Preempted
from paceline.base.waiting import waiting
from paceline.launch.process.heartbeats import signs_of_life
from paceline.runs.folder import EVENTS
from paceline.servers.clock import LEASES, Clock
from paceline.servers.evaluation import WorkersEvaluator
from paceline.servers.meetings import Meetings, Sums, clip_factor
from paceline.servers.membership import MembershipLog
from paceline.servers.peers import Peers
from paceline.servers.roles import RankTask, rank_of_worker
from paceline.servers.server import LOOK_S, Server
from paceline.servers.update_log import UpdateLog
from paceline.servers.wire import Connection, Peer, Role, WireError
from paceline.strategies.server.shards import Shard
from paceline.training import state
from paceline.training.optimizers.schedule import check_monitored, waits_for_evaluations
from paceline.training.parts.evaluations import Evaluations
from paceline.training.refusals import check_loss, check_used

_MOST_ALSO = 64  # updates that a copy may have beside whole steps from the first on: a line of the journal lists them


class Coordinator(Server):
    """See the module. Everything happens on the thread that calls `serve`, as messages come in.

    The run has counted steps of which all updates are made; with staleness these are not always the first ones.
    """

    def __init__(
        self, task: RankTask, *, number: int, model: torch.nn.Module, shards: tuple[Shard, ...]
    ) -> None:
        super().__init__(task, number=number, model=model, shards=shards)
        self.peers = Peers(self.context, self.sync, self.inbox)
        self.lost_early: dict[
            int, tuple[int, WireError]
        ] = {}  # whose gradients were at fault before they had joined
        self.reports: dict[int, dict[int, dict[str, Any]]] = {}  # of updates, by worker
        self.opened: int | None = None
        self.squares: dict[int, float] = {}
        self.saw_unused = False  # whether some update used only a part of the parameters
        self.copying: set[int] = set()  # followers that have yet to copy what they were told to
        self.exporting: set[int] = set()  # likewise to write their part of the weights
        self.stop_asked, self.stopped_rank = False, 0
        self.failed: PacelineError | None = None  # what ends the run before it is done
        self.over = False
        self.final_figures: dict[int, dict[str, Any]] = {}
        self.followers_left: dict[int, dict[str, Any]] = {}
        context, job, run = self.context, self.job, self.run
        assert job.total_steps is not None
        self.total_steps = job.total_steps
        self.evaluator = WorkersEvaluator(
            job,
            self.peers,
            version=lambda: self.version,
            attend=self._attend,
            step_schedule=lambda metrics: self._order("metrics", figures=metrics),
        )
        self.evaluations = Evaluations(run, self.evaluator, self.saves, self.callbacks)
        self.callbacks.obey = self._export_weights
        self.membership_log = MembershipLog(
            run.run_dir / EVENTS if run.run_dir is not None else None,
            goes_on=context.num_starts > 1,
        )
        self.update_log = UpdateLog(run, self.turns)
        run.parts = [
            self.update_log,
            self.membership_log,
            self.evaluations,
            self.saves,
            self.callbacks,
        ]
        self.begin(task.rendezvous)
        num_again = self.update_log.go_on(self.history)
        if context.num_starts > 1:
            server_deaths = context.deaths[: self.sync.server]  # servers are the first ranks
            self.membership_log.note_restart(server_deaths, step=self.step, updates=num_again)
            updates = (
                "1 update was lost and is"
                if num_again == 1
                else f"{num_again} updates were lost and are"
            )
            self.log.display.say(f"{updates} made again")
        self.meetings = (
            Meetings.of(
                job.optimizers,
                shards,
                num_workers=self.sync.workers,
                number=self.version,
            )
            if job.own_step is not None
            else None
        )
        self.clock = self._begin_clock()

    def _begin_clock(self) -> Clock:
        sync = self.sync
        end = self.turns.before(self._next_stop())
        if (
            self.run.is_copied
            and self.version
            and self.history.is_exactly(self.turns.before(self.step))
        ):
            end = self.version  # what the coordinator before this one had not ended here
        # What servers hold of a step of the job's own is known when each of its updates is made.
        return Clock(
            num_workers=sync.workers,
            num_servers=0 if self.job.own_step is not None else sync.server,
            first=self.history.first,
            later=self.history.later,
            end=end,
            staleness=None if sync.staleness == "inf" else sync.staleness,
        )

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
            self.log.display.say(
                "this host's memory has no room for copies of the state: if a server is lost, the run goes on "
                "from the last checkpoint"
            )
            return
        self.copying = set(self.peers.followers)
        self.peers.tell_followers("copy", version=self.version)
        self.context.beat("copy")
        self.copy(self.run.figures())

    @property
    def _is_complete(self) -> bool:
        """Whether all workers are here that the run needs: else it could end before one of them has come."""
        return self.turns.is_stale or len(self.peers.workers) == self.sync.workers

    def tell(self, message: dict[str, Any]) -> None:
        self.inbox.put((Peer(Role.SERVER, self.number, 0), message))

    def check(self, peer: Peer) -> None:
        if peer.role != Role.SERVER:
            super().check(replace(peer, role=Role.DATA))
            return
        self.peers.check_server(peer)

    def welcome(self, connection: Connection, peer: Peer) -> None:
        if peer.role == Role.DATA:
            super().welcome(connection, peer)
        else:
            self.peers.listen(connection, peer)

    def serve(self) -> dict[str, Any]:
        """Coordinate until the last step. Returns the summary.

        Raises:
            Preempted: the run was asked to stop; it saved a checkpoint.
            WireError: a peer that the others need is gone.
        """
        try:
            while self.settings.controller is not None and self.peers.lacks_followers:
                self._hear()  # callbacks may want all weights
            with self._callbacks_may_fail():
                for part in self.run.parts:
                    part.restored(self.checkpoint)
            while not self.over:
                self._attend()
                self._advance()
            return self._finish()
        finally:
            self.close()

    def close(self) -> None:
        super().close()
        self.log.close()
        self.peers.close()

    # --- What comes in -------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Hear what comes in, or look up after a moment; don't wait for those who are silent."""
        self._hear()
        self.stop_asked |= self.context.stop_signal is not None
        self._give_up_silent()
        self.peers.tell_workers_alive()

    def _hear(self) -> None:
        try:
            with waiting:
                peer, message = self.inbox.get(timeout=LOOK_S)
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
        if "sums" in message and (problem := self.evaluator.fault(message)):
            return problem
        if (
            "idle" in message
            and message["deaths"] > sum(self.context.deaths) + self.context.restarts
        ):
            return f"it says that it died {message['deaths']} times"
        if "left" in message and not self.over:
            return "it left before the run was over"
        if message.keys() & {"finished", "sums", "idle"} and not self.peers.workers[worker].orders:
            return f"it said '{next(iter(message))}' and was not asked"
        return None

    def _hear_worker(self, worker: int, message: dict[str, Any]) -> None:
        self.peers.workers[worker].heard_s = time.monotonic()
        self.context.beat("reduce")
        if "alive" in message:  # a step may be long: servers that wait for it are not stuck
            self.peers.tell_followers_alive()
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
        self.peers.workers[
            worker
        ].orders -= 1  # now: while callbacks hear of an evaluation, it may be lost and come back
        if "finished" in message:
            self.clock.finished(worker, message["finished"])
            self.reports[message["finished"]][worker].update(message)
        elif "sums" in message:
            self.evaluator.add(worker, message)
        elif "idle" in message:
            if self.job.own_validate is not None and not self.settings.is_trial:
                check_monitored(self.shelf.schedule, self.job, message["measured"])
            self.membership_log.note_deaths("worker", worker, message["deaths"])
            if self.membership_log.note_rejoined(worker, self.step):
                self.log.display.say(f"worker {worker} is back")

    def _end_meeting(self) -> None:
        """Do what comes of what all workers brought to a meeting within a step, once all is there."""
        assert self.meetings is not None
        result = self.meetings.take_result()
        if isinstance(result, Sums):
            self.peers.tell_workers({"met": result.number, "values": result.values})
        elif result is not None:
            self._order(
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
        if not self.turns.is_stale:
            raise WireError(
                f"worker {peer.number} is gone: {error}",
                hint="--resume goes on from the last checkpoint",
            )
        self.peers.remove_worker(peer.number)
        self.membership_log.note("worker_lost", worker=peer.number, step=self.step, why=str(error))
        keeps = [
            number
            for number in self.clock.ready()
            if peer.number in self.clock.updates[number].workers.values()
        ]
        self._dismiss(peer, keeps=keeps)
        for update in self.clock.leave(peer.number):
            self.reports.pop(update, None)
            self.squares.pop(update, None)
            self._order("drop", update=update)
        self.log.display.say(f"worker {peer.number} is gone ({error}); its samples go to others")
        self.evaluator.lose_worker()

    def _dismiss(self, peer: Peer, *, keeps: list[int]) -> None:
        self._order("dismiss", worker=peer.number, incarnation=peer.incarnation, keeps=keeps)

    def _give_up_silent(self) -> None:
        """Under staleness the others go on without a worker that stalls; see `Peers.silent`."""
        if self.turns.is_stale:
            for peer, error in self.peers.silent():
                self._lose(peer, error)

    # --- What is done about it -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Make what is complete, stop where something is due, and give idle workers something to do."""
        if self.peers.lacks_followers:
            return
        ready = self.clock.ready()
        for update in ready:
            self._make_update(update)
        if self._is_asked_to_stop or self.callbacks.want_attention:
            begun = self.turns.begun(max(self.clock.cursor, self.clock.version))
            self.clock.end = min(self.clock.end, self.turns.before(begun))
        if self.clock.is_drained and self._is_complete:
            self._stop_here()
        if ready and not self.clock.is_drained:
            self._copy()
        self._open_next()
        if not self.over:
            for _ in range(LEASES):  # everybody's first, then the next ones
                for number, worker in list(self.peers.workers.items()):
                    if worker.orders < LEASES and (lease := self.clock.lease(number)) is not None:
                        step, place = self.turns.place(lease.turn)
                        self.peers.say(
                            number,
                            {
                                "lease": lease.update,
                                "step": step,
                                "part": place if self.turns.is_stale else lease.part,
                                "version": max(lease.version, self.clock.version),
                            },
                        )

    def _open_next(self) -> None:
        """Let servers update slice by slice, if the loss of the next update is known and nothing is due before it.

        In a run's first step nothing is updated before it is known what the model uses.
        """
        update = next(iter(self.clock.updates), None)
        if (
            update is None
            or update == self.opened
            or self.turns.is_stale
            or self.clock.version == 0
        ):
            return
        reports = self.reports.get(update, {})
        if len(reports) == self.sync.workers and self.shelf.takes_slices:
            self.opened = update
            loss, count, scale = self._sums(update)
            check_loss(loss, count, [], self.step)
            self._order("open", update=update, scale=scale)

    def _sums(self, update: int) -> tuple[float, float, float]:
        """The loss, the count of an update, and what its gradient is to be scaled by."""
        reports = self.reports[update].values()
        loss, count = sum(r["loss"] for r in reports), sum(r["count"] for r in reports)
        if all(r["is_mean"] for r in reports) or not count:
            return loss, count, 1.0
        return loss, count, self.turns.part(self.clock.updates[update].turn) / count

    def _make_update(self, update: int) -> None:
        version, turn = self.clock.version, self.clock.updates[update].turn
        loss, count, scale = self._sums(update)
        check_loss(loss, count, [], self.step)
        reports = self.reports.pop(update).values()
        unused = set.intersection(*(set(r["unused"]) for r in reports))
        if unused and not self.saw_unused:
            self.saw_unused = True
            check_used(
                {name: float(name not in unused) for name in self.shelf.trainable}, self.step
            )
        # Of the mean over the update's own samples.
        norm = math.sqrt(self.squares.pop(update, 0.0)) * scale / self.turns.part(turn)
        stale = version - min(r["version"] for r in reports)
        rate = 1.0 / max(1.0, stale / self.turns.width) if self.sync.damping == "inverse" else 1.0
        if self.meetings is not None:
            self._order("end", turn=turn, loss=loss / count)
        else:
            self._order(
                "make",
                update=update,
                turn=turn,
                scale=scale,
                clip=clip_factor(norm, self.job.clip),
                rate=rate,
                unused=sorted(unused),
                loss=loss / count,
            )
        self.clock.made(update)
        if self.settings.observer is not None and self.meetings is None:
            self.peers.tell_workers({"made": turn, "loss": loss / count})
        digest = sum(r["digest"] for r in reports)
        self.update_log.add(turn, loss=loss, count=count, digest=digest, norm=norm, stale=stale)

    def _next_stop(self) -> int:
        """The next step at which all that was given out must be done: to save, to end an epoch, or as the last."""
        stops, controller = [self.total_steps], self.settings.controller
        if self.settings.save_every:
            stops.append((self.step // self.settings.save_every + 1) * self.settings.save_every)
        tells_epochs = controller is not None and "on_epoch" in controller.hooks
        if tells_epochs or self.job.validation is not None:
            stops.append(self.order.epoch_end(self.step))
        return min(stops)

    def _stop_here(self) -> None:
        """Nothing is on its way: do what is due, then go on or let the run be over."""
        run = self.run
        with self._callbacks_may_fail():
            if self.callbacks.want_attention:
                self.callbacks.take()
            if self._leaves_at_once:
                run.due.discard("evaluate")
            if run.step >= self.total_steps:  # what is saved then is the last
                run.due = {"evaluate"} | run.due - {"save"}
            if run.step > 0:
                run.settle()
            if run.ended is not None and run.step > 0:
                run.due.add("evaluate")
                run.settle()
        self.over = run.step >= self.total_steps or self._is_asked_to_stop
        if not self.over:
            self.clock.end = self.turns.before(self._next_stop())
        self.peers.excuse_silence()
        self.update_log.began_s = time.monotonic()

    @contextmanager
    def _callbacks_may_fail(self) -> Iterator[None]:
        """Let a callback that fails end the run where it is, with all peers sent home."""
        try:
            yield
        except CallbackError as error:
            self.failed = error

    @property
    def _is_asked_to_stop(self) -> bool:
        return self.stop_asked or self.run.ended is not None or self.failed is not None

    @property
    def _leaves_at_once(self) -> bool:
        """Whether a signal asked to stop, and neither callbacks nor the schedule need the evaluation of this epoch."""
        return (
            self.stop_asked
            and self.callbacks.control is None
            and not waits_for_evaluations(self.shelf.schedule, self.job)
        )

    def _export_weights(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have all servers write their parts of the weights, and see them complete before anybody removes them."""
        self.exporting = set(self.peers.followers)
        self.peers.tell_followers("export", step=self.run.step)
        answer = self.saves.export_weights(order)
        while self.exporting:
            self._hear()
        return answer

    def begin_save(self, *, last: bool) -> None:
        super().begin_save(last=last)
        self.peers.tell_followers("save", step=self.run.step, samples=self.run.samples, last=last)

    def keep_alive(self) -> None:
        """While callbacks or a save are waited for, those who wait with this server know that it lives. Called
        on another thread where callbacks run in this process, while peers come and go."""
        self.peers.tell_workers_alive()
        self.peers.tell_followers_alive()

    def _order(self, do: str, **values: Any) -> None:
        """Have every server do something, this one last; see `Server.orders`."""
        self.peers.tell_followers(do, **values)
        self.orders[do](**values)

    # --- The end -------------------------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        self.failed = self.failed or self._why_early()
        with (
            signs_of_life(self.keep_alive, every_s=self.context.timeout_s / 8),
            self._callbacks_may_fail(),
        ):
            if self.failed is not None:
                self.saves.save_before(self.failed)
            else:
                for part in self.run.parts:
                    part.finished()
        self._part()
        if self.failed is not None:
            raise self.failed
        return self._summary()

    def _why_early(self) -> PacelineError | None:
        """Return why the run ends before it is done, if it does."""
        run, sent = self.run, self.context.stop_signal
        if run.step < self.total_steps and run.ended is None:
            why = signal.Signals(sent).name if sent else f"a signal to rank {self.stopped_rank}"
            return Preempted(f"stopped by {why} after step {run.step}")
        return None if run.step else run.without_steps()

    def _part(self) -> None:
        """Send everybody home and hear what they have counted."""
        for number in list(self.peers.workers):
            self.peers.say(number, {"over": True, "version": self.clock.version})
        while not all(number in self.final_figures for number in self.peers.workers):
            self._hear()
            self._give_up_silent()
        self.check_history(self.version)
        for connection in self.peers.followers.values():
            connection.send_message({"over": True, "version": self.version})
        while len(self.followers_left) < len(self.peers.followers):
            self._hear()

    def _summary(self) -> dict[str, Any]:
        self.context.beat("end")
        reports = [
            {"peak_memory_bytes": self.log.memory.bytes(), "core_wait_s": self.core_wait.seconds},
            *self.final_figures.values(),
            *self.followers_left.values(),
        ]
        core_wait_s = max(figures["core_wait_s"] for figures in reports)
        if any(
            device.kind == "cuda" for device in self.settings.devices
        ):  # what servers hold is no GPU's
            reports = list(self.final_figures.values()) or reports
        return {
            **self.run.summary(),
            "core_wait_s": core_wait_s,
            "peak_memory_bytes": max(figures["peak_memory_bytes"] for figures in reports),
            "workers": {
                str(number): {
                    key: value
                    for key, value in sorted(figures.items())
                    if key != "peak_memory_bytes"
                }
                for number, figures in sorted(self.final_figures.items())
            },
        }
