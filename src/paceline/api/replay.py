"""The verb replay: compute steps of a run again, and compare them with what the run recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.api.train import TrainRequest
from paceline.base.errors import CheckpointError, PlanError, UsageError
from paceline.base.temporary import temporary_folder
from paceline.checkpoint.read import newest_checkpoint
from paceline.job import Job
from paceline.job.file import JobFile
from paceline.proof.tolerances import EPSILON
from paceline.runs import folder, journal
from paceline.runs.metrics import read_history
from paceline.runs.provenance import note_edits
from paceline.strategies import conflicts
from paceline.strategies.plan import Plan

SHOWN = 10  # differing figures that `describe` shows
# Steps that are equal to the bit before the first difference, after which it is none of rounding:
# hardware that rounds otherwise does so from the first step on, and one loss may be equal by chance.
ROUND_ALIKE = 2
_FIGURES = {"loss": "loss", "gradient_norm": "gradient norm"}

Verdict = Literal["equal", "rounding", "different"]


@dataclass(frozen=True, slots=True)
class ReplayFinding:
    """A figure of a step that is not what the run recorded."""

    step: int
    figure: str  # "loss", "gradient norm" or "weights"
    recorded: float | str | None  # None for a number that is not finite
    computed: float | str | None
    relative: float  # the difference, over the recorded number; infinite for fingerprints


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    run: Path
    plan: str
    after: int  # the step of the checkpoint that it went on from; 0 for the begin
    step: int  # the last one that was computed again
    num_compared: int  # figures that both have
    limit: float  # relative difference up to which numbers differ by rounding
    differences: tuple[ReplayFinding, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether all figures are equal to the bit, the numbers differ by rounding, or they differ
        by more.

        Hardware that rounds otherwise shows it in the first steps, within the limit. Fingerprints
        of weights then differ, too, and say nothing.
        """
        if not self.differences:
            return "equal"
        numbers = [each for each in self.differences if each.figure != "weights"]
        is_rounding = (
            bool(numbers)
            and all(each.relative <= self.limit for each in numbers)
            and self.equal_to - self.after < ROUND_ALIKE
        )
        return "rounding" if is_rounding else "different"

    @property
    def equal_to(self) -> int:
        """The last step up to which all figures are equal to the bit."""
        return min((each.step - 1 for each in self.differences), default=self.step)

    @property
    def passed(self) -> bool:
        return self.verdict != "different"

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "plan": self.plan,
            "after": self.after,
            "step": self.step,
            "verdict": self.verdict,
            "equal_to": self.equal_to,
            "num_compared": self.num_compared,
            "limit": self.limit,
            "differences": [
                {
                    **asdict(each),
                    "relative": each.relative if math.isfinite(each.relative) else None,
                }
                for each in self.differences
            ],
        }

    def describe(self) -> str:
        """Return the replay as text for people: the verdict, and the first figures that differ."""
        begin = f"step {self.after + 1}" if self.after + 1 < self.step else "this step alone"
        where = (
            f"{self.run}, plan {self.plan}, computed again to step {self.step} from {begin}: "
            f"{self.num_compared} figures compared"
        )
        if self.verdict == "equal":
            return f"equal to the bit\n{where}"
        lines = [
            f"step {each.step}: {each.figure} {each.computed}, and the run recorded {each.recorded}"
            for each in self.differences[:SHOWN]
        ]
        if len(self.differences) > SHOWN:
            lines.append(f"and {len(self.differences) - SHOWN} more: --json lists all")
        head = (
            f"equal but for rounding: no number differs by more than {self.limit:.1g} of it"
            if self.passed
            else f"DIFFERENT from step {self.equal_to + 1} on"
            + ("; equal to the bit before" if self.equal_to > self.after else "")
        )
        return "\n".join([head, where, *lines])


def replay(
    run: str | Path,
    step: int,
    plan: str | Plan | None = None,
    *,
    job: Job | None = None,
    devices: str | None = None,
    timeout_s: float = 300.0,
) -> Replay:
    """Compute a step of a run again, with the steps before it back to the run's newest checkpoint,
    and compare each with the figures that the run recorded: the loss, the norm of the gradients if
    the job clips, and the fingerprints of the weights that the journal has.

    On the hardware of the run, under its plan, all figures are equal to the bit, unless kernels of
    its GPUs do not repeat. A difference shows faulty hardware, or code that depends on more than
    the seed. On other hardware they differ by rounding: a number may differ by the square root of
    its precision's epsilon, because a small difference grows from step to step. Figures that are
    equal to the bit in the first two steps and differ later are no matter of rounding.

    Args:
        run: The folder of a trained run. Nothing in it is changed.
        step: The last step to compute, counted from 1.
        plan: A plan, by default the one that the run took this step under. Under another plan no
            fingerprints are compared.
        job: The run's job, if the folder does not say which file it comes from.
        devices: As in `train`.
        timeout_s: Seconds without a sign of life from a rank after which the replay is ended.

    Raises:
        UsageError: the run did not take this step, or its steps can't be repeated.
        RankFailed: a rank failed in the replay.
    """
    run_dir = Path(run)
    folder.read_document(run_dir, folder.PLAN)  # or it is no folder of a run
    recorded = {row["step"]: row for row in read_history(run_dir) if "step_s" in row}
    if step not in recorded:
        raise UsageError(
            f"{run_dir} recorded no step {step}"
            + (f"; its steps are {min(recorded)} to {max(recorded)}" if recorded else "")
        )
    source = None
    if job is None:
        source = JobFile.from_dict(folder.read_document(run_dir, folder.JOB))
        note_edits(run_dir)
        job = source.load()
    launch = _launch_of(run_dir, step)
    again = Plan.read(plan) if plan is not None else Plan.parse(launch.plan)
    _refuse_unrepeatable(again)
    try:
        checkpoint = newest_checkpoint(
            run_dir,
            accept=lambda saved: None if saved.step < step else "it is of a later step",
            warn=lambda text: None,
        )
    except CheckpointError:
        checkpoint = None  # the run begins with no checkpoint
    after = checkpoint.step if checkpoint is not None else 0
    _refuse_rewound(run_dir, after, step)
    request = TrainRequest.of(
        replace(job, steps=step, epochs=None, callbacks=()), source, again, devices=devices
    )
    with temporary_folder("replay") as place:
        again_dir = place / "run"
        if checkpoint is not None:
            saved = folder.checkpoint_of(again_dir, after)
            saved.parent.mkdir(parents=True)
            saved.symlink_to(checkpoint.path.resolve())
        request.train(
            again_dir,
            resume=checkpoint is not None,
            check=False,
            timeout_s=timeout_s,
            restarts=0,
            # The run left out steps that were spikes, by what was before them.
            on_spike="skip" if any("spike" in row for row in recorded.values()) else None,
        )
        computed = {row["step"]: row for row in read_history(again_dir) if "step_s" in row}
        pairs = [*_numbers(recorded, computed, range(after + 1, step + 1))]
        if again == Plan.parse(launch.plan):
            pairs += _fingerprints(run_dir, again_dir)
    return Replay(
        run_dir,
        str(again),
        after,
        step,
        len(pairs),
        math.sqrt(EPSILON[job.precision]),
        tuple(sorted((each for each in pairs if each.relative), key=lambda each: each.step)),
    )


def _launch_of(run_dir: Path, step: int) -> journal.Launch:
    """Return the launch that took a step which the run's weights contain."""
    launches = {
        record.launch: record
        for _, record in journal.read(run_dir / folder.JOURNAL)
        if isinstance(record, journal.Launch)
    }
    for update in journal.applied(run_dir / folder.JOURNAL):
        if update.step == step and update.launch in launches:
            return launches[update.launch]
    raise UsageError(f"the journal of {run_dir} has no step {step}")


def _refuse_unrepeatable(plan: Plan) -> None:
    try:
        conflicts.check(replace(plan, modifiers=replace(plan.modifiers, deterministic="yes")))
    except PlanError as error:
        raise UsageError(
            f"steps under {plan} can't be computed again: {error.args[0].rpartition(': ')[2]}"
        ) from error


def _refuse_rewound(run_dir: Path, after: int, step: int) -> None:
    for row in read_history(run_dir):
        if row.get("rewound_to") is not None and after < row["step"] < step:
            raise UsageError(
                f"the run went back to the weights of step {row['rewound_to']} after step "
                f"{row['step']}, so that step {step} does not follow from its checkpoint before",
                hint=f"--step {row['step']}, or a step before it",
            )


def _numbers(
    recorded: Mapping[int, Mapping[str, Any]],
    computed: Mapping[int, Mapping[str, Any]],
    steps: range,
) -> Iterator[ReplayFinding]:
    """Yield each number that both runs have, with its difference."""
    for step in steps:
        for key, figure in _FIGURES.items():
            if key in recorded.get(step, {}) and key in computed.get(step, {}):
                before, now = recorded[step][key], computed[step][key]
                yield ReplayFinding(step, figure, before, now, _relative(before, now))


def _relative(recorded: float | None, computed: float | None) -> float:
    if recorded == computed:
        return 0.0
    if recorded is None or computed is None or not recorded:
        return math.inf
    return abs(computed - recorded) / abs(recorded)


def _fingerprints(run_dir: Path, again_dir: Path) -> Iterator[ReplayFinding]:
    """Yield the weights of each step of which both journals have a fingerprint."""
    recorded = journal.fingerprints(run_dir / folder.JOURNAL)
    for step, weights in journal.fingerprints(again_dir / folder.JOURNAL).items():
        if step in recorded:
            relative = 0.0 if weights == recorded[step] else math.inf
            yield ReplayFinding(step, "weights", recorded[step], weights, relative)
