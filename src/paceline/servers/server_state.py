"""A server's share of a run's state: rows of parameters, their optimizer and schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paceline.base.errors import PlanRefused
from paceline.job import Job
from paceline.job.named_optimizers import NamedOptimizers
from paceline.servers.connection import rows, served_parameters
from paceline.servers.roles import servers_of
from paceline.servers.serve import ShardService
from paceline.strategies.layout import Extent, Layout
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.strategies.server.shards import Shard, assign
from paceline.strategies.server.tables import tables
from paceline.strategies.step_sync import SyncEveryStep
from paceline.torch_private.modules import own_parameters
from paceline.torch_private.optimizers import has_step_hooks, mark_stepped
from paceline.training.freezing import Freezing
from paceline.training.job_options import as_made
from paceline.training.optimizers.build import build_optimizer, refuse_coupled, refuse_kinds
from paceline.training.optimizers.probe import is_elementwise
from paceline.training.optimizers.schedule import (
    build_schedule,
    step_schedule,
    waits_for_metric,
)
from paceline.training.own_step.followers import followed
from paceline.training.own_step.named_parts import load_models
from paceline.training.prepare import build_in_files
from paceline.training.state import persistent_buffers


def trainable_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def deal_out(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan
) -> tuple[Shard, ...]:
    """What each server holds of a model; the same on every rank.

    Raises:
        JobError: a layer makes sparse gradients that can't be sent. PlanError: too few parameters for so many servers.
        PlanRefused: one of several models has a table of which single rows would travel.
    """
    names, parameters = tables(model).keys(), trainable_of(model)
    if isinstance(optimizer, NamedOptimizers):
        if names:
            raise PlanRefused(
                f"rows of '{min(names)}' lie on servers, and a job with models= has whole weights there",
                hint="sparse=False in the embedding, or a data=N plan",
            )
        updaters = {
            name: (key, optimizer.members[key])
            for key, of_it in optimizer.names.items()
            for name in of_it
        }
    else:
        updaters = dict.fromkeys(parameters, ("", optimizer))
    dealt = [
        replace(
            parameter,
            optimizer=updaters[parameter.name][0],
            may_split=is_elementwise(updaters[parameter.name][1]),
        )
        for parameter in served_parameters(
            {name: p for name, p in parameters.items() if name not in names}
        )
    ]
    return assign(
        dealt,
        servers_of(plan).servers,
        compress=plan.modifiers.compress,
        tables=served_parameters({name: p for name, p in parameters.items() if name in names}),
    )


@dataclass(frozen=True)
class Owned:
    """What a rank answers for in checkpoints; see `Ownership`."""

    owned: frozenset[str] = frozenset()
    owned_buffers: frozenset[str] = frozenset()
    extents: dict[str, Extent] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownState:
    """What a rank shows of a run's state that lies on several; see `StateOwner`."""

    replica: int
    layout: Owned | Layout = field(default_factory=Owned)
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    local_parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)


class ServerState:
    """The state of one server; see `StateOwner`. Server 0 also keeps what nobody trains. A follower's rows lie where
    those of its source do.

    exchange: the memory that `parameters` lie in is its.
    """

    replica = -1
    synchronisers: tuple[()] = ()
    attributes = None  # workers run the model's forward
    job_state, speaks_for_job = None, False  # workers compute losses and metrics
    has_modes, trains = False, True  # an optimizer with other weights for evaluations is refused
    scaling = None  # fp16 is refused under plans with servers

    def __init__(
        self,
        job: Job,
        plan: Plan,
        server: int,
        shards: tuple[Shard, ...],
        model: torch.nn.Module,
        exchange: ShardService,
    ) -> None:
        self.job, self.model = job, model
        self.mesh = Mesh.of(plan, 0)
        self.step_sync = SyncEveryStep(1)
        self.exchange = exchange
        self.trainable = trainable_of(model)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        followers: dict[str, torch.nn.Parameter] = {}
        extents: dict[str, Extent] = {}
        every = dict(model.named_parameters())
        following = {
            name: source
            for name, source in followed(job.followers, every).items()
            if source in self.trainable
        }
        for part in (*shards[server].slices, *shards[server].tables):
            view = exchange.views[part.name]
            with torch.no_grad():
                view.copy_(rows(self.trainable[part.name], part))
            self.parameters[part.name] = torch.nn.Parameter(view)
            follower_names = [name for name, source in following.items() if source == part.name]
            followers |= {
                name: torch.nn.Parameter(rows(every[name], part).clone(), requires_grad=False)
                for name in follower_names
            }
            extents |= dict.fromkeys((part.name, *follower_names), Extent(part.shape, part.offsets))
        frozen = (
            {name: p for name, p in every.items() if not p.requires_grad and name not in following}
            if server == 0
            else {}
        )
        self.local_parameters = {**self.parameters, **followers, **frozen}
        self.freezing = Freezing(job, model)
        load_models(job, model, self.local_parameters, extents)
        self.layout = Owned(
            frozenset(self.local_parameters),
            frozenset(persistent_buffers(model) if server == 0 else ()),
            extents,
        )
        built = build_optimizer(job, self.trainable, self.parameters)
        self.optimizer: torch.optim.Optimizer = built.optimizer
        self.groups, self.optimizer_state = built.groups, built.state
        if len(shards) > 1:
            refuse_coupled(self.optimizer, built.behaviour.reach, plan_key=f"servers={len(shards)}")
        self.schedule = build_schedule(job, self.optimizer)
        if waits_for_metric(self.schedule) and type(self.schedule).step is not (
            torch.optim.lr_scheduler.ReduceLROnPlateau.step
        ):
            raise PlanRefused(
                f"{type(self.schedule).__name__} has a step of its own that waits for a metric. Servers "
                "step it, and workers would not see what it changes beside learning rates",
                hint="a data=N plan, or torch's own ReduceLROnPlateau",
            )
        self.shares_schedule = self.schedule is not None and servers_of(plan).colocate == "yes"
        self.made = as_made(job, self.optimizer_state, self.schedule)
        self.updated: set[str] = set()  # slices of the update under way that have had theirs
        _hollow(model, frozen.values())

    def kept(self) -> tuple[()]:
        """Servers have no state but the optimizer's."""
        return ()

    @property
    def takes_slices(self) -> bool:
        """Whether slices may be updated one by one, each when its gradient is there. Not if a worker in this process
        must see what the schedule does before it has the weights."""
        return (
            self.job.clip is None
            and is_elementwise(self.optimizer)
            and not has_step_hooks(self.optimizer)
            and (not self.freezing.changes)
            and not self.shares_schedule
        )

    def update_slices(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        """One step of the optimizer for these slices alone."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        self._scale(scale)
        self.optimizer.step()
        self.drop_gradients()

    def take_gradient(self, update: int, *, scale: float, unused: Collection[str]) -> None:
        """Put an update's summed gradient in place. unused: parameters that no worker used have none."""
        gradients, updated = self.exchange.gradients(update)
        for name in gradients.keys() - updated - set(unused):
            self.parameters[name].grad = gradients[name]
        self._scale(scale)
        for name in updated:
            self.parameters[name].grad = gradients[name]
        self.updated = updated

    def update(self, *, clip: float, rate: float, ends_step: bool) -> None:
        """One step of the optimizer, for what is not updated yet.

        Args:
            clip: What gradients are scaled by to stay within the job's norm.
            rate: What the learning rates are multiplied by in this step alone.
            ends_step: Whether the schedule takes a step, too.
        """
        for name in self.updated:
            self.parameters[name].grad = None
        self._scale(clip)
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        if rate != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * rate
        if self.optimizer.param_groups:
            self.optimizer.step()
        if rate != 1.0:
            for group, rate_before in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate_before
        if ends_step:
            step_schedule(self.schedule)
        self.drop_gradients()

    def step_optimizer(self, name: str, *, clip: float) -> None:
        """One step of an optimizer of several, and of its schedule. clip: as in `update`."""
        self._scale(clip)
        assert isinstance(self.optimizer, NamedOptimizers)
        member: Any = self.optimizer.members[name]
        if any(group["params"] for group in member.param_groups):
            member.step()
        else:  # other servers have all that it updates; schedules look whether a step was taken
            mark_stepped(member)
        if self.schedule is not None:
            step_schedule(self.schedule.of(name))
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(
                [gradient.values() if gradient.is_sparse else gradient for gradient in gradients],
                factor,
            )


def _hollow(model: torch.nn.Module, kept: Iterable[torch.nn.Parameter]) -> None:
    """Give back the memory of parameters that lie on servers; names and shapes stay."""
    spared = set(kept)
    stand_ins: dict[Any, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(own_parameters(module).items()):
            if p is not None and p not in spared:
                if p not in stand_ins:
                    stand_ins[p] = torch.nn.Parameter(
                        torch.empty_like(p, device="meta"), requires_grad=p.requires_grad
                    )
                own_parameters(module)[name] = stand_ins[p]


def build(job: Job, plan: Plan) -> tuple[torch.nn.Module, tuple[Shard, ...]]:
    """The job's model on the CPU, in files where it is large, and how it is dealt out; on a rank that serves."""
    _, model = build_in_files(job, torch.device("cpu"))
    built = build_optimizer(job, trainable_of(model), {})
    refuse_kinds(built, plan)
    return model, deal_out(model, built.optimizer, plan)
