"""The verb rehearse: compare a run under faults with an undisturbed one, and report what the faults
cost and changed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.api.audit import Audit, audit
from paceline.api.train import TrainRequest
from paceline.base.errors import PacelineError, UsageError
from paceline.job.file import AnyJob, open_job
from paceline.launch.process.faults import Fault, draw, struck
from paceline.launch.process.messages import Line
from paceline.launch.process.supervisor import Supervisor
from paceline.runs import folder, journal
from paceline.runs.metrics import read_history
from paceline.strategies.plan import Plan

# Seconds without a sign of life. The value is small because rehearsed runs are short and rehearse
# hangs.
TIMEOUT_S = 10.0
ALLOWED = 10.0  # times the rounding, as in `verify`; see docs/verify.md
# Takes a run folder and options; returns an exit code and a message.
Launch = Callable[[Path, dict[str, Any]], tuple[int, str]]
SAVES = 5  # checkpoints in a run, by default


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a fault on a run."""

    fault: str
    step: int | None = None  # in which it struck; None if it did not strike
    phase: str | None = None  # in which it struck; None if it did not strike
    next_step_s: float | None = None  # from then to the next applied update; None if there was none
    # from then to the first update of a step that was not applied before; None if there was none
    caught_up_s: float | None = None


@dataclass(frozen=True)
class Rehearsal:
    """The result of a run under faults, beside an undisturbed run.

    The seconds of a run count from where its first launch begins to train to its last step, and
    include the restarts in between.
    """

    plan: str
    is_exact: bool
    ended: bool  # whether the run reached its last step
    effects: tuple[Effect, ...]
    exit_codes: tuple[int, ...]  # of all launches; negative for a launch that was killed
    # the first line of what each launch ended with, except the last one if it ended well
    messages: tuple[str, ...]
    audit: Audit
    # whether the final weights equal those of the undisturbed run bit by bit; None if there are
    # none
    weights: Literal["equal", "different"] | None
    difference: float | None  # the greatest difference of a weight
    undisturbed_s: float
    disturbed_s: float
    # The greatest difference of a weight between undisturbed runs: under the run's first plan, and
    # under the plans that it went on with. None if the run kept its plan; an exact plan then gives
    # equal weights.
    rounding: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the run ended with nothing lost or repeated.

        Under an exact plan the weights must also be equal or, if the number of ranks changed,
        differ only by rounding.
        """
        return (
            self.ended
            and self.audit.passed
            and (self.weights == "equal" or not self.is_exact or self._is_rounding)
        )

    @property
    def _is_rounding(self) -> bool:
        return (
            self.rounding is not None
            and self.difference is not None
            and (self.difference <= ALLOWED * self.rounding)
        )

    @property
    def goodput(self) -> float:
        """The undisturbed run's time divided by the disturbed one's; 0 if the disturbed run did not
        end.

        Both times leave out the first start, whose time depends on what the machine has read
        before.
        """
        return self.undisturbed_s / self.disturbed_s if self.ended else 0.0

    def to_dict(self) -> dict[str, Any]:
        audit = self.audit.to_dict()
        return {
            "plan": self.plan,
            "passed": self.passed,
            "ended": self.ended,
            "effects": [asdict(effect) for effect in self.effects],
            "exit_codes": list(self.exit_codes),
            "messages": list(self.messages),
            "recomputed_updates": self.audit.recomputed_updates,
            "samples_lost": _samples(self.audit, "lost"),
            "samples_repeated": _samples(self.audit, "repeated"),
            "weights": self.weights,
            "difference": self.difference,
            "rounding": self.rounding,
            "undisturbed_s": self.undisturbed_s,
            "disturbed_s": self.disturbed_s,
            "goodput": self.goodput,
            "audit": audit,
        }

    def describe(self) -> str:
        """Return the rehearsal as text for people: each fault, then what was lost, then the
        verdict.
        """
        lines = [f"plan {self.plan}"]
        for effect in self.effects:
            if effect.step is None:
                lines.append(
                    f"{effect.fault}: it did not strike, as the rank had no such phase of a step left"
                )
                continue
            after = "no further step"
            if effect.next_step_s is not None:
                after = f"next applied step after {effect.next_step_s:.2f} s"
            if effect.caught_up_s is not None and effect.caught_up_s != effect.next_step_s:
                after += f", first new one after {effect.caught_up_s:.2f} s"
            lines.append(f"{effect.fault}: struck in step {effect.step} ({effect.phase}); {after}")
        lines += [
            f"launch {number + 1} ended with {code}: {message}"
            for number, (code, message) in enumerate(
                zip(self.exit_codes, self.messages, strict=False)
            )
        ]
        lines += [
            f"steps recomputed  {self.audit.recomputed_updates}",
            f"samples lost      {_samples(self.audit, 'lost')}",
            f"samples repeated  {_samples(self.audit, 'repeated')}",
            f"final weights     {self._weights_in_words()}",
            f"goodput           {self.goodput:.0%} ({self.undisturbed_s:.1f} s undisturbed, "
            f"{self.disturbed_s:.1f} s under faults)",
        ]
        if not self.audit.passed:
            lines.append(self.audit.describe())
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])

    def _weights_in_words(self) -> str:
        if self.weights is None:
            return "none: the run did not end"
        if self.weights == "equal":
            return "those of the undisturbed run, bit by bit"
        note = "" if self.is_exact else "; the plan is not exact"
        if self.rounding is not None:
            note += f"; another number of ranks alone makes {self.rounding:.3g}"
        return f"up to {self.difference:.3g} from those of the undisturbed run{note}"


def rehearse(
    job: AnyJob,
    plan: str | Plan | None = None,
    faults: Sequence[Fault | str] = (),
    *,
    random: int = 0,
    seed: int = 0,
    run: str | Path | None = None,
    save_every: int | None = None,
    timeout_s: float = TIMEOUT_S,
    **request: Any,
) -> Rehearsal:
    """Train a job undisturbed, then under faults. A launch that ends too early is resumed as a user
    would resume it.

    Args:
        job, plan: As in `train`.
        faults: Faults that strike the second run, each once: values, or texts such as "kill 1@50".
        random: The number of additional faults that the seed draws.
        seed: The seed of the random faults.
        run: The folder for both runs, by default a new one in `runs/`. They are `undisturbed` and
            `disturbed` in it.
        save_every: Optimizer steps between checkpoints, of which a run has five by default.
        timeout_s: Seconds without a sign of life after which a rank counts as hanging.
        request: "steps", "restarts", "devices", "procs", "memory", as in `train`.

    Raises:
        UsageError: the request makes no sense.
        RankFailed: the undisturbed run failed.
    """
    source, loaded = open_job(job)
    if (steps := request.pop("steps", None)) is not None:
        loaded = replace(loaded, steps=steps, epochs=None)
    if loaded.total_steps is None:
        raise UsageError(
            "how long a stream lasts is not known, and faults strike in steps",
            hint="steps=N, or --steps N",
        )
    options: dict[str, Any] = {
        "timeout_s": timeout_s,
        "restarts": request.pop("restarts", None),
        "check": False,
        "save_every": save_every or max(1, loaded.total_steps // SAVES),
    }

    def ask(other_plan: str | Plan | None) -> TrainRequest:
        return TrainRequest.of(loaded, source, other_plan, **request)

    train_request = ask(plan)
    world_size = train_request.resolved.plan.world_size
    script = [
        *(Fault.read(fault) if isinstance(fault, str) else fault for fault in faults),
        *draw(random, seed=seed, world_size=world_size, steps=loaded.total_steps),
    ]
    for fault in script:
        if fault.rank >= world_size:
            raise UsageError(
                f"'{fault}' names rank {fault.rank}, and the plan {train_request.resolved.plan} has "
                f"{world_size} ranks, from 0"
            )
    base_dir = (
        Path(run)
        if run is not None
        else folder.fresh_name(f"rehearse-{source.path.stem if source else 'job'}")
    )
    launch = partial(_launch, train_request)
    return rehearsed(train_request.resolved.plan, launch, ask, base_dir, script, options)


def rehearsed(
    plan: Plan,
    launch: Launch,
    ask: Callable[[Plan], TrainRequest],
    base_dir: Path,
    faults: Sequence[Fault],
    options: dict[str, Any],
) -> Rehearsal:
    """Execute both runs.

    The run under faults is resumed until it ends, or until no fault is left that could have ended
    it.
    """
    _undisturbed(launch, base_dir / "undisturbed", options)
    run_dir, codes, messages = base_dir / "disturbed", list[int](), list[str]()
    while not codes or (codes[-1] and len(codes) <= len(faults)):
        code, message = launch(run_dir, {**options, "faults": tuple(faults), "resume": bool(codes)})
        codes.append(code)
        if code:
            messages.append(message)
    weights, difference = _compared(base_dir / "undisturbed", run_dir)
    roundings = [
        _rounding(ask(other), base_dir, number, options)
        for number, other in enumerate(_other_plans(run_dir, plan))
        if weights == "different"
    ]
    return Rehearsal(
        str(plan),
        plan.relaxed is None,
        not codes[-1],
        _effects(run_dir, faults),
        tuple(codes),
        tuple(messages),
        audit(run_dir),
        weights,
        difference,
        _trained_s(base_dir / "undisturbed"),
        _trained_s(run_dir),
        max(roundings, default=None),
    )


def _trained_s(run_dir: Path) -> float:
    """Return the seconds from where the first launch begins to train to the last step; 0 if there
    was no step.
    """
    steps = _recorded(run_dir)
    return steps[-1][1] - _launches(run_dir)[0].time if steps else 0.0


def _launches(run_dir: Path) -> list[journal.Launch]:
    return [
        record
        for _, record in journal.read(run_dir / folder.JOURNAL)
        if isinstance(record, journal.Launch)
    ]


def _undisturbed(launch: Launch, run_dir: Path, options: dict[str, Any]) -> None:
    """Train without faults.

    Raises:
        PacelineError: the run failed.
    """
    code, message = launch(run_dir, options)
    if code:
        raise PacelineError(
            f"the undisturbed run failed: {message}", hint=folder.read_failure(run_dir).get("hint")
        )


def _other_plans(run_dir: Path, plan: Plan) -> list[Plan]:
    """Return the plans, other than this one, under which the run went on."""
    return [
        Plan.parse(text)
        for text in dict.fromkeys(launch.plan for launch in _launches(run_dir))
        if text != str(plan)
    ]


def _rounding(request: TrainRequest, base_dir: Path, number: int, options: dict[str, Any]) -> float:
    """Return the greatest difference of a weight between undisturbed runs under another plan and
    under this one.
    """
    other = base_dir / f"other-plan-{number + 1}"
    _undisturbed(partial(_launch, request), other, options)
    return _compared(base_dir / "undisturbed", other)[1] or 0.0


def _launch(request: TrainRequest, run_dir: Path, options: dict[str, Any]) -> tuple[int, str]:
    """Train in a separate process, because faults may kill it. Return its exit code and what it
    ended with.
    """
    train = partial(request.train, run_dir, **options)
    with closing(Supervisor(lambda _, line: told_ending(train, line))) as processes:
        processes.start(0)
        return endings(processes, [0])[0]


def endings(processes: Supervisor, slots: Sequence[int]) -> list[tuple[int, str]]:
    """Return the exit codes of processes, and what each ended with."""
    return [
        (code or 0, message or f"it was ended by signal {-(code or 0)}")
        for code, message in processes.hear_out(slots).values()
    ]


def told_ending(train: Callable[[], Any], line: Line) -> None:
    """Train, and tell what the training ended with. The process ends with its exit code."""
    try:
        train()
    except PacelineError as error:
        line.end(" ".join(str(error).splitlines()[:2]), None)
        sys.exit(error.exit_code)
    line.end("it ended", None)


def _effects(run_dir: Path, faults: Sequence[Fault]) -> tuple[Effect, ...]:
    """Return the effects of the faults, from the times of the faults and of the recorded steps."""
    strikes, steps = struck(run_dir), _recorded(run_dir)
    effects = []
    for number, fault in enumerate(faults):
        if number not in strikes:
            effects.append(Effect(str(fault)))
            continue
        at_s = strikes[number]["time"]
        after = [(step, time_s - at_s) for step, time_s in steps if time_s > at_s]
        effects.append(
            Effect(
                str(fault),
                strikes[number]["step"],
                strikes[number]["phase"],
                after[0][1] if after else None,
                next((late_s for step, late_s in after if step >= strikes[number]["step"]), None),
            )
        )
    return tuple(effects)


def _recorded(run_dir: Path) -> list[tuple[int, float]]:
    """Return the number and time of each step in the run's metrics, in the order of time."""
    return [(row["step"], row["time"]) for row in read_history(run_dir) if "step_s" in row]


def _compared(
    undisturbed: Path, disturbed: Path
) -> tuple[Literal["equal", "different"] | None, float | None]:
    """Compare the final weights of two runs; return whether they are equal, and their greatest
    difference.
    """
    import torch

    from paceline.checkpoint.dtypes import load_tensors

    if not (disturbed / folder.MODEL).exists():
        return None, None
    first, second = (load_tensors(path / folder.MODEL) for path in (undisturbed, disturbed))

    def off_by(one: torch.Tensor, other: torch.Tensor) -> float:
        if torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other))):
            return 0.0
        apart = torch.where(one == other, 0.0, (one.double() - other.double()).abs())
        return float(apart.nan_to_num(nan=math.inf).max())

    difference = max((off_by(first[name], second[name]) for name in first), default=0.0)
    return ("equal" if difference == 0 else "different"), difference


def _samples(audit: Audit, kind: str) -> int:
    return sum(
        finding.positions[1] - finding.positions[0]
        for finding in audit.findings
        if finding.kind == kind and finding.positions is not None
    )
