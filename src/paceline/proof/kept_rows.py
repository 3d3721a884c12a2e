"""Find tensors that a model keeps from one batch to the next with a part for each sample, such as a
hidden state.
"""

from __future__ import annotations

import torch

from paceline.model.attributes import is_like_a_buffer, is_same, tensor_attributes
from paceline.proof.device import autocast
from paceline.proof.reference_loop import PlainRun, part_of_batch
from paceline.torch_private.pytree import tensor_leaves
from paceline.training.feed import MicroBatch


def kept_rows(run: PlainRun, batch: MicroBatch) -> str | None:
    """Find a tensor of samples that forwards leave in an attribute and that the next forward uses.

    Its shape depends on the number of samples. Activations that are only kept to be looked at do
    not count.

    Call this after a step on the batch, with random layers off. Jobs without such tensors run no
    further forwards. Buffers that forwards change go on changing; attributes are set back to their
    values before the step.

    Returns:
        The tensor's name and shape; None if there is none.
    """
    before, values = run.attributes, run.attributes.values()
    shapes = {
        name: value.shape
        for name, value in tensor_attributes(run.model)
        if not is_like_a_buffer(values.get(name), value) and not is_same(value, values.get(name))
    }
    if not shapes or batch.samples < 2:
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
            f"'{name}' of shape {tuple(shape)}"
            for name, shape in shapes.items()
            if name in of_half and of_half[name].shape != shape
        ),
        None,
    )


def _outputs(run: PlainRun, batch: MicroBatch) -> list[torch.Tensor]:
    with torch.no_grad(), autocast(run.job):
        return tensor_leaves(batch.call(run.model))
