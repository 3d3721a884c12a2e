"""Sets values that a model sets once from the samples of its first forward, as an ActNorm does, by
the whole first window.

Each rank runs the model on all samples of the window, twice, as one device would. A value that the
first forward changes and the second one does not change is set once, and stays. All other changes
are undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.base.streams import kept_streams, seed_streams
from paceline.model.attributes import is_same, plain_attributes
from paceline.model.casts import autocast
from paceline.model.forward_state import ForwardState, MappingSnapshots
from paceline.model.randomness import forget_draws
from paceline.strategies.batch_norm.run import apart
from paceline.strategies.compose import end_evaluation
from paceline.training.feed import DataShard, training_feed

if TYPE_CHECKING:
    from paceline.training.rank_state import RankState


def set_once(state: RankState) -> None:
    """Set these values by the samples of the first window. The model must be as before the run's
    first step.

    Collective if the plan's forwards are.
    """
    job, model = state.job, state.layout.module
    with kept_streams(), torch.no_grad():
        [(_, [batch])] = training_feed(job, part=DataShard((1,), 0, 1), steps=range(1))
        batch = batch.to(state.device, job.input_dtype)

        def state_after_forward() -> tuple[dict[str, torch.Tensor], MappingSnapshots]:
            seed_streams(job.seed, "step", 0, 0, 0)
            with autocast(job, state.device), apart():
                state.layout.forward(batch)
            return _tensors(state), ForwardState(model).now().attributes

        before, attributes = _tensors(state), ForwardState(model).now().attributes
        first, attributes_first = state_after_forward()
        state_after_forward()
        for name, tensor in _named(state).items():
            tensor.copy_(first[name] if is_same(tensor.detach(), first[name]) else before[name])
        changing, values = attributes_first.changed(), attributes.values()
        for name, module, key, _ in list(plain_attributes(model)):
            if name in changing and name in values:
                setattr(module, key, values[name])
    end_evaluation(state.synchronisers)
    forget_draws()


def _named(state: RankState) -> dict[str, torch.Tensor]:
    """Return the buffers, and the parameters of which no rank holds a part. Forwards can't write to
    other parameters.
    """
    whole = {
        name: p.detach() for name, p in state.local_parameters.items() if not hasattr(p, "to_local")
    }
    return {**dict(state.layout.module.named_buffers()), **whole}


def _tensors(state: RankState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _named(state).items()}
