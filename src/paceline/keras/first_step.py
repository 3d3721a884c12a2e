"""A run's first step on several ranks, held against the same step of one process.

Forks of the calling process compute it: one with Keras alone and the whole batch, and one for each rank. Their
gradients, variables and logs must be the same. If they are not, the plan is refused before this process's model takes a
step: the training step is no sum over samples, in a way that nothing corrected.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.base.codec import send
from paceline.base.errors import PacelineError, PlanRefused, in_words
from paceline.keras.computation import Computation, joined, rows_of
from paceline.keras.draws import ORDERS, several
from paceline.keras.forks import Forks
from paceline.keras.group import Meet
from paceline.keras.part import Part
from paceline.keras.state import set_random_state
from paceline.keras.tensors import tensors_of
from paceline.proof.compare import Furthest, off_by
from paceline.proof.reference_loop import greatest

ROUNDINGS = 10  # tolerated, in square roots of the dtype's relative step: 0.3 % in float32
_KILLED = "it was killed"
_FLOOR = 1e-3  # of the largest value of all: what is smaller is a rounding of nothing

_HINT = (
    "{kind}_step couples the samples of a batch; it must be a sum or a mean over samples: a loss of Keras, or a "
    "mean of values that each depend on one sample. plan='single' trains anything"
)


@dataclass(frozen=True)
class Trial:
    """A step to try.

    cuts: The samples of each rank. random: See `set_random_state`.
    order: Of `draws.ORDERS`. meet: How the ranks meet; None in one process.
    """

    computation: Computation
    kind: str
    batch: Any
    cuts: tuple[range, ...]
    random: Any
    order: str = ""
    meet: Meet | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.cuts))

    def __str__(self) -> str:
        return f"the first {self.kind} step of {type(self.computation.model).__name__} on several ranks"


def settled_order(trial: Trial, fork: Callable[..., Forks], meeting: Callable[[], Meet]) -> str:
    """Of `draws.ORDERS` the one by which ranks compute what one process does. This process's model is left alone.

    Args:
        fork: Makes forks of lives by rank. meeting: Makes how the ranks of a new group meet.

    Raises:
        PlanRefused: none does.
    """
    expected: dict[str, Any] = {}
    hint = _HINT.format(kind=trial.kind)
    with closing(fork({0: partial(_try, trial=trial)})) as alone:
        for order in ORDERS:
            of_ranks = replace(trial, order=order, meet=meeting())
            lives = {
                rank: partial(_try, trial=of_ranks, rank=rank) for rank in range(len(trial.cuts))
            }
            with closing(fork(lives)) as ranks:  # one that ended would be missed by others
                answers = [_answer(ranks, rank) for rank in lives]
            expected = expected or _answer(alone, 0)
            if (
                "failure" in expected
            ):  # of the step itself: it comes again in this process, where it can be seen
                if expected["failure"] == _KILLED:
                    print(
                        f"{trial} was not compared with one process, which was killed: memory may have run out",
                        file=sys.stderr,
                    )
                return order
            failures = [answer["failure"] for answer in answers if "failure" in answer]
            if failures:
                raise PlanRefused(
                    f"{trial} fails, and that of one process does not: {min(failures, key=_is_of_a_peer)}",
                    hint=hint,
                )
            first = answers[0]
            if trial.kind == "predict":
                outputs = [list(answer["value"].values()) for answer in answers]
                first["value"] = _numbered(joined(outputs, trial.counts))
            difference = _difference(first, expected)
            if difference is None:
                return order
            if not first["several"]:
                break
    raise PlanRefused(f"{trial} is not what one process computes: the {difference}", hint=hint)


def _is_of_a_peer(failure: str) -> bool:
    """Whether a rank only noticed that another one failed."""
    return "gloo" in failure.lower()


def _try(connection: Connection, sign: Any, trial: Trial, rank: int | None = None) -> None:
    """In a fork: take the step, and tell what it computed.

    rank: None computes the whole batch with Keras alone.
    """
    part, batch = None, trial.batch
    if rank is not None:
        assert trial.meet is not None
        part = Part(trial.meet(rank), trial.counts, trial.order)
        batch = rows_of(batch, trial.cuts[rank])
    torch.set_num_threads(1)
    set_random_state(trial.random)
    computation, model = trial.computation, trial.computation.model
    gradients: list[torch.Tensor | None] = []
    computation.gradients.recorder = gradients.extend
    try:
        with computation.in_place():  # Keras alone notes the gradients, too
            answer = computation.step(trial.kind, batch, part)
    except Exception as error:
        is_ours = isinstance(error, PacelineError)
        send(connection, {"failure": str(error.args[0]) if is_ours else in_words(error)})
        return
    # Of what trains, the gradients tell all. An update may turn the rounding of a gradient that is zero into a step.
    model_variables = model.non_trainable_variables if gradients else model.variables
    names = [variable.path for variable in model.trainable_variables]
    later = map(str, range(len(names), len(gradients)))  # a step may take them several times
    send(
        connection,
        {
            "gradient": _by_name(zip([*names, *later], gradients, strict=False)),
            "variable": _by_name((variable.path, variable._value) for variable in model_variables),
            "value": _numbered(answer),
            "several": bool(several),
        },
    )


def _by_name(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named = dict[str, Any]()
    for number, (path, tensor) in enumerate(tensors):
        name = path.replace("/", ".")
        named[f"{name} {number}" if name in named else name] = tensor
    return named


def _numbered(answer: Any) -> dict[str, Any]:
    """Return the tensors of logs or outputs by their numbers."""
    return {f"result {number}": tensor for number, tensor in enumerate(tensors_of(answer))}


def _answer(forks: Forks, rank: int) -> Any:
    """Return what a fork tells, or that it was killed."""
    try:
        return forks.receive(rank)
    except (EOFError, OSError):
        forks.failure()  # which raises an error of sending it
        return {"failure": _KILLED}


def _difference(actual: Any, expected: Any) -> str | None:
    """Return what differs from one process, in words; None if nothing does."""
    for kind in ("gradient", "variable", "value"):
        tensors: dict[str, Any] = expected[kind]
        sizes = {  # each is the largest absolute value that is finite
            name: greatest([tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)])
            for name, tensor in tensors.items()
            if tensor is not None
        }
        floor = _FLOOR * max(sizes.values(), default=0.0)
        limits = {name: _relative(tensors[name]) * max(size, floor) for name, size in sizes.items()}
        offs = {
            name: _off_by(actual[kind].get(name), tensors.get(name))
            for name in {**tensors, **actual[kind]}
        }
        furthest = Furthest.of(limits, [offs], 0)
        if furthest.excess > 1.0:
            return furthest.describe(kind, num_ranks=1)
    return None


def _relative(expected: torch.Tensor) -> float:
    """Return the difference that rounding may make, in sizes of the tensor."""
    if not expected.is_floating_point():
        return 0.0
    # Keras multiplies matrices in float32 even where its variables are float64.
    eps = max(torch.finfo(dtype).eps for dtype in (expected.dtype, torch.float32))
    return ROUNDINGS * float(eps**0.5)


def _off_by(value: Any, expected: Any) -> float:
    """Return the greatest difference of two tensors, in which NaN and infinities equal themselves."""
    if value is None or expected is None or value.shape != expected.shape:
        return 0.0 if value is expected else math.inf
    value, expected = (tensor.detach().cpu().double() for tensor in (value, expected))
    other = (value != expected) & ~(value.isnan() & expected.isnan())
    return off_by(value[other], expected[other])
