"""The ranks of a Keras model: the calling process is the first, and forks are the others.

They are forks of the calling process where no rank has a GPU and the process has not used one. Otherwise they are forks
of a new interpreter.

Keras's own loop runs in the calling process, with its callbacks, its data and its model. Of each batch every rank
computes a part. Between steps, workers are told new values of variables; after any other change they are forked anew.
"""

from __future__ import annotations

import select
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.base.codec import receive
from paceline.base.errors import DriftError, UsageError
from paceline.base.fork import forks_can_use_cuda
from paceline.base.temporary import temporary_folder
from paceline.cluster.devices import Device
from paceline.job.order import split
from paceline.keras import first_step
from paceline.keras.computation import KINDS, Computation, joined, rows_of
from paceline.keras.devices import name_of, on_device, refuse_other_kinds
from paceline.keras.forks import Fork, Forks, ForkServer, OwnForks
from paceline.keras.group import RankGroup
from paceline.keras.part import Part
from paceline.keras.state import checksums, random_state, structure, variables, versions
from paceline.keras.wire import send, tensors_of
from paceline.keras.worker import be_worker
from paceline.launch.process.failure import Failure, RankFailed, cause_of, killed
from paceline.launch.process.heartbeats import Heartbeat
from paceline.launch.process.rank_process import use_threads

_REPORT_S = 5.0  # for a worker that failed to say so
_LOOK_MS = 500


class Ranks:
    """Computes the steps of a model on several ranks. Use it inside of `running`.

    devices: of the ranks, this process's first; at least 2.
    """

    def __init__(self, model: Any, devices: Sequence[Device]) -> None:
        self.model, self.devices, self.size = (
            model,
            [name_of(device) for device in devices],
            len(devices),
        )
        self._uses_nccl = devices[0].kind == "cuda" and all(
            device.num_sharing == 1 for device in devices
        )
        self._computation = Computation(model)
        self._workers: list[Fork] = []
        self._forks: Forks = OwnForks()
        self._group: RankGroup | None = None
        self._structure: list[Any] = []
        self._versions: list[int] = []
        self._orders: dict[
            str, str
        ] = {}  # of random rows, by kind of step, once its first one was tried
        self._folder = Path()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the model's functions for batches are those of the ranks."""
        refuse_other_kinds()
        functions = {f"{kind}_function": getattr(self.model, f"{kind}_function") for kind in KINDS}
        threads = torch.get_num_threads()
        is_on_cpu = self.devices[0] == "cpu"
        self._forks = (
            OwnForks()
            if is_on_cpu and forks_can_use_cuda()
            else ForkServer(self._computation.out_of_place)
        )
        with (
            temporary_folder() as self._folder,
            closing(self._forks),
            on_device(self.model, self.devices[0]),
            self._computation.in_place(),
        ):
            for kind in KINDS:
                setattr(
                    self.model, f"{kind}_function", lambda data, kind=kind: self.step(kind, data[0])
                )
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
            self._orders[kind] = first_step.settled_order(
                first_step.Trial(
                    self._computation,
                    kind,
                    batch,
                    tuple(cuts),
                    self._uses_nccl,
                    random_state(self.devices[0]),
                ),
                self._forks,
                self.devices,
                self._folder,
            )
        self._begin(kind, batch, cuts)
        with self._failures():
            assert self._group is not None
            answer = self._computation.step(
                kind, rows_of(batch, cuts[0]), Part(self._group, counts, self._orders[kind])
            )
            if kind == "predict":
                answer = joined(
                    [answer, *(receive(worker.connection)["outputs"] for worker in self._workers)],
                    counts,
                )
        model_variables = variables(self.model)  # a first step may make some
        self._structure, self._versions = (
            structure(self.model, model_variables),
            versions(model_variables),
        )
        return answer

    def _begin(self, kind: str, batch: Any, cuts: list[range]) -> None:
        """Tell the workers of a step, with their samples and what changed since the last one."""
        model_variables = variables(self.model)
        current = structure(self.model, model_variables)
        if self._workers and current != self._structure:
            self._end()  # forks of the model as it is now take over
        if not self._workers:
            self._start()
            self._versions = versions(model_variables)
        changed = {
            index: variable._value.data
            for index, (variable, before, now) in enumerate(
                zip(model_variables, self._versions, versions(model_variables), strict=True)
            )
            if before != now
        }
        message = {
            "kind": kind,
            "counts": [len(cut) for cut in cuts],
            "order": self._orders[kind],
            "changed": changed,
            "random": random_state(self.devices[0]),
        }
        with self._failures():
            for cut, worker in zip(cuts[1:], self._workers, strict=True):
                send(worker.connection, {**message, "batch": rows_of(batch, cut)})

    def _start(self) -> None:
        rendezvous = self._folder / uuid.uuid4().hex
        for rank in range(1, self.size):
            self._workers.append(
                self._forks.fork(
                    partial(
                        be_worker,
                        computation=self._computation,
                        rank=rank,
                        size=self.size,
                        rendezvous=rendezvous,
                        uses_nccl=self._uses_nccl,
                    ),
                    self.devices[rank],
                )
            )
        use_threads(self.size)
        with self._failures():
            self._group = RankGroup(0, self.size, rendezvous, uses_nccl=self._uses_nccl)
        if self._uses_nccl:
            descriptors = [worker.connection.fileno() for worker in self._workers]
            threading.Thread(
                target=_abort_without, args=(self._group, descriptors), daemon=True
            ).start()

    def _end(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            if worker.exit_code(_REPORT_S) is None:
                worker.kill()
        self._workers.clear()

    def _compare(self) -> None:
        """
        Raises:
            DriftError: variables of two ranks differ.
        """
        if not self._workers or self._group is None:
            return
        model_variables = variables(self.model)
        unchanged = [
            i
            for i, (before, now) in enumerate(
                zip(self._versions, versions(model_variables), strict=False)
            )
            if before == now
        ]
        with self._failures():
            for worker in self._workers:
                send(worker.connection, {"kind": "compare"})
            all_sums = self._group.gather(
                checksums(model_variables).reshape(1, -1), [1] * self.size
            )
        same = ((all_sums == all_sums[0]) | all_sums.isnan()).all(dim=0).reshape(-1, 2).all(dim=1)
        different = [model_variables[i].path for i in unchanged if not same[i]]
        if different:
            raise DriftError(
                f"ranks that should be equal are not: {', '.join(different[:5])}",
                hint="a training step that draws random numbers by other means than torch, Keras or "
                "numpy, or that keeps state outside of Keras variables, needs plan='single'",
            )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """A worker's failure is raised in place of what this process notices of it."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            failures = [
                failure
                for rank, worker in enumerate(self._workers, 1)
                if (failure := _failure(rank, worker))
            ]
            if failures and not cause_of(failures).heard:
                raise RankFailed(cause_of(failures)) from error
            raise


def _abort_without(group: RankGroup, descriptors: Sequence[int]) -> None:
    """Waits until a worker has ended, or this process has closed its pipe, and ends the group."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, 0)  # its hang-up alone
    while not poller.poll(_LOOK_MS):
        pass
    group.abort()


def _failure(rank: int, worker: Fork) -> Failure | None:
    """What a worker says of its end, if it ended or is about to."""
    with suppress(EOFError, OSError, ValueError):
        while worker.connection.poll(_REPORT_S):
            message = receive(worker.connection)
            if "failure" in message:
                return Failure.from_json(message["failure"])
    code = worker.exit_code(_REPORT_S)
    return None if code is None else killed(rank, code, Heartbeat(0, "step", 0.0))


def _samples(batch: Any) -> int:
    """How many samples a batch has.

    Raises:
        UsageError: it has none, or not all of it has as many along dim 0.
    """
    try:
        lengths = [tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)]
    except TypeError as error:
        raise UsageError(
            f"a batch holds {error}, which can't be cut into samples",
            hint="tensors and arrays, in tuples and dictionaries; or plan='single'",
        ) from error
    if not lengths or None in lengths or len(set(lengths)) > 1:
        raise UsageError(
            f"a batch has tensors of {', '.join(map(str, lengths)) or 'no'} samples along dim 0",
            hint="each tensor of a batch must have its samples along dim 0; or plan='single'",
        )
    assert lengths[0] is not None
    return lengths[0]
