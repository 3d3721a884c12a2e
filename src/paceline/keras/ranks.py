"""The ranks of a Keras model: the calling process is the first, and forks are the others.

They are forks of the calling process where no rank has a GPU and the process has not used one. Otherwise they are forks
of a new interpreter.

Keras's own loop runs in the calling process, with its callbacks, its data and its model. Of each batch every rank
computes a part. Between steps, workers are told new values of variables; after any other change they are forked anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import DriftError, UsageError
from paceline.base.fork import forks_can_use_cuda
from paceline.base.temporary import temporary_folder
from paceline.cluster.devices import Device
from paceline.job.order import split
from paceline.keras import first_step
from paceline.keras.computation import KINDS, Computation, joined, rows_of
from paceline.keras.devices import name_of, on_device, refuse_other_kinds
from paceline.keras.forks import Forks
from paceline.keras.group import Meet, RankGroup
from paceline.keras.part import Part
from paceline.keras.patches import patched
from paceline.keras.state import fingerprints, random_state, structure, variables, versions
from paceline.keras.tensors import tensors_of
from paceline.keras.worker import be_worker
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.rank_process import use_threads


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
        self._uses_nccl = devices[0].kind == "cuda" and devices[0].backend is None
        self._computation = Computation(model)
        self._workers: Forks | None = None
        self._while_sent: Any = None  # see `Forks`
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
        functions = [
            (self.model, f"{kind}_function", lambda data, kind=kind: self.step(kind, data[0]))
            for kind in KINDS
        ]
        threads = torch.get_num_threads()
        is_on_cpu = self.devices[0] == "cpu"
        if not (is_on_cpu and forks_can_use_cuda()):
            self._while_sent = self._computation.out_of_place
        with (
            temporary_folder() as self._folder,
            on_device(self.model, self.devices[0]),
            self._computation.in_place(),
            patched(functions),
        ):
            try:
                yield
                self._compare()
            finally:
                self._end()
                torch.set_num_threads(threads)

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
                    random_state(self.devices[0]),
                ),
                partial(Forks, devices=self.devices, while_sent=self._while_sent),
                self._meeting,
            )
        self._begin(kind, batch, cuts)
        with self._failures():
            assert self._group is not None and self._workers is not None
            answer = self._computation.step(
                kind, rows_of(batch, cuts[0]), Part(self._group, counts, self._orders[kind])
            )
            if kind == "predict":
                answer = joined([answer, *map(self._workers.receive, range(1, self.size))], counts)
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
        if self._workers is not None and current != self._structure:
            self._end()  # forks of the model as it is now take over
        if self._workers is None:
            self._workers = self._start()
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
            for rank in range(1, self.size):
                self._workers.send(rank, {**message, "batch": rows_of(batch, cuts[rank])})

    def _start(self) -> Forks:
        meet = self._meeting()
        self._workers = Forks(
            {
                rank: partial(be_worker, computation=self._computation, rank=rank, meet=meet)
                for rank in range(1, self.size)
            },
            self.devices,
            self._while_sent,
            self._abort,
        )
        use_threads(self.size)
        with self._failures():
            self._group = meet(0)
        return self._workers

    def _meeting(self) -> Meet:
        """Return how the ranks of a new group meet."""
        return partial(
            RankGroup,
            size=self.size,
            rendezvous=self._folder / uuid.uuid4().hex,
            uses_nccl=self._uses_nccl,
        )

    def _abort(self) -> None:
        """End what waits for a rank that is no more: NCCL does not notice."""
        if (group := self._group) is not None:
            group.abort()

    def _end(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _compare(self) -> None:
        """
        Raises:
            DriftError: variables of two ranks differ.
        """
        if self._workers is None or self._group is None:
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
            for rank in range(1, self.size):
                self._workers.send(rank, {"kind": "compare"})
            of_ranks = self._group.gather(fingerprints(model_variables), [1] * self.size)
        same = (of_ranks == of_ranks[0]).all(dim=0)
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
            failure = None if self._workers is None else self._workers.failure()
            if failure is not None and not failure.heard:
                raise RankFailed(failure) from error
            raise


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
