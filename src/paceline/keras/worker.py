"""A rank beside the calling process: a fork that computes its part of each batch as it is told."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.base.codec import receive, send
from paceline.base.waiting import waiting
from paceline.keras.computation import Computation
from paceline.keras.group import Meet, RankGroup
from paceline.keras.part import Part
from paceline.keras.state import fingerprints, set_random_state, variables
from paceline.keras.tensors import map_tensors
from paceline.launch.process.failure import Failure, failure_of
from paceline.launch.process.heartbeats import Heartbeat
from paceline.launch.process.rank_process import use_threads


def be_worker(
    connection: Connection,
    sign: Callable[[int, str], None],
    computation: Computation,
    *,
    rank: int,
    meet: Meet,
) -> Failure:
    """The life of a fork that is a rank. It answers predictions, and returns why it could not go on.

    sign: See `forks.Life`.
    """
    steps, kind = 0, "start"
    try:
        group = meet(rank)
        use_threads(group.size)
        with computation.in_place():
            while True:
                with waiting:
                    message = receive(connection)
                    kind, steps = message["kind"], steps + 1
                    sign(steps, kind)
                _compute(computation, group, message, connection)
    except BaseException as error:
        return failure_of(error, rank=rank, sign=Heartbeat(steps, kind, 0.0))


def _compute(
    computation: Computation, group: RankGroup, message: dict[str, Any], connection: Connection
) -> None:
    model, kind = computation.model, message["kind"]
    model_variables = variables(model)
    if kind == "compare":
        group.gather(fingerprints(model_variables), [1] * group.size)
        return
    with torch.no_grad():
        for index, value in message["changed"].items():
            model_variables[index]._value.copy_(value)
    set_random_state(message["random"])
    model.train(kind == "train")
    answer = computation.step(
        kind, message["batch"], Part(group, tuple(message["counts"]), message["order"])
    )
    if kind == "predict":
        send(connection, map_tensors(torch.Tensor.detach, answer))
