"""One rank's side of a step: Keras's own training, test or prediction step on a part of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.base.errors import UsageError
from paceline.keras import losses, metrics, moments
from paceline.keras.draws import WholeBatchDraws
from paceline.keras.gradients import Gradients
from paceline.keras.part import Part, computing
from paceline.keras.patches import Patch, patched
from paceline.keras.tensors import map_tensors, tensors_of

KINDS = ("train", "test", "predict")


class Computation:
    """A model's steps in this process. Parts are right only inside of `in_place`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients = Gradients(model.parameters)
        self._originals: list[Patch] = []

    def __reduce__(self) -> Any:
        return Computation, (self.model,)  # which is not in place

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """With all that makes a step on a part of a batch compute its share of the whole one's. Forks inherit it."""
        if self._originals:
            yield
            return
        with patched(
            [*self.gradients.patches(), *losses.patches(), *metrics.patches(), *moments.patches()],
        ) as self._originals:
            yield
        self._originals = []

    @contextmanager
    def out_of_place(self) -> Iterator[None]:
        """Inside of `in_place`: as if outside."""
        with patched(self._originals):
            yield

    def step(self, kind: str, batch: Any, part: Part | None) -> Any:
        """Logs, equal on every rank, or the outputs of this rank's samples.

        Args:
            kind: Of KINDS.
            part: None computes the whole batch here.
        """
        step = getattr(self.model, f"{kind}_step")
        if part is None:
            with torch.set_grad_enabled(kind == "train"):
                return step(batch)
        with torch.set_grad_enabled(kind == "train"), computing(part), WholeBatchDraws():
            answer = step(batch)
        return answer if kind == "predict" else _of_all_ranks(part, answer)


def _of_all_ranks(part: Part, logs: Any) -> Any:
    """Logs that differ between ranks are means over their samples."""
    floats = [tensor for tensor in tensors_of(logs) if tensor.is_floating_point()]
    if not floats:
        return logs
    own_values = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in floats])
    all_ranks = part.group.gather(own_values.reshape(1, -1), [1] * part.group.size)
    if bool(((all_ranks == all_ranks[0]) | all_ranks.isnan()).all()):
        return logs
    means = iter(part.sum(own_values * part.weight).split([tensor.numel() for tensor in floats]))
    return map_tensors(
        lambda tensor: (
            next(means).reshape(tensor.shape).to(tensor) if tensor.is_floating_point() else tensor
        ),
        logs,
    )


def rows_of(batch: Any, cut: range) -> Any:
    """The samples of a rank, or the batch's first one for a rank that has none."""
    rows = slice(cut.start, cut.stop) if cut else slice(0, 1)
    return map_tensors(lambda tensor: tensor[rows], batch)


def joined(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """The ranks' outputs, one after the other along dim 0.

    Raises:
        UsageError: an output does not have the samples along dim 0.
    """
    parts = [tensors_of(its) for its in outputs]
    for part, count in zip(parts, counts, strict=True):
        if any(not tensor.dim() or tensor.shape[0] != max(1, count) for tensor in part):
            raise UsageError(
                "predict_step returns something without the samples along dim 0",
                hint="plan='single'",
            )
    whole = iter(
        [
            torch.cat([tensor[:count] for tensor, count in zip(same, counts, strict=True)])
            for same in zip(*parts, strict=True)
        ]
    )
    return map_tensors(lambda _: next(whole), outputs[0])
