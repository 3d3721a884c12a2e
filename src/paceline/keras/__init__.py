"""Keras models on several devices: `fit`, `evaluate` and `predict` as Keras has them, equal to one process."""

from __future__ import annotations

from typing import Any

from paceline.keras.calls import evaluate, fit, predict

__all__ = ["evaluate", "fit", "job", "load", "predict"]


def __getattr__(name: str) -> Any:
    if name not in ("job", "load"):
        raise AttributeError(f"module 'paceline.keras' has no attribute '{name}'")
    import importlib

    module = importlib.import_module(
        "paceline.keras.as_job"
    )  # which imports keras, with the backend that is set then
    return getattr(module, name)
