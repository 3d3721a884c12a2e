"""A cluster that a TOML file describes; see docs/planning.md for the format."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from paceline.base.errors import ClusterError
from paceline.base.schema import problems
from paceline.cluster.catalogue import Accelerator
from paceline.cluster.catalogue import accelerator as known_accelerator
from paceline.cluster.catalogue import link as known_link
from paceline.cluster.devices import Device, Nodes, described, link_of, size_bytes
from paceline.cluster.links import Link, Network

_ABOVE_0 = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a number above 0")]
_FILE = {
    "nodes": Annotated[list[dict[str, Any]], Meta(min_length=1, description="tables [[nodes]]")],
    "accelerator": Annotated[
        dict[str, dict[str, Any]], Meta(description="tables [accelerator.NAME]")
    ],
}
_NODES = {
    "devices": Annotated[list[str], Meta(min_length=1, description='a list such as ["8xH100"]')],
    "count": Annotated[int, Meta(ge=1, description="a whole number of at least 1")],
    "memory": str,
    "link": str,
    "network": str,
    "link_bytes_per_s": _ABOVE_0,
    "link_latency_s": _ABOVE_0,
    "network_bytes_per_s": _ABOVE_0,
    "network_latency_s": _ABOVE_0,
    "price_per_hour": _ABOVE_0,
}
_ACCELERATOR = {
    f.name: str if f.type == "str" else _ABOVE_0
    for f in fields(Accelerator)
    if f.name not in ("name", "aliases", "assumed")
}
_NEEDED = [
    f.name for f in fields(Accelerator) if f.default is MISSING and f.name not in ("name", "source")
]


def read(path: Path) -> tuple[Nodes, ...]:
    """Read the nodes of a file.

    Raises:
        ClusterError: the file can't be read, or fields are missing, unknown or make no sense; the
            message names all.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClusterError(
            f"can't read the cluster {path}: {error}",
            hint='[[nodes]] with count = 2 and devices = ["8xH100"]',
        ) from error
    wrong = problems(document, _FILE, needed=["nodes"])
    messages = list(wrong.values())
    accelerators, nodes = (
        {} if name in wrong else document.get(name, {}) for name in ("accelerator", "nodes")
    )
    for name, table in accelerators.items():
        messages += [
            f"accelerator.{name}: {text}"
            for text in problems(table, _ACCELERATOR, needed=_NEEDED).values()
        ]
    listed = (
        None
        if messages
        else {
            name.lower(): Accelerator(name=name, **{"source": str(path), **table})
            for name, table in accelerators.items()
        }
    )
    kinds = []
    for number, table in enumerate(nodes):
        texts = list(problems(table, _NODES, needed=["devices"]).values())
        try:
            kinds += [] if texts or listed is None else [_nodes(table, listed)]
        except ClusterError as error:
            texts.append(error.args[0])
        messages += [f"nodes {number}: {text}" for text in texts]
    if len({kind.price_per_hour is None for kind in kinds}) > 1:
        messages.append("some nodes have a price_per_hour and others have none")
    if messages:
        raise ClusterError(
            f"the cluster {path} can't be used:\n  " + "\n  ".join(messages),
            hint=f"fields of [[nodes]]: {', '.join(_NODES)}",
        )
    return tuple(kinds)


def _nodes(table: dict[str, Any], listed: dict[str, Accelerator]) -> Nodes:
    memory_bytes = size_bytes(table["memory"]) if "memory" in table else None
    devices: list[Device] = []
    for word in table["devices"]:
        match = re.fullmatch(r"(?:(\d{1,4})x)?([A-Za-z][\w .-]*)", word.strip())
        if match is None or match[1] == "0":
            raise ClusterError(f"can't read the devices '{word}', such as 8xH100")
        accelerator = listed.get(match[2].lower()) or known_accelerator(match[2])
        devices += [described(accelerator, memory_bytes=memory_bytes)] * int(match[1] or 1)
    first = devices[0].accelerator
    assert first is not None
    return Nodes(
        table.get("count", 1),
        tuple(devices),
        Network(
            _link(table, "link", table.get("link", first.link)),
            _link(table, "network", table.get("network", first.network)),
            len(devices),
        ),
        table.get("price_per_hour"),
    )


def _link(table: dict[str, Any], which: str, name: str) -> Link:
    """Return a link of the catalogue, with the figures that the file states in place of the
    catalogue's.

    The file's figures are those that messages reach.
    """
    stated = {
        key: table[f"{which}_{key}"]
        for key in ("bytes_per_s", "latency_s")
        if f"{which}_{key}" in table
    }
    return replace(link_of(known_link(name)), **stated)
