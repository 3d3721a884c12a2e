"""Paceline plans, proves and runs distributed training of an ordinary PyTorch model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.callbacks.callback import Callback
    from paceline.callbacks.keep_best import KeepBest
    from paceline.callbacks.stopping import EarlyStopping
    from paceline.choices import choice
    from paceline.cluster import Cluster, Device
    from paceline.errors import PacelineError
    from paceline.job import Job
    from paceline.job.metrics import whole
    from paceline.job.own_step import Optimizer, StepContext, copy_every, ema, frozen
    from paceline.job.phases import by_epoch, by_step, monitored
    from paceline.job.pretrained import weights
    from paceline.job.shards import Shards
    from paceline.jobfile import load
    from paceline.plans import Plan
    from paceline.study.space import Log, Range
    from paceline.verbs.audit import audit
    from paceline.verbs.inference import evaluate, predict
    from paceline.verbs.planning import plan
    from paceline.verbs.rehearsal import rehearse
    from paceline.verbs.report import compare, report
    from paceline.verbs.result import open
    from paceline.verbs.scaling import scale
    from paceline.verbs.search import search
    from paceline.verbs.train import train
    from paceline.verbs.verify import verify

__version__ = "0.2.0"

# Where each public name lives; loaded when first used, so that `import paceline` stays fast.
_HOMES = {
    "Callback": "paceline.callbacks.callback",
    "Cluster": "paceline.cluster",
    "Device": "paceline.cluster",
    "EarlyStopping": "paceline.callbacks.stopping",
    "Job": "paceline.job",
    "KeepBest": "paceline.callbacks.keep_best",
    "Log": "paceline.study.space",
    "Optimizer": "paceline.job.own_step",
    "PacelineError": "paceline.errors",
    "Plan": "paceline.plans",
    "Range": "paceline.study.space",
    "Shards": "paceline.job.shards",
    "audit": "paceline.verbs.audit",
    "by_epoch": "paceline.job.phases",
    "by_step": "paceline.job.phases",
    "StepContext": "paceline.job.own_step",
    "choice": "paceline.choices",
    "compare": "paceline.verbs.report",
    "copy_every": "paceline.job.own_step",
    "ema": "paceline.job.own_step",
    "evaluate": "paceline.verbs.inference",
    "frozen": "paceline.job.own_step",
    "load": "paceline.jobfile",
    "monitored": "paceline.job.phases",
    "open": "paceline.verbs.result",
    "plan": "paceline.verbs.planning",
    "predict": "paceline.verbs.inference",
    "rehearse": "paceline.verbs.rehearsal",
    "report": "paceline.verbs.report",
    "scale": "paceline.verbs.scaling",
    "search": "paceline.verbs.search",
    "train": "paceline.verbs.train",
    "verify": "paceline.verbs.verify",
    "weights": "paceline.job.pretrained",
    "whole": "paceline.job.metrics",
}

__all__ = [
    "Callback", "Cluster", "Device", "EarlyStopping", "Job", "KeepBest", "Log", "Optimizer", "PacelineError", "Plan",
    "Range", "Shards", "StepContext", "audit", "by_epoch", "by_step", "choice", "compare", "copy_every", "ema",
    "evaluate", "frozen", "load", "monitored", "open", "plan", "predict", "rehearse", "report", "scale", "search",
    "train", "verify", "weights", "whole",
]

# Packages of their own names, loaded when first used like the names.
_PACKAGES = ("keras",)


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    import importlib

    try:
        if name in _PACKAGES:
            return importlib.import_module(f"paceline.{name}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from paceline.errors import on_windows

        if (refusal := on_windows(error)) is not None:
            raise refusal from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
