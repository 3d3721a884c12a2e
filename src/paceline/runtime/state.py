"""Everything a run needs to go on, as named tensors and a JSON document that don't know the layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from paceline.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.launch.context import RankContext
from paceline.launch.logs import logger
from paceline.runtime.checkpoint.pieces import Piece, pieces_of
from paceline.runtime.checkpoint.read import Checkpoint, newest_checkpoint, open_checkpoint
from paceline.strategies.layout import Cut, Ownership
from paceline.strategies.mesh import Mesh, axes_cut

# Names of tensors in a checkpoint: parameters/NAME, buffers/NAME, optimizer/NAME/KEY.


class Holder(Protocol):
    """What holds a run's state on one rank: a `Stepper`, or a server.

    model: with every parameter's shape, though what is trained may be held elsewhere.
    replica: which part of every window this rank computes; -1 for none.
    """

    @property
    def replica(self) -> int: ...
    @property
    def job(self) -> Job: ...
    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def layout(self) -> Ownership: ...
    @property
    def held(self) -> dict[str, torch.nn.Parameter]: ...
    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def groups(self) -> list[list[str]]: ...
    @property
    def schedule(self) -> Any: ...


def pieces(stepper: Holder) -> Iterator[Piece]:
    """What this rank writes of what it owns: its part of a tensor, if it is the first of those that hold that part."""
    for name, tensor, cut in _tensors(stepper):
        cut_along = axes_cut(tensor)
        if not any(stepper.mesh.coordinates[axis] for axis in ("data", "shard", "tensor") if axis not in cut_along):
            yield from pieces_of(name, tensor.detach(), cut)


def _tensors(stepper: Holder) -> Iterator[tuple[str, torch.Tensor, Cut | None]]:
    owned, cuts = stepper.layout.owned, stepper.layout.cuts
    yield from ((f"parameters/{name}", parameter, cuts.get(name)) for name, parameter in stepper.held.items()
                if name in owned)
    yield from ((f"buffers/{name}", buffer, None) for name, buffer in persistent_buffers(stepper.model).items()
                if name in stepper.layout.owned_buffers)
    for name, parameter in stepper.parameters.items():
        if name not in owned:
            continue
        for key, value in stepper.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):  # laid out like its parameter if it has its shape, else whole
                yield f"optimizer/{name}/{key}", value, cuts.get(name) if value.shape == parameter.shape else None


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state of the model."""
    kept = set(model.state_dict(keep_vars=True)) if list(model.buffers()) else set()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def document(stepper: Holder, *, step: int, samples: int) -> dict[str, Any]:
    """What is not a tensor: the cursor, the optimizer's groups, the schedule.

    Raises:
        JobError: a schedule or optimizer keeps something that JSON can't hold.
    """
    groups = [{key: _plain(value, f"optimizer option '{key}'") for key, value in group.items()
               if key not in ("params", "param_names")} | {"parameters": names}
              for group, names in zip(stepper.optimizer.param_groups, stepper.groups, strict=True)]
    values = {name: {key: _plain(value, f"optimizer state '{key}'")
                     for key, value in stepper.optimizer.state.get(parameter, {}).items()
                     if not isinstance(value, torch.Tensor)}
              for name, parameter in stepper.parameters.items()}
    schedule = stepper.schedule.state_dict() if stepper.schedule is not None else None
    return {
        "step": step,
        "samples": samples,
        "seed": stepper.job.seed,
        "batch": stepper.job.batch,
        "num_samples": stepper.job.num_samples,
        "optimizer": {"kind": type(stepper.optimizer).__name__, "groups": groups,
                      "values": {name: kept for name, kept in values.items() if kept}},
        "schedule": _plain(schedule, "the learning-rate schedule"),
    }


def _plain(value: Any, what: str) -> Any:
    """The value if JSON gives it back, scalar tensors as numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return {"__items__": [[key, _plain(item, what)] for key, item in value.items()]}  # MultiStepLR's milestones
    if isinstance(value, dict):
        return {key: _plain(item, what) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, what) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    try:
        json.dumps(value)
    except TypeError:
        raise JobError(f"{what} holds a {type(value).__name__}, which a checkpoint can't keep without pickle",
                       hint="a schedule built from numbers, such as LambdaLR or CosineAnnealingLR") from None
    return value


def model_mismatch(model: torch.nn.Module, checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint's tensors are not this model's; None if they are."""
    wanted = {f"parameters/{name}": tuple(p.shape) for name, p in model.named_parameters()}
    wanted |= {f"buffers/{name}": tuple(b.shape) for name, b in persistent_buffers(model).items()}
    found = {name: tuple(entry.shape) for name, entry in checkpoint.tensors.items()
             if name.startswith(("parameters/", "buffers/"))}
    for kind, names in (("lacks", wanted.keys() - found.keys()), ("has unknown", found.keys() - wanted.keys())):
        if names:
            return f"it {kind} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    for name, shape in wanted.items():
        if found[name] != shape:
            return f"{name} has shape {found[name]} there and {shape} in this job"
    return None


def mismatch(stepper: Holder, checkpoint: Checkpoint) -> str | None:
    """Why a run can't go on from a checkpoint; None if it can."""
    other = model_mismatch(stepper.model, checkpoint)
    if other:
        return other
    for key in ("seed", "batch", "num_samples"):
        now = getattr(stepper.job, key)
        if checkpoint.document.get(key) != now:
            return f"its {key} was {checkpoint.document.get(key)} and this job's is {now}"
    kind, then = type(stepper.optimizer).__name__, checkpoint.document["optimizer"]["kind"]
    return f"its optimizer was {then} and this job's is {kind}" if kind != then else None


def choose_checkpoint(context: RankContext, run_dir: Path,
                      accept: Callable[[Checkpoint], str | None]) -> Checkpoint | None:
    """The newest valid checkpoint that is accepted; None if there is none. Rank 0 checks and chooses for all ranks.

    Raises:
        CheckpointError: there are some and none can be used.
    """
    if context.rank == 0:
        found = newest_checkpoint(run_dir, accept=accept, warn=logger.warning)
        if context.store is not None:
            context.store.set("checkpoint", found.path.name if found else "")
        return found
    assert context.store is not None
    name = context.store.get("checkpoint").decode()
    return open_checkpoint(run_dir / "checkpoints" / name, checksums=False) if name else None


def load_weights(model: torch.nn.Module, held: Mapping[str, torch.nn.Parameter], checkpoint: Checkpoint,
                 cuts: Mapping[str, Cut] = MappingProxyType({})) -> None:
    """Read parameters and buffers into the model; each rank reads only the parts it holds."""
    with torch.no_grad():
        for name, parameter in held.items():
            checkpoint.read_into(f"parameters/{name}", parameter, cuts.get(name))
        for name, buffer in persistent_buffers(model).items():
            checkpoint.read_into(f"buffers/{name}", buffer)


def restore(stepper: Holder, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer and schedule where they were, under this run's layout.

    Raises:
        CheckpointError: the optimizer's state doesn't fit this job's.
    """
    load_weights(stepper.model, stepper.held, checkpoint, stepper.layout.cuts)
    saved = checkpoint.document["optimizer"]
    positions = {name: position for position, name in enumerate(
        name for name in _names_in_order(stepper, saved["groups"]) if name in stepper.parameters)}
    state: dict[int, dict[str, Any]] = {}
    for full_name in checkpoint.tensors:
        name, _, key = full_name.removeprefix("optimizer/").rpartition("/")
        if full_name.startswith("optimizer/") and name in positions:
            state.setdefault(positions[name], {})[key] = _read_like(
                stepper.parameters[name], full_name, checkpoint, stepper.layout.cuts.get(name))
    for name, kept in saved["values"].items():
        if name in positions:
            state.setdefault(positions[name], {}).update(kept)
    fresh = stepper.optimizer.state_dict()
    groups = [{**now, **{key: _unplain(value, now.get(key)) for key, value in then.items() if key != "parameters"}}
              for now, then in zip(fresh["param_groups"], saved["groups"], strict=True)]
    stepper.optimizer.load_state_dict({"state": state, "param_groups": groups})
    if stepper.schedule is not None:
        stepper.schedule.load_state_dict(_unplain(checkpoint.document["schedule"], None))


def _names_in_order(stepper: Holder, saved_groups: list[dict[str, Any]]) -> list[str]:
    now = stepper.groups
    if now != [group["parameters"] for group in saved_groups]:
        raise CheckpointError("the optimizer of the checkpoint groups the parameters in another way than this job's",
                              hint="resume with the job that wrote the checkpoint")
    return [name for group in now for name in group]


def _read_like(parameter: torch.nn.Parameter, name: str, checkpoint: Checkpoint, cut: Cut | None) -> torch.Tensor:
    """A state tensor: laid out like its parameter if it has its shape, else whole."""
    entry = checkpoint.tensors[name]
    if cut is not None and tuple(entry.shape) == cut.shape:
        return checkpoint.read(name, cut.offsets, tuple(parameter.shape))
    if hasattr(parameter, "to_local") and tuple(entry.shape) == tuple(parameter.shape):
        target = torch.zeros_like(parameter)
        checkpoint.read_into(name, target)
        return target
    return checkpoint.read(name)


def _unplain(value: Any, like: Any) -> Any:
    """Undo `_plain` where the type matters: tuples and infinities."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict) and "__items__" in value:
        return {key: _unplain(item, None) for key, item in value["__items__"]}
    if isinstance(value, dict):
        return {key: _unplain(item, None) for key, item in value.items()}
    if isinstance(like, torch.Tensor) and isinstance(value, int | float):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tuple(value) if isinstance(like, tuple) else value
