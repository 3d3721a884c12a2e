"""Replicas that should hold equal weights are compared every so often; the first that differs is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import DriftError, JobError
from paceline.checkpoint.pieces import TensorPiece
from paceline.launch.collectives.values import values_of_all
from paceline.strategies.mesh import Mesh, local_part
from paceline.training import state
from paceline.training.run import RunPart, TrainingRun
from paceline.training.stepper import Stepper
from paceline.training.upload import uploaded

EVERY_STEPS = 100  # reading 1 GB takes one core 0.08 s, 1/1,000 of a hundred steps of 0.8 s
FINGERPRINTS = (
    "fingerprints/"  # names of rows of them: the ranks that should have equal ones come next
)
_UNLIKE = "the model is not built alike on all ranks: it depends on the rank, the time or the host"
_ROW_BYTES = (
    4096  # that are summed before they are weighted: as fast as a sum alone (19 GB/s, one core)
)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Depends on every bit of a tensor, and on the order of its rows of 4 KiB: the sum of its words of 8 bytes, those
    of a row weighted by its place. A whole number on the tensor's device, which the host need not wait for."""
    raw = local_part(tensor.detach()).contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:  # a view into an odd place of a buffer can't be read as words
        raw = raw.clone()
    in_rows = raw.numel() // _ROW_BYTES * _ROW_BYTES
    in_words = raw.numel() // 8 * 8
    parts = []  # those that are empty are left out: most tensors of a small model have one part
    if in_rows:
        parts.append(_weighted(raw[:in_rows].view(torch.int64).view(-1, _ROW_BYTES // 8).sum(1)))
    if in_words > in_rows:
        parts.append(_weighted(raw[in_rows:in_words].view(torch.int64)))
    if raw.numel() > in_words:
        parts.append(_weighted(raw[in_words:].long()))
    return (
        sum(parts[1:], parts[0]) if parts else torch.zeros((), dtype=torch.int64, device=raw.device)
    )


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """The sum of values times odd numbers, modulo 2**64: any change of one of them shows in it."""
    return (values * torch.arange(1, 2 * len(values), 2, device=values.device)).sum()


def replicated(stepper: Stepper) -> dict[str, torch.Tensor]:
    """What replicas should hold alike: the run's weights, and all buffers."""
    buffers = {
        name: buffer
        for name, buffer in stepper.model.named_buffers()
        if name not in stepper.buffers.unlike
    }
    return {**stepper.step_sync.global_weights(stepper.local_parameters), **buffers}


def check_replicas(tensors: Mapping[str, torch.Tensor], *, mesh: Mesh, step: int) -> None:
    """Compare every tensor along each axis of copies, while nothing else goes on. Collective along them.

    Raises:
        JobError: a rank has tensors that another one does not have. DriftError: see `ReplicaComparison`.
    """
    for axis in mesh.copy_axes:
        if mesh.sizes[axis] > 1:
            names = [set(each) for each in values_of_all(list(tensors), mesh.group(axis))]
            for name in sorted(set.union(*names) - set.intersection(*names)):
                ranks = zip(mesh.ranks_along(axis), names, strict=True)
                lacking = ", ".join(str(rank) for rank, own in ranks if name not in own)
                raise JobError(
                    f"the model has no '{name}' on rank {lacking}, and others have it", hint=_UNLIKE
                )
    ReplicaComparison(tensors, mesh=mesh, step=step).finish()


class ReplicaComparison:
    """What replicas hold after a step: fingerprints of tensors, read when this is made and compared by `finish`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        mesh: Mesh,
        step: int,
        more: Callable[[str], Mapping[str, torch.Tensor]] = lambda axis: {},
    ) -> None:
        """more: gives what else ranks along an axis should hold alike."""
        self.mesh, self.step = mesh, step
        self._weights = list(tensors)
        self._names: dict[str, list[str]] = {}  # by axis, what ranks along it should hold alike
        named = dict(tensors)
        for axis in mesh.copy_axes:
            if mesh.sizes[axis] > 1:
                along = {**tensors, **more(axis)}
                self._names[axis] = list(along)
                named |= along
        self._prints = {name: fingerprint(tensor) for name, tensor in named.items()}

    def finish(self, *, edited: Collection[str] = ()) -> None:
        """Compare. Collective along the axes of copies.

        edited: names of parameters that forwards were seen to change.

        Raises:
            DriftError: on every rank of the group, naming the first tensor, the ranks that are in the minority, and
                what may have changed it.
        """
        for axis, names in self._names.items():
            row = {name: self._prints[name] for name in names}
            _check_along(axis, row, mesh=self.mesh, step=self.step, edited=edited)

    def weights(self) -> str:
        """Return one fingerprint of the weights and buffers of all ranks, in 16 hexadecimal digits.

        It depends on the plan, which says what each rank holds. Collective over all ranks.
        """
        value = torch.zeros((), dtype=torch.int64)  # on the CPU: some ranks may hold no weight
        if self._weights:
            value = _weighted(_row(self._prints[name] for name in self._weights)).cpu()
        value = value * (2 * self.mesh.rank + 1)
        if self.mesh.world_size > 1:
            dist.all_reduce(value)
        return f"{int(value) % 2**64:016x}"


class Comparisons(RunPart):
    """Compares replicas every so many steps and whenever the run is saved."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.compared_step: int | None = None  # after which replicas were last compared

    def counted(self) -> None:
        if self.run.step % EVERY_STEPS == 0 or self.run.log.speed.steps == 1:
            self.run.due.add("compare")

    def settled(self) -> None:
        if self.run.takes("compare"):
            self.compare()

    def compare(self) -> None:
        """Compare what replicas hold, if that has not been done after this step. Collective."""
        run, stepper = self.run, self.run.stepper
        if self.compared_step == run.step:
            return
        self.compared_step = run.step
        stepper.step_sync.drain()
        more = partial(state.alike_along, stepper)
        comparison = ReplicaComparison(replicated(stepper), mesh=run.mesh, step=run.step, more=more)
        comparison.finish(edited=stepper.edits.names)
        if run.run_dir is not None:
            run.log.journal.note_weights(run.step, comparison.weights())


def fingerprints(
    stepper: Stepper, more: Callable[[str], Mapping[str, torch.Tensor]]
) -> Iterator[TensorPiece]:
    """For a copy of the run's state: what this rank holds of what ranks along each axis of copies should hold alike, as
    a row of fingerprints."""
    mesh, tensors = stepper.mesh, replicated(stepper)
    for axis in mesh.copy_axes:
        if mesh.sizes[axis] > 1:
            ranks = ",".join(map(str, mesh.ranks_along(axis)))
            row = _row(map(fingerprint, {**tensors, **more(axis)}.values()))
            yield TensorPiece(FINGERPRINTS + ranks, tuple(row.shape), (0,), row)


def _row(fingerprints: Iterable[torch.Tensor]) -> torch.Tensor:
    """All of them, on the device of the first."""
    first, *rest = fingerprints
    return torch.stack([first, *(uploaded(each, first.device) for each in rest)])


def _check_along(
    axis: str,
    named: Mapping[str, torch.Tensor],
    *,
    mesh: Mesh,
    step: int,
    edited: Collection[str],
) -> None:
    """named: fingerprints of this rank."""
    group, ranks = mesh.group(axis), mesh.ranks_along(axis)
    row = _row(named.values())
    least, most = row.clone(), row.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if torch.equal(least, most):
        return
    rows = [torch.empty_like(row) for _ in ranks]
    dist.all_gather(rows, row, group=group)
    index = int((least != most).nonzero()[0])
    values = [int(row[index]) for row in rows]
    name, when = list(named)[index], f"after step {step}" if step else "before the first step"
    raise DriftError(
        f"replicas differ {when}: '{name}' {who_differs(ranks, values)} "
        f"({int((least != most).sum())} of {len(row)} tensors differ)",
        hint=_cause(name, step, is_edited=name in edited),
    )


def who_differs(ranks: Sequence[int | str], values: Sequence[Any]) -> str:
    """Which ranks hold another value than most, where most hold the same.

    >>> who_differs([0, 2, 4], [7, 8, 7])
    'on rank 2 is not what the others hold'
    >>> who_differs([0, 1], [7, 8])
    'differs between rank 0 and rank 1, and nothing shows which of them is right'
    """
    usual = max(set(values), key=values.count)
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    if 2 * values.count(usual) > len(values):
        return f"on rank {', '.join(map(str, odd))} is not what the others hold"
    return (
        f"differs between {' and '.join(f'rank {rank}' for rank in ranks)}, and nothing shows which of them is "
        "right"
    )


def _cause(name: str, step: int, *, is_edited: bool) -> str:
    """What was seen of it, and what it is likely to come from."""
    if not step:
        return _UNLIKE
    if is_edited:
        return (
            f"a forward changes '{name}' in place: if what it becomes depends on the samples, let it be a buffer, "
            "which becomes the mean of all replicas"
        )
    return (
        "replicas were equal when the run began: look for an optimizer that draws random numbers or asks for the "
        "time, a hook that differs by rank, a data set or a thread that writes to weights, and faulty memory"
    )
