"""Optuna's samplers and pruners by name. In Python, any other one of Optuna's can be given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.base.errors import MissingPackage, UsageError, nearest, with_extra
from paceline.searches.storage import optuna, quiet

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


def _tpe(samplers: Any, seed: int) -> Any:
    # Running trials count as bad ones; otherwise devices that are free at the same time would get
    # the same parameters.
    return samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def _cmaes(samplers: Any, seed: int) -> Any:
    _needs("cmaes", "--sampler cmaes")
    return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)


def _gp(samplers: Any, seed: int) -> Any:
    _needs("scipy", "--sampler gp")
    return samplers.GPSampler(seed=seed, warn_independent_sampling=False)


SAMPLERS: Mapping[str, Callable[[Any, int], Any]] = {
    "random": lambda samplers, seed: samplers.RandomSampler(seed=seed),
    "tpe": _tpe,
    "cmaes": _cmaes,
    "gp": _gp,
    "nsga2": lambda samplers, seed: samplers.NSGAIISampler(seed=seed),
}
# Each function takes the number of evaluations of a trial, or None if it is not known.
PRUNERS: Mapping[str, Callable[[Any, int | None], Any]] = {
    "none": lambda pruners, evaluations: pruners.NopPruner(),
    "median": lambda pruners, evaluations: pruners.MedianPruner(
        n_startup_trials=5, n_warmup_steps=1
    ),
    "halving": lambda pruners, evaluations: pruners.SuccessiveHalvingPruner(),
    "hyperband": lambda pruners, evaluations: pruners.HyperbandPruner(
        max_resource=evaluations or "auto"
    ),
}


def make_sampler(
    sampler: str | BaseSampler | None, *, num_objectives: int, seed: int
) -> BaseSampler:
    """Make a sampler; by default TPE.

    Args:
        seed: Must differ for each part of a study that was interrupted, or the next part would draw
            the same again.

    Raises:
        UsageError: the name is unknown, or the sampler can't have several objectives.
        MissingPackage: the sampler needs a package that is not installed.
    """
    if sampler is not None and not isinstance(sampler, str):
        return sampler
    name = sampler or "tpe"
    if name not in SAMPLERS:
        raise UsageError(f"unknown sampler '{name}', {nearest(name, SAMPLERS)}")
    if num_objectives > 1 and name == "cmaes":
        raise UsageError(
            f"sampler '{name}' can't weigh {num_objectives} objectives",
            hint="--sampler nsga2, or tpe",
        )
    with quiet():
        return SAMPLERS[name](optuna().samplers, seed)


def make_pruner(
    pruner: str | BasePruner | None, *, num_objectives: int, evaluations: int | None
) -> BasePruner:
    """Make a pruner; by default the median pruner with one objective, and none with several.

    Optuna prunes only by one objective.

    Raises:
        UsageError: the name is unknown, or there are several objectives.
    """
    if pruner is not None and not isinstance(pruner, str):
        return pruner
    name = pruner or ("median" if num_objectives == 1 else "none")
    if name not in PRUNERS:
        raise UsageError(f"unknown pruner '{name}', {nearest(name, PRUNERS)}")
    if num_objectives > 1 and name != "none":
        raise UsageError(
            f"pruner '{name}' goes by one objective, and there are {num_objectives}",
            hint="--pruner none",
        )
    return PRUNERS[name](optuna().pruners, evaluations)


def _needs(package: str, feature: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(feature, package, install=with_extra("search"))
