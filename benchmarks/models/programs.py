"""Training programs of published measurements by name, from `programs.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.models.formats import EAGER, FLOAT32, Formats, Kernels
from paceline.base.errors import ClusterError, nearest
from paceline.cluster.software import Software

PROGRAMS = Path(__file__).with_name("programs.toml")


@dataclass(frozen=True, slots=True)
class Program(Software):
    """One training program, with the models that it trains."""

    kernels: Kernels = EAGER
    formats: Formats = FLOAT32
    fitted_on: tuple[str, ...] = ()  # sources of the measurements on which its figures were fitted


def program_names() -> tuple[str, ...]:
    """Return the names of all programs."""
    return tuple(_read())


def program(name: str) -> Program:
    """Return a program by its name.

    Raises:
        ClusterError: there is none of that name; the message names the nearest ones.
    """
    if name not in _read():
        raise ClusterError(f"unknown training program '{name}', {nearest(name, _read())}")
    stated = {"activation_bytes": 2, **_read()[name]}
    of_models = {f"{f.name}_bytes" for f in fields(Formats)} | {"elementwise", "dropout", "source"}
    return Program(
        name=name,
        kernels=Kernels(**{f.name: stated[f.name] for f in fields(Kernels) if f.name in stated}),
        formats=Formats(
            **{
                f.name: stated[f"{f.name}_bytes"]
                for f in fields(Formats)
                if f"{f.name}_bytes" in stated
            }
        ),
        fitted_on=tuple(stated.pop("fitted_on", ())),
        activation_bytes=stated["activation_bytes"],
        **{key: value for key, value in stated.items() if key not in of_models},
    )


@cache
def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(PROGRAMS.read_text())
