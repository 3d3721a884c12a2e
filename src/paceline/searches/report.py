"""The results of a study: study.json and the best configuration. They come only from Optuna's storage."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.base.document import strict
from paceline.job.file import JobFile
from paceline.searches.objectives import Objective
from paceline.searches.storage import quiet
from paceline.searches.trials import RECORD, TEST, best_trial, counted, front, state_of

if TYPE_CHECKING:
    import optuna

BEST = "best.json"
_RECORDED = (
    "plan",
    "devices",
    "seconds",
    "steps",
    "figures",
    "reason",
    "refused",
    "kind",
)  # as the controller has it


def document(
    study: optuna.Study,
    *,
    objectives: Sequence[Objective],
    source: JobFile | None,
    fixed: Mapping[str, Any],
    final: bool,
) -> dict[str, Any]:
    """Return the content of study.json.

    Args:
        final: Whether to add importances, which take a moment.
    """
    trials = counted(study)
    best = best_trial(study)
    began = min((trial.datetime_start for trial in trials if trial.datetime_start), default=None)
    content: dict[str, Any] = strict(
        {
            "study": study.study_name,
            "objectives": [{"name": each.name, "direction": each.direction} for each in objectives],
            "fixed": dict(fixed),
            "trials": [_trial(trial, fixed, began) for trial in trials],
            "best": None if best is None else _best(best, source, fixed),
            "pareto": [_trial(trial, fixed, began) for trial in front(study)],
            "importances": importances(study, objectives) if final else {},
            "test": study.user_attrs.get(TEST),
        }
    )
    return content


def _trial(
    trial: optuna.trial.FrozenTrial, fixed: Mapping[str, Any], began: datetime | None
) -> dict[str, Any]:
    """Return a trial as study.json contains it.

    Args:
        began: The start of the study's first trial, from which `ended_s` is counted.
    """
    record = trial.user_attrs.get(RECORD, {})
    values = (
        {"value": trial.values[0]}
        if trial.values and len(trial.values) == 1
        else {"values": trial.values}
    )
    return {
        "number": trial.number,
        "state": state_of(trial),
        "params": _varied(trial, fixed),
        **values,
        "ended_s": (trial.datetime_complete - began).total_seconds()
        if trial.datetime_complete and began
        else None,
        **{key: record[key] for key in _RECORDED if key in record},
    }


def _varied(trial: optuna.trial.FrozenTrial, fixed: Mapping[str, Any]) -> dict[str, Any]:
    params = trial.user_attrs.get(RECORD, {}).get("params", trial.params)
    return {name: value for name, value in params.items() if name not in fixed}


def _best(
    trial: optuna.trial.FrozenTrial, source: JobFile | None, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    record = trial.user_attrs[RECORD]
    settings = {**fixed, **record["params"]}
    return {
        "params": _varied(trial, fixed),
        "value": trial.values[0],
        "values": trial.values,
        "trial": trial.number,
        "plan": record["plan"],
        "settings": settings,
        "figures": record["figures"],
        "command": command(source, settings, record["plan"]) if source is not None else None,
    }


def command(source: JobFile, settings: Mapping[str, Any], plan: str) -> str:
    """Return the command line that trains a configuration."""
    words = ["paceline", "train", f"{source.path}:{source.function}"]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join([*words, "--plan", plan])


def importances(study: optuna.Study, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return how much of an objective's spread each parameter explains; by objective if there are
    several.

    The result is empty if there are too few trials. Source: fANOVA (Hutter et al. 2014), or
    PED-ANOVA (Watanabe et al. 2023) if scikit-learn is not installed; both are Optuna's.
    """
    by_objective = {each.name: _importances(study, index) for index, each in enumerate(objectives)}
    return by_objective if len(objectives) > 1 else next(iter(by_objective.values()))


def _importances(study: optuna.Study, index: int) -> dict[str, float]:
    from optuna import importance

    target = (lambda trial: trial.values[index]) if len(study.directions) > 1 else None
    kind = (
        importance.FanovaImportanceEvaluator
        if find_spec("sklearn")
        else importance.PedAnovaImportanceEvaluator
    )
    with quiet():
        evaluator: Any = kind()
        try:
            shares = importance.get_param_importances(study, evaluator=evaluator, target=target)
        except (ValueError, RuntimeError):  # fewer than two trials, or all alike
            return {}
    return {name: float(value) for name, value in shares.items()}
