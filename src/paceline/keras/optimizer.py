"""A Keras optimizer as one of torch's: the same rule, with its state where a job's ranks and checkpoints look."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import torch
from torch import nn

from paceline.keras.devices import move, where

_LEARNING_RATE = "lr"
_NOT_STATE = ("_variables", "_trainable_variables", "_learning_rate")


class KerasOptimizer(torch.optim.Optimizer):
    """Updates parameters by the rule of a Keras optimizer.

    The variables that Keras keeps for a parameter are its state, by their names. Those that it keeps once, such as the
    number of steps, are in the state of every parameter.

    Args:
        named: (name, parameter) pairs.
        like: A Keras optimizer with the same settings; it is left alone.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], like: Any) -> None:
        named = list(named)
        with where(next(iter(dict(named).values()), torch.zeros(0))):
            optimizer = type(like).from_config(like.get_config())
            names = "_exclude_from_weight_decay_pattern"  # which a configuration leaves out
            setattr(optimizer, names, getattr(like, names, None))
            rule = _Rule(optimizer, dict(named))
        super().__init__(named, {_LEARNING_RATE: float(optimizer.learning_rate)})
        # In a function, as all that is kept of it is in `state`: it must not be looked for in attributes as well.
        self._rule = lambda: rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if used:
                with where(used[0]):
                    self._rule().update(used, self.state, group)
        return loss


class _Rule:
    """The Keras optimizer with a Keras variable for each parameter. kept: its variables for each, by name."""

    def __init__(self, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.variables = {
            parameter: _variable(name, parameter) for name, parameter in named.items()
        }
        optimizer.build(list(self.variables.values()))
        self.kept: dict[nn.Parameter, dict[str, Any]] = {each: {} for each in self.variables}
        self.shared: dict[str, Any] = {}
        for name, value in vars(optimizer).items():
            if name in _NOT_STATE:
                continue
            if isinstance(value, keras.Variable):
                self.shared[name.strip("_")] = value
            elif isinstance(value, list) and len(value) == len(named):  # one for each parameter
                for kept, slot in zip(self.kept.values(), value, strict=True):
                    if isinstance(slot, keras.Variable):
                        kept[name.strip("_")] = slot

    def update(self, used: list[nn.Parameter], state: Any, group: dict[str, Any]) -> None:
        self._adopt(used, state)
        if isinstance(self.optimizer._learning_rate, keras.Variable):
            self.optimizer.learning_rate = group[_LEARNING_RATE]
        else:
            group[_LEARNING_RATE] = float(
                self.optimizer.learning_rate
            )  # of a Keras schedule, by the number of steps
        self.optimizer.apply(
            [parameter.grad for parameter in used],
            [self.variables[parameter] for parameter in used],
        )
        for parameter in used:
            for name, variable in self.kept[parameter].items():
                state[parameter][name] = variable._value.detach()
            for name, variable in self.shared.items():
                state[parameter][name] = variable._value.detach().clone()

    def _adopt(self, used: list[nn.Parameter], state: Any) -> None:
        """Go on with the state that is there, which may be a checkpoint's, where the parameters are by now."""
        move(self.shared.values(), used[0].device)
        for parameter in used:
            self.variables[parameter]._value = parameter
            move(self.kept[parameter].values(), used[0].device)
            for name, slot in self.kept[parameter].items():
                if name in state[parameter]:
                    slot._value = state[parameter][name]
        for name, variable in self.shared.items():
            if name in state[used[0]]:
                variable._value.copy_(state[used[0]][name])


def _variable(name: str, parameter: nn.Parameter) -> Any:
    """A Keras variable that is this parameter; its path, which weight decay may leave out, is the model's."""
    variable = keras.Variable(
        torch.zeros_like(parameter.detach()), trainable=True, name=name.replace("/", "_")
    )
    variable._value = parameter
    variable._path = name.partition("_torch_params.")[2] or name
    variable._name = variable._path.rpartition("/")[2]
    return variable
