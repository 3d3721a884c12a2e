"""A parameter server on torch.distributed.rpc, with asynchronous execution as PyTorch's tutorials have it.

A call carries a worker's gradients and brings the weights back. Asynchronously the server updates at every call, and a
worker computes its next gradient while a call is on its way; synchronously a future completes when all have called.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.contenders.servers.perceptron import job, model
from benchmarks.contenders.servers.work import BATCH, WARM_UP_UPDATES, Meter


class ParameterServer:
    """What the server's process holds; calls find it by `HERE`."""

    def __init__(self, workers: int, updates: int, synchronous: bool) -> None:
        self.parameters = list(model().parameters())
        self.optimizer = job().optimizer(self.parameters)
        self.gathers = workers if synchronous else 1
        self.updates_left = updates
        self.lock, self.done = threading.Lock(), threading.Event()
        self.meter = Meter()
        self.gathered: list[tuple[list[Tensor], float]] = []
        self.waiting: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def push(self, gradients: list[Tensor], loss: float) -> torch.futures.Future[list[Tensor]]:
        with self.lock:
            self.gathered.append((gradients, loss))
            answer = self.waiting
            if len(self.gathered) == self.gathers:
                self._update()
        return answer

    def _update(self) -> None:
        (total, loss), *others = self.gathered
        for gradients, other in others:
            torch._foreach_add_(total, gradients)
            loss += other
        if others:
            torch._foreach_mul_(total, 1 / self.gathers)
        for p, gradient in zip(self.parameters, total, strict=True):
            p.grad = gradient
        self.optimizer.step()
        self.gathered, answer, self.waiting = [], self.waiting, torch.futures.Future()
        answer.set_result([p.detach() for p in self.parameters])
        if self.updates_left:
            self.meter.updated(loss / self.gathers)
            self.updates_left -= 1
        if not self.updates_left:
            self.done.set()


HERE: list[ParameterServer] = []


@rpc.functions.async_execution
def push_and_pull(gradients: list[Tensor], loss: float) -> torch.futures.Future[list[Tensor]]:
    return HERE[0].push(gradients, loss)


def _join(folder: str, name: str, rank: int, workers: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=120)
    rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)


def serve(folder: str, workers: int, updates: int, synchronous: bool) -> None:
    HERE.append(ParameterServer(workers, updates, synchronous))
    _join(folder, "server", 0, workers)
    HERE[0].done.wait()
    HERE[0].meter.report(BATCH * HERE[0].gathers)


def work(folder: str, number: int, workers: int, synchronous: bool) -> None:
    torch.manual_seed(number)
    _join(folder, f"worker{number}", number + 1, workers)
    task, net = job(), model()
    parameters = list(net.parameters())
    loader = DataLoader(task.data, batch_size=BATCH, shuffle=True, drop_last=True)
    called: torch.futures.Future[list[Tensor]] | None = None

    def pull() -> None:
        if called is not None:
            with torch.no_grad():
                torch._foreach_copy_(parameters, called.wait())

    while True:  # until the server has its updates and everybody is ended
        for input, target in loader:
            if synchronous:
                pull()
            loss = task.loss(net(input), target)
            loss.backward()
            gradients = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            if not synchronous:
                pull()
            called = rpc.rpc_async("server", push_and_pull, args=(gradients, loss.item()))


def main(updates: int, workers: int, synchronous: bool) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    total = WARM_UP_UPDATES + updates
    with tempfile.TemporaryDirectory(prefix="rpc-") as folder:
        server = context.Process(
            target=_leave_after, args=(serve, folder, workers, total, synchronous)
        )
        others = [
            context.Process(
                target=_leave_after, args=(work, folder, number, workers, synchronous), daemon=True
            )
            for number in range(workers)
        ]
        for process in (server, *others):
            process.start()
        server.join()
        for process in others:
            process.kill()
            process.join()
    raise SystemExit(server.exitcode)


def _leave_after(role: object, *arguments: object) -> None:
    """Without a goodbye: agents would wait for calls that nobody answers any more."""
    role(*arguments)  # type: ignore[operator]
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--synchronous", action="store_true")
    options = parser.parse_args()
    main(options.updates, options.workers, options.synchronous)
