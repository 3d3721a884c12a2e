"""Finds what limits a run, why, and what to try next. It uses only the run's own measurements and
prediction.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.tables import in_ms
from paceline.reports.record import RunRecord

# A run of fewer steps is mostly its start. Step times are taken after so many steps.
FEW_STEPS = 10
SMALL = 0.02  # a part of a step that is smaller is not named
LARGE = 0.1  # a smaller part of the training's time is not worth a change

COMPUTING, OPTIMIZER, MESSAGES, IDLE, UNEXPLAINED, DATA, SAVES, CORES = (
    "computing",
    "the optimizer",
    "messages between ranks",
    "waiting for other ranks",
    "time that no part explains",
    "reading data",
    "writing checkpoints",
    "other work on its cores",
)
# Limits that can be removed. Each is named first if its part of the time is at least this. Ranks'
# own threads wait for each other, too: on a quiet machine two ranks of examples/01_digits.py do so
# for a tenth of the time.
AVOIDABLE = {DATA: LARGE, SAVES: LARGE, CORES: 2 * LARGE}
MOST_WAITED = 0.99  # the largest part of a run's time; a larger one would explain any slowdown
PREEMPTED = "preempted"  # the reason of a failure if the run was asked to stop
PREDICTED_PARTS = {
    "compute": COMPUTING,
    "optimizer": OPTIMIZER,
    "communication": MESSAGES,
    "bubble": IDLE,
    "unexplained": UNEXPLAINED,
}
_TRACED = {
    "forward": COMPUTING,
    "backward": COMPUTING,
    "input gradients": COMPUTING,
    "weight gradients": COMPUTING,
    "optimizer": OPTIMIZER,
    "reduce": MESSAGES,
}


@dataclass(frozen=True)
class StepPart:
    """A part of a step's time."""

    name: str
    seconds: float  # mean over steps
    is_measured: bool  # otherwise it is divided as the prediction divides the step


@dataclass(frozen=True)
class Diagnosis:
    """The limit of a run, the reason for it, and what to try next."""

    # The part that takes most of a step, or the part that should be changed first; None if that
    # can't be said.
    limit: str | None
    share: float  # the limit's part of a step together with its share of saving, from 0 to 1
    verdict: str
    why: str
    next: str
    outlook: Mapping[str, str]  # the gain in words, or what is kept of a run that did not end
    # By how much steps would be faster without the limit, or with twice the devices if computing is
    # the limit: 1.25 for a quarter. None if that can't be said.
    gain: float | None = None

    def lines(self) -> dict[str, str]:
        """Return the diagnosis for people: sentences by their names."""
        return {"verdict": self.verdict, "why": self.why, "next": self.next, **self.outlook}


def core_wait(record: RunRecord) -> float:
    """Return the part of a run's time in which a rank waited for a core that other work used, at
    most.
    """
    wall_s = record.summary.get("wall_s") or 0.0
    return min((record.summary.get("core_wait_s") or 0.0) / wall_s, MOST_WAITED) if wall_s else 0.0


def step_parts(record: RunRecord) -> list[StepPart]:
    """Return a step's time in parts, the longest first; empty for a run without a summary.

    Reading data, saving and waiting for a core are measured. The rest of the step is divided as a
    trace of the run measured it. Without a trace it is divided as the prediction divides it.
    """
    step_s = record.summary.get("step_s")
    if not step_s:
        return []
    input_s = min(record.summary.get("input_s") or 0.0, step_s)
    saving_s = (record.summary.get("save_blocked_s") or 0.0) / max(1, len(record.steps))
    core_wait_s = core_wait(record) * (step_s - input_s)
    parts = [
        StepPart(DATA, input_s, True),
        StepPart(SAVES, saving_s, True),
        StepPart(CORES, core_wait_s, True),
    ]
    traced = _traced_shares(record)
    shares = traced or _predicted_shares(record.predicted.get("breakdown") or {})
    parts += [
        StepPart(name, share * (step_s - input_s - core_wait_s), bool(traced))
        for name, share in shares.items()
    ]
    return sorted((part for part in parts if part.seconds > 0), key=lambda part: -part.seconds)


def _predicted_shares(breakdown: Mapping[str, float]) -> dict[str, float]:
    total_s = sum(breakdown.values())
    return (
        {PREDICTED_PARTS[name]: seconds / total_s for name, seconds in breakdown.items()}
        if total_s
        else {}
    )


def _traced_shares(record: RunRecord) -> dict[str, float]:
    """Return the share of each part in the time between the first and the last event of the traced
    steps.

    Reading data is left out. Time that no event covers counts as waiting.
    """
    events = record.traced
    if not events:
        return {}
    begin = min(event["ts"] for event in events)
    whole = (max(event["ts"] + event["dur"] for event in events) - begin) * len(
        {event["pid"] for event in events}
    )
    whole -= sum(event["dur"] for event in events if event["cat"] == "input")
    if whole <= 0:
        return {}
    shares: dict[str, float] = {}
    for event in events:
        if (name := _TRACED.get(event["cat"])) is not None:
            shares[name] = shares.get(name, 0.0) + event["dur"] / whole
    return {**shares, IDLE: max(0.0, 1.0 - sum(shares.values()))}


def rank_seconds(record: RunRecord) -> dict[int | str, dict[str, float]]:
    """Return how many seconds each rank spent on each part in the traced steps, by rank; empty for
    a run without a trace.
    """
    seconds: dict[int | str, dict[str, float]] = {}
    for event in record.traced:
        if (name := {**_TRACED, "input": DATA}.get(event["cat"])) is not None:
            rank = seconds.setdefault(event["pid"], {})
            rank[name] = rank.get(name, 0.0) + 1e-6 * event["dur"]
    return dict(sorted(seconds.items(), key=lambda item: str(item[0]).zfill(9)))


def diagnose(record: RunRecord) -> Diagnosis:
    """Find what limits the run, or what ended it.

    A limit that can be removed is named if its part of the time is at least that in `AVOIDABLE`.
    Otherwise the longest part is named.
    """
    if not record.summary:
        return _unfinished(record)
    parts = step_parts(record)
    if record.summary["steps"] <= FEW_STEPS or not parts:
        return Diagnosis(
            None,
            0.0,
            "this run was too short to say what limits it",
            f"{record.summary['steps']} steps are mostly a run's start",
            "train for longer",
            {"gain": "not known"},
        )
    whole_s = sum(part.seconds for part in parts)
    avoidable = [
        part
        for part in parts
        if part.seconds >= AVOIDABLE.get(part.name, math.inf) * whole_s
        and (part.name != SAVES or len(record.saves) > 1)  # one at the end is always written
    ]
    limit = (avoidable or parts)[0]
    saved_s = limit.seconds / 2 if limit.name == COMPUTING else limit.seconds
    gain = whole_s / (whole_s - saved_s) if whole_s > saved_s else None
    return Diagnosis(
        limit.name,
        limit.seconds / whole_s,
        f"this run is limited by {limit.name}",
        _why(limit, parts, whole_s),
        _next(limit.name, record),
        {"gain": _bound(limit.name, gain)},
        gain,
    )


def _unfinished(record: RunRecord) -> Diagnosis:
    """Diagnose a run without a summary."""
    done = record.steps[-1]["step"] if record.steps else 0
    failure, saved, run = record.failure, record.saved_step, shlex.quote(str(record.path))
    go_on = (
        f"the same command with --run {run} --resume goes on from step {saved}"
        if saved
        else "--save-every N keeps checkpoints that --resume goes on from"
        if done
        else "start again when that is mended: no step was lost"
    )
    why = _first_line(failure.get("message")) or "no message"
    if not failure:
        verdict, why = (
            "this run did not end",
            f"it recorded {done} steps and no summary: it goes on, or was killed",
        )
    elif failure["reason"] == PREEMPTED:
        verdict = f"this run was stopped in step {failure.get('step', done)}"
    else:
        verdict = f"rank {failure.get('rank', '?')} failed in step {failure.get('step', done)} ({failure['reason']})"
        why += f", at {failure['where']}" if failure.get("where") else ""
    return Diagnosis(
        None,
        0.0,
        verdict,
        why,
        _first_line(failure.get("hint")) or go_on,
        {"kept": f"the checkpoint of step {saved}" if saved else "no checkpoint"},
    )


def _first_line(text: str | None) -> str:
    """Return the first line that is no part of a traceback."""
    lines = (text or "").strip().splitlines()
    return next((line for line in lines if not line.startswith(("Traceback ", " "))), "")


def _why(limit: StepPart, parts: list[StepPart], whole_s: float) -> str:
    others = ", ".join(
        f"{part.name} {in_ms(part.seconds)}"
        for part in parts
        if part is not limit and part.seconds >= SMALL * whole_s
    )
    by = "" if limit.is_measured else "; divided as the prediction divides it"
    return (
        f"it takes {100 * limit.seconds / whole_s:.0f} % of a step's {in_ms(whole_s)}"
        f"{f' ({others})' if others else ''}{by}"
    )


def _next(limit: str, record: RunRecord) -> str:
    """Return what to try. Each text names a command or a plan's key that exists."""
    return {
        DATA: "--loader-workers 2 reads beside the steps",
        SAVES: "a larger --save-every saves less often"
        if len(record.saves) > 1
        else "train for longer: the checkpoint at the end is always written",
        CORES: "end what else runs there, or leave cores free: --devices names those to use",
        MESSAGES: "paceline plan JOB prices plans that send less; --relaxed also compress= and local=",
        UNEXPLAINED: "--trace 5 measures the parts of a step",
        IDLE: "--trace 5 draws who waits for whom; shares=speed gives slower devices less",
        OPTIMIZER: "a larger batch takes fewer updates a sample; "
        f"{'more servers divide' if 'server' in record.plan['plan'] else 'shard= divides'} the update",
        COMPUTING: (
            "paceline plan JOB prices more devices, lower precision and compiled blocks"
            if record.plan.get("world_size", 1) == 1
            else "paceline plan JOB --scale 1..64 says what more devices would bring"
        ),
    }[limit]


def _bound(limit: str, gain: float | None) -> str:
    if gain is None:
        return "not known"
    return f"at most {gain:.2f} times as fast{' on twice the devices' if limit == COMPUTING else ' without it'}"
