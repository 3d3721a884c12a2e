"""A job's named optimizers as one optimizer, which has their state and groups and steps all of them
at once.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from paceline.base.errors import JobError
from paceline.job.own_step import Optimizer


class NamedOptimizers(torch.optim.Optimizer):
    """Named optimizers as one optimizer. They share one `state`, and each has parameters of its
    own.

    `members` are the optimizers by name. `clips` has the greatest norm of each one's gradients, or
    None if there is no limit. `names` has the names of each one's parameters.
    """

    def __init__(
        self,
        members: Mapping[str, torch.optim.Optimizer],
        clips: Mapping[str, float | None],
        names: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__([{"params": [torch.nn.Parameter(torch.zeros(()))]}], {})
        self.members, self.clips, self.names = (
            dict(members),
            dict(clips),
            {k: list(v) for k, v in names.items()},
        )
        self.state: Any = defaultdict(dict)
        for member in self.members.values():
            self.state.update(member.state)
            member.state = self.state
        self.param_groups = [
            group for member in self.members.values() for group in member.param_groups
        ]

    @classmethod
    def of(
        cls,
        specs: Mapping[str, Optimizer],
        named: Sequence[tuple[str, torch.nn.Parameter]],
        models: Collection[str],
        *,
        of_all: bool = True,
    ) -> NamedOptimizers:
        """Build the optimizers and give each of them its parameters.

        Args:
            of_all: Whether the parameters are those of all models. Then an optimizer without a
                parameter is refused.

        Raises:
            JobError: a parameter has no optimizer, or two; or one of them has no parameters.
        """

        assigned: dict[str, list[tuple[str, torch.nn.Parameter]]] = {name: [] for name in specs}
        for parameter_name, p in named:
            users = [
                name for name, each in specs.items() if _updates(name, each, parameter_name, p)
            ]
            if len(users) != 1:
                updaters = (
                    f"the optimizers {' and '.join(map(repr, users))}" if users else "no optimizer"
                )
                raise JobError(
                    f"'{parameter_name}' is updated by {updaters}",
                    hint=(
                        "each trainable parameter has one optimizer; a model that is not trained is a follower, "
                        'followers={"teacher": pl.frozen(build)}'
                    ),
                )
            assigned[users[0]].append((parameter_name, p))
        idle = [name for name, pairs in assigned.items() if not pairs]
        if idle and of_all:
            raise JobError(
                f"the optimizer '{idle[0]}' has no parameter to update",
                hint="pl.Optimizer(build, parameters=...) says which: a model's name or a function of "
                "(name, parameter)",
            )
        members = {
            name: each.build(assigned[name]) for name, each in specs.items() if assigned[name]
        }
        for name, member in members.items():
            if not isinstance(member, torch.optim.Optimizer):
                raise JobError(
                    f"optimizers['{name}'] returned {type(member).__name__} and not a torch.optim.Optimizer"
                )
            if requires_closure(member):
                raise JobError(
                    f"optimizers['{name}'] is a {type(member).__name__}, which evaluates the loss itself, "
                    "and ctx.update has no loss to evaluate",
                    hint="an optimizer without a closure, or a job with one model, model= and loss=",
                )
        return cls(
            members,
            {name: each.clip for name, each in specs.items()},
            {name: [n for n, _ in pairs] for name, pairs in assigned.items()},
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members.values():
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members.values():
            member.zero_grad(set_to_none)

    def schedules(self, makes: Mapping[str, Callable[[Any], Any] | None]) -> NamedSchedules:
        """Build the schedule of each optimizer that has one."""
        made = {name: make(self.members[name]) for name, make in makes.items() if make is not None}
        for name, schedule in made.items():
            if not hasattr(schedule, "step"):
                raise JobError(
                    f"the lr_schedule of the optimizer '{name}' returned {type(schedule).__name__} and not "
                    "a learning-rate scheduler"
                )
        return NamedSchedules(made)


class NamedSchedules:
    """Learning-rate schedules by the names of their optimizers."""

    def __init__(self, schedules: Mapping[str, Any]) -> None:
        self.schedules = dict(schedules)

    def of(self, optimizer: str) -> Any:
        """Return the schedule of one optimizer; None if it has none."""
        return self.schedules.get(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.schedules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state[name])


def _updates(name: str, each: Optimizer, parameter_name: str, p: torch.nn.Parameter) -> bool:
    if callable(each.parameters):
        return bool(each.parameters(parameter_name, p))
    models = each.parameters if each.parameters is not None else name
    return parameter_name.partition(".")[0] in ((models,) if isinstance(models, str) else models)


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` can't be called without a closure, by its signature."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
