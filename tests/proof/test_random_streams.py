"""Random streams under a plan: other draws in another micro-batch, and no alarm for a job that repeats its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from jobs.classification import classification_job, failure_text, passes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.training import window

CUTTING = ("single microbatches=4", "data=2 microbatches=2 recompute=full")


def dropout(probability: float = 0.3) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.Dropout(probability)) for _ in range(4)),
        nn.Linear(6, 3),
    )


class Odd(nn.Module):
    """A net around a function of its activations that draws in an odd way."""

    def __init__(self, draw: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.draw(self, torch.tanh(self.first(x))))


def one_bit(self: Odd, x: Tensor) -> Tensor:
    """A coin for the whole micro-batch: equal ones say nothing."""
    return x + torch.bernoulli(torch.tensor(0.5, dtype=x.dtype))


def same_mask_twice(self: Odd, x: Tensor) -> Tensor:
    """Two layers share a mask, as in variational dropout."""
    with torch.random.fork_rng(devices=[]):
        x = F.dropout(x, 0.4)
    return F.dropout(self.first(x), 0.4)


def alike_in_every_forward(self: Odd, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + torch.randn(6, dtype=x.dtype)


def reentrant(self: Odd, x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(self.first(x), 0.4), x, use_reentrant=True)


def not_always(self: Odd, x: Tensor) -> Tensor:
    """Layers that some micro-batches skip, for what their samples are."""
    return F.dropout(x, 0.4) if float(x.detach().max()) > 0.8 else x


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "draw",
    [
        one_bit,
        same_mask_twice,
        alike_in_every_forward,
        reentrant,
        not_always,
        lambda self, x: F.dropout(x, 0.0),
    ],
)
def test_what_a_job_repeats_itself_is_no_alarm(draw: Callable[[Odd, Tensor], Tensor]) -> None:
    passes(classification_job(lambda: Odd(draw)), *CUTTING)


@pytest.mark.slow
def test_layers_that_draw_alike_are_no_alarm() -> None:
    """Masks of the same shape in four layers, micro-batches of a single sample, and a pipeline's."""
    passes(classification_job(dropout, batch=4), CUTTING[1], "pipeline=2 microbatches=4")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [*CUTTING, "pipeline=2", "shard=2 microbatches=2"])
def test_masks_that_are_alike_in_all_micro_batches(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that don't depend on the micro-batch, which no figure of the run shows."""
    seed_streams = window.seed_streams
    monkeypatch.setattr(
        window,
        "seed_streams",
        lambda seed, purpose, step, part, *place: seed_streams(seed, purpose, step, part),
    )

    assert "must be keyed by the micro-batch" in failure_text(classification_job(dropout), plan)
