"""The trials of a study: which of them count, which are the best, and what state each is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

# User attributes of a trial: its owner, its result, and whether it was one too many.
OWNER, RECORD, SURPLUS = "paceline:run", "paceline:record", "paceline:surplus"
TEST = "paceline:test"  # user attribute of a study: the winner's figures on the test data


def counted(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of a study, without those that were started again under another number, or
    never.
    """
    trials = study.get_trials(deepcopy=False)
    again = {number for trial in trials for number in trial.system_attrs.get("retry_history", [])}
    return [
        trial for trial in trials if trial.number not in again and SURPLUS not in trial.user_attrs
    ]


def state_of(trial: optuna.trial.FrozenTrial) -> str:
    """Return a trial's state: complete, pruned, refused, failed, running or waiting."""
    if trial.user_attrs.get(RECORD, {}).get("refused"):
        return "refused"
    return {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())


def front(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that no other one beats in every objective; with one objective, the
    best.
    """
    if len(study.directions) > 1:
        return study.best_trials
    best = best_trial(study)
    return [] if best is None else [best]


def best_trial(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    """Return the best complete trial by the first objective; None if there is none."""
    import optuna

    done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    sign = 1 if study.directions[0] == optuna.study.StudyDirection.MINIMIZE else -1
    return min(done, key=lambda trial: (sign * trial.values[0], trial.number), default=None)


def dominates(
    values: Sequence[float],
    others: Sequence[float],
    directions: Sequence[optuna.study.StudyDirection],
) -> bool:
    """Whether values are as good as others in every objective, and better in one."""
    signs = [1 if direction.name == "MINIMIZE" else -1 for direction in directions]
    pairs = [
        (sign * value, sign * other)
        for sign, value, other in zip(signs, values, others, strict=True)
    ]
    return all(value <= other for value, other in pairs) and any(
        value < other for value, other in pairs
    )
