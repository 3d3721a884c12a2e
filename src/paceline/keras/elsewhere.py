"""A run that a new process of this host controls, and whose epochs are told to this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from paceline.api.train import train
from paceline.base.codec import receive, send
from paceline.job.callback import Callback, EpochReport, RunHandle
from paceline.keras.copies import unpacked
from paceline.launch.process.apart import Apart

Hear = Callable[[EpochReport, Any], str | None]


class TellsEpochs(Callback):
    """Tells of each epoch and of the weights of the moment. hear: Returns why the run must stop, or None."""

    def __init__(self, hear: Hear) -> None:
        self.hear = hear

    def on_epoch(self, run: RunHandle, epoch: EpochReport) -> None:
        if (reason := self.hear(epoch, run.state_dict())) is not None:
            run.stop(reason)


def train_elsewhere(data: bytes, hear: Hear) -> None:
    """Train a job in a new process, where CUDA is not in use yet.

    Args:
        data: A job with all its tensors on the CPU, a plan and options of `train`, packed.
        hear: See `TellsEpochs`; called on this thread. What it raises ends the run, and is raised here.
    """
    apart = Apart(partial(_begin, data), 1, is_sent=True)
    (connection,) = apart.connections
    with closing(apart):
        try:
            while True:
                send(connection, hear(*apart.receive(connection)))
        except EOFError:
            apart.answer()


def _begin(data: bytes, connections: Sequence[Connection]) -> Callable[[], Any]:
    (connection,) = connections
    job, plan, options = unpacked(data)

    def hear(*told: Any) -> str | None:
        send(connection, told)
        reason: str | None = receive(connection)
        return reason

    def run() -> None:
        train(replace(job, callbacks=[TellsEpochs(hear)]), plan, **options)

    return run
