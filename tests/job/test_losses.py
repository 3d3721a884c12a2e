"""The loss that a model brings itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from paceline.base.errors import TrainingError
from paceline.job.losses import OwnLoss

LABELS = torch.tensor([[1, 2, 3, -100], [2, -100, -100, -100], [0, 1, 2, 3]])


def output(*, ahead: int, labels: torch.Tensor = LABELS, seed: int = 0) -> SimpleNamespace:
    logits = torch.randn(
        *labels.shape, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )
    given = logits[:, : labels.shape[1] - ahead].flatten(0, 1)
    return SimpleNamespace(logits=logits, loss=F.cross_entropy(given, labels[:, ahead:].flatten()))


@pytest.mark.parametrize(("ahead", "count"), [(1, 5), (0, 8)])
def test_a_mean_over_tokens_is_given_with_its_count(ahead: int, count: int):
    """Whether labels are shifted is seen from the first loss."""
    made = output(ahead=ahead)
    total, counted = OwnLoss()(made, {"labels": LABELS})
    assert counted == count
    torch.testing.assert_close(total, made.loss * count)


def test_nothing_but_ignored_labels_counts_nothing():
    """Such a mean is not a number, and its gradient would spoil the others'."""
    loss, nothing = OwnLoss(), torch.full((1, 4), -100)
    loss(output(ahead=1), {"labels": LABELS})
    made = output(ahead=1, labels=nothing)
    total, count = loss(made, {"labels": nothing})
    total.backward()
    assert (total.item(), int(count)) == (0.0, 0)
    assert not made.logits.grad.any()


def test_another_loss_is_a_mean_over_samples():
    """With label smoothing, say, or without labels of tokens."""
    made = output(ahead=1)
    made.loss = 2 * made.loss
    assert OwnLoss()(made, {"labels": LABELS}) is made.loss
    assert (
        OwnLoss()({"loss": made.loss, "logits": made.logits[:, 0]}, {"labels": LABELS[:, 0]})
        is made.loss
    )


def test_a_model_without_a_loss_is_refused():
    """The message says how a loss is given."""
    with pytest.raises(
        TrainingError, match=r"the job gives no loss, and neither does the model(?s:.*)loss="
    ):
        OwnLoss()(torch.zeros(3), {"labels": LABELS})
