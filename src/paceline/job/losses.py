"""Losses that are totals, and the loss that a model computes itself, as those of Transformers do in
`output.loss`, with the count of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.base.errors import TrainingError

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out by default
AHEAD = (
    1,
    0,
)  # tokens that labels may be ahead of the logits: one in models of the next token, none in taggers
AS_NEAR = 1e-3  # a loss in bf16 is taken for the mean of its tokens, and the mean over other tokens is not


class Total(NamedTuple):
    """A loss or figure that is summed over samples and divided by nothing; see `total`."""

    value: Any


def total(value: Any) -> Total:
    """Return a loss that is a sum over its samples and stays one: gradients are those of the sum over
    the whole batch, however it is cut.

    `pl.total(F.mse_loss(output, target, reduction="sum"))` is for scripts whose learning rate is
    chosen for such a sum. An evaluation gives the total of its data.

    Args:
        value: The sum, a scalar.
    """
    return Total(value)


class OwnLoss:
    """A function (output, batch) -> the model's own loss.

    The loss is `output.loss`, taken as the mean over the samples. If the batch has `labels` of
    tokens and `output.loss` is the mean cross-entropy of those that are not ignored, the function
    returns (sum, count of these labels). Then padding and ignored labels have no weight, however a
    batch is cut.

    Raises:
        TrainingError: the output has no loss.
    """

    def __init__(self) -> None:
        self._ahead: int | None = None  # a value of AHEAD, once a batch has shown which

    def __call__(self, output: Any, batch: Any) -> Any:
        loss = _part(output, "loss")
        if loss is None:
            raise TrainingError(
                f"the job gives no loss, and neither does the model: its output is a "
                f"{type(output).__name__} without .loss",
                hint="give Job a loss= or compute=, or let the model return one; models of Transformers do so "
                "where the batch has 'labels'",
            )
        labels, logits = _part(batch, "labels"), _part(output, "logits")
        if not _are_of_tokens(labels, logits):
            return loss
        if self._ahead is None:
            self._ahead = _ahead(loss, logits, labels)
        if self._ahead is None:
            return loss
        count = (labels[:, self._ahead :] != IGNORED).sum()
        return (loss * count if count else logits.flatten()[:0].sum()), count


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _are_of_tokens(labels: Any, logits: Any) -> bool:
    """Whether there is a whole-number label for each token's logits, (samples, tokens) and
    (samples, tokens, V).
    """
    import torch

    return (
        type(labels) is torch.Tensor
        and isinstance(logits, torch.Tensor)
        and not labels.is_floating_point()
        and labels.dim() == 2
        and logits.dim() == 3
        and logits.shape[:2] == labels.shape
    )


def _ahead(loss: Any, logits: Any, labels: Any) -> int | None:
    """Return the shift of the labels for which the loss is their mean cross-entropy; None if no
    shift fits.
    """
    import torch

    if type(loss) is not torch.Tensor or type(logits) is not torch.Tensor:  # without values
        return None
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        for ahead in AHEAD:
            kept = labels[:, ahead:].flatten()
            if not bool((kept != IGNORED).any()):
                continue
            shifted = logits[:, : logits.shape[1] - ahead].flatten(0, 1)
            mean = torch.nn.functional.cross_entropy(shifted.double(), kept, ignore_index=IGNORED)
            if abs(float(mean) - float(loss)) <= AS_NEAR * abs(float(mean)):
                return ahead
    return None
