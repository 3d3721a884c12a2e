"""Samplers and pruners by name, and regularised evolution."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from paceline.searches.evolution import EvolutionSampler, mutated
from paceline.searches.objectives import Limit, Objective, parse_objectives
from paceline.searches.samplers import PRUNERS, SAMPLERS, make_pruner, make_sampler


def bowl(trial: optuna.trial.Trial) -> float:
    """A sum of squares over options and numbers; 0 at its least."""
    x, n = trial.suggest_float("x", -1, 1), trial.suggest_int("n", 0, 20)
    extra = (
        trial.suggest_float("y", 1e-3, 1.0, log=True)
        if trial.suggest_categorical("has_y", [True, False])
        else 0.5
    )
    return x**2 + (n / 20) ** 2 + extra**2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_samples_spaces_with_conditions(name: str):
    """By its name, with a seed."""
    study = optuna.create_study(sampler=make_sampler(name, num_objectives=1, seed=0))
    study.optimize(bowl, n_trials=12)
    assert len(study.trials) == 12 and study.best_value < 1.5


@pytest.mark.parametrize("name", PRUNERS)
def test_each_pruner_is_made(name: str):
    """By its name."""
    assert isinstance(make_pruner(name, num_objectives=1, evaluations=5), optuna.pruners.BasePruner)


def test_objects_of_optunas_are_taken_as_they_are():
    """All of it is reachable."""
    sampler, pruner = optuna.samplers.RandomSampler(), optuna.pruners.NopPruner()
    assert make_sampler(sampler, num_objectives=2, seed=0) is sampler
    assert make_pruner(pruner, num_objectives=2, evaluations=None) is pruner


def test_evolution_beats_random_search():
    """The median of the best value after 100 trials, over five seeds."""

    def median(make: type) -> float:
        bests = []
        for seed in range(5):
            study = optuna.create_study(sampler=make(seed=seed))
            study.optimize(bowl, n_trials=100)
            bests.append(study.best_value)
        return float(np.median(bests))

    assert median(EvolutionSampler) < 0.5 * median(optuna.samplers.RandomSampler)


def test_a_child_differs_from_its_parent_in_one_parameter():
    """Once the first population has been drawn."""
    study = optuna.create_study(sampler=EvolutionSampler(population=5, tournament=5, seed=0))
    study.optimize(bowl, n_trials=30)
    for trial in study.trials[5:]:
        shared = [
            sum(other.params.get(name) == value for name, value in trial.params.items())
            / len(trial.params)
            for other in study.trials[: trial.number]
        ]
        assert max(shared) >= 0.5


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FloatDistribution(0, 1), 0.0),
        (FloatDistribution(1e-5, 1.0, log=True), 1e-5),
        (FloatDistribution(0, 1, step=0.25), 0.5),
        (IntDistribution(2, 8), 8),
        (IntDistribution(1, 1024, log=True), 32),
        (CategoricalDistribution(("a", "b", None)), "b"),
    ],
)
def test_a_mutation_is_another_value_of_the_distribution(
    kind: optuna.distributions.BaseDistribution, value: object
):
    """Within its ends and on its steps."""
    rng = np.random.RandomState(0)
    for _ in range(50):
        mutant = mutated(value, kind, rng)
        assert kind._contains(kind.to_internal_repr(mutant))
        assert mutant != value or type(mutant) is not type(value)


def test_objectives_and_limits_are_read():
    """As on the command line; a breach says by how much."""
    assert parse_objectives(None) == (Objective("validation_loss"),)
    assert parse_objectives(["accuracy:max", "step_ms"]) == (
        Objective("accuracy", "maximize"),
        Objective("step_ms"),
    )
    most, least = Limit.parse("step_ms <= 2"), Limit.parse("parameters>=1e3")
    assert most.breach({"step_ms": 2.0}) is None and least.breach({"parameters": 1000}) is None
    assert most.breach({"step_ms": 2.5}) == "step_ms is 2.5 and may be 2 at most"
    assert least.breach({"parameters": 10}) == "parameters is 10 and may be 1000 at least"
