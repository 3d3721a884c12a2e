"""Replicas that take local steps and meet in outer steps.

A replica takes `local` steps on its part of each global batch, with its own optimizer. Then the
replicas average their pseudo-gradients, each weighted by the replica's count. The average updates
the shared weights in one outer step:

    outer     update of the shared weights                           source
    average   subtract the mean pseudo-gradient                      Stich 2019, local SGD
    diloco    SGD, Nesterov momentum 0.9, learning rate 0.7          Douillard et al. 2023

With fragments=F the parameters are in F groups whose outer steps are spread over the local steps
(Douillard et al. 2025). A group is transferred while local steps continue. When it arrives, a
replica takes the mean of the shared weights and its own weights, which have changed in the
meantime.

`local=1 outer=average` does not use this module. It means that replicas meet after every step. If
the optimizer is not linear in the gradient, only summed gradients give the result of one device, so
that this plan runs as `data=N`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.errors import JobError
from paceline.strategies.compress.size import all_reduce_bytes
from paceline.strategies.data.run import bucketed
from paceline.strategies.local.schedule import assign, delay_steps, fragment_after
from paceline.strategies.state_tensors import SavedState, StateTensor
from paceline.strategies.step_sync import StepFigures, SyncedFigures
from paceline.strategies.synchroniser import Synchroniser

if TYPE_CHECKING:
    from torch import nn

    from paceline.strategies.local.keys import Local
    from paceline.strategies.mesh import Mesh
    from paceline.strategies.plan import Plan
MOMENTUM, LEARNING_RATE = 0.9, 0.7  # Douillard et al. 2023, section 3
LOCAL_WEIGHT = 0.5  # weight of a replica's own weights when a fragment arrives


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh, **_: Any) -> OuterSync:
    assert plan.outer_steps is not None
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return OuterSync(
        trainable, plan.outer_steps, mesh.group("data"), compress=plan.modifiers.compress
    )


class Fragment:
    """A group of parameters that take their outer steps together."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        order: Local,
        compress: str,
    ) -> None:
        self.parameters = dict(parameters)
        # The weights that all replicas share, by name.
        self.outer = {name: p.detach().clone() for name, p in parameters.items()}
        # Momentum of the outer steps, by name.
        self.momentum = (
            {name: torch.zeros_like(tensor) for name, tensor in self.outer.items()}
            if order.outer == "diloco"
            else {}
        )
        names, tensors = list(self.outer), list(self.outer.values())
        kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        _, self.reduction, ways = bucketed(tensors, kinds, group, compress=compress)
        self.ways = dict(zip(names, ways, strict=True))  # pseudo-gradients by name
        # Local steps since the last outer step, and their count on this replica.
        self.steps, self.count = 0, 0.0

    def send(self, weight: float) -> None:
        """Start the sum of the replicas' weighted pseudo-gradients."""
        for name, way in self.ways.items():
            torch.sub(self.outer[name], self.parameters[name], out=way)
            way.mul_(weight)
        for number in range(len(self.reduction.memory)):
            self.reduction.start(number)
        self.steps, self.count = 0, 0.0

    def step(self) -> None:
        """Take the outer step with the mean pseudo-gradient, which is in `ways`."""
        for name, way in self.ways.items():
            if self.momentum:
                self.momentum[name].mul_(MOMENTUM).add_(way)
                self.outer[name].sub_(
                    way.add(self.momentum[name], alpha=MOMENTUM), alpha=LEARNING_RATE
                )
            else:
                self.outer[name].sub_(way)

    def take_over(self, local_weight: float) -> None:
        """Continue from the shared weights, or from a mean of them and this replica's own
        weights."""
        for name, p in self.parameters.items():
            if local_weight:
                p.mul_(local_weight).add_(self.outer[name], alpha=1.0 - local_weight)
            else:
                p.copy_(self.outer[name])


@dataclass
class _Transfer:
    """A pending transfer of a fragment."""

    fragment: int
    arrives: int  # the step after which the outer step is taken
    landed: bool = False  # whether the sum has already arrived


class OuterSync(Synchroniser):
    """Runs the outer steps.

    It is a synchroniser that never touches gradients, and also the step synchronisation.
    """

    has_own_steps = True
    world_size = 1  # the figures of a step are those of this replica alone

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        order: Local,
        group: dist.ProcessGroup,
        *,
        compress: str,
    ) -> None:
        if len(parameters) < order.fragments:
            raise JobError(
                f"fragments={order.fragments}, and the model has {len(parameters)} trainable parameters",
                hint=f"at most fragments={len(parameters)}",
            )
        names = list(parameters)
        self.order, self.group = order, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        # A separate group: ranks may communicate for other purposes while a fragment is
        # transferred, and the collectives of one group run in order.
        travel = (
            dist.new_group(dist.get_process_group_ranks(group)) if order.fragments > 1 else group
        )
        self.fragments = [
            Fragment(
                {names[i]: parameters[names[i]] for i in part},
                travel,
                order=order,
                compress=compress,
            )
            for part in assign([p.nbytes for p in parameters.values()], order.fragments)
        ]
        self.delay = delay_steps(local=order.local, fragments=order.fragments)
        self.transfer: _Transfer | None = None
        self.figures: list[StepFigures] = []
        self.met_bytes = 0.0

    @property
    def sent_bytes(self) -> float:
        return sum(fragment.reduction.sent_bytes for fragment in self.fragments)

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        return figures

    @torch.no_grad()
    def end_step(
        self, step: int, figures: StepFigures, beat: Callable[[str], None]
    ) -> SyncedFigures | None:
        self.figures.append(figures)
        for fragment in self.fragments:
            fragment.steps, fragment.count = fragment.steps + 1, fragment.count + figures.count
        if self.transfer is not None and self.transfer.arrives <= step:
            beat("reduce")
            self._arrive(LOCAL_WEIGHT)
        leaving = fragment_after(step, local=self.order.local, fragments=self.order.fragments)
        if leaving is None:
            return None
        beat("reduce")
        synced, weights = self._meet([leaving])
        self._leave(leaving, weights[0], arrives=step + self.delay)
        if not self.delay:
            self._arrive(0.0)
        return synced

    @torch.no_grad()
    def finalize(self, step: int) -> SyncedFigures | None:
        if self.transfer is not None:
            self._arrive(LOCAL_WEIGHT)
        unfinished = [number for number, fragment in enumerate(self.fragments) if fragment.steps]
        synced = None
        if unfinished:
            synced, weights = self._meet(unfinished)
            for number, weight in zip(unfinished, weights, strict=True):
                self._leave(number, weight, arrives=step)
                self._arrive(0.0)
        for fragment in self.fragments:
            fragment.take_over(0.0)
        # Unfinished fragments may remain after the last meeting, without new figures.
        return synced if synced is not None and synced.losses else None

    def drain(self) -> None:
        if self.transfer is not None and not self.transfer.landed:
            self.fragments[self.transfer.fragment].reduction.finish()
            self.transfer.landed = True

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {
            **weights,
            **{
                name: tensor
                for fragment in self.fragments
                for name, tensor in fragment.outer.items()
            },
        }

    @contextmanager
    def global_weights_in_place(self) -> Iterator[None]:
        if self.order.fragments == 1:
            # Evaluations and checkpoints come at the end of a round, when the weights are the
            # shared ones.
            yield
            return
        local_weights = [
            {name: p.detach().clone() for name, p in fragment.parameters.items()}
            for fragment in self.fragments
        ]
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.take_over(0.0)
        try:
            yield
        finally:
            with torch.no_grad():
                for fragment, weights in zip(self.fragments, local_weights, strict=True):
                    for name, p in fragment.parameters.items():
                        p.copy_(weights[name])

    def _meet(self, leaving: list[int]) -> tuple[SyncedFigures, list[float]]:
        """Sum the figures of all replicas since the last meeting.

        The figures were read to the host in their steps and are sent from there, so that no replica
        waits for its GPU.

        Returns:
            The synchronised figures, and this replica's weight in each of the fragments.
        """
        counts = torch.tensor(
            [self.fragments[number].count for number in leaving], dtype=torch.float64
        )
        figures = torch.tensor(
            [each.values for each in self.figures] or [StepFigures().values], dtype=torch.float64
        )
        losses, flags = figures[: len(self.figures), :2], figures[:, 2:].sum(0)
        message = torch.cat([losses.flatten(), flags, counts])
        dist.all_reduce(message, group=self.group)
        self.met_bytes += all_reduce_bytes(message.nbytes, self.ranks)
        all_losses, all_flags, totals = message.split([losses.numel(), len(flags), len(counts)])
        self.figures = []
        by_step = [(loss, count) for loss, count in all_losses.view(losses.shape).tolist()]
        total = sum(count for _, count in by_step)
        synced = SyncedFigures(
            by_step,
            StepFigures.read([0.0, 0.0, *all_flags.tolist()]),
            float(losses[:, 1].sum()) / total if total else 0.0,
        )
        return synced, [
            count / total if total else 0.0
            for count, total in zip(counts.tolist(), totals.tolist(), strict=True)
        ]

    def _leave(self, number: int, weight: float, *, arrives: int) -> None:
        self.fragments[number].send(weight)
        self.transfer = _Transfer(number, arrives)

    def _arrive(self, local_weight: float) -> None:
        """Complete the pending transfer and take the fragment's outer step."""
        self.drain()
        assert self.transfer is not None
        fragment, self.transfer = self.fragments[self.transfer.fragment], None
        fragment.step()
        fragment.take_over(local_weight)

    def kept(self) -> Iterator[StateTensor]:
        """Yield the state for a checkpoint. Collective while a fragment's transfer is pending.

        outer/order holds the number of replicas, local steps and fragments. Only a plan with the
        same numbers can continue from the rest of the state.
        """
        self.drain()
        under_way = self.transfer.fragment if self.transfer is not None else -1
        yield StateTensor(
            "outer/order", torch.tensor([self.ranks, self.order.local, self.order.fragments])
        )
        yield StateTensor(
            "outer/under_way",
            torch.tensor([under_way, self.transfer.arrives if self.transfer else 0]),
        )
        yield StateTensor(
            "outer/steps", torch.tensor([fragment.steps for fragment in self.fragments])
        )
        yield StateTensor(
            f"replicas/{self.rank}/counts",
            torch.tensor([fragment.count for fragment in self.fragments], dtype=torch.float64),
            replica=True,
        )
        for number, fragment in enumerate(self.fragments):
            for name, momentum in fragment.momentum.items():
                yield StateTensor(f"outer/momentum/{name}", momentum, like=name)
            if number == under_way:
                for name, way in fragment.ways.items():
                    yield StateTensor(f"outer/way/{name}", way, like=name)
            if len(self.fragments) > 1:
                for name, p in fragment.parameters.items():
                    yield StateTensor(
                        f"replicas/{self.rank}/parameters/{name}",
                        p.detach(),
                        like=name,
                        replica=True,
                    )

    @torch.no_grad()
    def restore(self, saved: SavedState) -> list[str]:
        """Continue from a checkpoint: to the bit under the same plan; otherwise from the shared
        weights."""
        for fragment in self.fragments:
            for name, p in fragment.parameters.items():
                fragment.outer[name].copy_(p)
            for name, momentum in fragment.momentum.items():
                if f"outer/momentum/{name}" in saved:
                    momentum.copy_(saved.read(f"outer/momentum/{name}", name))
        order = [self.ranks, self.order.local, self.order.fragments]
        if "outer/order" not in saved:
            return []
        if saved.read("outer/order").tolist() != order:
            return ["replicas start from the weights that they shared last"]
        steps, counts = (
            saved.read("outer/steps").tolist(),
            saved.read(f"replicas/{self.rank}/counts").tolist(),
        )
        under_way, arrives = saved.read("outer/under_way").tolist()
        self.transfer = _Transfer(under_way, arrives, landed=True) if under_way >= 0 else None
        for number, fragment in enumerate(self.fragments):
            fragment.steps, fragment.count = steps[number], counts[number]
            for name in fragment.parameters if len(self.fragments) > 1 else ():
                fragment.parameters[name].copy_(
                    saved.read(f"replicas/{self.rank}/parameters/{name}", name)
                )
                if number == under_way:
                    fragment.ways[name].copy_(saved.read(f"outer/way/{name}", name))
        return []
