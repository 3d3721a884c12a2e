"""Makes a job of what a script has built: its models, optimizers, schedules and loader."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.errors import JobError, nearest
from paceline.base.nested import tensors_in
from paceline.job import Job, loaders
from paceline.job.compute import WholeBatch
from paceline.job.named_optimizers import NamedOptimizers, requires_closure
from paceline.job.own_step import Optimizer, StepContext, computed_in_loop
from paceline.model.forward_state import ForwardSnapshot, ForwardState
from paceline.torch_private.fake_tensors import detect_fake_mode
from paceline.training.optimizers.local_shards import as_plain
from paceline.training.optimizers.state import OptimizerState
from paceline.training.rank_state import RankState

if TYPE_CHECKING:
    from paceline.training.own_step.step_batch import StepBatch

ONLY = ""  # the name of a script's only model, and of its only optimizer


class GivenModel:
    """A function that "builds" the script's module.

    Trials of a plan may run the module that they are given. It is as the script made it each time that
    it is asked for.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: ForwardSnapshot | None = None

    def __call__(self) -> nn.Module:
        if detect_fake_mode() is not None:  # who looks at shapes alone makes a copy
            return self.module
        if self._before is None:
            edited = frozenset(self.module.parameters())
            self._before = ForwardState(self.module, edited=edited).now()
        else:
            self._before.restore()
        return self.module

    def forget(self) -> None:
        """Keep nothing of what the module was, because training begins."""
        self._before = None


class GivenOptimizer:
    """A function that makes optimizers like the script's, for other parameters of the same names.

    Raises:
        JobError: the script's optimizer can't be mapped to names.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """names: of all parameters of the models, by id."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(
                f"pl.attach is given a {type(optimizer).__name__} as optimizer",
                hint="a torch.optim.Optimizer, or several by name: {'critic': optimizer, ...}",
            )
        if requires_closure(optimizer):
            raise JobError(
                f"{type(optimizer).__name__} evaluates the loss itself, which a loop of one's own does",
                hint="another optimizer, or a pl.Job, which takes such optimizers",
            )
        self.optimizer = optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if strangers := [p for p in held if id(p) not in names]:
            raise JobError(
                f"the {type(optimizer).__name__} has {len(strangers)} parameters that are not of the "
                f"model, the first of shape {tuple(strangers[0].shape)}",
                hint="build it from model.parameters() of the model that pl.attach gets, and give "
                "every module that is trained: {'model': model, 'head': head}",
            )
        self.groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self.state = {names[id(p)]: optimizer.state[p] for p in held if p in optimizer.state}

    def covers(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether it updates the parameter of a name."""
        return any(name in group for group in self.groups)

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return a twin of the optimizer for these parameters, without state."""
        parameters = dict(named)
        kind = type(self.optimizer)
        twin = kind.__new__(kind)
        own = {key: value for key, value in vars(self.optimizer).items() if key not in _OWN}
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        twin.__dict__.update(copy.deepcopy(own, {id(p): p for p in held}))
        twin.state = defaultdict(dict)
        twin.param_groups = [
            {**group, "params": [parameters[name] for name in names if name in parameters]}
            for group, names in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]
        for group in twin.param_groups:
            group.pop("param_names", None)
        return twin

    def adopt(self, twin: torch.optim.Optimizer, of_rank: OptimizerState) -> None:
        """Let the script's optimizer hold what its twin on this rank does, and its own state by name.

        Raises:
            JobError: its state belongs to whole parameters, and this rank updates parts of them.
        """
        optimizer, held = self.optimizer, of_rank.local_parameters()
        for group, of_twin in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group.update(of_twin)
        optimizer.state = twin.state
        for name, state in self.state.items():
            if name in held:
                optimizer.state[of_rank.parameters[name]] = {
                    key: as_plain(_like(value, held[name]))
                    if name in of_rank.distributed
                    else value
                    for key, value in state.items()
                }


# Attributes of an optimizer that a twin does not share: `step` may be wrapped by a schedule, and calls the original's.
_OWN = ("param_groups", "state", "step")


def _like(value: Any, parameter: Any) -> Any:
    """Return a value of a whole parameter's state as ranks hold the parameter, which is distributed.

    Raises:
        JobError: it can't be cut as the parameter is.
    """
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if value.shape != parameter.shape:
        raise JobError(
            f"the optimizer has taken steps already, and keeps a state of shape {tuple(value.shape)} for a "
            f"parameter of shape {tuple(parameter.shape)}, which this plan cuts",
            hint="pl.attach before the first step, or a data=N plan",
        )
    from torch.distributed.tensor import distribute_tensor

    whole = value.to(parameter.to_local().device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Given:
    """This holds what a script gives to `pl.attach`.

    Attributes:
        models: Modules by name; "" of an only one.
        optimizers: By name.
        schedules: By the name of their optimizer.
        names: The names of all parameters by their ids, as the script's objects held them.
    """

    def __init__(self, model: Any, optimizer: Any, schedule: Any) -> None:
        self.is_named = isinstance(model, Mapping)
        self.models = _by_name(model, "model", self.is_named)
        self.names: dict[int, str] = {}
        self.builders: dict[str, GivenModel] = {}
        for name, module in self.models.items():
            if not isinstance(module, nn.Module):
                raise JobError(
                    f"pl.attach is given a {type(module).__name__} as model",
                    hint="a torch.nn.Module, or several by name: {'critic': critic, ...}",
                )
            if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
                raise JobError(
                    f"pl.attach is given a {type(module).__name__}, which divides batches itself",
                    hint="give the module in it: model.module",
                )
            prefix = f"{name}." if name else ""
            self.builders[name] = GivenModel(module)
            self.names |= {id(p): prefix + key for key, p in module.named_parameters()}
        self.optimizers = {
            name: GivenOptimizer(each, self.names)
            for name, each in _by_name(optimizer, "optimizer", self.is_named).items()
        }
        self.schedules = {} if schedule is None else _by_name(schedule, "schedule", self.is_named)
        for name, each in self.schedules.items():
            self._check_schedule(name, each)

    def _check_schedule(self, name: str, schedule: Any) -> None:
        if name not in self.optimizers:
            raise JobError(f"schedule is given for '{name}', and there is no such optimizer")
        if not hasattr(schedule, "step"):
            raise JobError(
                f"schedule is a {type(schedule).__name__} and not a learning-rate scheduler",
                hint="one of torch.optim.lr_scheduler, made of the optimizer that pl.attach gets",
            )
        optimizer = getattr(schedule, "optimizer", None)
        if optimizer is not None and optimizer is not self.optimizers[name].optimizer:
            raise JobError(
                "the schedule is of another optimizer than the one that pl.attach gets",
                hint="torch.optim.lr_scheduler.X(optimizer, ...) of the same optimizer",
            )

    def _schedule_of(self, name: str) -> Callable[[Any], Any] | None:
        schedule = self.schedules.get(name)
        return None if schedule is None else lambda optimizer: schedule

    def job(self, loader: Any, *, state: Mapping[str, Any], **fields: Any) -> Job:
        """Return the job of a loop over a loader.

        state: what of the script checkpoints keep, by name.
        """
        fields = {**_of_loader(loader), **fields}
        in_loop = partial(computed_in_loop, state=state)
        if not self.is_named:
            return Job(
                model=self.builders[ONLY],
                optimizer=self.optimizers[ONLY],
                lr_schedule=self._schedule_of(ONLY),
                loss=in_loop,
                **fields,
            )
        clip = fields.pop("clip", None)
        if isinstance(clip, Mapping) and (unknown := [n for n in clip if n not in self.optimizers]):
            raise JobError(
                f"clip is given for '{unknown[0]}', and there is no such optimizer",
                hint=nearest(unknown[0], self.optimizers),
            )
        return Job(
            models=self.builders,
            optimizers={
                name: Optimizer(
                    each,
                    parameters=each.covers,
                    lr_schedule=self._schedule_of(name),
                    clip=clip.get(name) if isinstance(clip, Mapping) else clip,
                )
                for name, each in self.optimizers.items()
            },
            training_step=partial(
                computed_in_loop,
                state=state,
                tried=partial(tried_in_loop, names=tuple(self.models)),
            ),
            **fields,
        )

    def adopt(self, state: RankState) -> None:
        """Let the script's optimizers hold the parameters of this rank, and step them in place of their twins."""
        for builder in self.builders.values():
            builder.forget()
        of_state = state.optimizer_state
        optimizer = state.optimizer
        if isinstance(optimizer, NamedOptimizers):
            for name, each in self.optimizers.items():
                each.adopt(optimizer.members[name], of_state)
                optimizer.members[name] = each.optimizer
            groups = [group for each in optimizer.members.values() for group in each.param_groups]
            optimizer.param_groups = groups
            return
        self.optimizers[ONLY].adopt(optimizer, of_state)
        state.optimizer = of_state.optimizer = self.optimizers[ONLY].optimizer


def tried_in_loop(context: StepContext, batch: StepBatch, *, names: Sequence[str]) -> None:
    """The step of a job of several models whose loop is a script's.

    It is only ever tried, where a plan has to know what models write to. What the loop gives to them
    is not known: each is tried with the batch's first tensor, and what fails so tells nothing.
    """
    first = next((tensor for tensor in tensors_in(batch.input) if tensor.ndim), torch.zeros(1, 1))
    for name in names:
        with suppress(Exception):
            context.run(name, first)


def _by_name(value: Any, field: str, is_named: bool) -> dict[str, Any]:
    if is_named is not isinstance(value, Mapping):
        raise JobError(
            f"{field} is {'one' if is_named else 'several by name'}, and model is "
            f"{'several by name' if is_named else 'one'}",
            hint="give models, optimizers and schedules by name, or one of each",
        )
    return dict(value) if is_named else {ONLY: value}


def _of_loader(loader: Any) -> dict[str, Any]:
    """Return the fields of a job that a loader says. Its batch size is the global one.

    Raises:
        JobError: it is no DataLoader, or one that can't be read in parts.
    """
    if not loaders.is_loader(loader):
        raise JobError(
            f"pl.attach is given a {type(loader).__name__} as loader",
            hint="a torch.utils.data.DataLoader: its batch size is the batch of all ranks together",
        )
    fields = loaders.training_fields(loader)
    fields["collate"] = WholeBatch(fields["collate"])
    fields["data"] = loaders.opened(fields["data"], loader)
    if fields["batch"] is None:  # the sampler's groups are the steps
        del fields["batch"]
    return fields
