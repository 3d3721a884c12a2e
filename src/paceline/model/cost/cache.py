"""Measurements of this machine, kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.cluster.accelerators import identity
from paceline.cluster.devices import DeviceKind
from paceline.cluster.limits import usable_cores

VERSION = 7
# A folder that can't be used; a user without a home, as in a container under any number, has none.
_NO_FOLDER = (OSError, RuntimeError)


def read(what: str, kind: DeviceKind) -> Any:
    """A document of this machine; None if there is none, or it is damaged."""
    with suppress(*_NO_FOLDER, ValueError):
        return json.loads(_path(what, kind).read_text())
    return None


def write(what: str, kind: DeviceKind, document: Any) -> None:
    """Keep a document; several processes may do so at once. A cache that can't be written is no reason to stop."""
    with suppress(*_NO_FOLDER):
        path = _path(what, kind)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(document, indent=1))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _path(what: str, kind: DeviceKind) -> Path:
    """The file of this machine and this torch."""
    identity = "\n".join(
        map(str, (VERSION, kind, usable_cores(), processor(kind), version("torch")))
    )
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "paceline" / f"{what}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def processor(kind: DeviceKind) -> str:
    """Which one this machine has, in its maker's words."""
    if kind == "cuda":
        return identity()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
