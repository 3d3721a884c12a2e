"""The cores and the memory of the machine that this process may use under the limits of its control
groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process and its ranks may use together.

    These are the machine's cores, or fewer because of affinity or a cgroup's quota.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min([allowed, *(max(1, quota // period) for quota, period in _cpu_quotas())])


def _cpu_quotas() -> Iterator[tuple[int, int]]:
    """Yield the CPU limit of each cgroup of this process that has one: a quota and a period.

    All cores together may compute for the quota in each period. Both are in microseconds.
    """
    for root, controller, names in (
        (_CGROUP, "", ("cpu.max",)),
        (_CGROUP / "cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    ):
        for folder in _cgroups(root, controller):
            words = " ".join(filter(None, (_text(folder / name) for name in names))).split()
            if len(words) == 2 and all(map(str.isdigit, words)):  # "max" and "-1" are no limit
                yield int(words[0]), int(words[1])


def usable_memory_bytes() -> int:
    """Return the memory that this process and its ranks may use together: the machine's, or a
    cgroup's lower limit.
    """
    import psutil

    return min(
        [psutil.virtual_memory().total, *(limit_bytes for limit_bytes, _ in _memory_limits())]
    )


def free_memory_bytes() -> int:
    """Return the memory that this process and others could take now: the machine's, or less under a
    cgroup's limit.

    Memory that the system would take back from its cache of files counts as free.
    """
    import psutil

    return max(
        0,
        min(
            [
                psutil.virtual_memory().available,
                *(limit_bytes - used_bytes for limit_bytes, used_bytes in _memory_limits()),
            ]
        ),
    )


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each cgroup of this process that has a limit.

    Files in the cache do not count as used.
    """
    for root, controller, limit, used, prefix in (
        (_CGROUP, "", "memory.max", "memory.current", ""),
        (_CGROUP / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _cgroups(root, controller):
            if (limit_bytes := _text(folder / limit)).isdigit():
                cached = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$",
                    _text(folder / "memory.stat"),
                    re.MULTILINE,
                )
                yield int(limit_bytes), int(_text(folder / used) or 0) - sum(map(int, cached))


def _text(path: Path) -> str:
    """Return the text of a file of the system; "" if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups that this process is in, from its own to the root, as far as
    they are visible.

    Args:
        controller: The controller for cgroups of version 1; "" for version 2.
    """
    for _, controllers, path in (line.split(":", 2) for line in _text(_OWN_CGROUPS).splitlines()):
        if controllers.split(",").count(controller):
            place = PurePosixPath(path.lstrip("/"))
            yield from (
                root / parent for parent in (place, *place.parents) if str(parent) not in ("", ".")
            )
    yield root
