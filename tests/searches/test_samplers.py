"""Samplers and pruners by name."""

from __future__ import annotations

import optuna
import pytest

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
