"""A worker: asks for a part of a step, fetches weights, computes gradients, and sends them off while it does."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.checkpoint.read import open_checkpoint
from paceline.job.order import Order, Window
from paceline.launch.process.malloc import HeapTrimmer
from paceline.launch.process.memory_use import PeakMemory
from paceline.model.copy_on_write import TensorSnapshot
from paceline.runs.folder import checkpoint_of
from paceline.servers.connection import Pusher, ServerConnection
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.order_inbox import OrderInbox
from paceline.servers.roles import RankTask, Roles, servers_of
from paceline.servers.rows import Rows
from paceline.servers.served_steps import ServedSteps
from paceline.servers.server_state import ShownState, deal_out
from paceline.servers.update_order import UpdateOrder
from paceline.servers.wire import Peer, Role, WireError, connect
from paceline.strategies.mesh import Mesh
from paceline.strategies.server.cost import WITHOUT_STATISTICS
from paceline.strategies.server.shards import fingerprint
from paceline.strategies.server.tables import tables
from paceline.torch_private.autograd import version_of
from paceline.torch_private.optimizers import mark_stepped
from paceline.training.cores import CoreWait
from paceline.training.evaluate import Evaluator
from paceline.training.feed import DataShard, MicroBatch, is_stream, training_feed
from paceline.training.loss import LossSum
from paceline.training.optimizers.schedule import step_schedule
from paceline.training.own_step.followers import followed
from paceline.training.parts.copied_state import open_copies
from paceline.training.refusals import check_loss
from paceline.training.stepper import Stepper

_CONNECT_S = 60.0


class Worker:
    """One worker of a run. It holds the whole model and no optimizer state that matters."""

    def __init__(self, task: RankTask, *, number: int) -> None:
        context, job, plan, settings = task.context, task.job, task.plan, task.settings
        context.beat("build")
        self.context, self.job, self.plan = context, job, plan
        self.settings, self.number = settings, number
        self.sync = servers_of(plan)
        self.memory, self.heap = PeakMemory(context.device), HeapTrimmer(context.device.type)
        self.core_wait = CoreWait()
        self.stepper = Stepper(
            job, plan, Mesh.of(plan, 0), context.device, devices=settings.devices
        )
        self.stepper.logs_nothing = "servers don't record what steps log"
        shards = deal_out(self.stepper.model, self.stepper.optimizer, plan)
        layout, incarnation = fingerprint(shards), secrets.randbits(31)

        def reach(server: int, role: Role) -> Any:
            return connect(
                task.rendezvous.address(server),
                Peer(role, number, incarnation),
                secret=context.secret,
                layout=layout,
                timeout_s=_CONNECT_S,
            )

        self.control = reach(0, Role.CONTROL)
        self.links = [
            ServerConnection(
                reach(server, Role.DATA),
                shard,
                worker=number,
                incarnation=incarnation,
                uplink=task.uplink,
                compress=plan.modifiers.compress,
            )
            for server, shard in enumerate(shards)
        ]
        self.frozen: frozenset[str] = frozenset()
        tables_of_rows = tables(self.stepper.model)
        if self.stepper.freezing.changes and job.own_step is None:
            self._send_zeros_for_frozen(tables_of_rows)
        for name in tables_of_rows:  # no rank that works holds them
            del self.stepper.parameters[name], self.stepper.local_parameters[name]
        self.rows = Rows(tables_of_rows, self.links)
        self.arrivals = WeightArrivals(
            self.stepper.parameters, self.links, lambda: self.inbox.settled()
        )
        self.order = Order.of(job)
        self.turns = UpdateOrder(self.order, self.sync)
        self.serves = Roles.of(plan, context.rank).server is not None
        # A schedule may change the model, or what its forward reads, beside learning rates. So each
        # worker steps one of its own. Beside a server in the same process, which steps the same
        # schedule's functions, it is stepped only to catch up after a resume.
        self.schedule: Any = self.stepper.schedule
        self.scheduled: int | None = None  # steps that it has taken; None before the first order
        self.windows: Iterator[tuple[Window, list[MicroBatch]]] | None = None
        self.inbox = OrderInbox(
            self.control,
            self.arrivals,
            takes_any=self.sync.staleness != 0,
            alive=partial(context.beat, "input"),
        )
        self.served: ServedSteps | None = None
        if job.own_step is not None:
            self.served = self._serve_steps()
        else:
            self.pusher = Pusher(self.stepper.parameters, self.links, self.arrivals.settle)
            self.stepper.synchronisers += [self.rows, self.pusher]
        self.observed_step: int | None = None
        self.has_looked_at_attributes = False
        self.unserved = {
            name: (TensorSnapshot(tensor), version_of(tensor))
            for name, tensor in self._unserved().items()
        }
        self.is_over = threading.Event()
        threading.Thread(target=self._tell_alive, name="paceline-alive", daemon=True).start()
        self.waited_for_step_s = 0.0

    def _serve_steps(self) -> ServedSteps:
        """Have the stepper take steps of the job's own with servers."""
        stepper, self.inbox.asks = self.stepper, False
        served = ServedSteps(
            stepper.parameters,
            self.links,
            self.arrivals,
            self.control,
            self.inbox.met,
            num_workers=self.sync.workers,
        )
        stepper.loss_number = self.number
        stepper.part = DataShard(self.settings.shares, self.number, self.plan.num_microbatches)

        def update(
            optimizer: str,
            parameters: Mapping[str, torch.nn.Parameter],
            norm: torch.Tensor | None = None,
        ) -> None:
            served.update(optimizer, parameters)
            if self.schedule is not None and not self.serves:
                self._step_schedule(
                    self.schedule.of(optimizer), stepper.optimizer.members[optimizer]
                )

        stepper.step_sync, stepper.named_update = served, update
        return served

    def _send_zeros_for_frozen(self, tables_of_rows: Collection[str]) -> None:
        """What is frozen in a step counts nothing in the norm of its gradient. Before the hooks that send gradients.

        Raises:
            PlanRefused: a table would be trained in some steps alone.
        """
        if names := sorted(
            set().union(*self.stepper.freezing.phases.values).intersection(tables_of_rows)
        ):
            raise PlanRefused(
                f"freeze changes during the run, and rows of '{names[0]}' lie on servers",
                hint="sparse=False in the embedding, or a data=N plan",
            )

        def silence(name: str, p: torch.Tensor) -> None:
            if name in self.frozen and p.grad is not None:
                p.grad.zero_()

        for name, p in self.stepper.parameters.items():
            p.register_post_accumulate_grad_hook(partial(silence, name))

    def run(self) -> None:
        """Work until the coordinator says that it is over."""
        try:
            names = None
            data = self.job.validation
            if not (self.settings.is_trial or data is None or is_stream(data)):
                names = self._evaluator(self.stepper.part).look()
            self.control.send_message(
                {
                    "idle": True,
                    "deaths": self.context.deaths[self.context.rank],
                    "measured": names or [],
                }
            )
            self.inbox.listen()
            while True:
                self.context.beat("input")
                began_s = time.perf_counter()
                order = self.inbox.next()
                self.waited_for_step_s += time.perf_counter() - began_s
                if "over" in order:
                    break
                if self.served is not None and self.served.meeting < 0:
                    self._begin_at(order["version"])
                answer = self._take(order) if "lease" in order else self._evaluate(order)
                self.control.send_message({**answer, "stop": self.context.stop_signal is not None})
                self.heap.poll()
            if self.settings.observer is not None and self.served is None:
                self._fetch(order)
            self.control.send_message({"left": self._figures()})
            self.context.beat("end")
        finally:
            self.is_over.set()
        for link in (
            self.links
        ):  # not if a server is gone: to the others this would look like a worker's end
            link.close()
        self.control.close()

    def _tell_alive(self) -> None:
        """Let the coordinator know of this process's signs of life while it computes, however long that takes."""
        last_s = 0.0
        while not self.is_over.wait(self.context.timeout_s / 8):
            if (sign := self.context.sign).time_s > last_s:
                last_s = sign.time_s
                with suppress(WireError):
                    self.control.send_message({"alive": True})

    def _fetch(self, order: dict[str, Any]) -> None:
        """Begin to put weights of at least the version that the order names in place."""
        self.inbox.fetch(order)
        self.rows.version = order["version"]
        observer = self.settings.observer
        if observer is not None and self.observed_step is not None:
            self.arrivals.settle()
            observer.weights(
                self.observed_step, self._weights(), self.inbox.loss(self.observed_step)
            )
            self.observed_step = None

    def _follow_schedule(self, step: int) -> None:
        """Bring what the schedule has changed to where it is after `step` steps of the run."""
        if self.schedule is None:
            return
        if self.serves and self.scheduled is not None:
            self.arrivals.settle()  # the server has stepped its own before its weights are complete
            return
        for _ in range(self.scheduled or 0, step):
            self._step_schedule(self.schedule, self.stepper.optimizer)
        self.scheduled = max(step, self.scheduled or 0)

    @staticmethod
    def _step_schedule(schedule: Any, optimizer: Any) -> None:
        mark_stepped(optimizer)  # schedules look whether a step was taken, and servers take them
        step_schedule(schedule)

    def _take(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compute a part of a step, or take a step of the job's own. Returns what the coordinator is told."""
        step, observer = order["step"], self.settings.observer
        self.context.step = step + 1
        if self.served is None:
            self._fetch(order)
            self._follow_schedule(step)
        window, batches = self._samples(step, order["part"])
        if observer is not None:
            observer.samples(step, batches)
            observer.gradients(step, ShownState(self.number))  # type: ignore[arg-type]
        unused = (
            self._compute(order, window, batches)
            if self.served is None
            else self._take_own_step(order, window, batches)
        )
        self._check_unserved()
        version = self.arrivals.version if self.served is None else step
        return {"finished": order["lease"], "version": version, "unused": unused}

    def _compute(
        self, order: dict[str, Any], window: Window, batches: list[MicroBatch]
    ) -> list[str]:
        """Send the gradient of a part of a step. Returns the parameters that it does not use."""
        step, stepper = order["step"], self.stepper
        self.frozen = stepper.freezing.at(step, window.epoch)
        if self.settings.observer is not None:
            self.observed_step = step
        self.pusher.update = self.rows.update = order["lease"]
        if self.arrivals.are_here():
            self.arrivals.settle()

        def tell(tallies: list[LossSum]) -> None:
            loss = float(sum(float(tally.total) for tally in tallies))
            count = float(sum(float(tally.count) for tally in tallies))
            # Whether anything counts is known of all parts together.
            check_loss(loss, max(count, 1.0), tallies, step)
            self._tell(order, batches, loss, count, all(tally.is_mean for tally in tallies))

        with self.arrivals.watched(stepper.model):
            used = stepper.backward(
                window,
                batches,
                step=step,
                part=order["part"],
                beat=self.context.beat,
                tell=tell,
            )
        return sorted(stepper.parameters.keys() - used)

    def _take_own_step(
        self, order: dict[str, Any], window: Window, batches: list[MicroBatch]
    ) -> list[str]:
        """Take a step of the job's own: what it doesn't use is known of each update."""
        step, observer = order["step"], self.settings.observer
        result = self.stepper.step(window, batches, step=step, beat=self.context.beat)
        (loss,) = result.losses
        if observer is not None:
            observer.weights(step, self._weights(), loss)
        self._check_unserved()
        self._tell(order, batches, loss, 1.0, is_mean=True)
        return []

    def _tell(
        self,
        order: dict[str, Any],
        batches: list[MicroBatch],
        loss: float,
        count: float,
        is_mean: bool,
    ) -> None:
        """Tell the coordinator of a loss."""
        self.control.send_message(
            {
                "told": order["lease"],
                "loss": loss,
                "count": count,
                "is_mean": is_mean,
                "digest": sum(batch.digest for batch in batches),
            }
        )

    def _begin_at(self, version: int) -> None:
        """The weights after so many steps of the job's own: servers send those that they update, and followers, which
        each rank moves by itself, come from what the servers went on from."""
        assert self.served is not None
        self.context.beat("restore")
        self.served.begin_at(version)
        if version and self.settings.run_dir is not None:
            copies, servers = self.context.copies, range(self.sync.servers)
            # The servers' next copies are of updates that this worker has a part in.
            checkpoint = (
                open_copies(version, [(copies, server) for server in servers])
                if copies is not None and (copies.newest(servers) == version)
                else open_checkpoint(checkpoint_of(self.settings.run_dir, version))
            )
            if self.schedule is not None:
                for name, then in checkpoint.document["schedule"].items():
                    for _ in range(then.get("last_epoch", 0)):
                        self._step_schedule(
                            self.schedule.of(name), self.stepper.optimizer.members[name]
                        )
            for name in followed(self.job.followers, self.stepper.local_parameters):
                checkpoint.read_into(f"parameters/{name}", self.stepper.local_parameters[name].data)

    def _samples(self, step: int, part: int) -> tuple[Window, list[MicroBatch]]:
        """A part of a step's samples; with staleness nobody knows which comes next."""
        job, follows = self.job, self.sync.staleness == 0
        if self.windows is None or not follows:
            end = job.total_steps if follows else step + 1
            assert end is not None
            self.windows = training_feed(
                job,
                order=self.order,
                steps=range(step, end),
                part=DataShard(self.settings.shares, part, self.plan.num_microbatches),
                loader_workers=self.settings.loader_workers if follows else 0,
            )
        return next(self.windows)

    def _evaluate(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.served is None:
            self._fetch(order)
            self.arrivals.settle()
            self._follow_schedule(self.turns.steps(order["version"]))
        part = DataShard((1,) * order["of"], order["part"], self.plan.num_microbatches)
        sums, refused = self._evaluator(part).sums(self.job.validation)
        return {
            "sums": order["evaluate"],
            "names": list(sums),
            "values": [row.tolist() for row in sums.values()],
            "refused": [] if refused is None else [str(refused)],
        }

    def _evaluator(self, part: DataShard) -> Evaluator:
        stepper, context = self.stepper, self.context
        return Evaluator(
            stepper.model, stepper.parts, self.job, part, stepper.mesh, context.device, context.beat
        )

    def _unserved(self) -> dict[str, torch.Tensor]:
        """What nothing may change of a model, by name: buffers and frozen parameters, but those that follow others."""
        model = self.stepper.model
        unserved = {
            **dict(model.named_buffers()),
            **{name: p for name, p in model.named_parameters() if not p.requires_grad},
        }
        moving = followed(self.job.followers, unserved)
        return {name: tensor for name, tensor in unserved.items() if name not in moving}

    def _check_unserved(self) -> None:
        """Refuse a model whose forward changes what servers don't keep, in whatever step it first does; tell of other
        attributes once."""
        now = self._unserved()
        changed = [
            name
            for name, (seen, version) in self.unserved.items()
            if name not in now
            or (
                version_of(now[name]) != version or seen.is_changed()
                if now[name] is seen.tensor
                else not torch.equal(seen.value, now[name])
            )
        ]
        if changed := changed or self.stepper.attributes.changed_tensors():
            raise JobError(
                f"training changes '{changed[0]}', and servers keep trained parameters alone",
                hint=WITHOUT_STATISTICS,
            )
        if not self.has_looked_at_attributes and (
            attributes := [*self.stepper.attributes.changed(), *self.stepper.job_state.changed()]
        ):
            logger.warning(
                "training changes the attribute '%s', which servers don't save: a resumed run begins with "
                "its first value, unless the learning-rate schedule sets it again",
                attributes[0],
            )
        self.has_looked_at_attributes = True

    def _figures(self) -> dict[str, Any]:
        return {
            "peak_memory_bytes": self.memory.bytes(),
            "core_wait_s": self.core_wait.seconds,
            "waited_for_step_s": self.waited_for_step_s,
            "waited_for_weights_s": self.arrivals.waited_s,
            "pushed_bytes": sum(link.connection.sent_bytes for link in self.links),
            "pulled_bytes": sum(link.connection.received_bytes for link in self.links),
        }

    def _weights(self) -> Any:
        """What this rank has of a step's update: weights. Optimizer, schedule and buffers are the servers'."""
        stepper = self.stepper
        return ShownState(
            stepper.replica, stepper.layout, stepper.parameters, stepper.local_parameters
        )
