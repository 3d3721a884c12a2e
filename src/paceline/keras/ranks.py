"""The ranks of a Keras model: the calling process is the first, and forks of it are the others.

Keras's own loop runs in the calling process, with its callbacks, its data and its model. Of each batch every rank
computes a part. Between steps, workers are told new values of variables; after any other change they are forked anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from paceline.errors import DriftError, UsageError
from paceline.keras import first_step
from paceline.keras.computation import KINDS, Computation, joined, rows_of
from paceline.keras.forks import forked
from paceline.keras.group import RankGroup
from paceline.keras.part import Part
from paceline.keras.state import checksums, random_state, structure, variables, versions
from paceline.keras.wire import receive, send, tensors_of
from paceline.keras.worker import be_worker
from paceline.launch.failure import Failure, RankFailed, cause_of, killed
from paceline.launch.fork import refuse_used_cuda
from paceline.launch.heartbeats import Heartbeat
from paceline.launch.process import use_threads
from paceline.launch.temporary import temporary_folder
from paceline.runtime.order import split

_REPORT_S = 5.0  # for a worker that failed to say so


class Ranks:
    """Computes the steps of a model on several ranks. Use it inside of `running`.

    size: of the ranks, this process included; at least 2.
    """

    def __init__(self, model: Any, size: int) -> None:
        self.model, self.size = model, size
        self._computation = Computation(model)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._group: RankGroup | None = None
        self._structure: list[Any] = []
        self._versions: list[int] = []
        self._orders: dict[str, str] = {}  # of random rows, by kind of step, once its first one was tried
        self._folder = Path()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the model's functions for batches are those of the ranks."""
        refuse_used_cuda()
        functions = {f"{kind}_function": getattr(self.model, f"{kind}_function") for kind in KINDS}
        threads = torch.get_num_threads()
        with temporary_folder() as self._folder, self._computation.in_place():
            for kind in KINDS:
                setattr(self.model, f"{kind}_function", lambda data, kind=kind: self.step(kind, data[0]))
            try:
                yield
                self._compare()
            finally:
                self._end()
                torch.set_num_threads(threads)
                for name, function in functions.items():
                    setattr(self.model, name, function)

    def step(self, kind: str, batch: Any) -> Any:
        """One step of a kind of KINDS: its logs, or the outputs of the whole batch.

        Raises:
            PlanRefused: the first step of this kind is not what one process computes.
            RankFailed: a worker failed. UsageError: the batch can't be cut into samples.
        """
        count = _samples(batch)
        cuts = split(count, [1] * self.size)
        counts = tuple(len(cut) for cut in cuts)
        if kind not in self._orders:
            self._orders[kind] = first_step.settled_order(self._computation, kind, batch, cuts, self._folder)
        self._begin(kind, batch, cuts)
        with self._failures():
            assert self._group is not None
            answer = self._computation.step(kind, rows_of(batch, cuts[0]),
                                            Part(self._group, counts, self._orders[kind]))
            if kind == "predict":
                answer = joined([answer, *(receive(connection)["outputs"] for _, connection in self._workers)], counts)
        kept = variables(self.model)  # a first step may make some
        self._structure, self._versions = structure(self.model, kept), versions(kept)
        return answer

    def _begin(self, kind: str, batch: Any, cuts: list[range]) -> None:
        """Tell the workers of a step, with their samples and what changed since the last one."""
        kept = variables(self.model)
        current = structure(self.model, kept)
        if self._workers and current != self._structure:
            self._end()  # forks of the model as it is now take over
        if not self._workers:
            self._start()
            self._versions = versions(kept)
        changed = {index: variable._value.data for index, (variable, before, now) in enumerate(
            zip(kept, self._versions, versions(kept), strict=True)) if before != now}
        told = {"kind": kind, "counts": [len(cut) for cut in cuts], "order": self._orders[kind], "changed": changed,
                "random": random_state()}
        with self._failures():
            for cut, (_, connection) in zip(cuts[1:], self._workers, strict=True):
                send(connection, {**told, "batch": rows_of(batch, cut)})

    def _start(self) -> None:
        rendezvous = self._folder / uuid.uuid4().hex
        for rank in range(1, self.size):
            self._workers.append(forked(
                partial(be_worker, computation=self._computation, rank=rank, size=self.size, rendezvous=rendezvous),
                beside=[connection for _, connection in self._workers]))
        use_threads(self.size)
        with self._failures():
            self._group = RankGroup(0, self.size, rendezvous)

    def _end(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(_REPORT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()

    def _compare(self) -> None:
        """
        Raises:
            DriftError: variables of two ranks differ.
        """
        if not self._workers or self._group is None:
            return
        kept = variables(self.model)
        unchanged = [i for i, (before, now) in enumerate(zip(self._versions, versions(kept), strict=False))
                     if before == now]
        with self._failures():
            for _, connection in self._workers:
                send(connection, {"kind": "compare"})
            all_sums = self._group.gather(checksums(kept).reshape(1, -1), [1] * self.size)
        same = ((all_sums == all_sums[0]) | all_sums.isnan()).all(dim=0).reshape(-1, 2).all(dim=1)
        different = [kept[i].path for i in unchanged if not same[i]]
        if different:
            raise DriftError(f"ranks that should be equal are not: {', '.join(different[:5])}",
                             hint="a training step that draws random numbers by other means than torch, Keras or "
                                  "numpy, or that keeps state outside of Keras variables, needs plan='single'")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """A worker's failure is raised in place of what this process notices of it."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            failures = [failure for rank, (process, connection) in enumerate(self._workers, 1)
                        if (failure := _failure(rank, process, connection))]
            if failures and not cause_of(failures).heard:
                raise RankFailed(cause_of(failures)) from error
            raise


def _failure(rank: int, process: Any, connection: Connection) -> Failure | None:
    """What a worker says of its end, if it ended or is about to."""
    with suppress(EOFError, OSError, ValueError):
        while connection.poll(_REPORT_S):
            message = receive(connection)
            if "failure" in message:
                return Failure.from_json(message["failure"])
    process.join(_REPORT_S)
    return None if process.exitcode is None else killed(rank, process.exitcode, Heartbeat(0, "step", 0.0))


def _samples(batch: Any) -> int:
    """How many samples a batch has.

    Raises:
        UsageError: it has none, or not all of it has as many along dim 0.
    """
    try:
        lengths = [tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)]
    except TypeError as error:
        raise UsageError(f"a batch holds {error}, which can't be cut into samples",
                         hint="tensors and arrays, in tuples and dictionaries; or plan='single'") from error
    if not lengths or None in lengths or len(set(lengths)) > 1:
        raise UsageError(f"a batch has tensors of {', '.join(map(str, lengths)) or 'no'} samples along dim 0",
                         hint="each tensor of a batch must have its samples along dim 0; or plan='single'")
    assert lengths[0] is not None
    return lengths[0]
