"""The subject of a certificate: the model by its weights, the packages that made it, and its random
parts.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from typing import Any

import torch
from torch import nn

import paceline
from paceline.job import Job
from paceline.model.randomness import WithoutRandomness
from paceline.proof.device import described
from paceline.proof.order import whole_batches
from paceline.proof.reference_loop import PlainRun, build_plain


def subject(job: Job) -> dict[str, Any]:
    """Return the job's model and optimizer, the versions of their packages, the device, and what is
    random; JSON-able.
    """
    model = build_plain(job)
    parameters = dict(model.named_parameters())
    return {
        "model": {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "parameters": sum(p.numel() for p in parameters.values()),
            "trainable": sum(p.numel() for p in parameters.values() if p.requires_grad),
            "initial_weights_sha256": weights_sha256(parameters),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "paceline": paceline.__version__,
            **_packages(model),
        },
        "device": described(),
        "optimizer": type(
            job.optimizer([(name, p) for name, p in parameters.items() if p.requires_grad])
        ).__name__,
        "randomness": _randomness(job),
    }


def weights_sha256(parameters: dict[str, nn.Parameter]) -> str:
    """Return a digest of names, dtypes, shapes and elements, in the order of the names."""
    digest = hashlib.sha256()
    for name, p in sorted(parameters.items()):
        digest.update(f"{name} {p.dtype} {tuple(p.shape)}\n".encode())
        digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _packages(model: nn.Module) -> dict[str, str]:
    """Return the versions of the packages that the model's layers come from, if they have any."""
    tops = {type(module).__module__.partition(".")[0] for module in model.modules()} - {
        "torch",
        "paceline",
    }
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(tops)}
    return {name: str(version) for name, version in versions.items() if version}


def _randomness(job: Job) -> dict[str, Any]:
    """Return which modules draw in the first training step, and what is switched off in them."""
    random, run = WithoutRandomness(), PlainRun(job)
    for batch in whole_batches(job, 1):
        with random, random.watching(run.model):
            run.step(batch)
    return {
        "compared": "switched off: random operators give the mean of what they would draw",
        "switched_off": {
            path or "outside any module": sorted(names) for path, names in random.off.items()
        },
        "left_on": sorted(random.left_on),
    }
