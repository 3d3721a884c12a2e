"""Finds out what an optimizer does, by running it on small stand-ins of the parameters with random
gradients.

It finds what an update depends on: one element's history, its whole tensor, or other parameters. It
also finds whether an optimizer that is built anew continues like the one that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, partial

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import JobError
from paceline.base.streams import drawing, kept_streams, seed_streams
from paceline.job.foreign_fields import optimizer_hint
from paceline.job.modes import for_training
from paceline.job.named_optimizers import NamedOptimizers, requires_closure
from paceline.torch_private.optimizers import has_step_hooks
from paceline.training.optimizers.parts import SeenSlots, unnamed_of
from paceline.training.optimizers.state import OptimizerState, load_snapshot, snapshot

LONGEST_DIM = 4  # longest dim of a stand-in
UPDATES, FEWEST_STEPS, MOST_STEPS = (
    600,
    4,
    30,
)  # updates of parameters in a trial; optimizers may begin some of their work late
# Two parameters, or two elements, are in different halves of at least one of 2 * SPLITS splits with
# odds of 63/64.
SPLITS = 3
# Relative. An update of a single element is equal to the last bit, except for the order of vector
# operations.
ROUNDING = 1e-12
# The most elements of all parameters that are tried in full, if the job's function requires their
# shapes.
REAL_SIZES = 1_000_000
# torch's own optimizers whose update of an element depends only on that element's history.
ELEMENTWISE = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "SparseAdam",
    }
)

Build = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


class Reach(IntEnum):
    """The part of the parameters on which the update of an element depends."""

    ELEMENT = 0
    TENSOR = 1
    PARAMETERS = 2


@dataclass(frozen=True)
class Behaviour:
    """The behaviour of an optimizer, as its trial steps showed it."""

    reach: Mapping[str, Reach]  # by the name of the parameter
    changing: frozenset[str] = frozenset()  # paths of attributes that steps change
    # Those of `changing` that hold tensors by position and not by parameter.
    unnamed: frozenset[str] = frozenset()
    # Whether its state can be saved only through its own `state_dict`.
    through_state_dict: bool = False
    unkept: str = ""  # what goes wrong if its state is saved; "" if nothing does
    needs_closure: bool = False  # whether its steps evaluate the loss


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether rows of a tensor can be updated without the other rows."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def known_reach(optimizer: Optimizer) -> Reach | None:
    """Return the reach of one of torch's own optimizers, which needs no trial; None for other
    optimizers.

    If steps call the user's hooks, the reach is not known.
    """
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim.") or has_step_hooks(optimizer):
        return None
    if kind.__name__ in ELEMENTWISE:
        return Reach.ELEMENT
    return {"Muon": Reach.TENSOR, "Adafactor": Reach.TENSOR, "LBFGS": Reach.PARAMETERS}.get(
        kind.__name__
    )


def known_reaches(optimizer: Optimizer, names: Iterable[str]) -> dict[str, Reach] | None:
    """Return the known reaches by the name of the parameter; None if one of them is not known.

    This also covers torch's optimizers that a job's own step has by name.
    """
    if not isinstance(optimizer, NamedOptimizers):
        reach = known_reach(optimizer)
        return None if reach is None else dict.fromkeys(names, reach)
    reaches: dict[str, Reach] = {}
    for name, member in optimizer.members.items():
        if (reach := known_reach(member)) is None:
            return None
        reaches |= dict.fromkeys(optimizer.names[name], reach)
    return reaches


def observe(
    build: Build, parameters: Mapping[str, torch.Tensor], sparse: frozenset[str] = frozenset()
) -> Behaviour:
    """Find out what the job's optimizer does. Random streams are left as they were.

    Args:
        parameters: The trainable ones, by name. Their shapes, dtypes and attributes matter, and
            their values don't.
        sparse: Names of those that get sparse gradients, if the optimizer accepts such gradients.

    Raises:
        JobError: the job's function fails for parameters like these, or a step does.
    """
    with _trials():
        trial, optimizer = _first_trial(build, parameters, sparse)
        reaches = known_reaches(optimizer, parameters)
        if reaches is not None:
            return Behaviour(reaches, needs_closure=trial.needs_closure)
        return _observe(trial)


def needs_closure(
    optimizer: Optimizer, build: Build, parameters: Mapping[str, torch.Tensor]
) -> bool:
    """Whether the steps of an optimizer evaluate the loss: `step` requires a closure, or fails
    without one.

    Random streams are left as they were.

    build, parameters: the function and the parameters that made it; as for `observe`.
    """
    if known_reaches(optimizer, ()) is None:
        with _trials(), suppress(Exception):
            return _first_trial(build, parameters)[0].needs_closure
    return requires_closure(optimizer)


def is_exact_in_parts(
    build: Build,
    parameters: Mapping[str, torch.Tensor],
    distribute: Callable[[str, torch.Tensor], torch.Tensor],
) -> bool:
    """Whether steps on distributed tensors give the same result as steps on whole ones.

    Collective over the ranks that hold the parts. Random streams are left as they were.

    distribute: gives this rank's distributed tensor for a whole one, cut like the parameter of that
    name.
    """
    with _trials():
        trial, _ = _first_trial(build, parameters)
        whole, *_ = trial.run(trial.weights, trial.gradients, FEWEST_STEPS)
        try:
            parts, *_ = trial.run(
                {name: distribute(name, weight) for name, weight in trial.weights.items()},
                [
                    {name: distribute(name, gradient) for name, gradient in each.items()}
                    for each in trial.gradients
                ],
                FEWEST_STEPS,
            )
            full = {
                name: p.full_tensor().cpu() if hasattr(p, "full_tensor") else p.cpu()
                for name, p in parts.items()
            }
        except Exception:
            return False
        return not any(bool(_differs(full[name], weight).any()) for name, weight in whole.items())


def _first_trial(
    build: Build, parameters: Mapping[str, torch.Tensor], sparse: frozenset[str] = frozenset()
) -> tuple[_Trial, Optimizer]:
    """Return a trial on stand-ins that the job's function accepts: small ones, or of the real
    shapes.
    """
    shapes = {
        name: tuple(min(length, LONGEST_DIM) for length in p.shape)
        for name, p in parameters.items()
    }
    for names in dict.fromkeys((sparse, frozenset[str]())):
        small = _Trial(build, shapes, parameters, names)
        try:
            return small, small.begin()
        except Exception:
            if not names and sum(p.numel() for p in parameters.values()) > REAL_SIZES:
                raise
    full = _Trial(build, {name: tuple(p.shape) for name, p in parameters.items()}, parameters)
    return full, full.begin()


def _observe(trial: _Trial) -> Behaviour:
    weights, changing, unnamed = trial.run(trial.weights, trial.gradients)
    reach = dict.fromkeys(trial.shapes, Reach.ELEMENT)
    for half in trial.halves():
        others, *_ = trial.run(
            trial.mixed(trial.weights, trial.other_weights, half), trial.mixed_each_step(half)
        )
        for name, mask in half.items():
            moved = _differs(weights[name], others[name]) & ~mask
            if bool(moved.any()):
                reach[name] = max(
                    reach[name], Reach.TENSOR if bool(mask.any()) else Reach.PARAMETERS
                )
    for through_state_dict in (False, True):
        unkept = trial.lost_by_resuming(weights, changing, through_state_dict=through_state_dict)
        if not unkept:
            return Behaviour(
                reach, changing, unnamed, through_state_dict, needs_closure=trial.needs_closure
            )
    return Behaviour(reach, changing, unnamed, unkept=unkept, needs_closure=trial.needs_closure)


class _Trial:
    """Stand-ins of some shapes, with random weights and gradients."""

    def __init__(
        self,
        build: Build,
        shapes: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, torch.Tensor],
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        # sparse: names of the stand-ins whose gradients are sparse.
        self.make_optimizer, self.shapes, self.like, self.sparse = build, shapes, parameters, sparse
        self.steps = min(max(UPDATES // max(len(shapes), 1), FEWEST_STEPS), MOST_STEPS)
        self.draws = torch.Generator().manual_seed(0)
        self.weights = self._drawn()
        self.needs_closure = False  # whether a step is given a closure; `begin` finds it out

    # Drawn when they are needed: an optimizer that is known needs none of them.
    @cached_property
    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [self._drawn() for _ in range(self.steps)]

    @cached_property
    def other_weights(self) -> dict[str, torch.Tensor]:
        return self._drawn()

    @cached_property
    def other_gradients(self) -> list[dict[str, torch.Tensor]]:
        return [self._drawn() for _ in range(self.steps)]

    def _drawn(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.randn(shape, generator=self.draws, dtype=_dtype(self.like[name]))
            for name, shape in self.shapes.items()
        }

    def build(
        self, weights: Mapping[str, torch.Tensor]
    ) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        for name, parameter in parameters.items():
            parameter.__dict__.update(getattr(self.like[name], "__dict__", {}))
        seed_streams("optimizer", "build")
        optimizer = for_training(self.make_optimizer, list(parameters.items()))
        if not isinstance(optimizer, Optimizer):
            raise no_optimizer(optimizer)
        return optimizer, parameters

    def begin(self) -> Optimizer:
        """Take a step to see whether these shapes are accepted, and whether it needs a closure.

        Returns:
            A new optimizer.
        """
        optimizer = self.build(self.weights)[0]
        self.needs_closure = requires_closure(optimizer)
        if known_reaches(optimizer, ()) is None:
            try:
                self.run(self.weights, self.gradients, steps=1)
            except Exception as error:
                if self.needs_closure:
                    raise
                self.needs_closure = True
                try:
                    self.run(self.weights, self.gradients, steps=1)
                except Exception:
                    raise error from None
        return optimizer

    def run(
        self,
        weights: Mapping[str, torch.Tensor],
        gradients: list[dict[str, torch.Tensor]],
        steps: int | None = None,
    ) -> tuple[dict[str, torch.Tensor], frozenset[str], frozenset[str]]:
        """Return the weights after some steps, the paths of attributes that the steps changed, and
        which of these are unnamed.
        """
        optimizer, parameters = self.build(weights)
        made = SeenSlots(optimizer)
        changing, unnamed = set[str](), set[str]()
        for number, each in enumerate(gradients[:steps]):
            self.take(optimizer, parameters, [each], number)
            # Checked after each step, because a list that is collected over steps may be empty
            # after the last one.
            changed = made.changed()
            changing |= changed.keys()
            unnamed |= unnamed_of(changed)
        return (
            {name: p.detach() for name, p in parameters.items()},
            frozenset(changing),
            frozenset(unnamed),
        )

    def take(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        gradients: list[dict[str, torch.Tensor]],
        first: int = 0,
    ) -> None:
        for number, each in enumerate(gradients, first):
            seed_streams("optimizer", "step", number)
            if not self.needs_closure:
                for name, p in parameters.items():
                    p.grad = each[name].to_sparse(1) if name in self.sparse else each[name].clone()
                optimizer.step()
                continue
            evaluate = partial(_quadratic, parameters, each, self.sparse)
            evaluate()  # some optimizers start from existing gradients
            optimizer.step(evaluate)  # type: ignore[arg-type]

    def lost_by_resuming(
        self,
        weights: Mapping[str, torch.Tensor],
        changing: frozenset[str],
        *,
        through_state_dict: bool,
    ) -> str:
        """Return what differs if the run is saved and continues with an optimizer that is built
        anew; "" if nothing does.

        weights: the weights after all steps of a run that was not interrupted.
        """
        # Save at a step that is no multiple of a usual interval of updates: between updates, state
        # could be lost.
        half = next((steps for steps in (13, 7) if 3 * steps <= 2 * self.steps), 1)
        optimizer, parameters = self.build(self.weights)
        self.take(optimizer, parameters, self.gradients[:half])
        saved_weights = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            saved = snapshot(
                OptimizerState(
                    optimizer, parameters, changing, through_state_dict=through_state_dict
                )
            )
            optimizer, parameters = self.build(self.weights)
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(saved_weights[name])
            load_snapshot(
                OptimizerState(
                    optimizer, parameters, changing, through_state_dict=through_state_dict
                ),
                *saved,
            )
            self.take(optimizer, parameters, self.gradients[half:], half)
        except Exception as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        lost = [
            name
            for name, p in parameters.items()
            if bool(_differs(p.detach(), weights[name]).any())
        ]
        return f"'{lost[0]}' goes on otherwise" if lost else ""

    def halves(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield masks of the elements that are drawn anew: some of every tensor in one half of the
        tensors, then in the other.
        """
        names = list(self.shapes)
        for split in range(SPLITS):
            order = torch.randperm(len(names), generator=self.draws).tolist()
            for side in (order[::2], order[1::2]):
                chosen = {names[index] for index in side}
                yield {
                    name: self._mask(shape, split)
                    if name in chosen
                    else torch.zeros(shape, dtype=torch.bool)
                    for name, shape in self.shapes.items()
                }

    def _mask(self, shape: tuple[int, ...], split: int) -> torch.Tensor:
        """Return a mask of about half of a tensor's elements. It has at least one and, if there are
        two or more, not all.
        """
        count = torch.Size(shape).numel()
        mask = torch.zeros(count, dtype=torch.bool)
        mask[torch.randperm(count, generator=self.draws)[: (count + 1) // 2]] = True
        return mask.view(shape)

    def mixed(
        self,
        values: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
        half: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        return {name: torch.where(half[name], others[name], values[name]) for name in values}

    def mixed_each_step(self, half: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [
            self.mixed(*each, half)
            for each in zip(self.gradients, self.other_gradients, strict=True)
        ]


@torch.no_grad()
def _quadratic(
    parameters: Mapping[str, nn.Parameter],
    slopes: Mapping[str, torch.Tensor],
    sparse: frozenset[str],
) -> torch.Tensor:
    """Return a loss to which every element adds its own part, and put its gradients into the
    parameters.

    sparse: names of the parameters that get sparse gradients.
    """
    for name, p in parameters.items():
        gradient = slopes[name] + p
        p.grad = gradient.to_sparse(1) if name in sparse else gradient
    return torch.stack(
        [((slopes[name] + p / 2).conj() * p).real.sum() for name, p in parameters.items()]
    ).sum()


@contextmanager
def _trials() -> Iterator[None]:
    """Draw stand-ins inside the block, also where drawing is switched off, leave random streams as
    they were, and use one thread.

    Products of a few elements wait for each other's threads on busy cores: 16 s for a trial that
    takes 0.3 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kept_streams(), torch.enable_grad(), drawing():
            yield
    finally:
        torch.set_num_threads(before)


def _dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a stand-in. Real parameters are tried in float64, so that rounding can't
    hide a dependence.
    """
    return torch.float64 if parameter.is_floating_point() else parameter.dtype


def _differs(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = (value == other) | ((value != value) & (other != other))
    return ~(same | ((value - other).abs() <= ROUNDING * other.abs()))


def no_optimizer(returned: object) -> JobError:
    """Return the error for a job whose `optimizer` returned something else."""
    return JobError(
        f"optimizer returned {type(returned).__name__} and not a torch.optim.Optimizer",
        hint=optimizer_hint(returned),
    )
