"""Applies the strategies of a plan to a model, in the order of the registry.

Each strategy changes the model in place. It may return a `Synchroniser`, which runs its collectives
at the right moments of a step. Each strategy sees the model as the one before left it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.model.forward_effects import NOTHING, ForwardEffects
from paceline.model.graph_check import is_comparable
from paceline.strategies.active_plan import USUAL_LOOP, ActivePlan
from paceline.strategies.layout import CutBasis, Layout, ModelUse, Whole
from paceline.strategies.plan import Plan
from paceline.strategies.step_sync import StepSync, SyncEveryStep
from paceline.strategies.synchroniser import Synchroniser
from paceline.torch_private.late_imports import OF_CAPTURING, OF_OPTIMIZERS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.strategies.mesh import Mesh


Models = Literal["only", "one", "all"]  # a job's only model, one of several, all of several


class Runner(Protocol):
    """The running side of a strategy: a module."""

    def prepare(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        mesh: Mesh,
        observed: ForwardEffects = NOTHING,
        device: torch.device | None = None,
    ) -> Synchroniser | None:
        """Change the model in place for this rank. Collective along the strategy's axis.

        Args:
            observed: The effects that were observed in a forward of the model.
            device: The device on which the rank's part must end up. Only sharding receives a model
                that is not yet on this device.
        """


def load(plan: Plan) -> None:
    """Import the modules that the ranks of a plan need, so that forks of this process share
    them."""
    active = ActivePlan(plan)
    names = [*OF_OPTIMIZERS, active.trainer or USUAL_LOOP]
    for strategy in active.strategies:
        names += filter(None, (strategy.run, *strategy.imports))
    names += ("paceline.strategies.stages.build", *OF_CAPTURING) if plan.splits_model else ()
    for name in names:
        importlib.import_module(name)


def may_be_elsewhere(plan: Plan, model: nn.Module) -> bool:
    """Whether the plan accepts a model that is not on the device, and moves it there part by part.

    If a plan splits a model that is small enough, its capture is first compared with the model
    itself. That needs the model on the device.
    """
    if plan.splits_model:
        return not (is_comparable(model) or _reads_past_modules(model))
    return _gathers_weights(plan) and not _reads_past_modules(model)


def prepare(
    model: nn.Module,
    *,
    active: ActivePlan,
    mesh: Mesh,
    observed: ForwardEffects = NOTHING,
    device: torch.device | None = None,
    models: Models = "only",
) -> list[Synchroniser]:
    """Let the strategies of the plan change the model. Collective: every rank calls it with equal
    weights.

    Args:
        observed: The effects that were observed in a forward of the model.
        device: See `may_be_elsewhere`.
        models: Which of a job's models this is. Strategies that take all of several models together
            don't change one of them.

    Returns:
        The synchronisers. They begin in this order and finish in the reverse order: the outermost
        reduction has already run beside backward, and the inner ones add to its result.
    """
    runners: list[Runner] = [
        importlib.import_module(strategy.run)
        for strategy in active.strategies
        if strategy.run and (models == "only" or strategy.takes_all_models == (models == "all"))
    ]
    made = [
        runner.prepare(model, plan=active.plan, mesh=mesh, observed=observed, device=device)
        for runner in runners
    ]
    return [synchroniser for synchroniser in made if synchroniser is not None]


def end_evaluation(synchronisers: Sequence[Synchroniser]) -> None:
    """Let synchronisers that keep gathered weights from one forward to the next drop them: the next
    forward is one of training, with other weights."""
    for synchroniser in synchronisers:
        synchroniser.end_evaluation()


def reported(synchronisers: Sequence[Synchroniser]) -> dict[str, Any]:
    """Return the figures that the plan's strategies add to a run's summary. Collective."""
    return {
        key: value
        for synchroniser in synchronisers
        for key, value in synchroniser.summary().items()
    }


def step_sync_of(synchronisers: Sequence[Synchroniser], mesh: Mesh) -> StepSync:
    """Return how ranks synchronise their steps: by a strategy of the plan, or else in every
    step."""
    syncs = [synchroniser for synchroniser in synchronisers if isinstance(synchroniser, StepSync)]
    return syncs[0] if syncs else SyncEveryStep(mesh.world_size)


def lay_out(
    model: nn.Module,
    use: ModelUse,
    basis: CutBasis,
    *,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
) -> Layout:
    """Return the part of the model that this rank runs. Collective."""
    from paceline.strategies.batch_norm.cost import joins_statistics
    from paceline.strategies.batch_norm.run import JoinedStatistics

    if joins_statistics(plan):
        use = replace(use, statistics=JoinedStatistics(model, mesh))
    if plan.splits_model or (_gathers_weights(plan) and _reads_past_modules(model)):
        from paceline.strategies.stages.build import lay_out as lay_out_stages

        return lay_out_stages(model, use, basis, plan=plan, mesh=mesh, device=device)
    return Whole(model, use, gathers_weights=_gathers_weights(plan))


def _gathers_weights(plan: Plan) -> bool:
    """Whether ranks with different samples hold parts of tensors, which their forwards gather."""
    return plan.axes.num_ranks(lambda axis: axis.cuts_samples and axis.cuts_weights) > 1


def _reads_past_modules(model: nn.Module) -> bool:
    """Whether the model keeps its parameters in a mapping that is never called, and reads them
    elsewhere.

    Keras models do this. FSDP2 replaces a module's parameters by shards, which such a model would
    not see. A captured graph takes the parameters as arguments.
    """
    return any("_torch_params." in name for name, _ in model.named_parameters())
