"""A placement by hand: a file assigns modules to parts by patterns of names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.base.errors import PlanError, nearest

EXAMPLE = 'such as\n[parts]\n0 = ["embed", "blocks.0"]\n1 = ["blocks.*", "head"]'


@dataclass(frozen=True, slots=True)
class Placement:
    """Patterns of module names for each part. A pattern covers a module and all modules inside it.

    If several patterns match, the longest wins.
    """

    path: Path
    patterns: tuple[tuple[str, ...], ...]

    @property
    def num_parts(self) -> int:
        return len(self.patterns)

    def part_of(self, modules: Sequence[str], *, known: Iterable[str]) -> dict[str, int]:
        """Return the part of each module, by name.

        Args:
            modules: The modules that need a part.
            known: All names of modules in the model.

        Raises:
            PlanError: a module matches no pattern, a pattern matches no module, or two patterns
                contradict each other.
        """
        known = list(known)
        for pattern in (p for patterns in self.patterns for p in patterns):
            if not any(fnmatchcase(name, pattern) for name in known):
                raise PlanError(
                    f"{self.path}: the model has no module '{pattern}', {nearest(pattern, known)}"
                )
        parts = {}
        for module in modules:
            matching = sorted(
                {
                    (len(pattern), part)
                    for part, patterns in enumerate(self.patterns)
                    for pattern in patterns
                    if _covers(pattern, module)
                },
                reverse=True,
            )
            if not matching:
                raise PlanError(
                    f"{self.path} leaves out '{module}'",
                    hint="name it, or let a last pattern '*' take what is left",
                )
            if len(matching) > 1 and matching[0][0] == matching[1][0]:
                raise PlanError(
                    f"{self.path} puts '{module}' on parts {matching[1][1]} and {matching[0][1]}"
                )
            parts[module] = matching[0][1]
        return parts


def _covers(pattern: str, module: str) -> bool:
    """Whether the pattern matches the module or one that contains it."""
    parts = module.split(".")
    return any(
        fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1)
    )


def read_placement(path: Path) -> Placement:
    """Read a TOML file with one list of patterns per part.

    Raises:
        PlanError: the file is missing or has another form.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"can't read the placement {path}: {error}", hint=EXAMPLE) from error
    parts: Mapping[str, object] = document.get("parts", {})
    if (
        not isinstance(parts, dict)
        or sorted(parts) != sorted(map(str, range(len(parts))))
        or not parts
    ):
        raise PlanError(f"{path} needs a table [parts] with the keys 0, 1, ...", hint=EXAMPLE)
    patterns = []
    for key in sorted(parts, key=int):
        listed = parts[key]
        if (
            not isinstance(listed, list)
            or not listed
            or not all(isinstance(item, str) for item in listed)
        ):
            raise PlanError(f"{path}: part {key} must be a list of names of modules", hint=EXAMPLE)
        patterns.append(tuple(listed))
    return Placement(path, tuple(patterns))
