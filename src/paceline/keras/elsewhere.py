"""A run that a new process of this host controls, and whose epochs are told to a callback of this process."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from paceline.api.train import train
from paceline.base.codec import receive
from paceline.job.callback import Callback, EpochReport, EvaluationReport, RunHandle
from paceline.keras.copies import unpacked
from paceline.keras.wire import send
from paceline.launch.process.subprocess_call import in_a_fresh_process


class HearsEpochs(Protocol):
    """A callback that `train_elsewhere` tells of epochs."""

    def on_epoch(self, run: Any, epoch: EpochReport) -> None:
        """As that of a `Callback`; `run` has `state_dict` and `stop` alone."""


def train_elsewhere(data: bytes, callback: HearsEpochs) -> None:
    """Train a job in a new process, where CUDA is not in use yet.

    Args:
        data: A job with all its tensors on the CPU, a plan and options of `train`, packed.
        callback: Hears of epochs on this thread. What it raises ends the run, and is raised here.
    """
    parent_end, child_end = multiprocessing.Pipe()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            in_a_fresh_process(partial(_train, data), [child_end])
        except BaseException as error:
            errors.append(error)
        finally:
            child_end.close()

    thread = threading.Thread(target=run, name="run", daemon=True)
    thread.start()
    try:
        with parent_end:
            _hear(parent_end, callback)
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _hear(connection: Connection, callback: HearsEpochs) -> None:
    while True:
        try:
            message = receive(connection)
        except EOFError:
            return
        run, loss = _Run(message["weights"]), message["validation_loss"]
        step, epoch = message["step"], message["epoch"]
        callback.on_epoch(
            run,
            EpochReport(
                epoch,
                step,
                message["samples"],
                message["loss"],
                None if loss is None else EvaluationReport(step, epoch, loss),
            ),
        )
        send(connection, {"stop": run.reason})


class _Run:
    """What the callback has of the run. reason: why it stops it."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self.reason: str | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._weights

    def stop(self, reason: str) -> None:
        self.reason = reason


def _train(data: bytes, connections: Sequence[Connection]) -> None:
    """In the new process."""
    job, plan, options = unpacked(data)
    train(replace(job, callbacks=[_Tells(connections[0])]), plan, **options)


class _Tells(Callback):
    """Tells the process that waits for the run of each epoch, and waits until it was heard."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def on_epoch(self, run: RunHandle, epoch: EpochReport) -> None:
        evaluation = epoch.evaluation
        send(
            self.connection,
            {
                "weights": run.state_dict(),
                "epoch": epoch.epoch,
                "step": epoch.step,
                "samples": epoch.samples,
                "loss": epoch.loss,
                "validation_loss": None if evaluation is None else evaluation.validation_loss,
            },
        )
        answer = receive(self.connection)
        if answer["stop"] is not None:
            run.stop(answer["stop"])
