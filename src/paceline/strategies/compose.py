"""What composes with what, and in which order the rooms of a plan are entered.

Every room changes the model in place and may answer with a `Synchroniser`, which says when its collectives run.
The order is from the innermost change to the outermost meeting: blocks are first compiled, then told to recompute,
then sharded, and what gradients a rank then holds are reduced over the replicas. Each room sees only what the one
before left.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from paceline.capture.compare import is_comparable
from paceline.capture.probe import NOTHING, Observed
from paceline.plans import Plan, Servers
from paceline.strategies.compile import run as compile_blocks
from paceline.strategies.data import run as data
from paceline.strategies.kept import Kept, Saved
from paceline.strategies.layout import Batch, Layout, Whole
from paceline.strategies.local import run as local
from paceline.strategies.meeting import EveryStep, Meetings
from paceline.strategies.recompute import run as recompute
from paceline.strategies.server.rows import tables
from paceline.strategies.shard import run as shard

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.cluster import Device
    from paceline.strategies.mesh import Mesh


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

    def kept(self) -> Iterable[Kept]:
        """State for a checkpoint; its tensors change as training goes on."""

    def restore(self, saved: Saved) -> list[str]:
        """Go on from a checkpoint's state. Returns what could not be taken over, in words."""


@runtime_checkable
class Gathers(Protocol):
    """A synchroniser that keeps gathered weights from one forward to the next."""

    def end_evaluation(self) -> None:
        """The next forward is one of training, at other weights."""


@runtime_checkable
class Reports(Protocol):
    """A synchroniser that adds figures to a run's summary."""

    def summary(self) -> Mapping[str, Any]:
        """Figures of all ranks by their key in `summary.json`. Collective."""


class Room(Protocol):
    """The running side of a strategy.

    IMPORTS: modules it needs beyond torch itself, for a parent to import once for all the ranks it forks.
    """

    IMPORTS: tuple[str, ...]

    def is_active(self, plan: Plan) -> bool: ...

    def prepare(self, model: nn.Module, *, plan: Plan, mesh: Mesh, observed: Observed = NOTHING,
                device: torch.device | None = None) -> Synchroniser | None:
        """Change the model in place for this rank. Collective along the room's axis.

        observed: what the model's forward was seen to do. device: where the rank's part is to be, which only sharding
        is given a model for that isn't there.
        """


ROOMS: tuple[Room, ...] = (compile_blocks, recompute, shard, data, local)
# What capturing a model imports, for plans that split it: 26 MiB of pages in each rank that imports them itself.
_CAPTURE_IMPORTS = ("paceline.strategies.stages.build", "torch.export._trace", "torch._inductor.sizevars",
                    "torch._inductor.fx_passes.dedupe_symint_uses", "torch._inductor.compiler_bisector",
                    "torch._export.passes._node_metadata_hook", "torch._export.passes.replace_autocast_with_hop_pass",
                    "torch._export.passes.replace_set_grad_with_hop_pass", "torch._subclasses.schema_check_mode",
                    "torch.fx.experimental.validator", "torch.distributed.tensor")
_PARTS_IMPORTS = ("torch.distributed.checkpoint",)  # a DTensor asks it which part of the whole it holds


def load(plan: Plan) -> None:
    """Import what the ranks of a plan will need, so that forks of this process don't each pay for it."""
    names = ["torch._dynamo"]  # torch's optimizers import it when they are built; it takes a second
    names += [name for room in ROOMS if room.is_active(plan) for name in room.IMPORTS]
    names += _CAPTURE_IMPORTS if plan.splits_model else ()
    names += _PARTS_IMPORTS if plan.axes.tensor > 1 else ()
    for name in names:
        importlib.import_module(name)


def holds_parts(plan: Plan) -> bool:
    """Whether a rank holds a part of the model, at least between steps."""
    axes = plan.axes
    return isinstance(plan.sync, Servers) or any(
        size > 1 for size in (axes.pipeline, axes.parts, axes.shard, axes.tensor))


def may_be_elsewhere(plan: Plan, model: nn.Module) -> bool:
    """Whether the plan takes a model that isn't on the device, and brings it there part by part.

    A model that is split is tried on the device where it is small enough to be tried at all.
    """
    if plan.splits_model:
        return not (is_comparable(model) or _reads_past_modules(model))
    return plan.axes.shard > 1 and not _reads_past_modules(model)


def held_elsewhere(plan: Plan, model: nn.Module) -> set[torch.Tensor]:
    """What a rank uses of a model and never holds: tables whose rows lie on servers."""
    if not isinstance(plan.sync, Servers):
        return set()
    return {module.weight for module in tables(model).values()}


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh, observed: Observed = NOTHING,
            device: torch.device | None = None) -> list[Synchroniser]:
    """Enter every room of the plan. Collective: every rank calls it with equal weights.

    observed: what the model's forward was seen to do. device: see `may_be_elsewhere`.

    Returns:
        What must be begun in this order and finished in the reverse one: the outermost reduction has run beside
        backward already, and the inner ones add to what it gives.
    """
    made = [room.prepare(model, plan=plan, mesh=mesh, observed=observed, device=device)
            for room in ROOMS if room.is_active(plan)]
    return [synchroniser for synchroniser in made if synchroniser is not None]


def end_evaluation(synchronisers: Sequence[Synchroniser]) -> None:
    """An evaluation is over."""
    for synchroniser in synchronisers:
        if isinstance(synchroniser, Gathers):
            synchroniser.end_evaluation()


def reported(synchronisers: Sequence[Synchroniser]) -> dict[str, Any]:
    """What the plan's rooms add to a run's summary. Collective."""
    return {key: value for synchroniser in synchronisers if isinstance(synchroniser, Reports)
            for key, value in synchroniser.summary().items()}


def runs_again(plan: Plan) -> bool:
    """Whether the plan runs parts of the model's own code a second time in a step."""
    return recompute.is_active(plan) and not plan.splits_model


def refuse_unseen_state(model: nn.Module, path: str) -> None:
    """
    Args:
        path: Of a module with a state that the model doesn't show; see `module_with_unseen_state`.

    Raises:
        PlanRefused: it is run a second time.
    """
    recompute.refuse_unseen_state(model, path)


def meetings(synchronisers: Sequence[Synchroniser], mesh: Mesh) -> Meetings:
    """When ranks meet: as a room of the plan says, or else in every step."""
    said = [synchroniser for synchroniser in synchronisers if isinstance(synchroniser, Meetings)]
    return said[0] if said else EveryStep(mesh.world_size)


def lay_out(model: nn.Module, *, plan: Plan, mesh: Mesh, device: torch.device, example: Callable[[int], Batch],
            context: Callable[[], Any], microbatch_samples: int,
            state_factor: Callable[[], float], devices: Sequence[Device],
            functions: Mapping[str, Callable[[Any, Any], Any]], evaluated: Callable[[], Batch] | None,
            running: Callable[[], AbstractContextManager[None]] = nullcontext) -> Layout:
    """What this rank runs of the model. Collective.

    Args:
        microbatch_samples: Most samples of a micro-batch.
        state_factor: Gives bytes of optimizer state a byte of parameters.
        devices: Of each rank.
        example: Makes a batch of so many samples, for plans that must see the model's forward.
        context: The numeric context of a forward.
        functions: The job's loss and metrics, from (output, target), by what they are called in a message.
        evaluated: Makes a batch as the model is evaluated on; None if it isn't.
        running: Entered where the whole model's weights are used.
    """
    if plan.splits_model or (plan.axes.shard > 1 and _reads_past_modules(model)):
        from paceline.strategies.stages.build import lay_out as lay_out_stages

        return lay_out_stages(model, plan=plan, mesh=mesh, device=device, example=example, context=context,
                              microbatch_samples=microbatch_samples, state_factor=state_factor,
                              devices=devices, functions=functions, evaluated=evaluated, running=running)
    return Whole(model, context, meets_in_forward=plan.axes.shard > 1)


def _reads_past_modules(model: nn.Module) -> bool:
    """Whether the model may keep its parameters in a mapping that is never called, and read them elsewhere.

    Keras's do. FSDP2 puts shards in the place of a module's parameters, which such a model would not see; a captured
    graph takes them as arguments.
    """
    from torch.nn import ParameterDict

    return any(isinstance(module, ParameterDict) and len(module) for module in model.modules())
