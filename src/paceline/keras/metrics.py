"""Keras metrics of a part of a batch: every rank's metric ends in the state that the whole batch leads to.

Keras's own metrics add up over samples, so each rank updates from zero with its samples and the states are summed.
Any other metric is updated with the samples of all ranks. A scalar counts as a mean over the samples, such as a loss.
"""

from __future__ import annotations

from typing import Any

import torch
from keras.src import backend
from keras.src.metrics import Metric
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from paceline.base.errors import PlanRefused
from paceline.keras.part import Part, computing, in_part
from paceline.keras.patches import Patch, with_subclasses
from paceline.keras.tensors import map_tensors, tensors_of

_HINT = "give the metric values that have the samples along dim 0, or train with plan='single'"


def patches() -> list[Patch]:
    """(owner, name, replacement): `update_state` of every class of metrics but those that only hold others."""
    return [
        (kind, "update_state", in_part(vars(kind)["update_state"], _updated))
        for kind in with_subclasses(Metric)
        if "update_state" in vars(kind) and kind.__module__ != "keras.src.trainers.compile_utils"
    ]


def _updated(part: Part, original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = (list(args), kwargs)
    lengths = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(arguments)}
    if _adds_up(metric) and lengths == {part.rows}:
        return _summed(part, original, metric, *args, **kwargs)
    args, kwargs = _of_whole_batch(part, arguments, metric)
    with computing(None):
        return original(metric, *args, **kwargs)


def _adds_up(metric: Any) -> bool:
    """Whether the metric's variables are sums over samples: Keras's own, unless a function of the user's is inside."""
    kind = next(kind for kind in type(metric).__mro__ if "update_state" in vars(kind))
    function = getattr(metric, "_fn", None) if isinstance(metric, MeanMetricWrapper) else None
    return kind.__module__.startswith("keras.src.metrics.") and (
        function is None or getattr(function, "__module__", "").startswith("keras.src.")
    )


def _summed(part: Part, original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    variables = metric.variables
    before = [variable.value.clone() for variable in variables]
    with torch.no_grad(), computing(None):
        for variable in variables:
            variable.value.zero_()
        original(metric, *args, **kwargs)
        for kind in {variable.value.dtype for variable in metric.variables}:
            same = [variable for variable in metric.variables if variable.value.dtype == kind]
            sums = part.sum(torch.cat([variable.value.reshape(-1) for variable in same]))
            for variable, total in zip(
                same, sums.split([variable.value.numel() for variable in same]), strict=True
            ):
                variable.value.copy_(total.reshape(variable.value.shape))
        for variable, earlier in zip(variables, before, strict=True):
            variable.value.add_(earlier)


def _of_whole_batch(part: Part, arguments: Any, metric: Any) -> Any:
    """What the metric would be given by one process."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            if not tensor.is_floating_point():
                raise PlanRefused(
                    f"the metric {metric.name!r} is given a whole number for a part of the batch, and "
                    "Paceline can't know whether numbers of parts add up",
                    hint=_HINT,
                )
            return part.sum(tensor.detach() * part.weight)
        if tensor.shape[0] % part.rows:
            raise PlanRefused(
                f"the metric {metric.name!r} is given a tensor of shape {tuple(tensor.shape)} for "
                f"{part.rows} samples",
                hint=_HINT,
            )
        gathered = part.gathered(tensor)
        mask = backend.get_keras_mask(tensor)
        if mask is not None:
            backend.set_keras_mask(gathered, part.gathered(mask))
        return gathered

    return _counted(part, map_tensors(whole, arguments))


def _counted(part: Part, value: Any) -> Any:
    """With the number of this rank's samples, a weight of a mean, replaced by that of the batch."""
    if isinstance(value, dict):
        return {key: _counted(part, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_counted(part, item) for item in value)
    return part.total if type(value) is int and value == part.rows else value
