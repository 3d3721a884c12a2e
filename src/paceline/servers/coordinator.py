"""Server 0: hands out steps, decides when an update is made, and speaks for the run."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from paceline.base.errors import CallbackError, PacelineError, Preempted
from paceline.launch.process.heartbeats import signs_of_life
from paceline.runs.folder import EVENTS
from paceline.servers.clock import LEASES, Clock
from paceline.servers.evaluation import WorkersEvaluator
from paceline.servers.meetings import Meetings, clip_factor
from paceline.servers.membership import MembershipLog
from paceline.servers.peers import Peers
from paceline.servers.reception import Reception
from paceline.servers.roles import RankTask, rank_of_worker
from paceline.servers.server import Server
from paceline.servers.update_log import UpdateLog
from paceline.servers.wire import Connection, Peer, Role
from paceline.strategies.server.shards import Shard
from paceline.training import state
from paceline.training.optimizers.schedule import waits_for_evaluations
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
        self.opened: int | None = None
        self.saw_unused = False  # whether some update used only a part of the parameters
        self.failed: PacelineError | None = None  # what ends the run before it is done
        context, job, run = self.context, self.job, self.run
        assert job.total_steps is not None
        self.total_steps = job.total_steps
        self.evaluator = WorkersEvaluator(
            job,
            self.peers,
            version=lambda: self.version,
            attend=lambda: self.reception.attend(),
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
            server_deaths = context.deaths[: self.sync.servers]  # servers are the first ranks
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
        self.reception = Reception(
            self,
            self.peers,
            clock=self.clock,
            meetings=self.meetings,
            evaluator=self.evaluator,
            membership=self.membership_log,
            order=self._order,
        )

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
            num_servers=0 if self.job.own_step is not None else sync.servers,
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
            or self.reception.copying
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
        self.reception.copying = set(self.peers.followers)
        self.peers.tell_followers("copy", version=self.version)
        self.context.beat("copy")
        self.copy(self.run.figures())

    @property
    def _is_complete(self) -> bool:
        """Whether all workers are here that the run needs: else it could end before one of them has come.

        Under staleness the end alone waits, for each worker whose process is here and has yet to come.
        """
        if not self.turns.is_stale:
            return len(self.peers.workers) == self.sync.workers
        if self.run.step < self.total_steps:
            return True
        came, board = {peer.number for peer in self.peers.joined}, self.context.board
        to_come = {rank_of_worker(self.plan, n) for n in range(self.sync.workers) if n not in came}
        # The pool's table has the ranks of several trials, by other numbers than their own.
        is_of_this_run = board.num_ranks == self.context.world_size
        return not is_of_this_run or not any(map(board.process, to_come.difference(board.dead)))

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
                self.reception.hear()  # callbacks may want all weights
            with self._callbacks_may_fail():
                self.run.tell("restored", self.checkpoint)
            while not self.reception.over:
                self.reception.attend()
                self._advance()
            return self._finish()
        finally:
            self.close()

    def close(self) -> None:
        super().close()
        self.log.close()
        self.peers.close()

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
        if not self.reception.over:
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
        reports = self.reception.reports.get(update, {})
        if len(reports) == self.sync.workers and self.shelf.takes_slices:
            self.opened = update
            loss, count, scale = self._sums(update)
            check_loss(loss, count, [], self.step)
            self._order("open", update=update, scale=scale)

    def _sums(self, update: int) -> tuple[float, float, float]:
        """The loss, the count of an update, and what its gradient is to be scaled by."""
        reports = self.reception.reports[update].values()
        loss, count = sum(r["loss"] for r in reports), sum(r["count"] for r in reports)
        if all(r["is_mean"] for r in reports) or not count:
            return loss, count, 1.0
        return loss, count, self.turns.part(self.clock.updates[update].turn) / count

    def _make_update(self, update: int) -> None:
        version, turn = self.clock.version, self.clock.updates[update].turn
        loss, count, scale = self._sums(update)
        check_loss(loss, count, [], self.step)
        reports = self.reception.reports.pop(update).values()
        unused = set.intersection(*(set(r["unused"]) for r in reports))
        if unused and not self.saw_unused:
            self.saw_unused = True
            check_used(
                {name: float(name not in unused) for name in self.shelf.trainable}, self.step
            )
        # Of the mean over the update's own samples.
        norm = math.sqrt(self.reception.squares.pop(update, 0.0)) * scale / self.turns.part(turn)
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
        self.reception.over = run.step >= self.total_steps or self._is_asked_to_stop
        if not self.reception.over:
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
        return self.reception.stop_asked or self.run.ended is not None or self.failed is not None

    @property
    def _leaves_at_once(self) -> bool:
        """Whether a signal asked to stop, and neither callbacks nor the schedule need the evaluation of this epoch."""
        return (
            self.reception.stop_asked
            and self.callbacks.controller is None
            and not waits_for_evaluations(self.shelf.schedule, self.job)
        )

    def _export_weights(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have all servers write their parts of the weights, and see them complete before anybody removes them."""
        self.reception.exporting = set(self.peers.followers)
        self.peers.tell_followers("export", step=self.run.step)
        answer = self.saves.export_weights(order)
        while self.reception.exporting:
            self.reception.hear()
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
                self.run.tell("finished")
        self._part()
        if self.failed is not None:
            raise self.failed
        return self._summary()

    def _why_early(self) -> PacelineError | None:
        """Return why the run ends before it is done, if it does."""
        run, sent = self.run, self.context.stop_signal
        if run.step < self.total_steps and run.ended is None:
            why = (
                signal.Signals(sent).name
                if sent
                else f"a signal to rank {self.reception.stopped_rank}"
            )
            return Preempted(f"stopped by {why} after step {run.step}")
        return None if run.step else run.without_steps()

    def _part(self) -> None:
        """Send everybody home and hear what they have counted."""
        for number in list(self.peers.workers):
            self.peers.say(number, {"over": True, "version": self.clock.version})
        while not all(number in self.reception.left for number in self.peers.workers):
            self.reception.hear()
            self.reception.give_up_silent()
        self.check_history(self.version)
        for connection in self.peers.followers.values():
            connection.send_message({"over": True, "version": self.version})
        while len(self.reception.followers_left) < len(self.peers.followers):
            self.reception.hear()

    def _summary(self) -> dict[str, Any]:
        self.context.beat("end")
        reports = [
            {"peak_memory_bytes": self.log.memory.bytes(), "core_wait_s": self.core_wait.seconds},
            *self.reception.left.values(),
            *self.reception.followers_left.values(),
        ]
        core_wait_s = max(figures["core_wait_s"] for figures in reports)
        if any(
            device.kind == "cuda" for device in self.settings.devices
        ):  # what servers hold is no GPU's
            reports = list(self.reception.left.values()) or reports
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
                for number, figures in sorted(self.reception.left.items())
            },
        }
