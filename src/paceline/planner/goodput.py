"""How a plan fares in a long run on devices that fail: how often to save, and which part of the time is useful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.planner.rank import Candidate, amount
from paceline.profile.profile import Profile
from paceline.simulate.failures import (
    CHECKPOINT_BYTES_PER_S,
    RESTART_S,
    Failures,
    daly_interval_s,
    goodput,
    simulated_goodput,
    young_interval_s,
)

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """What failures cost a plan.

    failures: of all its devices. state_bytes: of a checkpoint. bytes_per_s: at which all devices together write it.
    interval_s: of work between checkpoints. goodput: the part of the time that lasts, by formula; and as played.
    """

    failures: Failures
    state_bytes: int
    bytes_per_s: float
    interval_s: float
    goodput: float
    simulated_goodput: float

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"mtbf_s": self.failures.mtbf_s, "checkpoint_bytes": self.state_bytes,
                "checkpoint_bytes_per_s": self.bytes_per_s, "checkpoint_write_s": self.failures.write_s,
                "restart_s": self.failures.restart_s, "checkpoint_interval_s": self.interval_s,
                "young_interval_s": young_interval_s(self.failures), "goodput": self.goodput,
                "simulated_goodput": self.simulated_goodput}

    def describe(self) -> str:
        failures = self.failures
        return (f"with a failure every {_hours(failures.mtbf_s)}: a checkpoint every {_hours(self.interval_s)}, and "
                f"{100 * self.goodput:.1f} % of the time is progress ({100 * self.simulated_goodput:.1f} % as played); "
                f"{amount(self.state_bytes)} are written in {failures.write_s:.3g} s at {self.bytes_per_s / 1e9:.3g} "
                f"GB/s, and a restart takes {failures.restart_s:.3g} s")


def outlook(profile: Profile, chosen: Candidate, *, mtbf_hours: float,
            checkpoint_bytes_per_s: float = CHECKPOINT_BYTES_PER_S) -> Goodput:
    """What failures cost a plan.

    Args:
        mtbf_hours: Mean time between failures of one device.
        checkpoint_bytes_per_s: That one device writes, and reads; all write their part at the same time.

    Raises:
        UsageError: a figure is not above 0.
    """
    for name, value in (("mtbf_hours", mtbf_hours), ("checkpoint_bytes_per_s", checkpoint_bytes_per_s)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, got {value}")
    num_devices = chosen.plan.world_size
    state_bytes = sum((p.num_bytes + p.state_bytes) * p.count for p in profile.parameters)
    bytes_per_s = num_devices * checkpoint_bytes_per_s
    write_s = max(state_bytes / bytes_per_s, 1e-3)
    failures = Failures(mtbf_hours * HOUR_S / num_devices, write_s, RESTART_S + write_s)
    # At least a step lies between two checkpoints.
    interval_s = max(daly_interval_s(failures), chosen.estimate.step_s)
    lasting = goodput(failures, interval_s)
    played = simulated_goodput(failures, interval_s, intervals=2000) if lasting > 0.01 else 0.0
    return Goodput(failures, state_bytes, bytes_per_s, interval_s, lasting, played)


def _hours(seconds: float) -> str:
    """
    >>> _hours(90), _hours(600), _hours(7200), _hours(864000), _hours(1e9)
    ('90 s', '10 min', '2 h', '10 days', '11,574 days')
    """
    for unit, name, least in ((86400.0, "days", 172800.0), (HOUR_S, "h", 5400.0), (60.0, "min", 120.0)):
        if seconds >= least:
            return f"{seconds / unit:,.0f} {name}" if seconds >= 100 * unit else f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
