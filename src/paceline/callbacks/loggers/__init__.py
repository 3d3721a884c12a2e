"""Loggers write a run's figures to TensorBoard, MLflow, Weights & Biases or trackio in addition to
the run folder.

Each uses the client of its service.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.base.errors import MissingPackage, UsageError, nearest, with_extra

if TYPE_CHECKING:
    from paceline.callbacks.loggers.logger import Logger
    from paceline.job.callback import Callback

# By kind: the module and its class, and the package that it needs.
_KINDS = {
    "tensorboard": ("paceline.callbacks.loggers.tensorboard", "TensorBoard", "tensorboard"),
    "mlflow": ("paceline.callbacks.loggers.mlflow", "MLflow", "mlflow"),
    "wandb": ("paceline.callbacks.loggers.wandb", "WeightsAndBiases", "wandb"),
    "trackio": ("paceline.callbacks.loggers.trackio", "Trackio", "trackio"),
}


def loggers_of(given: str | Sequence[str] | None) -> list[Logger]:
    """Return the loggers for one or several texts of the form `KIND` or `KIND:WHERE`.

    Raises:
        UsageError: an unknown kind, or one twice.
        MissingPackage: its client is not installed.
    """
    texts = [given] if isinstance(given, str) else list(given or ())
    kinds = [text.partition(":")[0] for text in texts]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise UsageError(f"--log {twice} is given twice")
    return [_logger(text) for text in texts]


def of_cluster(environ: Mapping[str, str] = os.environ) -> list[Callback]:
    """Return the callbacks that report a run to its cluster. There are none outside of Kubeflow."""
    if not environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
        return []
    from paceline.callbacks.kubeflow import KubeflowProgress  # loads the HTTP client

    return [KubeflowProgress(environ)]


def _logger(text: str) -> Logger:
    kind, _, where = text.partition(":")
    if kind not in _KINDS:
        raise UsageError(
            f"--log {text}: {nearest(kind, _KINDS)}", hint="--log tensorboard, or --log mlflow:URI"
        )
    module, name, package = _KINDS[kind]
    if importlib.util.find_spec(package) is None:
        raise MissingPackage(f"--log {kind}", package, install=with_extra(kind))
    logger: Logger = getattr(importlib.import_module(module), name)(where or None)
    return logger
