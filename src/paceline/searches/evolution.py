"""Regularised evolution as an Optuna sampler.

The population consists of the youngest trials, so each trial leaves it at some age, however good it
was by luck. It begins with as many trials as a tournament has, and grows. In the source the whole
population is first drawn at random, which would use up a budget of tens of trials. Source: Real et
al. 2019, "Regularized Evolution for Image Classifier Architecture Search" (AAAI).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

SPREAD = 0.2  # of the change of a mutated number, as a part of its range


class EvolutionSampler(BaseSampler):
    """A sampler whose trials are the best of a few of the youngest trials, with one parameter
    changed.

    A parameter that the parent doesn't have, as in a space with conditions, is drawn at random.

    Args:
        population: The largest number of living trials.
        tournament: The number of trials of which the best becomes a parent. The same number of
            trials is drawn at random at first.
    """

    def __init__(
        self, *, population: int = 20, tournament: int = 5, seed: int | None = None
    ) -> None:
        self.population, self.tournament = population, tournament
        self._random = RandomSampler(seed=seed)
        self._rng = np.random.RandomState(seed)
        # The parent of each running trial, and the parameter that is to change.
        self._parents: dict[int, tuple[FrozenTrial, str]] = {}

    def reseed_rng(self) -> None:
        self._random.reseed_rng()
        self._rng.seed()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        parent = self._parent(study)
        varied = (
            [name for name, kind in parent.distributions.items() if not kind.single()]
            if parent
            else []
        )
        if parent is not None and varied:
            self._parents[trial.number] = parent, varied[self._rng.randint(len(varied))]

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._parents.pop(trial.number, None)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        parent, changed = self._parents.get(trial.number, (None, ""))
        if parent is None or parent.distributions.get(param_name) != param_distribution:
            return self._random.sample_independent(study, trial, param_name, param_distribution)
        value = parent.params[param_name]
        return mutated(value, param_distribution, self._rng) if param_name == changed else value

    def _parent(self, study: Study) -> FrozenTrial | None:
        """Return the best of a few living trials; None while the first ones are drawn at random."""
        done = [
            trial
            for trial in study.get_trials(
                deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)
            )
            if trial.value is not None
        ]
        if len(done) < self.tournament:
            return None
        by_age = sorted(
            done, key=lambda trial: (trial.datetime_complete or datetime.max, trial.number)
        )
        living = by_age[-self.population :]
        drawn = self._rng.choice(len(living), size=min(self.tournament, len(living)), replace=False)
        sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
        return min((living[index] for index in drawn), key=lambda trial: _rank(trial, sign))


def _rank(trial: FrozenTrial, sign: int) -> tuple[bool, float]:
    """Return the sort key of a trial. A pruned trial is worse than each that was trained to its
    end.
    """
    assert trial.value is not None
    return trial.state == TrialState.PRUNED, sign * trial.value


def mutated(value: Any, kind: BaseDistribution, rng: np.random.RandomState) -> Any:
    """Return another value of the distribution: another option, or a number at a normally
    distributed distance.
    """
    if isinstance(kind, CategoricalDistribution):
        others = [
            option for option in kind.choices if option != value or type(option) is not type(value)
        ]
        return others[rng.randint(len(others))]
    assert isinstance(kind, FloatDistribution | IntDistribution)
    low, high = (math.log(kind.low), math.log(kind.high)) if kind.log else (kind.low, kind.high)
    position = math.log(value) if kind.log else value
    for _ in range(20):  # a step may round to where it began
        moved = float(np.clip(position + rng.normal() * SPREAD * (high - low), low, high))
        changed = _on_grid(math.exp(moved) if kind.log else moved, kind)
        if changed != value:
            return changed
    return value


def _on_grid(value: float, kind: FloatDistribution | IntDistribution) -> float | int:
    if kind.step is not None and not kind.log:
        value = kind.low + round((value - kind.low) / kind.step) * kind.step
    nearest = float(min(max(value, kind.low), kind.high))
    return round(nearest) if isinstance(kind, IntDistribution) else nearest
