"""How much memory this rank has taken since it started."""

from __future__ import annotations

import resource
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

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


class _Peak:
    """Of what this process has in memory, but for what is left out.

    earlier_bytes: before more or less was left out. is_stale: whether the system's peak is of more than is left out.
    """

    def __init__(self) -> None:
        self.left_out_bytes = self.earlier_bytes = 0
        self.is_stale = False

    def bytes(self) -> int:
        if self.is_stale:  # what was left out is not in memory any more
            self.is_stale = False
            with suppress(OSError):
                self._forget()
        peak_bytes = _status_bytes("VmHWM:") or _peak_resident_bytes()
        return max(self.earlier_bytes, peak_bytes - self.left_out_bytes)

    def reset(self) -> None:
        self._forget()
        self.earlier_bytes = 0

    def leave_out(self, num_bytes: int) -> None:
        self.earlier_bytes = self.bytes()
        self.left_out_bytes += num_bytes
        self.is_stale = num_bytes < 0

    @staticmethod
    def _forget() -> None:
        Path("/proc/self/clear_refs").write_text("5")


_peak = _Peak()


class LeftOut:
    """Memory that is mapped and does not count as this process's own, until its owner is gone."""

    def __init__(self, owner: Any) -> None:
        self._num_bytes = 0
        weakref.finalize(owner, self._end)

    def grow(self, num_bytes: int) -> None:
        """So much more is about to be written to."""
        _peak.leave_out(num_bytes)
        self._num_bytes += num_bytes

    def _end(self) -> None:
        _peak.leave_out(-self._num_bytes)


def resident_peak_bytes() -> int:
    """The most that this process has had in memory, but for what is left out."""
    return _peak.bytes()


def reset_peak() -> None:
    """Forget it but for what is in memory now; Linux alone can."""
    _peak.reset()


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
