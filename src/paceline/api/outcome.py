"""The outcome of a verb that leaves a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The run folder that a verb leaves, and its figures."""

    figures: dict[str, Any]  # by name, as in the run folder's file
    run: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.figures, "run": str(self.run)}

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]
