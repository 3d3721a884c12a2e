"""Determines which parameters are trained in which steps, by the patterns of a job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from paceline.base.errors import JobError, PlanRefused
from paceline.job import Job
from paceline.job.phases import Phases, matching, matching_pattern, patterns
from paceline.strategies.state_tensors import StateTensor


def frozen_names(job: Job, model: torch.nn.Module) -> Phases[frozenset[str]]:
    """Return the parameters that are frozen in each phase, each by the first of its names.

    Raises:
        JobError: a pattern matches no parameter, or a phase leaves none to train.
    """
    phases = patterns(job.freeze)
    names = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    frozen = tuple(
        frozenset(first[id(names[name])] for name in matching(wanted, list(names)))
        for wanted in phases.values
    )
    for start, names_of_phase in zip(phases.starts, frozen, strict=True):
        if trained and not trained - names_of_phase:
            raise JobError(
                f"freeze leaves no parameter to train from {phases.unit} {start} on",
                hint="let the patterns of each phase leave some out",
            )
    return Phases(phases.unit, phases.starts, frozen)


def freeze_throughout(job: Job, model: torch.nn.Module, prefix: str = "") -> None:
    """Let parameters that are frozen in every phase need no gradient at all.

    prefix: the prefix of the model's names among those of the job's models, if it has several.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    names = {
        prefix + name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)
    }
    if not prefix:
        frozen_names(job, model)  # refuses patterns that match nothing
    frozen = frozenset.intersection(
        *(
            frozenset(
                names[name] for pattern in wanted for name in matching_pattern(pattern, names)
            )
            for wanted in patterns(job.freeze).values
        )
    )
    for name, p in model.named_parameters():
        if name in frozen:
            p.requires_grad_(False)


class Freezing:
    """The phases of a run's frozen parameters.

    If a backward makes a gradient of a frozen parameter, the gradient is dropped before anything
    looks at it. So the norm, the optimizer and its state treat the parameter as one that nothing
    uses.
    """

    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        self.phases = frozen_names(job, model)
        # Parameters that are frozen until this changes, whatever the job says.
        self.held = frozenset[str]()

    @property
    def changes(self) -> bool:
        """Whether a parameter is frozen in some steps and trained in others."""
        return bool(self.held) or len(set(self.phases.values)) > 1

    def at(self, step: int, epoch: int) -> frozenset[str]:
        """Return the names of parameters that are frozen in a step."""
        return self.held | self.phases.at(step, epoch) if self.changes else frozenset()

    def let_go(self, parameters: Mapping[str, torch.nn.Parameter], step: int, epoch: int) -> None:
        """Drop the gradients of parameters that are frozen in a step."""
        for name in self.at(step, epoch):
            if name in parameters:
                parameters[name].grad = None

    def refuse_thawed(
        self, parameters: Mapping[str, torch.nn.Parameter], trained: Collection[str], step: int
    ) -> None:
        """Refuse parameters that need a gradient although the optimizer does not have them.

        Args:
            parameters: The parameters of this rank.
            trained: The parameters from which the optimizer was built, and no others.

        Raises:
            JobError: another parameter has come to need a gradient, and would silently stay
                unchanged.
        """
        if thawed := [
            name
            for name, p in parameters.items()
            if p.requires_grad and name not in trained and name not in self.phases.values[-1]
        ]:
            raise JobError(
                f"requires_grad_(True) of '{thawed[0]}'{' and others' * (len(thawed) > 1)} after the run "
                f"began, seen in step {step + 1}: the optimizer has only what needed a gradient then",
                hint="let the model be built with requires_grad, and say when a parameter is trained: "
                f"Job(freeze=pl.by_step({{0: '{thawed[0]}', {step}: ()}}))",
            )

    def refuse_kept(self, kept: Iterable[StateTensor]) -> None:
        """Refuse a plan that keeps parts of gradients, if other parameters are frozen in later
        steps.

        Args:
            kept: The state that the plan's strategies keep from step to step.

        Raises:
            PlanRefused: a part of each gradient is kept for a later step, when its parameter may be
                frozen.
        """
        if self.changes and any(tensor.name.startswith("residuals/") for tensor in kept):
            raise PlanRefused(
                "compress= sends later what it leaves out of a gradient, and freeze changes during the "
                "run: it would be sent when its parameter is frozen",
                hint="leave out compress, or freeze the same parameters in the whole run",
            )
