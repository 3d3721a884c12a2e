"""Restores the state of a run from a checkpoint, under the plan that wrote it or under another one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.base.codec import unpack
from paceline.base.errors import CheckpointError
from paceline.base.logs import logger
from paceline.checkpoint.pieces import Region, pieces_of
from paceline.checkpoint.read import Checkpoint, newest_checkpoint, open_checkpoint
from paceline.checkpoint.values import from_text_tensor
from paceline.job.modes import set_mode
from paceline.launch.process.context import RankContext
from paceline.strategies.layout import Extent
from paceline.strategies.mesh import local_part
from paceline.training.attributes import restore_attributes
from paceline.training.job_options import (
    in_order,
    load_options,
    load_schedules,
    other_schedules,
    settings_notes,
    unplain,
)
from paceline.training.optimizers.local_shards import as_plain
from paceline.training.optimizers.parts import groups_of, parts_of
from paceline.training.optimizers.state import OptimizerState, placed
from paceline.training.state import (
    VALUES,
    StateOwner,
    batch_text,
    left_out,
    own_prefix,
    persistent_buffers,
    saved_shapes,
)


def model_mismatch(model: torch.nn.Module, checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint's tensors are not this model's; None if they are."""
    wanted = {
        name: shape
        for name, shape in saved_shapes(model).items()
        if name not in left_out(checkpoint)
    }
    stored = {
        name: tuple(entry.shape)
        for name, entry in checkpoint.tensors.items()
        if name.startswith(("parameters/", "buffers/"))
    }
    for kind, names in (
        ("lacks", wanted.keys() - stored.keys()),
        ("has unknown", stored.keys() - wanted.keys()),
    ):
        if names:
            return f"it {kind} {min(names)}" + (
                f" and {len(names) - 1} more" if len(names) > 1 else ""
            )
    for name, shape in wanted.items():
        if stored[name] != shape:
            return f"{name} has shape {stored[name]} there and {shape} in this job"
    return None


def mismatch(stepper: StateOwner, checkpoint: Checkpoint) -> str | None:
    """Return why a run can't continue from a checkpoint; None if it can."""
    other = model_mismatch(stepper.model, checkpoint)
    if other:
        return other
    for key in ("seed", "batch", "num_samples"):
        now = batch_text(stepper.job) if key == "batch" else getattr(stepper.job, key)
        if checkpoint.document.get(key, now) != now:
            return f"its {key} was {checkpoint.document.get(key)} and this job's is {now}"
    kind, then = type(stepper.optimizer).__name__, checkpoint.document["optimizer"]["kind"]
    return f"its optimizer was {then} and this job's is {kind}" if kind != then else None


def choose_checkpoint(
    context: RankContext, run_dir: Path, accept: Callable[[Checkpoint], str | None]
) -> Checkpoint | None:
    """Return the newest valid checkpoint that is accepted; None if there is none. Rank 0 checks and
    chooses for all ranks.

    Raises:
        CheckpointError: there are some and none can be used.
    """
    key = f"checkpoint/{context.num_trained}"
    if context.rank == 0:
        newest = newest_checkpoint(run_dir, accept=accept, warn=logger.warning)
        if context.store is not None:
            context.store.set(key, newest.path.name if newest else "")
        return newest
    name = context.hear(key, "restore").decode()
    return open_checkpoint(run_dir / "checkpoints" / name, checksums=False) if name else None


def load_weights(
    model: torch.nn.Module,
    parameters: Mapping[str, torch.nn.Parameter],
    checkpoint: Checkpoint,
    extents: Mapping[str, Extent] = MappingProxyType({}),
) -> None:
    """Read parameters, buffers and attributes into the model. Each rank reads only the parts that
    it holds.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f"parameters/{name}" not in left_out(checkpoint):
                checkpoint.read_into(f"parameters/{name}", parameter, extents.get(name))
        for name, buffer in persistent_buffers(model).items():
            checkpoint.read_into(f"buffers/{name}", buffer)
    restore_attributes(model, checkpoint)


class _Saved:
    """The tensors of a checkpoint that strategies of a plan have saved; see
    `strategies/state_tensors.py`.
    """

    def __init__(self, stepper: StateOwner, checkpoint: Checkpoint) -> None:
        self.stepper, self.checkpoint = stepper, checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def replicas(self, kind: str) -> int:
        numbers = (
            name.split("/")[1] for name in self.checkpoint.tensors if name.startswith(f"{kind}/")
        )
        return max((int(number) + 1 for number in numbers), default=0)

    def read(self, name: str, like: str = "") -> torch.Tensor:
        if not like:
            return self.checkpoint.read(name)
        parameter = self.stepper.local_parameters[like]
        for piece in pieces_of(like, parameter.detach()):
            return self.checkpoint.read(name, piece.region)
        return torch.zeros(local_part(parameter).shape)


def restore(stepper: StateOwner, checkpoint: Checkpoint) -> list[str]:
    """Restore weights, optimizer and schedule, under this run's plan.

    Returns:
        What could not be restored unchanged, in words.

    Raises:
        CheckpointError: the optimizer's state doesn't fit this job's.
    """
    # Set the mode first, because the weights that it changes are overwritten below.
    if stepper.has_modes:
        stepper.trains = checkpoint.document["trains"]
        set_mode(stepper.optimizer, is_training=stepper.trains)
    load_weights(stepper.model, stepper.local_parameters, checkpoint, stepper.layout.extents)
    notes = _restore_optimizer(stepper, checkpoint)
    if stepper.job_state is not None:
        notes += [
            f"what was saved of {name} has no place in this job"
            for name in stepper.job_state.restore(checkpoint)
        ]
    if (
        stepper.scaling is not None and "loss_scale" in checkpoint.document
    ):  # otherwise the run was in another precision
        vars(stepper.scaling).update(checkpoint.document["loss_scale"])
    return list(dict.fromkeys(notes)) + _restore_rooms(stepper, _Saved(stepper, checkpoint))


def _restore_optimizer(stepper: StateOwner, checkpoint: Checkpoint) -> list[str]:
    """Restore the optimizer and the schedule. Returns what differs between this job and the
    checkpoint's, in words.

    Values are restored in place, because a schedule, or an optimizer that wraps others, may refer
    to them.
    """
    saved, state = checkpoint.document["optimizer"], stepper.optimizer_state
    optimizer: Any = stepper.optimizer
    _take_order(stepper, [group["parameters"] for group in saved["groups"]])
    then, now = checkpoint.document.get("made", {}), stepper.made
    notes = list(settings_notes(then.get("job", {}), now["job"]))
    schedules = checkpoint.document["schedule"], then.get("schedules", {}), now["schedules"]
    begun = other_schedules(*schedules)
    rescheduled = {
        id(group)
        for name in begun
        for group in (optimizer.members[name] if name else optimizer).param_groups
    }
    for group, options_then, made_then, made_now in zip(
        optimizer.param_groups,
        saved["groups"],
        then.get("groups", [{}] * len(now["groups"])),
        now["groups"],
        strict=True,
    ):
        notes += load_options(
            group, options_then, made_then, made_now, is_rescheduled=id(group) in rescheduled
        )
    wrapped, made_of_wrapped = state.wrapped_groups(), then.get("wrapped", {})
    for path, groups in saved.get("wrapped", {}).items():
        for number, (group, options_then) in enumerate(
            zip(wrapped.get(path, ()), groups, strict=True)
        ):
            notes += load_options(
                group,
                options_then,
                made_of_wrapped[path][number] if path in made_of_wrapped else {},
                now["wrapped"][path][number],
            )
    notes += load_schedules(stepper.schedule, *schedules, begun=begun, step=checkpoint.step)
    state.load_attributes(saved.get("attributes", {}), lambda name, like: checkpoint.read(name))
    of_groups = {id(p): group for group in groups_of(stepper.optimizer) for p in group["params"]}
    stored: dict[str, dict[str, list[str]]] = {}
    every = {name for names in stepper.groups for name in names}
    for full_name, names in _optimizer_tensors(stepper, checkpoint).items():
        name, key = _name_and_key(full_name, every)
        stored.setdefault(name, {})[key] = names
    for name, parameter in state.local_parameters().items():
        values = {
            key: unplain(value, None)
            for key, value in saved.get("values", {}).get(name, {}).items()
        }
        _restore_state(
            _Reader(
                checkpoint,
                parameter,
                stored.get(name, {}),
                stepper.layout.extents.get(name),
                of_groups.get(id(state.parameters[name]), {}),
                is_plain=name in state.distributed,
            ),
            state,
            name,
            values,
        )
    return notes


def _take_order(stepper: StateOwner, saved: list[list[str]]) -> None:
    """Put the optimizer's groups, and the parameters in them, into the order of the checkpoint.

    Raises:
        CheckpointError: they are other groups.
    """
    if stepper.groups == saved:
        return
    places = in_order(stepper.groups, saved)
    rank = {
        id(stepper.optimizer.param_groups[place]): number for number, place in enumerate(places)
    }
    name_of = {id(p): name for name, p in stepper.optimizer_state.parameters.items()}
    for part in parts_of(stepper.optimizer).optimizers.values():
        part.param_groups.sort(key=lambda group: rank.get(id(group), 0))
        for group in part.param_groups:
            if id(group) in rank:
                order = {name: number for number, name in enumerate(saved[rank[id(group)]])}
                group["params"].sort(key=lambda p: order[name_of[id(p)]])
    stepper.groups[:] = saved
    stepper.made["groups"] = [stepper.made["groups"][place] for place in places]


def _name_and_key(full_name: str, parameters: Collection[str]) -> tuple[str, str]:
    """Split a full name into a parameter's name and the key after it. Both may contain slashes, as
    Keras's names do.

    >>> _name_and_key("dense/kernel/exp_avg", {"dense", "dense/kernel"})
    ('dense/kernel', 'exp_avg')
    """
    slash = full_name.rfind("/")
    while slash > 0 and full_name[:slash] not in parameters:
        slash = full_name.rfind("/", 0, slash)
    name, _, key = (
        (full_name[:slash], "/", full_name[slash + 1 :]) if slash > 0 else full_name.partition("/")
    )
    return name, key


def state_of_parameter(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return the state that an optimizer had for a parameter, whole, on the CPU."""
    prefix = f"optimizer/{name}/"
    stored = {
        full_name.removeprefix(prefix): full_name
        for full_name in checkpoint.tensors
        if full_name.startswith(prefix)
    }
    packed = from_text_tensor(checkpoint.read(stored.pop(VALUES))) if VALUES in stored else {}
    values = {
        key: unpack(value, lambda key, like: checkpoint.read(stored.pop(key)), None)
        for key, value in packed.items()
    }
    return values | {key: checkpoint.read(full_name) for key, full_name in stored.items()}


def take_over(owner: Any, changing: Mapping[str, Any]) -> None:
    """Set an optimizer's groups and a schedule to what a `changing_document` says.

    owner: has `optimizer` and `schedule`, which may be None.
    """
    for group, saved in zip(owner.optimizer.param_groups, changing["groups"], strict=True):
        load_options(group, saved, {}, {})
    if owner.schedule is not None:
        load_schedules(owner.schedule, changing["schedule"], {}, {}, begun=(), step=0)


@dataclass
class _Reader:
    """Reads the state that a checkpoint has for a parameter."""

    checkpoint: Checkpoint
    parameter: torch.nn.Parameter
    stored: dict[str, list[str]]  # names of tensors by key, of each replica that had its own
    extent: Extent | None
    options: Mapping[str, Any]  # of the parameter's group
    is_plain: bool  # whether the optimizer has this rank's own part of a distributed parameter

    def take(self, key: str, like: Any = None) -> torch.Tensor:
        """Read the value of a key. Each value is read once."""
        values = [
            _read_like(self.parameter, name, self.checkpoint, self.extent)
            for name in self.stored.pop(key)
        ]
        value = values[0] if len(values) == 1 else _mean(values)
        return placed(
            as_plain(value) if self.is_plain else value, self.parameter, key, self.options
        )


def _restore_state(
    reader: _Reader, state: OptimizerState, name: str, values: dict[str, Any]
) -> None:
    """Restore the optimizer's state of a parameter.

    values: numbers of this parameter that the document has, as older versions wrote them.
    """
    if VALUES in reader.stored:
        for key, packed in from_text_tensor(
            reader.checkpoint.read(reader.stored.pop(VALUES)[0])
        ).items():
            place = state.place(name, key)
            values[key] = unpack(
                packed, reader.take, place[0].get(place[1]) if place is not None else None
            )
    values |= {key: reader.take(key) for key in list(reader.stored)}
    for key, value in values.items():
        place = state.place(name, key)
        if place is None:
            raise CheckpointError(
                f"the optimizer of the checkpoint keeps '{key}' of '{name}', and this job's doesn't",
                hint="resume with the job that wrote the checkpoint",
            )
        holder, inner = place
        current = holder.get(inner)
        if (
            isinstance(value, torch.Tensor)
            and isinstance(current, torch.Tensor)
            and type(current) is type(value)
            and (current.shape == value.shape and current.dtype == value.dtype)
        ):
            current.detach().copy_(value)
        else:
            holder[inner] = value


def _optimizer_tensors(stepper: StateOwner, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return for each tensor of the optimizer's state the tensors of the checkpoint from which it
    is read.

    These are this replica's own, or those of all replicas if other replicas continue the run.
    """
    replicas = checkpoint.document.get("replicas", 1)
    is_local = stepper.step_sync.has_own_steps and replicas == stepper.mesh.num_copies
    names: dict[str, list[str]] = {}
    for replica in (stepper.mesh.copy,) if is_local else range(replicas):
        prefix = f"{own_prefix(replica)}optimizer/"
        for name in checkpoint.tensors:
            if name.startswith(prefix):
                names.setdefault(name.removeprefix(prefix), []).append(name)
    return names


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of the values. For whole numbers, such as counts of steps, return the first."""
    return sum(values[1:], values[0]) / len(values) if values[0].is_floating_point() else values[0]


def _restore_rooms(stepper: StateOwner, saved: _Saved) -> list[str]:
    replicas, is_local = (
        saved.checkpoint.document.get("replicas", 1),
        stepper.step_sync.has_own_steps,
    )
    notes = []
    if replicas > 1 and not (is_local and replicas == stepper.mesh.num_copies):
        notes.append(f"the optimizer states of {replicas} replicas are averaged")
    if "outer/order" in saved and not is_local:
        notes.append("the outer steps' momentum is dropped")
    notes += [
        words for synchroniser in stepper.synchronisers for words in synchroniser.restore(saved)
    ]
    kinds = {kept.name.partition("/")[0] for kept in stepper.kept()}
    if saved.replicas("residuals") and "residuals" not in kinds:
        notes.append(
            "what replicas had not sent yet of their gradients is dropped: this plan leaves nothing out"
        )
    return list(dict.fromkeys(notes))  # strategies of several models give the same notes


def _read_like(
    parameter: torch.nn.Parameter, name: str, checkpoint: Checkpoint, extent: Extent | None
) -> torch.Tensor:
    """Read a state tensor: laid out like its parameter if it has the same shape, otherwise whole."""
    entry = checkpoint.tensors[name]
    if extent is not None and tuple(entry.shape) == extent.shape:
        return checkpoint.read(name, Region(extent.offsets, tuple(parameter.shape)))
    if hasattr(parameter, "to_local") and tuple(entry.shape) == tuple(parameter.shape):
        target = torch.zeros_like(parameter)
        checkpoint.read_into(name, target)
        return target
    stored = checkpoint.read(name)
    if stored.shape != parameter.shape:
        return stored
    # Fused kernels go through a parameter and its state in parallel, so both need the same order in
    # memory.
    return torch.empty_like(parameter, dtype=stored.dtype).copy_(stored)
