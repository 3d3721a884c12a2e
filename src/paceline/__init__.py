"""Paceline plans, proves and runs distributed training of an ordinary PyTorch model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api.audit import audit
    from paceline.api.inference import evaluate, predict
    from paceline.api.planning import plan
    from paceline.api.rehearsal import rehearse
    from paceline.api.replay import replay
    from paceline.api.report import compare, report
    from paceline.api.result import open as open
    from paceline.api.scaling import scale
    from paceline.api.train import train
    from paceline.api.verify import verify
    from paceline.attached.run import attach
    from paceline.base.errors import PacelineError
    from paceline.callbacks.keep_best import KeepBest
    from paceline.callbacks.stopping import EarlyStopping
    from paceline.cluster.cluster import Cluster
    from paceline.cluster.devices import Device
    from paceline.job import Job
    from paceline.job.callback import Callback
    from paceline.job.choices import choice
    from paceline.job.file import load
    from paceline.job.from_lightning import from_lightning
    from paceline.job.losses import total
    from paceline.job.metrics import whole
    from paceline.job.own_step import Optimizer, StepContext, copy_every, ema, frozen
    from paceline.job.phases import by_epoch, by_step, monitored
    from paceline.job.pretrained import pretrained
    from paceline.job.script_order import like_torch
    from paceline.job.shards import Shards
    from paceline.searches.search import search
    from paceline.searches.space import Log, Range
    from paceline.strategies.plan import Plan
    from paceline.training.run import RunPart

__version__ = "0.2.0"

# Where each public name lives; loaded when first used, so that `import paceline` stays fast.
_HOMES = {
    "Callback": "paceline.job.callback",
    "Cluster": "paceline.cluster.cluster",
    "Device": "paceline.cluster.devices",
    "EarlyStopping": "paceline.callbacks.stopping",
    "Job": "paceline.job",
    "KeepBest": "paceline.callbacks.keep_best",
    "Log": "paceline.searches.space",
    "Optimizer": "paceline.job.own_step",
    "PacelineError": "paceline.base.errors",
    "Plan": "paceline.strategies.plan",
    "Range": "paceline.searches.space",
    "RunPart": "paceline.training.run",
    "Shards": "paceline.job.shards",
    "attach": "paceline.attached.run",
    "audit": "paceline.api.audit",
    "by_epoch": "paceline.job.phases",
    "by_step": "paceline.job.phases",
    "StepContext": "paceline.job.own_step",
    "choice": "paceline.job.choices",
    "compare": "paceline.api.report",
    "copy_every": "paceline.job.own_step",
    "ema": "paceline.job.own_step",
    "evaluate": "paceline.api.inference",
    "from_lightning": "paceline.job.from_lightning",
    "frozen": "paceline.job.own_step",
    "like_torch": "paceline.job.script_order",
    "load": "paceline.job.file",
    "monitored": "paceline.job.phases",
    "open": "paceline.api.result",
    "plan": "paceline.api.planning",
    "predict": "paceline.api.inference",
    "pretrained": "paceline.job.pretrained",
    "rehearse": "paceline.api.rehearsal",
    "replay": "paceline.api.replay",
    "report": "paceline.api.report",
    "scale": "paceline.api.scaling",
    "search": "paceline.searches.search",
    "total": "paceline.job.losses",
    "train": "paceline.api.train",
    "verify": "paceline.api.verify",
    "whole": "paceline.job.metrics",
}

# What `from paceline import *` brings: not `open`, which is Python's.
__all__ = [
    "Callback",
    "Cluster",
    "Device",
    "EarlyStopping",
    "Job",
    "KeepBest",
    "Log",
    "Optimizer",
    "PacelineError",
    "Plan",
    "Range",
    "RunPart",
    "Shards",
    "StepContext",
    "attach",
    "audit",
    "by_epoch",
    "by_step",
    "choice",
    "compare",
    "copy_every",
    "ema",
    "evaluate",
    "from_lightning",
    "frozen",
    "like_torch",
    "load",
    "monitored",
    "plan",
    "predict",
    "pretrained",
    "rehearse",
    "replay",
    "report",
    "scale",
    "search",
    "total",
    "train",
    "verify",
    "whole",
]

# Packages of their own names, loaded when first used like the names.
_PACKAGES = ("keras",)


def __getattr__(name: str) -> Any:
    if name == "weights":
        import warnings

        warnings.warn("pl.weights is now pl.pretrained", FutureWarning, stacklevel=2)
        name = "pretrained"
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    import importlib

    try:
        if name in _PACKAGES:
            return importlib.import_module(f"paceline.{name}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from paceline.base.errors import on_windows

        if (refusal := on_windows(error)) is not None:
            raise refusal from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_PACKAGES, "__version__"])
