"""What limits a run, why, and what to try next: from what it measured and what was predicted for it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.reports.record import RunRecord

FEW_STEPS = 10  # a run of fewer is mostly its start: step times are taken after so many
LARGE = 0.1  # of the training's time: a smaller part is not worth a change

COMPUTING, OPTIMIZER, MESSAGES, IDLE, DATA, SAVES = (
    "computing", "the optimizer", "messages between ranks", "waiting for other ranks", "reading data",
    "writing checkpoints")
_PREDICTED = {"compute": COMPUTING, "optimizer": OPTIMIZER, "communication": MESSAGES}
_TRACED = {"forward": COMPUTING, "backward": COMPUTING, "input gradients": COMPUTING, "weight gradients": COMPUTING,
           "optimizer": OPTIMIZER, "reduce": MESSAGES}


@dataclass(frozen=True)
class StepPart:
    """A part of a step's time. seconds: of a step, in the mean. is_measured: or divided as the prediction divides."""

    name: str
    seconds: float
    is_measured: bool


@dataclass(frozen=True)
class Diagnosis:
    """limit: what takes most of a step, or the part that is worth a change first; None if that can't be said.

    share: the limit's part of a step with its share of saving, from 0 to 1. gain: by how much steps would be faster if
    it were gone, 1.25 for a quarter; None where nothing removes it.
    """

    limit: str | None
    share: float
    why: str
    next: str
    gain: float | None = None

    def lines(self) -> dict[str, str]:
        """For people: a sentence by its name."""
        return {"verdict": self.why if self.limit is None else f"this run is limited by {self.limit}",
                **({} if self.limit is None else {"why": self.why}), "next": self.next}


def step_parts(record: RunRecord) -> list[StepPart]:
    """A step's time in parts, the longest first; empty of a run without a summary.

    Reading data and saving are measured. What is left of the step is divided as a trace of the run measured it, else as
    the prediction divides it.
    """
    step_s = record.summary.get("step_s")
    if not step_s:
        return []
    input_s = min(record.summary.get("input_s") or 0.0, step_s)
    saving_s = (record.summary.get("save_blocked_s") or 0.0) / max(1, len(record.steps))
    parts = [StepPart(DATA, input_s, True), StepPart(SAVES, saving_s, True)]
    traced = _traced_shares(record)
    shares = traced or _predicted_shares(record.predicted.get("breakdown") or {})
    parts += [StepPart(name, share * (step_s - input_s), bool(traced)) for name, share in shares.items()]
    return sorted((part for part in parts if part.seconds > 0), key=lambda part: -part.seconds)


def _predicted_shares(breakdown: Mapping[str, float]) -> dict[str, float]:
    total_s = sum(breakdown.values())
    return {_PREDICTED.get(name, name): seconds / total_s for name, seconds in breakdown.items()} if total_s else {}


def _traced_shares(record: RunRecord) -> dict[str, float]:
    """Of the time between the traced steps' first and last events, without reading data; what no event covers is
    waiting."""
    events = record.traced
    if not events:
        return {}
    begin = min(event["ts"] for event in events)
    whole = (max(event["ts"] + event["dur"] for event in events) - begin) * len({event["pid"] for event in events})
    whole -= sum(event["dur"] for event in events if event["cat"] == "input")
    if whole <= 0:
        return {}
    shares: dict[str, float] = {}
    for event in events:
        if (name := _TRACED.get(event["cat"])) is not None:
            shares[name] = shares.get(name, 0.0) + event["dur"] / whole
    return {**shares, IDLE: max(0.0, 1.0 - sum(shares.values()))}


def diagnose(record: RunRecord) -> Diagnosis:
    """What limits the run.

    Reading data or saving is named where it takes a tenth of the time, because each can be removed; else the longest
    part is.
    """
    if not record.summary:
        done = record.steps[-1]["step"] if record.steps else 0
        return Diagnosis(None, 0.0, f"this run did not end: {done} steps are recorded",
                       f"paceline train JOB --run {record.path} --resume goes on from the newest checkpoint")
    parts = step_parts(record)
    if record.summary["steps"] <= FEW_STEPS or not parts:
        return Diagnosis(None, 0.0, f"{record.summary['steps']} steps are mostly a run's start", "train for longer")
    whole_s = sum(part.seconds for part in parts)
    avoidable = [part for part in parts if part.name in (DATA, SAVES) and part.seconds >= LARGE * whole_s]
    limit = (avoidable or parts)[0]
    gain = whole_s / (whole_s - limit.seconds) if avoidable and whole_s > limit.seconds else None
    return Diagnosis(limit.name, limit.seconds / whole_s, _why(limit, parts, whole_s), _next(limit.name, record, gain),
                   gain)


def _why(limit: StepPart, parts: list[StepPart], whole_s: float) -> str:
    others = ", ".join(f"{part.name} {1e3 * part.seconds:.3g} ms" for part in parts if part is not limit)
    by = "" if limit.is_measured else "; divided as the prediction divides it"
    return (f"it takes {100 * limit.seconds / whole_s:.0f} % of a step's {1e3 * whole_s:.3g} ms"
            f"{f' ({others})' if others else ''}{by}")


def _next(limit: str, record: RunRecord, gain: float | None) -> str:
    """What to try. Each names a command or a plan's key that exists."""
    faster = "" if gain is None else f": at most {gain:.2f} times as fast"
    return {
        DATA: f"--loader-workers 2 reads beside the steps{faster}",
        SAVES: f"a larger --save-every saves less often{faster}",
        MESSAGES: "paceline plan JOB prices plans that send less; --relaxed also compress= and local=",
        IDLE: "--trace 5 draws who waits for whom; shares=speed gives slower devices less",
        OPTIMIZER: "a larger batch takes fewer updates a sample; shard= divides the update among ranks",
        COMPUTING: ("paceline plan JOB prices more devices, lower precision and compiled blocks"
                    if record.plan.get("world_size", 1) == 1 else
                    "paceline plan JOB --scale 1..64 says what more devices would bring"),
    }[limit]
