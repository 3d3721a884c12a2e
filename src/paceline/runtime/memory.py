"""How much memory this rank has taken since it started."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def _status_bytes(key: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return None


class PeakMemory:
    """Peak bytes above those of the moment it was made: resident size on a CPU, torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = _status_bytes("VmRSS:") or _peak_resident_bytes()

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return max(0, resident_peak_bytes() - self._before)


def resident_peak_bytes() -> int:
    """The most that this process has had in memory."""
    return _status_bytes("VmHWM:") or _peak_resident_bytes()


def reset_peak() -> None:
    """Forget it but for what is in memory now; Linux alone can."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
