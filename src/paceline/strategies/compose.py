"""How the strategies of a plan change a model together, in the order of the registry.

Each strategy changes the model in place and may return a `Synchroniser`, which says when its collectives run. Each sees
only what the one before left.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from paceline.model.forward_effects import NOTHING, Observed
from paceline.model.graph_check import is_comparable
from paceline.strategies.layout import CutBasis, Layout, ModelUse, Whole
from paceline.strategies.plan import Plan
from paceline.strategies.registry import active
from paceline.strategies.state_tensors import SavedState, StateTensor
from paceline.strategies.step_sync import StepSync, SyncEveryStep
from paceline.strategies.strategy import Observation

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.strategies.mesh import Mesh


Models = Literal["only", "one", "all"]  # a job's only model, one of several, all of several


class Synchroniser(Protocol):
    """When a room's collectives run in a step."""

    def begin(self, *, last: bool) -> None:
        """A micro-batch's forward is next; `last` if it is the last one of the update."""

    def unused(self) -> set[str]:
        """Parameters whose gradient is only there because other ranks may have one, by name; before `finish`."""

    def finish(self) -> None:
        """The last backward is done; on return every gradient this rank holds is the whole window's."""

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent to other replicas so far."""

    def kept(self) -> Iterable[StateTensor]:
        """State for a checkpoint; its tensors change as training goes on."""

    def restore(self, saved: SavedState) -> list[str]:
        """Go on from a checkpoint's state. Returns what could not be taken over, in words."""


@runtime_checkable
class Gathers(Protocol):
    """A synchroniser that keeps gathered weights from one forward to the next."""

    def end_evaluation(self) -> None:
        """The next forward is one of training, at other weights."""


GradientLook = Callable[
    [str, "torch.Tensor"], None
]  # a parameter's name, and this rank's own gradient of it


@runtime_checkable
class SumsReplicas(Protocol):
    """A synchroniser that sums the gradients of replicas."""

    def gradients_seen(self, look: GradientLook, *, sums: bool) -> AbstractContextManager[None]:
        """Meanwhile `look` is told of each gradient before it is summed, in one order on all ranks. sums: whether it
        is summed then."""


@runtime_checkable
class Switched(Protocol):
    """A synchroniser whose room changes how a step is computed and not what: a step can be taken without it."""

    def switch(self, *, on: bool) -> None:
        """The next step is taken with the room or without."""


@runtime_checkable
class Reports(Protocol):
    """A synchroniser that adds figures to a run's summary."""

    def summary(self) -> Mapping[str, Any]:
        """Figures of all ranks by their key in `summary.json`. Collective."""


class Runner(Protocol):
    """The running side of a strategy: a module."""

    def prepare(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        mesh: Mesh,
        observed: Observed = NOTHING,
        device: torch.device | None = None,
    ) -> Synchroniser | None:
        """Change the model in place for this rank. Collective along the strategy's axis.

        observed: what the model's forward was seen to do. device: where the rank's part is to be, which only sharding
        is given a model for that isn't there.
        """


# What capturing a model imports, for plans that split it: 26 MiB of pages in each rank that imports them itself.
_CAPTURE_IMPORTS = (
    "paceline.strategies.stages.build",
    "torch.export._trace",
    "torch._inductor.sizevars",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._inductor.compiler_bisector",
    "torch._export.passes._node_metadata_hook",
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
    "torch._subclasses.schema_check_mode",
    "torch.fx.experimental.validator",
    "torch.distributed.tensor",
)


def load(plan: Plan) -> None:
    """Import what the ranks of a plan will need, so that forks of this process don't each pay for it."""
    names = ["torch._dynamo"]  # torch's optimizers import it when they are built; it takes a second
    names += [
        name for strategy in active(plan) for name in (strategy.run, *strategy.imports) if name
    ]
    names += _CAPTURE_IMPORTS if plan.splits_model else ()
    for name in names:
        importlib.import_module(name)


def holds_parts(plan: Plan) -> bool:
    """Whether a rank holds a part of the model, at least between steps."""
    return plan.axes.num_ranks(lambda axis: not axis.copies_weights) > 1 or any(
        strategy.keeps_weights_elsewhere for strategy in active(plan)
    )


def may_be_elsewhere(plan: Plan, model: nn.Module) -> bool:
    """Whether the plan takes a model that isn't on the device, and brings it there part by part.

    A model that is split is tried on the device where it is small enough to be tried at all.
    """
    if plan.splits_model:
        return not (is_comparable(model) or _reads_past_modules(model))
    return _gathers_weights(plan) and not _reads_past_modules(model)


def held_elsewhere(plan: Plan, model: nn.Module) -> set[torch.Tensor]:
    """What a rank uses of a model and never holds, such as tables whose rows lie on servers."""
    return {weight for strategy in active(plan) for weight in strategy.held_elsewhere(model)}


def prepare(
    model: nn.Module,
    *,
    plan: Plan,
    mesh: Mesh,
    observed: Observed = NOTHING,
    device: torch.device | None = None,
    models: Models = "only",
) -> list[Synchroniser]:
    """Let the strategies of the plan change the model. Collective: every rank calls it with equal weights.

    observed: what the model's forward was seen to do. device: see `may_be_elsewhere`. of: which of a job's models it
    is; strategies that take all of several together don't change one of them.

    Returns:
        What must be begun in this order and finished in the reverse one: the outermost reduction has run beside
        backward already, and the inner ones add to what it gives.
    """
    runners: list[Runner] = [
        importlib.import_module(strategy.run)
        for strategy in active(plan)
        if strategy.run and (models == "only" or strategy.takes_all_models == (models == "all"))
    ]
    made = [
        runner.prepare(model, plan=plan, mesh=mesh, observed=observed, device=device)
        for runner in runners
    ]
    return [synchroniser for synchroniser in made if synchroniser is not None]


def end_evaluation(synchronisers: Sequence[Synchroniser]) -> None:
    """An evaluation is over."""
    for synchroniser in synchronisers:
        if isinstance(synchroniser, Gathers):
            synchroniser.end_evaluation()


@contextmanager
def gradients_seen(
    synchronisers: Sequence[Synchroniser], look: GradientLook, *, sums: bool
) -> Iterator[None]:
    """See `SumsReplicas`."""
    with ExitStack() as entered:
        for synchroniser in synchronisers:
            if isinstance(synchroniser, SumsReplicas):
                entered.enter_context(synchroniser.gradients_seen(look, sums=sums))
        yield


def reported(synchronisers: Sequence[Synchroniser]) -> dict[str, Any]:
    """What the plan's rooms add to a run's summary. Collective."""
    return {
        key: value
        for synchroniser in synchronisers
        if isinstance(synchroniser, Reports)
        for key, value in synchroniser.summary().items()
    }


def runs_again(plan: Plan) -> bool:
    """Whether the plan runs parts of the model's own code a second time in a step."""
    return any(strategy.runs_forward_again(plan) for strategy in active(plan))


def copies_weights_lazily(plan: Plan) -> bool:
    """Whether forwards keep lazy copies of weights: of memory that torch did not allocate they would be whole ones."""
    return any(strategy.copies_weights_lazily(plan) for strategy in active(plan))


def refuse_unseen_state(model: nn.Module, plan: Plan, path: str) -> None:
    """
    Args:
        path: Of a module with a state that the model doesn't show; see `module_with_unseen_state`.

    Raises:
        PlanRefused: it is run a second time.
    """
    for strategy in active(plan):
        if strategy.runs_forward_again(plan):
            importlib.import_module(strategy.run).refuse_unseen_state(model, path)


def observed_of(plan: Plan) -> frozenset[Observation]:
    """What must be seen of a model's forward before the plan's strategies change it."""
    return frozenset().union(*(strategy.observes(plan) for strategy in active(plan)))


def no_edits(plan: Plan) -> str:
    """Why forwards can't edit parameters in place under the plan; "" where they can."""
    return next((strategy.no_edits for strategy in active(plan) if strategy.no_edits), "")


def step_sync_of(synchronisers: Sequence[Synchroniser], mesh: Mesh) -> StepSync:
    """When ranks synchronise their steps: as a strategy of the plan says, or else every step."""
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
    """What this rank runs of the model. Collective."""
    from paceline.strategies.batch_norm.cost import joins_statistics
    from paceline.strategies.batch_norm.run import JoinedStatistics

    if joins_statistics(plan):
        use = replace(use, statistics=JoinedStatistics(model, mesh))
    if plan.splits_model or (_gathers_weights(plan) and _reads_past_modules(model)):
        from paceline.strategies.stages.build import lay_out as lay_out_stages

        return lay_out_stages(model, use, basis, plan=plan, mesh=mesh, device=device)
    return Whole(model, use, gathers_weights=_gathers_weights(plan))


def _gathers_weights(plan: Plan) -> bool:
    """Whether ranks with other samples hold parts of tensors, which their forwards gather."""
    return plan.axes.num_ranks(lambda axis: axis.cuts_samples and axis.cuts_weights) > 1


def _reads_past_modules(model: nn.Module) -> bool:
    """Whether the model keeps its parameters in a mapping that is never called, and reads them elsewhere.

    Keras's do. FSDP2 puts shards in the place of a module's parameters, which such a model would not see; a captured
    graph takes them as arguments.
    """
    return any("_torch_params." in name for name, _ in model.named_parameters())
