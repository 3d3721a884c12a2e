"""Everything that a run needs to continue, as named tensors and a JSON document that are
independent of the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.base.errors import JobError
from paceline.checkpoint.assemble import write_model
from paceline.checkpoint.owners import Owners
from paceline.checkpoint.pieces import TensorPiece, pieces_of
from paceline.checkpoint.read import Checkpoint, open_checkpoint
from paceline.checkpoint.values import pack, text_tensor
from paceline.checkpoint.write import Writer
from paceline.job import Job
from paceline.job.phases import ChangingBatch
from paceline.launch.process.context import RankContext
from paceline.runs.folder import MODEL, checkpoint_of
from paceline.strategies.layout import Extent, Ownership
from paceline.strategies.mesh import Mesh, axes_cut
from paceline.strategies.state_tensors import StateTensor
from paceline.strategies.step_sync import StepSync
from paceline.strategies.synchroniser import Synchroniser
from paceline.training.attributes import ChangingAttributes
from paceline.training.job_options import (
    options,
    plain,
)
from paceline.training.job_state import JobState
from paceline.training.optimizers.state import OptimizerState
from paceline.training.scaling import LossScale

# Names of tensors in a checkpoint: parameters/NAME, buffers/NAME, optimizer/NAME/KEY (keys: see
# OptimizerState), optimizer-attributes/PATH, attributes/NAME, and those of the plan's strategies:
# residuals/REPLICA/NAME, factors/NAME, outer/..., replicas/REPLICA/... (the optimizer's state is
# the first replica's where each has one of its own; those of the others are
# replicas/REPLICA/optimizer/NAME/KEY). The document's "left_out" names tensors that are not stored.
# The job that resumes must give a model that has them.

# Key of the text that holds the values of a parameter's optimizer state that are no tensors.
VALUES = ".values"


class StateOwner(Protocol):
    """The object that holds a run's state on one rank: a `Stepper`, or a server.

    Attributes:
        model: The model with every parameter's shape. Trained parameters may be held elsewhere.
        replica: Which part of every window this rank computes; -1 for none.
        speaks_for_job: Whether the state that a job keeps outside its models is saved as it is on
            this rank.
        trains: Whether the weights in place are those that the optimizer trains, if it has others
            for evaluations.
    """

    trains: bool
    speaks_for_job: bool
    replica: int
    job: Job
    model: torch.nn.Module
    mesh: Mesh

    @property
    def layout(self) -> Ownership: ...

    local_parameters: dict[str, torch.nn.Parameter]
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    groups: list[list[str]]
    optimizer_state: OptimizerState

    @property
    def attributes(self) -> ChangingAttributes | None: ...
    @property
    def job_state(self) -> JobState | None: ...

    schedule: Any
    made: dict[str, Any]
    has_modes: bool

    @property
    def scaling(self) -> LossScale | None: ...
    @property
    def step_sync(self) -> StepSync: ...
    @property
    def synchronisers(self) -> Sequence[Synchroniser]: ...

    def kept(self) -> Iterable[StateTensor]:
        """Yield the state of the plan's strategies."""


def pieces(stepper: StateOwner, *, host_ranks: int | None = None) -> Iterator[TensorPiece]:
    """Yield the pieces that this rank writes.

    Of the ranks that hold the same part of a tensor, one writes it. Each of these ranks writes
    about as many bytes.

    Args:
        host_ranks: Number of ranks of each host, if the ranks of a host should write all that they
            hold.
    """
    owners = Owners(stepper.mesh, host_ranks=host_ranks)

    def owns(alike: tuple[str, ...], tensor: torch.Tensor, like: torch.Tensor) -> bool:
        cut_along = axes_cut(like)
        along = tuple(axis for axis in alike if axis not in cut_along)
        # The bytes of a DTensor are those of all its parts together.
        return owners.owns(along, tensor.numel() * tensor.element_size())

    for name, tensor, alike, extent in _tensors(stepper, owners):
        if owns(alike, tensor, tensor):
            yield from pieces_of(name, tensor.detach(), extent)
    for kept in stepper.kept():
        alike = stepper.mesh.part_axes if kept.replica else stepper.mesh.alike_axes
        if not owns(alike, kept.tensor, stepper.local_parameters.get(kept.like, kept.tensor)):
            continue
        if not kept.like:
            yield from pieces_of(kept.name, kept.tensor)
        elif kept.like in stepper.layout.owned:
            for piece in pieces_of(kept.like, stepper.local_parameters[kept.like].detach()):
                yield TensorPiece(kept.name, piece.shape, piece.offsets, kept.tensor)


def alike_along(stepper: StateOwner, axis: str) -> dict[str, torch.Tensor]:
    """Return tensors of the optimizer's state that ranks along an axis of copies should hold alike,
    by name.
    """
    return {
        name: tensor
        for name, tensor, alike, _ in _tensors(stepper, Owners(stepper.mesh))
        if name.startswith("optimizer/")
        and not name.endswith("/.values")
        and axis in alike
        and axis not in axes_cut(tensor)
    }


def save_weights(
    stepper: StateOwner, folder: Path, context: RankContext, *, step: int, num_ranks: int
) -> Path:
    """Write a checkpoint of the model as it is now, without the state of its training, and return
    its path. The first ranks, which own all pieces, do so.

    num_ranks: how many these are.
    """
    writer = Writer(folder, rank=context.rank, world_size=num_ranks, attempt=context.attempt)
    of_model = (
        piece
        for piece in pieces(stepper)
        if piece.name.startswith(("parameters/", "buffers/", "attributes/"))
    )
    writer.save(step, of_model, {"step": step, "ties": ties(stepper.model)}, snapshot=False)
    writer.wait()
    return checkpoint_of(folder, step)


def _tensors(
    stepper: StateOwner, owners: Owners
) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...], Extent | None]]:
    """Yield names, tensors, the axes along which ranks hold them alike, and the place of tensors
    that are a part.
    """
    mesh, owned, extents = stepper.mesh, stepper.layout.owned, stepper.layout.extents
    stepper.optimizer_state.look()
    everywhere, persistent = mesh.alike_axes, persistent_buffers(stepper.model)
    shared = stepper.step_sync.global_weights(stepper.local_parameters)
    yield from (
        (f"parameters/{name}", parameter, everywhere, extents.get(name))
        for name, parameter in shared.items()
        if name in owned
    )
    yield from (
        (f"buffers/{name}", buffer, everywhere, None)
        for name, buffer in persistent.items()
        if name in stepper.layout.owned_buffers
    )
    own_steps = stepper.step_sync.has_own_steps
    prefix = own_prefix(mesh.copy) if own_steps else ""
    for name, parameter in stepper.optimizer_state.local_parameters().items():
        is_alone = name in stepper.optimizer_state.alone
        if name not in owned and not is_alone:
            continue
        alike = mesh.part_axes if own_steps else everywhere
        if is_alone or (axes_cut(stepper.parameters[name]) and not axes_cut(parameter)):
            alike = () if own_steps else mesh.copy_axes  # one rank of several updates it whole
        for key, value in _stored_state(stepper.optimizer_state, name).items():
            # Laid out like its parameter if it has the same shape, otherwise whole.
            yield (
                f"{prefix}optimizer/{name}/{key}",
                value,
                alike,
                extents.get(name) if value.shape == parameter.shape else None,
            )
    whole: dict[str, torch.Tensor] = {}
    if stepper.attributes is not None and owners.is_first(everywhere):
        whole |= stepper.attributes.stored(
            mesh.coordinates[mesh.stage_axis],
            {
                name: buffer
                for name, buffer in stepper.model.named_buffers()
                if name in stepper.layout.owned_buffers and name not in persistent
            },
        )
    if stepper.job_state is not None and stepper.speaks_for_job:
        whole |= stepper.job_state.stored()
    if owners.is_first(mesh.sizes):
        stepper.optimizer_state.attributes(whole)
    yield from ((name, tensor, (), None) for name, tensor in whole.items())


def _stored_state(state: OptimizerState, name: str) -> dict[str, torch.Tensor]:
    """Return tensors that hold a parameter's optimizer state, by key. Values that are no tensors
    are in one of them, as text.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.by_parameter(name):
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            values[key] = pack(value, key, tensors)
    return tensors | ({VALUES: text_tensor(values)} if values else {})


def own_prefix(replica: int) -> str:
    return f"replicas/{replica}/" if replica else ""


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to the state of the model."""
    kept = set(model.state_dict(keep_vars=True)) if list(model.buffers()) else set()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def saved_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors by their names in a checkpoint."""
    return {
        **{f"parameters/{name}": tuple(p.shape) for name, p in model.named_parameters()},
        **{f"buffers/{name}": tuple(b.shape) for name, b in persistent_buffers(model).items()},
    }


def stored_names(model: torch.nn.Module) -> dict[str, str]:
    """Return for every name that `model.state_dict()` has for a tensor its name in a checkpoint.
    Tied tensors are stored once.
    """
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), f"parameters/{name}")
    kept = set(model.state_dict(keep_vars=True)) if list(model.buffers()) else set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in kept:
            names[name] = first.setdefault(id(buffer), f"buffers/{name}")
    return names


def ties(model: torch.nn.Module) -> dict[str, str]:
    """Return for each further name that the model has for a tensor its name in the checkpoint."""
    return {
        name: stored
        for name, stored in stored_names(model).items()
        if stored.partition("/")[2] != name
    }


def export(model: torch.nn.Module, run_dir: Path, *, step: int) -> None:
    """Write the trained model under its own names, tensor by tensor, from the checkpoint of this
    step.

    Tensors that the checkpoint does not store are left out.
    """
    checkpoint = open_checkpoint(checkpoint_of(run_dir, step), checksums=False)
    stored = {
        name: key for name, key in stored_names(model).items() if key not in left_out(checkpoint)
    }
    write_model(run_dir / MODEL, checkpoint, stored)


def document(
    stepper: StateOwner, *, step: int, samples: int, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the state that is not in tensors: the cursor, the optimizer's groups, the schedule.

    left_out: tensors of the model that are not stored.

    Raises:
        JobError: a schedule or optimizer keeps something that JSON can't hold.
        PlanRefused: the optimizer keeps something from which this rank's part can't be separated.
    """
    state = stepper.optimizer_state
    state.check([name for names in stepper.groups for name in names])
    changing = changing_document(stepper, step=step, samples=samples)
    return {
        "seed": stepper.job.seed,
        "batch": batch_text(stepper.job),
        "num_samples": stepper.job.num_samples,
        "ties": ties(stepper.model),
        "made": stepper.made,
        "replicas": stepper.mesh.num_copies if stepper.step_sync.has_own_steps else 1,
        "optimizer": {
            "kind": type(stepper.optimizer).__name__,
            "groups": [
                values | {"parameters": names}
                for values, names in zip(changing.pop("groups"), stepper.groups, strict=True)
            ],
            "wrapped": {
                path: [options(group) for group in wrapped]
                for path, wrapped in state.wrapped_groups().items()
            },
            "attributes": state.attributes({}),
        },
        **changing,
        **({"left_out": sorted(left_out)} if left_out else {}),
    }


def changing_document(stepper: StateOwner, *, step: int, samples: int) -> dict[str, Any]:
    """Return the part of the document that steps change.

    Raises:
        JobError: as `document`.
    """
    schedule = stepper.schedule.state_dict() if stepper.schedule is not None else None
    return {
        "step": step,
        "samples": samples,
        "groups": [options(group) for group in stepper.optimizer.param_groups],
        "schedule": plain(schedule, "the learning-rate schedule"),
        **({"trains": stepper.trains} if stepper.has_modes else {}),
        **({"loss_scale": asdict(stepper.scaling)} if stepper.scaling is not None else {}),
    }


def left_out(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the tensors of the model that the checkpoint does not store."""
    return frozenset(checkpoint.document.get("left_out", ()))


def batch_text(job: Job) -> int | str:
    """Return the samples of a step; in words if their number changes."""
    return str(job.batch) if isinstance(job.batch, ChangingBatch) else job.batch


def refuse_unsaveable(stepper: StateOwner) -> None:
    """Refuse a run whose state could not be saved, before it begins.

    Raises:
        JobError: a schedule or optimizer keeps something that JSON can't hold, or a tensor has a
            dtype or a layout that no file of a checkpoint can hold, such as a sparse one.
        PlanRefused: as `document`.
    """
    document(stepper, step=0, samples=0)
    try:
        for _ in pieces(stepper):
            pass
    except ValueError as error:
        raise JobError(
            f"a run could not be saved: {error}",
            hint="use dense tensors; a buffer that the model makes anew can be registered with "
            "persistent=False",
        ) from error
