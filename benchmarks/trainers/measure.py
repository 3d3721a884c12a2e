"""Runs of every trainer on two ranks, and how far each is from one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from benchmarks.trainers.contenders import CONTENDERS, RUNS, Contender
from benchmarks.trainers.jobs import STOP_AFTER, job_of
from benchmarks.trainers.one_device import train
from benchmarks.trainers.record import Request, load
from benchmarks.turns import ROOT


@dataclass(frozen=True)
class Result:
    """A trainer's run of a job, or why there is none.

    Args:
        setting: "" for the job as documented.
        failure: what was printed, if the run failed; the figures are None then.
        weights: greatest difference of a final weight from one device's.
        buffers: the same of running statistics; None without any.
        loss: greatest difference of a step's loss; None if the numbers of steps differ.
        steps, expected_steps: optimizer steps that were taken, and those of one device.
    """

    trainer: str
    job: str
    setting: str
    failure: str | None = None
    weights: float | None = None
    buffers: float | None = None
    loss: float | None = None
    steps: int | None = None
    expected_steps: int | None = None


class RunFailed(Exception):
    """A run that failed or did not end; the message is its first error."""


def measure(trainers: Sequence[str], jobs: Sequence[str]) -> Iterator[Result]:
    """Every job as documented, then with each setting."""
    for trainer in trainers:
        script = Script(CONTENDERS[trainer])
        try:
            for name, job, setting in RUNS:
                if name == trainer and job in jobs:
                    yield measure_one(trainer, job, setting, script)
        finally:
            script.end()


def measure_one(trainer: str, job: str, setting: str, script: Script) -> Result:
    contender = CONTENDERS[trainer]
    with tempfile.TemporaryDirectory(prefix="paceline-trainers-") as folder:
        try:
            losses, state = run(script, job, setting, Path(folder))
            expected_losses, expected = expectation(contender, script, job, setting, Path(folder))
        except RunFailed as failed:
            return Result(trainer, job, setting, failure=str(failed))
    parameters = {name for name, _ in job_of(job, setting).model().named_parameters()}
    buffers = {
        name
        for name, tensor in expected.items()
        if name not in parameters and tensor.is_floating_point()
    }
    return Result(
        trainer,
        job,
        setting,
        weights=greatest_difference(state, expected, parameters),
        buffers=greatest_difference(state, expected, buffers) if buffers else None,
        loss=max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
        if len(losses) == len(expected_losses)
        else None,
        steps=len(losses),
        expected_steps=len(expected_losses),
    )


def greatest_difference(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: set[str]
) -> float:
    return max(
        (state[name].double() - expected[name].double()).abs().max().item() for name in names
    )


def run(
    script: Script, job: str, setting: str, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the final weights of a job on two ranks; of the job that is resumed, in two launches.

    Raises:
        RunFailed: a launch failed, or did not end in time.
    """
    if job != "resume":
        script.run(job, setting, folder / "whole")
        return load(folder / "whole")
    script.run(job, setting, folder / "parts", part="first")
    before, _ = load(folder / "parts")
    if len(before) != STOP_AFTER:
        raise RunFailed(f"the first launch took {len(before)} steps for {STOP_AFTER}")
    script.run(job, setting, folder / "parts", part="second")
    after, state = load(folder / "parts")
    return before + after, state


def expectation(
    contender: Contender, script: Script, job: str, setting: str, folder: Path
) -> tuple[list[float], dict[str, Tensor]]:
    """One device's losses and weights. Of the job that is resumed: the same trainer's on two ranks, not stopped."""
    if job == "resume":
        script.run(job, setting, folder / "whole")
        return load(folder / "whole")
    request = Request(job, setting, folder, "")
    if contender.module == "with_keras":
        from benchmarks.trainers import with_keras

        keras_model = with_keras.built(request)
        losses = train(
            request.job, with_keras.InTraining(keras_model), contender.order_under(setting)
        )
        return losses, with_keras.weights(keras_model)
    model: nn.Module = request.job.model()
    losses = train(request.job, model, contender.order_under(setting))
    return losses, model.state_dict()


class Script:
    """A process that runs a trainer's script on two ranks as often as it is asked to."""

    def __init__(self, contender: Contender) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.trainers.ranks",
            contender.module,
            str(contender.num_processes),
        ]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def run(self, job: str, setting: str, folder: Path, *, part: str = "") -> None:
        """Leaves losses and weights in the folder.

        Raises:
            RunFailed: with the first error that was printed, or because it did not end in time.
        """
        folder.mkdir(exist_ok=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(
            json.dumps([job, str(folder), f"--setting={setting}", f"--part={part}"]) + "\n"
        )
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        failure = json.loads(answer) if answer else "its script could not be imported"
        if failure:
            raise RunFailed(failure)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
