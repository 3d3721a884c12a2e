"""Run Transformers' Trainer under any plan, by changing one import of a script.

`Trainer` replaces `transformers.Trainer`, and `SFTTrainer` replaces TRL's. Both are built with
`PlannedTraining`, which also works for your own Trainer: `class Ours(PlannedTraining,
transformers.Trainer)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.transformers.sft import SFTTrainer
    from paceline.transformers.trainer import PlannedTraining, Trainer

_HOMES = {"Trainer": "trainer", "PlannedTraining": "trainer", "SFTTrainer": "sft"}

__all__ = ["PlannedTraining", "SFTTrainer", "Trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.transformers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"paceline.transformers.{_HOMES[name]}"), name)
