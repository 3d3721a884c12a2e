"""A description of the machine by its own tools. As a module it prints what torch sees, as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import command

_QUERY = (
    "name,driver_version,memory.total,memory.free,pcie.link.gen.current,pcie.link.width.current,"
    "mig.mode.current,clocks.max.sm,power.limit"
)


def seen(python: Sequence[str]) -> dict[str, Any]:
    """The names of the GPUs that torch can use, and which can read which other's memory, looked at in a process.

    Raises:
        RuntimeError: torch can't say.
    """
    ended = command.run([*python, "-m", __name__])
    if ended.exit_code != 0:
        raise RuntimeError(f"torch can't say which GPUs are here: {ended.reason}")
    return dict(json.loads(ended.stdout.strip().splitlines()[-1]))


def machine(python: Sequence[str]) -> dict[str, Any]:
    """What `paceline doctor`, torch and NVIDIA's tools say."""
    doctor = command.run([*python, "-m", "paceline", "doctor", "--json"])
    description: dict[str, Any] = {
        "doctor": json.loads(doctor.stdout) if doctor.stdout.strip() else {"failed": doctor.reason},
        "torch": command.run([*python, "-m", "torch.utils.collect_env"]).stdout,
    }
    if shutil.which("nvidia-smi"):
        description["nvidia-smi"] = command.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"]
        ).stdout
        description["topology"] = command.run(["nvidia-smi", "topo", "-m"]).stdout
    return description


def _look() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "access": [
            [
                device == other or torch.cuda.can_device_access_peer(device, other)
                for other in range(count)
            ]
            for device in range(count)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(_look()))
