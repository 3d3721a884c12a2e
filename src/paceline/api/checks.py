"""The check before a run: does the plan's first update equal one device's, and does an earlier
check already say so?
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
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
    from paceline.proof.first_update import FirstUpdate

# file in this machine's cache, and how many of the latest checks it keeps
_DOCUMENT, _REMEMBERED = "checks", 1000


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
        PlanError: the model has fewer pieces than the plan has stages.
        PlanRefused: the update is not one device's, or the data set has a memory of its own.
        RankFailed: a rank failed, as it would have in the run.
    """
    from paceline.api.preflight import refuse_few_pieces
    from paceline.proof.first_update import FirstUpdate, check_first_update
    from paceline.proof.samples import refuse_memory

    refuse_few_pieces(job, resolved.plan)
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
    key = key_of(source, resolved) if source is not None else None
    if key is not None and (remembered := _read().get(key)):
        return FirstUpdate(remembered["verdict"], remembered["reason"])
    update = check_first_update(job, resolved, timeout_s=timeout_s)
    if key is not None and update.verdict != "unchecked":
        _remember(key, update.verdict, update.reason)
    return update


def remember(source: JobFile, resolved: Resolved, *, verdict: str, reason: str) -> None:
    """Store a certificate's verdict, so that runs of the same job under the plan need no check."""
    _remember(key_of(source, resolved), verdict, reason)


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


def key_of(source: JobFile, resolved: Resolved) -> str:
    """Return a digest of everything that decides what a first update is.

    This is the job's files and settings, the plan, the kinds of its devices, and the versions. The
    files are the job's own file and the loaded modules beside it; data files that it reads are not
    included.
    """
    digest = hashlib.sha256()
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
    digest.update(json.dumps(identity, sort_keys=True, default=str).encode())
    for path in sorted(_files_of(source)):
        digest.update(os.fsencode(path) + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _files_of(source: JobFile) -> set[Path]:
    folder = source.path.parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    beside = {
        Path(file)
        for file in loaded
        if file and file.endswith(".py") and Path(file).is_relative_to(folder)
    }
    return {
        source.path,
        *(path for path in beside if "site-packages" not in path.parts and path.exists()),
    }


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


def _remember(key: str, verdict: str, reason: str) -> None:
    verdicts = {**_read(), key: {"verdict": verdict, "reason": reason, "time": time.time()}}
    latest = sorted(verdicts, key=lambda key: verdicts[key]["time"])[-_REMEMBERED:]
    cache.write(_DOCUMENT, "cpu", {key: verdicts[key] for key in latest})
