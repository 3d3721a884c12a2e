"""How a plan fares in a long run on devices that fail: how often to save, and which part of the time is useful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.launch.live_states import COPY_SHARE
from paceline.launch.live_states import TIME_SHARE as NOTE_SHARE
from paceline.launch.state_copies import TIME_SHARE
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


SurvivalName = Literal["copies", "checkpoint", "resume"]
_IN_WORDS: dict[SurvivalName, str] = {
    "copies": "ranks are replaced on their host and go on from what they left in memory",
    "checkpoint": "ranks are replaced on their host and go on from the newest checkpoint",
    "resume": "the run ends (--restarts 0, or a host is lost) and is resumed from the newest checkpoint",
}
# Until the ranks of one host are replaced and compute again: forks of a warm process, a process group, a small model.
# The slowest plan's median, python -m benchmarks.recovery on two cores.
REPLACED_S = 0.7
COPIED_BYTES_PER_S = 6.5e9  # by one core, to memory that it has used before; measured on two cores
NOTE_S, NOTE_TENSOR_S = 1e-4, 1e-6  # of a note, and more a tensor of the state: 0.1 to 0.2 ms for 72, 1.1 ms for 1,152
STATE_TENSORS = 3  # a parameter: itself, and what Adam keeps of it


@dataclass(frozen=True, slots=True)
class Survival:
    """How a run outlives failures, and what they cost it then.

    interval_s: of work between copies or checkpoints, or of a step where ranks leave their state.
    goodput: the part of the time that lasts, by formula; and as played.
    """

    name: SurvivalName
    failures: Failures
    interval_s: float
    goodput: float
    simulated_goodput: float

    @classmethod
    def of(cls, name: SurvivalName, failures: Failures, interval_s: float) -> Survival:
        lasting = goodput(failures, interval_s)
        played = simulated_goodput(failures, interval_s, intervals=2000) if lasting > 0.01 else 0.0
        return cls(name, failures, interval_s, lasting, played)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"restart_s": self.failures.restart_s, "blocked_s": self.failures.waited_s,
                "write_s": self.failures.write_s, "interval_s": self.interval_s, "goodput": self.goodput,
                "simulated_goodput": self.simulated_goodput}

    def describe(self) -> str:
        return (f"{_IN_WORDS[self.name]}: {100 * self.goodput:.1f} % is progress "
                f"({100 * self.simulated_goodput:.1f} % as played), going back to at most {_hours(self.interval_s)} "
                f"of work, {self.failures.restart_s:.3g} s after the failure")


@dataclass(frozen=True, slots=True)
class Goodput:
    """What failures cost a plan.

    state_bytes: of a checkpoint. bytes_per_s: at which all that hold it together write it.
    survivals: those that exist under the plan on the cluster; the last one resumes the run.
    """

    state_bytes: int
    bytes_per_s: float
    survivals: tuple[Survival, ...]

    @property
    def resumed(self) -> Survival:
        """The way that outlives any failure."""
        return self.survivals[-1]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        failures, resumed = self.resumed.failures, self.resumed
        return {"mtbf_s": failures.mtbf_s, "checkpoint_bytes": self.state_bytes,
                "checkpoint_bytes_per_s": self.bytes_per_s, "checkpoint_write_s": failures.write_s,
                "restart_s": failures.restart_s, "checkpoint_interval_s": resumed.interval_s,
                "young_interval_s": young_interval_s(failures), "goodput": resumed.goodput,
                "simulated_goodput": resumed.simulated_goodput,
                "survival": {survival.name: survival.to_dict() for survival in self.survivals}}

    def describe(self) -> str:
        failures = self.resumed.failures
        interval = _hours(self.resumed.interval_s)
        lines = [f"with a failure every {_hours(failures.mtbf_s)}: a checkpoint every {interval}; "
                 f"{amount(self.state_bytes)} are written in {failures.write_s:.3g} s at {self.bytes_per_s / 1e9:.3g} "
                 f"GB/s, and training waits {failures.waited_s:.2g} s of it"]
        return "\n    ".join([*lines, *(survival.describe() for survival in self.survivals)])


def outlook(profile: Profile, chosen: Candidate, *, mtbf_hours: float, is_one_host: bool = False,
            is_on_cpus: bool = False, checkpoint_bytes_per_s: float = CHECKPOINT_BYTES_PER_S) -> Goodput:
    """What failures cost a plan.

    Args:
        mtbf_hours: Mean time between failures of one device.
        is_one_host: Whether one process starts all ranks, which then replaces those that are lost.
        is_on_cpus: Whether the state lies in memory that can outlive its rank.
        checkpoint_bytes_per_s: That one device writes, and reads; all write their part at the same time.

    Raises:
        UsageError: a figure is not above 0.
    """
    for name, value in (("mtbf_hours", mtbf_hours), ("checkpoint_bytes_per_s", checkpoint_bytes_per_s)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, got {value}")
    num_devices, num_savers = chosen.plan.world_size, chosen.plan.sync.num_savers(chosen.plan.axes)
    state_bytes = sum((p.num_bytes + p.state_bytes) * p.count for p in profile.parameters)
    bytes_per_s = num_savers * checkpoint_bytes_per_s
    copied_s = max(state_bytes / num_savers / COPIED_BYTES_PER_S, 1e-3)
    read_s = max(state_bytes / bytes_per_s, 1e-3)
    mtbf_s, write_s, step_s = mtbf_hours * HOUR_S / num_devices, copied_s + read_s, chosen.estimate.step_s
    survivals = []
    if is_one_host:
        waited_s, between_s = copied_s, max(copied_s / TIME_SHARE, step_s)
        note_s = NOTE_S + NOTE_TENSOR_S * STATE_TENSORS * sum(p.count for p in profile.parameters)
        leaves_state = is_on_cpus and chosen.plan.sync.leaves_state and note_s <= NOTE_SHARE * step_s
        if leaves_state:  # beside copies, for ranks that are lost in an update
            waited_s, between_s = note_s + COPY_SHARE * step_s, step_s
        survivals.append(Survival.of("copies", Failures(mtbf_s, waited_s, REPLACED_S + copied_s), between_s))
    restarts_s: dict[SurvivalName, float] = {**({"checkpoint": REPLACED_S} if is_one_host else {}), "resume": RESTART_S}
    for name, restart_s in restarts_s.items():
        saving = Failures(mtbf_s, write_s, restart_s + read_s, blocked_s=copied_s)
        # At least a step lies between two checkpoints.
        survivals.append(Survival.of(name, saving, max(daly_interval_s(saving), step_s)))
    return Goodput(state_bytes, bytes_per_s, tuple(survivals))


def _hours(seconds: float) -> str:
    """
    >>> _hours(90), _hours(600), _hours(7200), _hours(864000), _hours(1e9)
    ('90 s', '10 min', '2 h', '10 days', '11,574 days')
    """
    for unit, name, least in ((86400.0, "days", 172800.0), (HOUR_S, "h", 5400.0), (60.0, "min", 120.0)):
        if seconds >= least:
            return f"{seconds / unit:,.0f} {name}" if seconds >= 100 * unit else f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
