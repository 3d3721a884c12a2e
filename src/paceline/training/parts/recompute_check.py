"""Gradients that are computed a second time, by another replica where there is one: what finds wrong arithmetic.

A bit that flips in one replica's gradients, activations or samples changes the sum, and all replicas then take the same
wrong update: comparing their weights finds nothing. Now and then each replica therefore computes the gradients of its
neighbour's samples beside its own. Samples and random numbers of a step depend on its number alone, so both come to the
same bits. Where they don't, all replicas compute these samples again, twice:

- A replica that comes to another result than before is the culprit.
- If nobody does, and most replicas come to one result, it is those that come to another.
- With two replicas nothing more is known, and both are named.
- If several come to another result each time, the arithmetic does not repeat, and nothing is compared any more. Nor is
  it if the data set gives them other samples, each time the same.

Where only one replica holds the weights, its ranks compute the gradients of their own samples again, and twice more if
they come to something else. If those two agree, what differs from them was wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from paceline.base.errors import DriftError
from paceline.base.logs import logger
from paceline.base.streams import kept_streams
from paceline.job import Job
from paceline.job.order import Order
from paceline.model.attributes import StateOfForward
from paceline.model.state_snapshot import generators
from paceline.strategies.compose import SumsReplicas, gradients_seen
from paceline.strategies.plan import Plan
from paceline.training.attributes import numbers_of_objects
from paceline.training.feed import DataShard, MicroBatch, is_stream, training_feed
from paceline.training.parts.drift import fingerprint
from paceline.training.stepper import Stepper
from paceline.training.upload import uploaded

_UNSUMMED = "unsummed "  # before the name of a weight whose gradient is not summed yet
_AGAIN = 2  # times that replicas compute samples again which two of them disagree on


def log_state_alone(reason: str) -> None:
    """Say why gradients are not computed a second time."""
    logger.info(
        "gradients are not computed a second time, and what ranks keep between updates is compared alone: %s",
        reason,
    )


def _no_gradients(stepper: Stepper, plan: Plan) -> str | None:
    """Why gradients can't be computed a second time and compared to the bit; None if they can."""
    if stepper.job.models:
        return "the job brings a step of its own"
    if stepper.step_sync.has_own_steps:
        return "replicas take steps of their own"
    if is_stream(stepper.job.data):
        return "a data stream gives its samples once, and to one replica"
    if stepper.mesh.num_copies > 1 and _axis(stepper) is None:
        return "the plan does not sum them by one room"
    if stepper.needs_closure:
        return f"{type(stepper.optimizer).__name__} evaluates the loss itself"
    if stepper.device.type != "cpu" and plan.modifiers.deterministic != "yes":
        return "kernels of GPUs repeat to the bit under deterministic=yes alone"
    return None


def _axis(stepper: Stepper) -> str | None:
    """The only axis of several copies of the weights, if gradients along it are summed where they can be seen."""
    mesh = stepper.mesh
    axes = [axis for axis in mesh.copy_axes if mesh.sizes[axis] > 1]
    return (
        axes[0]
        if len(axes) == 1 and any(isinstance(each, SumsReplicas) for each in stepper.synchronisers)
        else None
    )


@dataclass
class RecomputeCheck:
    """When gradients are computed a second time, and what follows.

    axis: along which replicas do so for each other; None if each rank does for itself. ranks: along it.
    every: steps from one such step to the next.
    mark: called on all ranks when gradients are wrong, with the step after which they were last found right; says which
        checkpoints are marked since.
    right_step: that step. has_ended: whether nothing is compared any more.
    """

    stepper: Stepper
    job: Job
    shares: tuple[int, ...]
    loader_workers: int
    beat: Callable[[str], None]
    mark: Callable[[int], Sequence[int]]
    every: int
    right_step: int = 0
    has_ended: bool = False
    _samples: torch.Tensor = field(
        default_factory=lambda: torch.zeros(1, dtype=torch.int64), init=False
    )

    def __post_init__(self) -> None:
        self.mesh, self.axis = self.stepper.mesh, _axis(self.stepper)
        self.ranks = self.mesh.ranks_along(self.axis) if self.axis else [self.mesh.rank]
        self.place = self.ranks.index(self.mesh.rank)
        self.order = Order.of(self.job)

    @classmethod
    def of(cls, stepper: Stepper, plan: Plan, every: int, **more: Any) -> RecomputeCheck | None:
        """None where that can't be: rank 0 says why."""
        if (reason := _no_gradients(stepper, plan)) is None:
            kind = cls if _axis(stepper) else _RecheckAlone
            return kind(stepper, stepper.job, every=every, **more)
        if stepper.mesh.rank == 0:
            log_state_alone(reason)
        return None

    def is_due(self, step: int) -> bool:
        """Whether this step is one, counted from 1; not a launch's first, which shows whether forwards write to
        parameters: such a model is not run a second time. Alike on all ranks."""
        return not (self.has_ended or self.stepper.edits.names) and step % self.every == 0

    @contextmanager
    def checking(self, step: int) -> Iterator[Callable[[Stepper], None] | None]:
        """Around a step, counted from 0. Gives what is to be called when its gradients are summed, before the update.
        Collective."""
        before = _Moment(self.stepper)
        neighbour_row = self._computed((self.place + 1) % len(self.ranks), step)
        before.restore()
        if neighbour_row is None:
            self._end(
                "a forward meets other replicas, and gives another result with their samples in another order"
            )
            yield None
            return
        fingerprints: dict[str, torch.Tensor] = {}
        with self._noting(fingerprints, sums=True):
            yield lambda stepper: self._compare(step, fingerprints, neighbour_row, before)

    @contextmanager
    def _noting(self, prints: dict[str, torch.Tensor], *, sums: bool) -> Iterator[None]:
        """Note fingerprints of the gradients that are computed meanwhile, before replicas sum them. sums: whether they
        are to."""
        with gradients_seen(self.stepper.synchronisers, _note_in(prints), sums=sums):
            yield

    def _computed(self, place: int, step: int) -> torch.Tensor | None:
        """Fingerprints of the gradients of a replica's samples, computed here; None if that met other replicas.
        Collective over the ranks of this replica. Leaves gradients of no use."""
        stepper, other_mesh = self.stepper, self.mesh.at(self.ranks[place])
        part = DataShard(self.shares, other_mesh.replica, stepper.part.num_microbatches)
        prints: dict[str, torch.Tensor] = {}
        meetings, part_before = self._meetings(), stepper.part
        with kept_streams(), self._noting(prints, sums=False):
            stepper.part = part  # which samples an error is about
            try:
                [(window, batches)] = training_feed(
                    self.job,
                    order=self.order,
                    part=part,
                    steps=range(step, step + 1),
                    loader_workers=min(self.loader_workers, 1),
                )
                self._samples = _print_of(batches)
                stepper.backward(
                    window, batches, step=step, part=other_mesh.loss_number, beat=self.beat
                )
            finally:
                stepper.part = part_before
        return self._row(prints) if self._meetings() == meetings else None

    def _meetings(self) -> int:
        """Collectives of the replicas so far."""
        assert self.axis is not None
        group: Any = self.mesh.group(self.axis)
        statistics = self.stepper.layout.statistics  # type: ignore[attr-defined]  # of one model
        return int(group._get_sequence_number_for_group()) + int(statistics.num_meetings)

    def _row(self, prints: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([uploaded(value, self.stepper.device) for value in prints.values()])

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all replicas. Collective along the axis."""
        assert self.axis is not None
        rows = [torch.empty_like(row) for _ in self.ranks]
        dist.all_gather(rows, row, group=self.mesh.group(self.axis))
        return torch.stack(rows)

    def _agreed(self, values: torch.Tensor) -> list[int]:
        """The greatest over all ranks. Collective."""
        values = uploaded(values.long(), self.stepper.device)
        if self.mesh.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return [int(value) for value in values.tolist()]

    def _compare(
        self,
        step: int,
        fingerprints: dict[str, torch.Tensor],
        neighbour_row: torch.Tensor,
        before: _Moment,
    ) -> None:
        """
        neighbour_row: fingerprints of the gradients of the next replica's samples, as this replica computed them.

        Raises:
            DriftError: on all ranks; that of a culprit is the one that counts.
        """
        count = len(self.ranks)
        machine = torch.tensor([_machine(self.stepper.device)], device=neighbour_row.device)
        rows = self._gathered(torch.cat([machine, self._row(fingerprints), neighbour_row])).cpu()
        first_results, second_results = rows[:, 1:].chunk(2, 1)
        second_results = second_results.roll(
            1, 0
        )  # in row k what the replica before k came to of its samples
        differs = first_results != second_results
        *differing, other_machines = self._agreed(
            torch.cat([differs.any(1), torch.tensor([int((rows[:, 0] != rows[0, 0]).any())])])
        )
        if other_machines:
            self._end("ranks compute on different processors, and so may round differently")
        elif not any(differing):
            self.right_step = step + 1
        else:
            places = [place for place in range(count) if differing[place]]
            wrong, why = self._culprits(places, step, first_results, second_results, before)
            if not wrong:
                self._end(why)
                return
            names = list(fingerprints)
            tensor = next((names[int(row.nonzero()[0])] for row in differs if row.any()), names[0])
            self._refuse(step, tensor, wrong, why)

    def _culprits(
        self,
        places: Sequence[int],
        step: int,
        first_results: torch.Tensor,
        second_results: torch.Tensor,
        before: _Moment,
    ) -> tuple[list[int], str]:
        """Which replicas computed wrongly what two of them disagree on, and what shows it; none, and why, if that can't
        be said. Collective over all ranks.

        Args:
            places: Of the replicas whose samples it is about.
        """
        count = len(self.ranks)
        unstable, odd = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
        have_others = False
        for place in places:
            repeats = [
                self._gathered(row).cpu() for row in self._computed_again(place, step, before)
            ]
            unstable |= (repeats[0] != repeats[1]).any(1)
            for culprit, result in (
                (place, first_results[place]),
                ((place - 1) % count, second_results[place]),
            ):
                unstable[culprit] |= (repeats[0][culprit] != result).any()
            odd |= _minority(repeats[0])
            samples = self._gathered(uploaded(self._samples, self.stepper.device)).cpu()
            have_others |= bool((samples != samples[0]).any())
        *flags, others_samples = self._agreed(
            torch.cat([unstable, odd, torch.tensor([have_others])])
        )
        changing, others = (
            [place for place in range(count) if half[place]]
            for half in (flags[:count], flags[count:])
        )
        if changing:
            if len(changing) > 1:
                return [], "it comes to another result each time, on several ranks"
            return changing, "came to another result when it computed them again"
        if others_samples:
            return [], "the data set gives other samples on another rank"
        if others:
            return others, "comes to another result than most replicas"
        return sorted({culprit % count for place in places for culprit in (place - 1, place)}), ""

    def _computed_again(self, place: int, step: int, before: _Moment) -> list[torch.Tensor]:
        """What this rank comes to of a replica's samples, twice more. Leaves the step's own gradients, and what its
        forwards did. Collective over the ranks of this replica."""
        after, rows = _Moment(self.stepper), []
        gradients = [
            (p, None if p.grad is None else p.grad.clone())
            for p in self.stepper.local_parameters.values()
        ]
        for _ in range(_AGAIN):
            before.restore()
            row = self._computed(place, step)
            assert row is not None
            rows.append(row)
        after.restore()
        for p, gradient in gradients:
            p.grad = gradient
        return rows

    def _refuse(self, step: int, tensor: str, wrong: Sequence[int], why: str) -> None:
        assert self.axis is not None
        ranks = [
            rank
            for rank in range(self.mesh.world_size)
            if self.mesh.at(rank).coordinates[self.axis] in wrong
        ]
        names = _named(ranks)
        if not why:
            finding = f"{names} come to different ones each time, and nothing shows which of them is right"
        else:
            finding = f"{'one of ' if len(ranks) > 1 else ''}{names} {why}"
        raise self._error(
            ranks,
            f"gradients of step {step + 1} are wrong before they are summed: two replicas "
            f"computed '{tensor}' of the same samples, and {finding}",
        )

    def _error(self, ranks: Sequence[int], finding: str) -> DriftError:
        """Collective. ranks: of which one computed wrongly."""
        marked = self.mark(self.right_step)
        since = (
            f"after step {self.right_step}, when gradients were last found right"
            if self.right_step
            else ("in any step before, of which none was compared")
        )
        suspects = f"step {', '.join(map(str, marked))}" if marked else "none"
        error = DriftError(
            f"{finding}; the step's update was not made",
            hint=f"faulty memory or a faulty processor, which may have gone wrong {since}; checkpoints that are marked "
            f"as suspect, and that --resume passes over: {suspects}",
        )
        error.heard = self.mesh.rank not in ranks  # type: ignore[attr-defined]
        return error

    def _end(self, why: str) -> None:
        self.has_ended = True
        if self.mesh.rank == 0:
            logger.warning(
                "gradients are not computed a second time any more to find wrong arithmetic: %s",
                why,
            )


class _RecheckAlone(RecomputeCheck):
    """Each rank computes the gradients of its own samples again, as no other one holds the same weights.

    Two kinds of gradients are compared: those that a rank's own backward gives to the weights of a module, and those
    that are in the parameters when ranks have summed what they sum. If the first kind differs somewhere, it is there
    that something went wrong, or where its numbers went.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._paths = {
            id(module): path for path, module in self.stepper.layout.module.named_modules()
        }
        unsummed = [
            _unsummed(path, key)
            for path, module in self.stepper.layout.module.named_modules()
            for key in module._parameters
        ]
        self._num_unsummed, self._names = len(unsummed), [*unsummed, *self.stepper.parameters]

    @contextmanager
    def _noting(self, prints: dict[str, torch.Tensor], *, sums: bool) -> Iterator[None]:
        stepper, handles = self.stepper, dict[str, Any]()

        def add(name: str, p: torch.Tensor) -> None:
            assert p.grad is not None
            prints[name] = prints.get(name, 0) + fingerprint(p.grad)

        def called(module: torch.nn.Module, args: Any, output: Any) -> None:
            path = self._paths.get(id(module))
            if path is None or not torch.is_grad_enabled():
                return
            for key, p in module._parameters.items():
                name = _unsummed(path, key)
                if (
                    p is not None
                    and p.requires_grad
                    and not hasattr(p, "to_local")
                    and name not in handles
                ):
                    handles[name] = p.register_post_accumulate_grad_hook(partial(add, name))

        def note() -> None:
            prints.update(
                {
                    name: fingerprint(p.grad)
                    for name, p in stepper.parameters.items()
                    if p.grad is not None
                }
            )

        handles[""] = register_module_forward_hook(called)
        stepper.after_backward = note
        try:
            yield
        finally:
            stepper.after_backward = None
            for handle in handles.values():
                handle.remove()

    def _row(self, prints: dict[str, torch.Tensor]) -> torch.Tensor:
        nothing = torch.zeros((), dtype=torch.int64)
        return torch.stack(
            [
                uploaded(prints.get(name, nothing), self.stepper.device)
                for name in (*self._names, "")
            ]
        )

    def _meetings(self) -> int:
        return 0  # there are no other replicas

    def _compare(
        self,
        step: int,
        fingerprints: dict[str, torch.Tensor],
        neighbour_row: torch.Tensor,
        before: _Moment,
    ) -> None:
        first, second = self._row(fingerprints), neighbour_row
        if not any(self._agreed((first != second).any()[None])):
            self.right_step = step + 1
            return
        third, fourth = self._computed_again(self.place, step, before)
        differs = ((first != third) | (second != third)).cpu()
        own_flags = torch.zeros(1 + self.mesh.world_size, dtype=torch.int64)
        own_flags[0] = int((third != fourth).any())
        own_flags[1 + self.mesh.rank] = (
            2 if differs[: self._num_unsummed].any() else int(differs.any())
        )
        changes, *flags = self._agreed(own_flags)
        ranks = [rank for rank, flag in enumerate(flags) if flag and flag == max(flags)]
        if changes or not ranks:
            self._end("it comes to another result each time")
            return
        name = next(
            (
                name
                for name, is_other in zip(self._names, differs.tolist(), strict=False)
                if is_other
            ),
            "",
        )
        of_tensor = f" of '{name.removeprefix(_UNSUMMED)}'" if name else ""
        raise self._error(
            ranks,
            f"gradients{of_tensor} of step {step + 1} are wrong: {'one of ' * (len(ranks) > 1)}"
            f"{_named(ranks)} came to another result when it computed them again",
        )


def _unsummed(path: str, key: str) -> str:
    return f"{_UNSUMMED}{path}.{key}" if path else f"{_UNSUMMED}{key}"


def _named(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


class _Moment:
    """What the forwards of a model, and of a loss that is a module, may change beside parameters, at one moment."""

    def __init__(self, stepper: Stepper) -> None:
        model, criterion = stepper.layout.module, stepper.job.criterion
        self._states = [
            StateOfForward(each) for each in (model, criterion) if isinstance(each, torch.nn.Module)
        ]
        self._numbers = [
            (holder, name, getattr(holder, name)) for _, holder, name in numbers_of_objects(model)
        ]
        self._generators = [(put, get()) for get, put in generators(model)]

    def restore(self) -> None:
        for state in self._states:
            state.restore()
        for holder, name, value in self._numbers:
            if getattr(holder, name) != value:  # those that never change may be read alone
                setattr(holder, name, value)
        for put, state in self._generators:
            put(state)


def _note_in(prints: dict[str, torch.Tensor]) -> Callable[[str, torch.Tensor], None]:
    def look(name: str, gradient: torch.Tensor) -> None:
        prints[name] = fingerprint(gradient)

    return look


def _print_of(batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Depends on every bit of all tensors of micro-batches."""
    prints = [
        int(fingerprint(leaf))
        for batch in batches
        for leaf in pytree.tree_leaves((batch.input, batch.target))
        if isinstance(leaf, torch.Tensor)
    ]
    return fingerprint(torch.tensor(prints, dtype=torch.int64, device="cpu")).reshape(1)


def _minority(rows: torch.Tensor) -> torch.Tensor:
    """Which rows are not what more than half of them are; none where there is no such majority."""
    values = [tuple(row) for row in rows.tolist()]
    usual = max(set(values), key=values.count)
    return torch.tensor(
        [2 * values.count(usual) > len(values) and value != usual for value in values]
    )


def _machine(device: torch.device) -> int:
    """A number of what bits depend on beside the samples: the processor, and over how many threads it divides work."""
    from paceline.model.cost.cache import processor

    kind: Any = processor("cpu"), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return int.from_bytes(
        hashlib.blake2b(repr((kind, torch.__version__)).encode(), digest_size=7).digest(), "little"
    )
