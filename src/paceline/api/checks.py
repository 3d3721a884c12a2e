"""The check before a run: does the plan's first update equal one device's, and does an earlier
check already say so?
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job import Job
from paceline.job.file import JobFile
from paceline.launch.hosts.environment import Environment
from paceline.model.cost import cache
from paceline.planner.resolve import Resolved
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from paceline.launch.local.launcher import Launcher
    from paceline.proof.first_update import FirstUpdate

# file in this machine's cache, and how many of the latest checks it keeps
_DOCUMENT, _REMEMBERED = "first-updates", 1000


def first_update(
    job: Job,
    source: JobFile | None,
    resolved: Resolved,
    *,
    environment: Environment | None,
    timeout_s: float,
    loader_workers: int = 0,
) -> FirstUpdate | None:
    """Check the plan's first update if that is possible and the result is not known yet.

    If several ranks or loader workers read samples, some of them are checked first, on whatever
    device.

    Returns:
        The result; None if one device does the job as it is.

    Raises:
        PlanRefused: the update is not one device's, or the data set has a memory of its own.
        RankFailed: a rank failed, as it would have in the run.
    """
    from paceline.proof.first_update import FirstUpdate, check_first_update
    from paceline.proof.samples import refuse_memory

    # The check also looks at the model with some other samples.
    looks_ahead = resolved.plan.with_(deterministic="no", microbatches=1) != Plan()
    if resolved.plan.relaxed is None and (looks_ahead or loader_workers > 1):
        readers = (
            f"The ranks of '{resolved.plan}'"
            if resolved.plan.world_size > 1
            else f"A look ahead under '{resolved.plan}' and the run"
            if looks_ahead
            else "Loader workers"
        )
        refuse_memory(job, readers, timeout_s=timeout_s)
    if resolved.plan.with_(deterministic="no") == Plan():
        return None
    if (reason := unchecked(resolved, environment)) is not None:
        return FirstUpdate("unchecked", reason)
    if source is not None and (update := known(source, resolved)) is not None:
        return update
    update = check_first_update(job, resolved, timeout_s=timeout_s)
    if source is not None and update.verdict != "unchecked":
        remember(source, resolved, verdict=update.verdict, reason=update.reason)
    return update


def agreed_update(
    launcher: Launcher, check: Callable[[], FirstUpdate | None]
) -> FirstUpdate | None:
    """Return what the first rank's check gives, on all of them. Collective over hosts."""
    from paceline.proof.first_update import FirstUpdate

    def text() -> str:
        update = check()
        return json.dumps(update and update.to_dict())

    document = json.loads(launcher.agree("first update", text))
    return FirstUpdate(**document) if document else None


def known(source: JobFile, resolved: Resolved) -> FirstUpdate | None:
    """Return the verdict of an earlier check of the same files under the plan; None if there is none."""
    from paceline.proof.first_update import FirstUpdate

    entry = _read().get(_key(source, resolved))
    if entry is None or entry["files"] != _digests(map(Path, entry["files"])):
        return None
    return FirstUpdate(entry["verdict"], entry["reason"])


def remember(source: JobFile, resolved: Resolved, *, verdict: str, reason: str) -> None:
    """Store a verdict, so that runs of the same job or script under the plan need no check.

    This process has loaded the files: the source, and the modules beside it. Data files that it
    reads are not included.
    """
    files = _digests(_files_of(source))
    entry = {"verdict": verdict, "reason": reason, "files": files}
    entries = {**_read(), _key(source, resolved): entry}
    cache.write(_DOCUMENT, "cpu", dict([*entries.items()][-_REMEMBERED:]))


def unchecked(resolved: Resolved, environment: Environment | None) -> str | None:
    """Return why a plan is not checked; None if it is."""
    if resolved.plan.relaxed is not None:
        return f"the plan is relaxed ({resolved.plan.relaxed}) and can't equal one device"
    if environment is not None and environment.local_world_size < environment.world_size:
        return (
            f"{environment.launcher} started ranks on several hosts, and a check takes as many ranks on one; "
            "'paceline verify' with this plan does so"
        )
    if any(device.is_limit for device in resolved.cluster.devices):
        return "the ranks' memory has a limit, and one device holds several copies of the model for a check"
    return None


def _key(source: JobFile, resolved: Resolved) -> str:
    """Return a digest of everything besides files that decides what a first update is: the job's settings,
    the plan, the kinds of its devices, and the versions.
    """
    identity = {
        "file": str(source.path),
        "function": source.function,
        "settings": dict(source.settings),
        "plan": str(resolved.plan),
        "shares": list(resolved.shares),
        "devices": sorted({device.name for device in resolved.cluster.devices}),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "paceline": _own_files(),
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each file that is there."""
    digests = {}
    for file in files:
        with suppress(OSError):
            digests[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _files_of(source: JobFile) -> set[Path]:
    folder = source.path.parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    beside = {
        Path(file)
        for file in loaded
        if file and file.endswith(".py") and Path(file).is_relative_to(folder)
    }
    return {source.path, *(path for path in beside if "site-packages" not in path.parts)}


def _own_files() -> str:
    """Return sizes and modification times of this package's files, so that an edited file counts as
    another version.
    """
    package = Path(__file__).parent.parent
    stats = [
        (str(path.relative_to(package)), path.stat()) for path in sorted(package.rglob("*.py"))
    ]
    text = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()


def _read() -> dict[str, Any]:
    document = cache.read(_DOCUMENT, "cpu")
    return document if isinstance(document, dict) else {}
