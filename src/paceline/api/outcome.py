"""The outcome of a verb that leaves a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Figures by name, as the run folder has them in a file, and the folder."""

    figures: dict[str, Any]
    run: Path

    def to_dict(self) -> dict[str, Any]:
        return {**self.figures, "run": str(self.run)}

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]
