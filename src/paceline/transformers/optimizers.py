"""Make a Trainer's optimizer and schedule again for the parameters of a rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.errors import UsageError
from paceline.torch_private.optimizers import has_step_hooks


def follows_evaluations(trainer: Any) -> bool:
    """Whether the schedule is one that Trainer steps by a metric of evaluations, in its own
    process.
    """
    scheduler = trainer.lr_scheduler
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    return isinstance(scheduler, plateau) or (
        scheduler is None and trainer.args.lr_scheduler_type == "reduce_lr_on_plateau"
    )


@dataclass(frozen=True)
class Recipe:
    """The information to make an optimizer again."""

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]  # the arguments of its class
    # options and parameter names of each group
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]

    @classmethod
    def of(cls, optimizer: Any, model: torch.nn.Module, *, prefix: str = "") -> Recipe:
        """Read the recipe from an optimizer.

        Args:
            prefix: The prefix of the names of the model's parameters on ranks.

        Raises:
            UsageError: it is no optimizer of torch, has taken steps or hooks, or has parameters
                that are not the model's.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # what Accelerate has wrapped
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__} and not a torch.optim.Optimizer"
            )
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise UsageError(
                f"the {type(optimizer).__name__} has taken steps already, and ranks would begin without "
                "its state",
                hint="resume_from_checkpoint= goes on from a checkpoint",
            )
        if has_step_hooks(optimizer):
            raise UsageError(
                f"the {type(optimizer).__name__} has step hooks, and ranks make it again without them",
                hint="a callback's on_optimizer_step sees each update; a create_optimizer that returns a "
                "subclass of the optimizer has its step() on ranks",
            )
        names = {id(p): prefix + name for name, p in model.named_parameters()}
        unknown = [
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in names
        ]
        if unknown:
            raise UsageError(
                f"the {type(optimizer).__name__} has {len(unknown)} parameters that are not of the model",
                hint="make it of model.parameters() of the model that the Trainer has",
            )
        accepted = inspect.signature(type(optimizer)).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        arguments = {
            key: value for key, value in optimizer.defaults.items() if takes_any or key in accepted
        }
        groups = tuple(
            (
                {
                    key: value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
                tuple(names[id(p)] for p in group["params"]),
            )
            for group in optimizer.param_groups
        )
        return cls(type(optimizer), arguments, groups)

    def __call__(self, named: Iterable[tuple[str, Any]]) -> torch.optim.Optimizer:
        parameters = dict(named)
        groups = [
            {**options, "params": [parameters[name] for name in names if name in parameters]}
            for options, names in self.groups
        ]
        return self.kind(groups, **self.arguments)


def schedule_of(trainer: Any, optimizer: torch.optim.Optimizer, *, steps: int) -> Any:
    """Make the Trainer's learning-rate schedule for this optimizer.

    It is made by `create_scheduler`, or is a copy of a schedule that the Trainer was given.
    """
    scheduler = trainer.lr_scheduler
    if scheduler is not None and not trainer._created_lr_scheduler:
        if type(scheduler) is torch.optim.lr_scheduler.LambdaLR:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, scheduler.lr_lambdas)
        torch.optim.lr_scheduler.ConstantLR(
            optimizer, 1.0, 0
        )  # marks the optimizer, as a copy doesn't, and else warns
        return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    trainer.lr_scheduler = None
    try:
        return trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
    finally:
        trainer.lr_scheduler, trainer._created_lr_scheduler = scheduler, scheduler is not None
