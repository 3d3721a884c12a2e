"""A worker: asks for a part of a step, fetches weights, computes gradients, and sends them off while it does."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from paceline.errors import JobError
from paceline.job import Job
from paceline.launch.context import RankContext
from paceline.plan import Plan
from paceline.runtime.evaluate import evaluation_sums
from paceline.runtime.feed import MicroBatch, Part, training_feed
from paceline.runtime.loop import Settings
from paceline.runtime.memory import PeakMemory
from paceline.runtime.order import Order, Window
from paceline.runtime.servers.roles import Meeting, servers_of
from paceline.runtime.servers.shelf import deal_out
from paceline.runtime.stepper import Stepper, check_loss
from paceline.strategies.layout import Extent
from paceline.strategies.mesh import Mesh
from paceline.strategies.server.run import Link, Pusher, pull
from paceline.strategies.server.shards import fingerprint
from paceline.strategies.server.wire import Peer, Role, WireError, connect

_CONNECT_S = 60.0


class Worker:
    """One worker of a run. It holds the whole model and no optimizer state that matters."""

    def __init__(self, context: RankContext, job: Job, plan: Plan, settings: Settings, *, number: int,
                 meeting: Meeting) -> None:
        context.beat("build")
        self.context, self.job, self.plan, self.settings, self.number = context, job, plan, settings, number
        self.memory = PeakMemory(context.device)
        self.stepper = Stepper(job, plan, Mesh(plan.axes.sizes(), 0), context.device,
                               devices=settings.devices)
        shards = deal_out(self.stepper.model, self.stepper.optimizer, servers_of(plan).server)
        layout, incarnation = fingerprint(shards), secrets.randbits(31)

        def reach(server: int, role: Role) -> Any:
            return connect(meeting.address(server), Peer(role, number, incarnation), secret=context.secret,
                           layout=layout, timeout_s=_CONNECT_S)

        self.control = reach(0, Role.CONTROL)
        self.links = [Link(reach(server, Role.DATA), shard, self.stepper.parameters, worker=number,
                           incarnation=incarnation) for server, shard in enumerate(shards)]
        self.pusher = Pusher(self.stepper.parameters, self.links)
        self.stepper.synchronisers.append(self.pusher)
        assert job.num_samples is not None
        self.order = Order(job.num_samples, job.batch, job.seed, job.drop_last)
        self.windows: Iterator[tuple[Window, list[MicroBatch]]] | None = None
        self.version = -1
        self.observed_step: int | None = None
        self.buffers: dict[str, torch.Tensor] | None = {
            name: buffer.detach().clone() for name, buffer in self.stepper.model.named_buffers()}
        self.is_over = threading.Event()
        threading.Thread(target=self._tell_alive, name="paceline-alive", daemon=True).start()
        self.waits = {"waited_for_step_s": 0.0, "waited_for_weights_s": 0.0}

    def run(self) -> None:
        """Work until the coordinator says that it is over."""
        try:
            self.control.send_message({"idle": True})
            while True:
                self.context.beat("input")
                began_s = time.perf_counter()
                order = self.control.receive_message()
                self.waits["waited_for_step_s"] += time.perf_counter() - began_s
                if "over" in order:
                    break
                answer = self._compute(order) if "lease" in order else self._evaluate(order)
                self.control.send_message({**answer, "stop": self.context.stop_signal is not None})
            if self.settings.observer is not None:
                self._fetch(order)
            self.control.send_message({"left": self._figures()})
            self.context.beat("end")
        finally:
            self.is_over.set()
            for link in self.links:
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
        """Have weights of at least the version that the order names."""
        if self.version < order["version"]:
            self.version, waited_s = pull(self.links, order["version"])
            self.waits["waited_for_weights_s"] += waited_s
        observer = self.settings.observer
        if observer is not None and self.observed_step is not None:
            observer.weights(self.observed_step, self.stepper, order["loss"])
            self.observed_step = None

    def _compute(self, order: dict[str, Any]) -> dict[str, Any]:
        step, observer = order["step"], self.settings.observer
        self.context.step = step + 1
        self._fetch(order)
        window, batches = self._samples(step, order["part"])
        if observer is not None:
            observer.samples(step, batches)
            observer.gradients(step, _Elsewhere(self.number))  # type: ignore[arg-type]
            self.observed_step = step
        self.pusher.update = order["lease"]
        tallies, used = self.stepper.backward(window, batches, step=step, part=order["part"], beat=self.context.beat)
        self._check_buffers()
        loss = float(sum(float(tally.total) for tally in tallies))
        count = float(sum(float(tally.count) for tally in tallies))
        check_loss(loss, max(count, 1.0), tallies, step)  # whether anything counts is known of all parts together
        return {"finished": order["lease"], "loss": loss, "count": count, "version": self.version,
                "is_mean": all(tally.is_mean for tally in tallies),
                "unused": sorted(self.stepper.parameters.keys() - used)}

    def _samples(self, step: int, part: int) -> tuple[Window, list[MicroBatch]]:
        """This worker's samples of a step: its share if all work at it, else all of it."""
        job, shares = self.job, self.settings.shares
        whole = len(shares) == 1
        own = Part((1,), 0, self.plan.num_microbatches) if whole else Part(shares, part, self.plan.num_microbatches)
        if self.windows is None or whole:
            end = job.total_steps if not whole else step + 1
            assert end is not None
            self.windows = training_feed(job.data, order=self.order, batch=job.batch, seed=job.seed,
                                         drop_last=job.drop_last, part=own, steps=range(step, end), epochs=job.epochs,
                                         loader_workers=0 if whole else self.settings.loader_workers)
        return next(self.windows)

    def _evaluate(self, order: dict[str, Any]) -> dict[str, Any]:
        self._fetch(order)
        part = Part((1,) * order["of"], order["part"], self.plan.num_microbatches)
        sums = evaluation_sums(self.stepper.model, self.stepper.layout, self.job, self.job.validation, part=part,
                               mesh=self.stepper.mesh, device=self.context.device, beat=self.context.beat)
        return {"sums": order["evaluate"], "values": sums.tolist()}

    def _check_buffers(self) -> None:
        """Refuse a model whose forward changes its buffers; looked at after the first step."""
        if self.buffers is None:
            return
        now = dict(self.stepper.model.named_buffers())
        changed = [name for name, before in self.buffers.items() if not torch.equal(before, now[name])]
        self.buffers = None
        if changed:
            raise JobError(f"training changes the buffer '{changed[0]}', and servers keep parameters alone",
                           hint="GroupNorm or LayerNorm in place of BatchNorm, or a data=N plan")

    def _figures(self) -> dict[str, Any]:
        return {"peak_memory_bytes": self.memory.bytes(), **self.waits,
                "pushed_bytes": sum(link.connection.sent_bytes for link in self.links),
                "pulled_bytes": sum(link.connection.received_bytes for link in self.links)}


class _Elsewhere:
    """What a worker has of a step's complete gradient: nothing. Its samples are those of its part."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.held: dict[str, torch.nn.Parameter] = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.layout = _Nothing()


class _Nothing:
    owned: frozenset[str] = frozenset()
    owned_buffers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.extents: dict[str, Extent] = {}
