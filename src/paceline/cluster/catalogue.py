"""Accelerators and links by name, from `catalogue.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import ClusterError, nearest

if TYPE_CHECKING:
    from paceline.job import Precision

CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of link, with the figures of its maker and the part of them that collectives reach."""

    name: str
    bytes_per_s: float  # one direction of one device
    reached: float  # the part of it that collectives of large messages reach
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator, and the node that it usually comes in."""

    name: str
    bf16_flops_per_s: float  # dense
    float32_flops_per_s: float  # dense
    product_reached: float  # the part of the rate that the best matrix product reaches
    attention_reached: float  # the part of the rate that fused attention reaches
    memory_bytes: int
    memory_bytes_per_s: float
    multiprocessors: int
    link: str  # name of the link between devices of a node
    network: str  # name of the link across nodes, which is one device's share
    devices_per_node: int
    source: str
    aliases: tuple[str, ...] = ()
    tf32_flops_per_s: float | None = None  # dense; None if there are no such products
    fp8_flops_per_s: float | None = None  # dense; None if there are no such products
    # If only the memory of a GPU is known: the accelerator whose other figures it is given.
    assumed: str = ""

    def product_flops_per_s(self, precision: Precision) -> float:
        """Return the dense rate of matrix products under a job's precision, as the maker states
        it.
        """
        if precision in ("float32", "float64"):
            return self.float32_flops_per_s / (2 if precision == "float64" else 1)
        if precision == "tf32":
            return self.tf32_flops_per_s or self.float32_flops_per_s
        return (self.fp8_flops_per_s if precision == "fp8" else None) or self.bf16_flops_per_s


def accelerator(name: str) -> Accelerator:
    """Return an accelerator by its name or an alias, in upper or lower case.

    Raises:
        ClusterError: there is none of that name; the message names the nearest ones.
    """
    known = _accelerators()
    match = known.get(_plain(name))
    if match is None:
        raise ClusterError(
            f"unknown accelerator '{name}', {nearest(name, [a.name for a in _listed()])}",
            hint="a TOML file describes any other: see `paceline docs planning`",
        )
    return match


def assumed(memory_bytes: int) -> Accelerator:
    """Return the accelerator whose figures a GPU is given if only its memory is known.

    It is an ordinary accelerator with as much memory or a little less.

    >>> assumed(24 * 2**30).name
    'RTX3090'
    """
    sizes = {int(size) * 2**30: name for size, name in _read()["assumed"].items()}
    return accelerator(
        sizes[max((size for size in sizes if size <= memory_bytes), default=min(sizes))]
    )


def memory_sizes() -> list[int]:
    """Return the memory sizes of the listed accelerators in bytes, each once, from the smallest."""
    return sorted({listed.memory_bytes for listed in _listed()})


def named_by_driver(name: str) -> Accelerator | None:
    """Return the accelerator that a driver calls by this name; None if it is not listed.

    >>> named_by_driver("NVIDIA H100 80GB HBM3").name, named_by_driver("NVIDIA H100 PCIe").name
    ('H100', 'H100-PCIe')
    >>> named_by_driver("NVIDIA L40S")
    """
    words = f" {_words(name)} "
    return max(
        ((len(alias), accelerator) for alias, accelerator in _by_words() if f" {alias} " in words),
        key=lambda item: item[0],
        default=(0, None),
    )[1]


def link(name: str) -> LinkKind:
    """Return a kind of link by its name.

    Raises:
        ClusterError: there is none of that name; the message names the nearest ones.
    """
    known = _read()["link"]
    if name not in known:
        raise ClusterError(f"unknown link '{name}', {nearest(name, known)}")
    return LinkKind(name=name, **known[name])


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")


def _words(name: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", name.lower()))


@cache
def _by_words() -> tuple[tuple[str, Accelerator], ...]:
    return tuple(
        (_words(name), listed) for listed in _listed() for name in (listed.name, *listed.aliases)
    )


@cache
def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(CATALOGUE.read_text())


@cache
def _listed() -> tuple[Accelerator, ...]:
    return tuple(
        Accelerator(name=name, **{**stated, "aliases": tuple(stated.get("aliases", ()))})
        for name, stated in _read()["accelerator"].items()
    )


@cache
def _accelerators() -> dict[str, Accelerator]:
    return {_plain(name): listed for listed in _listed() for name in (listed.name, *listed.aliases)}
