"""Prepare a search before its first trial: build the job once, and create or open the study."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError
from paceline.job import Job
from paceline.job.choices import choosing
from paceline.job.file import JobFunction
from paceline.searches.controller import Request, domain_of
from paceline.searches.objectives import check_reported
from paceline.searches.samplers import make_pruner, make_sampler
from paceline.searches.space import Domain, Options
from paceline.searches.storage import optuna, quiet
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study

    from paceline.searches.trial import TrialBody

_ASKED = "paceline:asked"  # user attribute of a study: what it searches for, the same for all who share it


def probe(function: JobFunction, request: Request) -> tuple[Job, dict[str, Domain]]:
    """Build the job once, with its defaults, to refuse what no trial could do and to keep warm what
    it loads.

    Returns the job, and the options of its model's choices, by name.

    Raises:
        UsageError: there is nothing to vary, or the job won't report an objective.
    """
    import torch

    met: dict[str, Domain] = {}

    def note(name: str, options: Sequence[Any]) -> Any:
        met[name] = Options(tuple(options))
        return options[0]

    job = function.job(
        {name: value for name, value in request.space.example().items() if "." not in name}
    )
    check_reported(request.objectives, job)
    with choosing(note), torch.device("meta"):
        job.model()
    if (
        not request.space.domains
        and request.define is None
        and not met.keys() - request.space.fixed.keys()
    ):
        raise UsageError(
            f"there is nothing to search: each parameter of {function.name}() with a range and each "
            "choice in its model is set, or there are none",
            hint="lr: Annotated[float, pl.Log(1e-5, 1e-1)] in the signature, or --vary lr=1e-5..1e-1:log",
        )
    return job, {**met, **request.space.domains}


def body(function: JobFunction) -> TrialBody:
    """Return the function that ranks run.

    Everything that a training imports is loaded here, so that forks of this process have it.
    """
    from paceline.searches.trial import TrialBody
    from paceline.strategies.compose import load

    load(Plan())
    importlib.import_module("paceline.training.loop")
    return TrialBody(function)


def open_study(
    storage: BaseStorage,
    name: str,
    request: Request,
    *,
    sampler: Any,
    pruner: Any,
    seed: int,
    example: Job,
    function: JobFunction,
    joins: bool,
) -> Study:
    """Return the study; create it if necessary.

    Raises:
        UsageError: the study exists and may not be joined, or it was begun with another request.
    """
    known = optuna().study.get_all_study_names(storage)
    count = len(request.objectives)
    if name in known and not joins:
        raise UsageError(
            f"the database already has a study '{name}'",
            hint="--resume joins it; --study names another",
        )
    subject = {
        "job": function.name,
        "objectives": [str(each) for each in request.objectives],
        "fixed": {key: str(value) for key, value in request.space.fixed.items()},
    }
    with quiet():
        begun = optuna().create_study(
            storage=storage,
            study_name=name,
            load_if_exists=True,
            directions=[each.direction for each in request.objectives]
            if name not in known
            else optuna().load_study(study_name=name, storage=storage).directions,
            pruner=make_pruner(pruner, num_objectives=count, evaluations=example.epochs),
        )
    before = begun.user_attrs.get(_ASKED)
    if before is not None and before != subject:
        wrong = next(key for key in subject if before.get(key) != subject[key])
        raise UsageError(
            f"study '{name}' was begun with {wrong} {before.get(wrong)}, not {subject[wrong]}",
            hint="ask for the same, or start another study (--run DIR, --study NAME)",
        )
    begun.set_user_attr(_ASKED, subject)
    begun.sampler = make_sampler(
        sampler, num_objectives=count, seed=seed + 7919 * len(begun.get_trials(False))
    )
    return begun


def refuse_changes(study: Study, domains: Mapping[str, Domain]) -> None:
    """Check that choices still have the options that earlier trials of the study chose from.

    Ranges may change.

    Raises:
        UsageError: the options or the kind of a parameter have changed.
    """
    for trial in study.get_trials(deepcopy=False):
        for name, distribution in trial.distributions.items():
            before, now = domain_of(distribution), domains.get(name)
            if (
                now is not None
                and (
                    isinstance(before, Options)
                    or isinstance(now, Options)
                    or (before.is_log, before.whole) != (now.is_log, now.whole)
                )
                and before != now
            ):
                raise UsageError(
                    f"study '{study.study_name}' was begun with {name} from {before}, and it is from {now}"
                    " now; a study keeps its choices and the kind of its ranges",
                    hint="start another study (--run DIR, --study NAME), or give the old one with --vary",
                )
