"""Keras models on several devices: `fit`, `evaluate` and `predict` as Keras has them, equal to one process."""

from __future__ import annotations

from paceline.keras.calls import evaluate, fit, predict

__all__ = ["evaluate", "fit", "predict"]
