"""Make an optimizer and a schedule again, which another tool made for a model, for the parameters of
a rank.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.base.errors import UsageError
from paceline.torch_private.optimizers import has_step_hooks


@dataclass(frozen=True)
class Recipe:
    """The information to make an optimizer again."""

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]  # the arguments of its class
    # options and parameter names of each group
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]

    @classmethod
    def of(cls, optimizer: Any, model: torch.nn.Module) -> Recipe:
        """Read the recipe from an optimizer.

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
        names = {id(p): name for name, p in model.named_parameters()}
        unknown = [
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in names
        ]
        if unknown:
            raise UsageError(
                f"the {type(optimizer).__name__} has {len(unknown)} parameters that are not of the model",
                hint="make it of the parameters of the model that is trained",
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


def remade_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a copy of a learning-rate schedule that has not stepped, for this optimizer."""
    # It marks the optimizer, which a copy doesn't, and which then warns.
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 0)
    return copy.deepcopy(schedule, {id(schedule.optimizer): optimizer})
