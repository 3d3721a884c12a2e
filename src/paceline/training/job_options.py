"""Compares what a job says of its optimizer, its schedule and itself with the checkpoint, so that a
resumed job's changes count.

A change by the user is distinguished from a change by steps: what the job's functions made then is
compared with what they make now.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from paceline.base.errors import CheckpointError, JobError
from paceline.job import Job
from paceline.job.foreign_fields import present_name
from paceline.job.named_optimizers import NamedSchedules
from paceline.job.order import Order, digest
from paceline.torch_private.optimizers import LAST_RATES, schedules_in
from paceline.training.optimizers.state import OptimizerState

_KERNELS = (
    "fused",
    "foreach",
)  # options of how an optimizer computes, and not of what; they stay as it was built here
_OF_RATES = "base_lrs", LAST_RATES  # values of a schedule that follow from the optimizer's
_RATE = "lr", "initial_lr"
# Options that a schedule may change.
_MOVED = *_RATE, "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"
_SHOWN_CHARACTERS = 200  # the most characters of a value that a message shows


def as_made(job: Job, state: OptimizerState, schedule: Any) -> dict[str, Any]:
    """Return what a job's functions have made, before any step, as JSON. Values that JSON can't
    hold are left out.
    """
    schedules: dict[str, Any] = {}
    for name, each in schedules_of(schedule).items():
        schedules[name] = {"kind": _kind(each), "state": {}}
        with suppress(JobError):
            schedules[name]["state"] = plain(each.state_dict(), "")
    return {
        "job": _settings(job),
        "schedules": schedules,
        "groups": _made(state.optimizer.param_groups),
        "wrapped": {path: _made(groups) for path, groups in state.wrapped_groups().items()},
    }


def _made(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for group in groups:
        made.append({})
        for key in group:
            with suppress(JobError):
                made[-1] |= options({key: group[key]})
    return made


def _settings(job: Job) -> dict[str, Any]:
    """Return settings of a job that may change between two runs.

    A change of these leaves a checkpoint usable, and neither run would show it.
    """
    functions = {
        name: _named(getattr(job, name))
        for name in ("loss", "compute", "collate", "training_step", "validation_step")
    }
    settings = {
        "clip": job.clip,
        "precision": job.precision,
        "drop_last": job.drop_last,
        "freeze": repr(job.freeze),
    }
    if job.sampler is not None and job.num_samples is not None:
        drawn = Order.of(job).indices(0, range(job.num_samples))
        kind = type(getattr(job.sampler, "groups", job.sampler)).__name__
        settings["sampler"] = f"{kind} (draws {digest(0, range(len(drawn)), drawn):x})"
    return functions | {"sampler": None} | settings


def _named(function: Any) -> str | None:
    """Return a function's name, or a module as torch writes it."""
    if function is None:
        return None
    if isinstance(function, torch.nn.Module):
        return " ".join(repr(function).split())
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _kind(schedule: Any) -> str:
    inner = schedules_in(schedule)
    return type(schedule).__name__ + (f"({', '.join(map(_kind, inner))})" if inner else "")


def schedules_of(schedule: Any) -> dict[str, Any]:
    """Return schedules by the name of their optimizer; "" is the name of a job's only one."""
    if isinstance(schedule, NamedSchedules):
        return schedule.schedules
    return {} if schedule is None else {"": schedule}


def settings_notes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a resumed job that differ, in words."""
    then = {present_name(name): value for name, value in then.items()}
    return (
        _changed(name, then[name], value)
        for name, value in now.items()
        if name in then and then[name] != value
    )


def _changed(name: str, then: Any, now: Any) -> str:
    before, after = (str(value)[:_SHOWN_CHARACTERS] for value in (then, now))
    return f"{name} is {after}, and was {before}"


def in_order(groups: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[int]:
    """Return the place among an optimizer's groups of each saved group. Both are given by the names
    of their parameters.

    Groups that are made of sets of names have another order in each process.

    Raises:
        CheckpointError: they are other groups.
    """
    places = {frozenset(names): place for place, names in enumerate(groups)}
    if sorted(map(sorted, groups)) != sorted(map(sorted, saved)):
        raise CheckpointError(
            "the optimizer of the checkpoint groups the parameters in another way than this job's",
            hint="resume with the job that wrote the checkpoint",
        )
    return [places[frozenset(names)] for names in saved]


def load_options(
    group: dict[str, Any],
    saved: Mapping[str, Any],
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    is_rescheduled: bool = False,
) -> list[str]:
    """Restore a group's options, except those that the job gives differently now.

    Args:
        then: The options that the job's function made when the checkpoint's run began.
        now: The options that it makes here.
        is_rescheduled: Whether another schedule begins here, from the job's own values.

    Returns:
        The options that differ now, in words.
    """
    made = dict(group)
    group.update(
        {
            key: unplain(value, made.get(key))
            for key, value in saved.items()
            if key not in ("parameters", *_KERNELS)
        }
    )
    changed = {key for key, value in now.items() if key in then and then[key] != value} - {
        *_KERNELS,
        *_RATE,
    }
    if is_rescheduled:
        changed -= set(_MOVED)
        group.update({key: made[key] for key in _MOVED if key in made})
    group.update({key: made[key] for key in changed})
    rates = [
        each.get("initial_lr", each.get("lr")) for each in (then, now)
    ]  # without a schedule's factor
    notes = [_changed(key, then[key], now[key]) for key in sorted(changed)]
    if "lr" not in then or rates[0] == rates[1]:
        return notes
    if not is_rescheduled:
        group.update({key: made[key] for key in _RATE if key in made})
        if saved["lr"] != then["lr"] and rates[0]:  # a schedule has changed it
            group["lr"] = unplain(saved["lr"] * rates[1] / rates[0], made["lr"])
    return [_changed("lr", *rates), *notes]


def load_schedules(
    schedule: Any,
    saved: Any,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    begun: Collection[str],
    step: int,
) -> list[str]:
    """Restore schedules, with the options that the job gives differently now.

    Args:
        saved: The schedules of the checkpoint's document.
        begun: Names of those that begin here; see `other_schedules`.

    Returns:
        The options that differ now, in words.
    """
    notes, here = [], schedules_of(schedule)
    for name in begun:
        kinds = [made[name]["kind"] if name in made else "none" for made in (then, now)]
        notes.append(
            _changed(f"the schedule{f' of {name}' if name else ''}", *kinds)
            + (
                f": it begins at step {step}"
                if name in here
                else f": the rates of step {step} are the optimizer's own"
            )
        )
    for name in here.keys() - set(begun):
        state = saved[name] if isinstance(schedule, NamedSchedules) else saved
        made = [each[name]["state"] if name in each else {} for each in (then, now)]
        found: list[str] = []
        merged = _merged(state, made[0], made[1], found) if made[0] else state
        here[name].load_state_dict(unplain(merged, None))
        notes += [f"the schedule's {words}" for words in found]
    return notes


def other_schedules(saved: Any, then: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return names of schedules whose kind has changed since the checkpoint was saved, or that
    exist on one side only.

    saved: the schedules of the checkpoint's document.
    """
    if not then:  # a run without schedules, or an older version, which does not record them
        return set() if saved else set(now)
    return {
        name
        for name in then.keys() | now.keys()
        if then.get(name, {}).get("kind") != now.get(name, {}).get("kind")
    }


def _merged(saved: Any, then: Any, now: Any, found: list[str], name: str = "") -> Any:
    """Return the saved value with the parts that the job gives differently now. Their names are
    appended to `found`.
    """
    if then == now or name == LAST_RATES:
        return saved
    parts = saved, then, now
    if all(isinstance(part, dict) and "__items__" not in part for part in parts):
        return saved | {
            key: _merged(saved.get(key), then.get(key), value, found, key)
            for key, value in now.items()
        }
    if all(isinstance(part, list) for part in parts) and len(saved) == len(then) == len(now):
        return [_merged(*each, found=found, name=name) for each in zip(*parts, strict=True)]
    if name not in _OF_RATES:
        found.append(_changed(name, then, now))
    return now


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: plain(value, f"optimizer option '{key}'")
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def plain(value: Any, description: str) -> Any:
    """Return the value if JSON gives it back. Scalar tensors become numbers."""
    if (
        value is None
        or type(value) in (bool, int, str)
        or (type(value) is float and math.isfinite(value))
    ):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        # MultiStepLR's milestones
        return {"__items__": [[key, plain(item, description)] for key, item in value.items()]}
    if isinstance(value, dict):
        return {key: plain(item, description) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, description) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    try:
        json.dumps(value)
    except TypeError:
        raise JobError(
            f"{description} holds a {type(value).__name__}, which a checkpoint can't keep without pickle",
            hint="a schedule built from numbers, such as LambdaLR or CosineAnnealingLR",
        ) from None
    return value


def unplain(value: Any, like: Any) -> Any:
    """Undo `plain` if the type matters: tuples and infinities."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict) and "__items__" in value:
        return {key: unplain(item, None) for key, item in value["__items__"]}
    if isinstance(value, dict):
        return {key: unplain(item, None) for key, item in value.items()}
    if isinstance(like, torch.Tensor) and isinstance(value, int | float):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tuple(value) if isinstance(like, tuple) else value
