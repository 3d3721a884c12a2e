"""What a replica does: a step of its own, then the mean of its weights and its two neighbours'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import Plan
from paceline.strategies.mesh import Mesh
from paceline.strategies.state_tensors import SavedState, StateTensor
from paceline.strategies.step_sync import StepFigures, StepSync, SyncedFigures
from paceline.strategies.synchroniser import Synchroniser

from . import AXIS


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh, **_: Any) -> Ring:
    """Leaves the model as it is."""
    parameters = model.named_parameters()
    return Ring({name: p for name, p in parameters if p.requires_grad}, mesh)


class Ring(StepSync, Synchroniser):
    """Lets each replica step by itself and then meet its neighbours. Gradients stay where they are."""

    has_own_steps = True
    world_size = 1  # a step's figures are this replica's own
    sent_bytes = 0.0

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        self.parameters, self.group = dict(parameters), mesh.group(AXIS.name)
        self.place, ranks = mesh.coordinates[AXIS.name], mesh.ranks_along(AXIS.name)
        self.num_replicas = len(ranks)
        self.neighbours = sorted({ranks[self.place - 1], ranks[(self.place + 1) % len(ranks)]})

    @torch.no_grad()
    def end_step(
        self,
        step: int,
        figures: StepFigures,
        beat: Callable[[str], None],
    ) -> SyncedFigures:
        """Average with the neighbours; then all ranks learn of each other's losses. Collective over the replicas."""
        beat("reduce")
        for alike in self._by_kind():
            flat = torch.cat([p.flatten() for p in alike])
            received = [torch.empty_like(flat) for _ in self.neighbours]
            sends = [dist.P2POp(dist.isend, flat, rank, self.group) for rank in self.neighbours]
            receives = [
                dist.P2POp(dist.irecv, buffer, rank, self.group)
                for buffer, rank in zip(received, self.neighbours, strict=True)
            ]
            for work in dist.batch_isend_irecv([*sends, *receives]):
                work.wait()
            self.sent_bytes += flat.nbytes * len(self.neighbours)
            mean = torch.stack([flat, *received]).mean(0)
            for p, part in zip(alike, mean.split([p.numel() for p in alike]), strict=True):
                p.copy_(part.view_as(p))
        values = torch.tensor(figures.values, dtype=torch.float64)
        dist.all_reduce(values, group=self.group)
        summed = StepFigures.read(values.tolist())
        weight = figures.count / summed.count if summed.count else 0.0
        return SyncedFigures([(summed.loss, summed.count)], summed, weight)

    def finalize(self, step: int) -> None:
        """The run ends with the mean of all replicas."""
        self._take(self.global_weights(self.parameters))

    @torch.no_grad()
    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The mean of all replicas' weights, which is what the run is evaluated and saved as. Collective."""
        means = {name: p.detach() / self.num_replicas for name, p in self.parameters.items()}
        for mean in means.values():
            dist.all_reduce(mean, group=self.group)
        return {**weights, **means}

    @contextmanager
    def global_weights_in_place(self) -> Iterator[None]:
        local_weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._take(self.global_weights(self.parameters))
        yield
        self._take(local_weights)

    def kept(self) -> Iterable[StateTensor]:
        """Each replica's own weights."""
        yield StateTensor("gossip/replicas", torch.tensor([self.num_replicas]))
        for name, p in self.parameters.items():
            yield StateTensor(
                f"replicas/{self.place}/parameters/{name}",
                p.detach(),
                like=name,
                replica=True,
            )

    def restore(self, saved: SavedState) -> list[str]:
        """Bit by bit on as many replicas; else all of them start from the mean."""
        if "gossip/replicas" not in saved:
            return []
        if saved.read("gossip/replicas").tolist() != [self.num_replicas]:
            return ["replicas start from the mean of their weights"]
        self._take(
            {
                name: saved.read(f"replicas/{self.place}/parameters/{name}", name)
                for name in self.parameters
            }
        )
        return []

    @torch.no_grad()
    def _take(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(weights[name])

    def _by_kind(self) -> list[list[nn.Parameter]]:
        """Parameters of one dtype and device together: each kind is one message."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in self.parameters.values():
            kinds.setdefault((p.dtype, p.device), []).append(p)
        return list(kinds.values())
