"""What a model keeps of the samples of one batch for the next, such as a hidden state that goes on."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from paceline.model.attributes import is_like_a_buffer, is_same, tensor_attributes
from paceline.proof.reference_loop import PlainRun, autocast, part_of_batch
from paceline.training.feed import MicroBatch


def kept_rows(run: PlainRun, batch: MicroBatch) -> str | None:
    """A tensor that forwards leave in an attribute, whose shape depends on the number of samples, and from which the
    next forward goes on: its name and shape. None if there is none; activations that are kept to be looked at are not.

    Call it after a step on the batch, with random layers off. The forwards of jobs without such tensors are not run.
    Buffers that forwards change go on changing; attributes are put back to what they were before the step.
    """
    before = run.attributes
    attributes = {
        name: value.detach().clone()
        for name, value in tensor_attributes(run.model)
        if not is_like_a_buffer(before.values.get(name), value)
        and not is_same(value, before.values.get(name))
    }
    if not attributes or batch.samples < 2:
        return None
    later = _outputs(run, batch)
    before.restore()
    first = _outputs(run, batch)
    if all(map(is_same, later, first)):
        return None
    before.restore()
    _outputs(run, part_of_batch(batch, range(batch.samples // 2)))
    of_half = dict(tensor_attributes(run.model))
    before.restore()
    return next(
        (
            f"'{name}' of shape {tuple(value.shape)}"
            for name, value in attributes.items()
            if name in of_half and of_half[name].shape != value.shape
        ),
        None,
    )


def _outputs(run: PlainRun, batch: MicroBatch) -> list[torch.Tensor]:
    with torch.no_grad(), autocast(run.job):
        return [
            leaf for leaf in tree_leaves(batch.call(run.model)) if isinstance(leaf, torch.Tensor)
        ]
