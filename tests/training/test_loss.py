"""A loss is a mean over samples or (sum, count); anything else is refused with the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.base.errors import TrainingError
from paceline.training.loss import read_tally, with_gradient


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([[3.0]])])
def test_a_scalar_is_the_mean_over_the_samples(value: torch.Tensor):
    """A tensor of one element counts as often as there are samples."""
    tally = read_tally(value, samples=4)
    assert (float(tally.total), tally.count, tally.is_mean) == (12.0, 4.0, True)
    assert tally.value.shape == ()


@pytest.mark.parametrize(
    "value",
    [
        (torch.tensor(6.0), torch.tensor(3)),
        [torch.tensor([6.0]), 3],
        (6.0, 3.0),
        (torch.tensor(6.0), torch.tensor(3.0)),
    ],
)
def test_a_sum_and_its_count(value: Any):
    """A pair, as tensors or numbers, is taken as it is: the number of samples plays no part."""
    tally = read_tally(value, samples=100)
    assert (float(tally.total), float(tally.count), tally.is_mean) == (6.0, 3.0, False)


def test_the_total_is_exact_in_float64():
    """Sums of many samples are not kept in the loss's own precision, and carry no gradient."""
    value = torch.tensor(1 / 3, dtype=torch.bfloat16, requires_grad=True)
    total = read_tally(value, samples=3_000_001).total
    assert total.dtype == torch.float64
    assert not total.requires_grad
    assert float(total) == value.item() * 3_000_001


def test_the_count_carries_no_gradient():
    """A weight that is computed from parameters normalises and is not trained on."""
    weight = torch.tensor(2.0, requires_grad=True)
    count = read_tally((torch.tensor(1.0), weight), samples=1).count
    assert isinstance(count, torch.Tensor)
    assert not count.requires_grad


def test_a_metric_may_be_a_plain_number():
    """Metrics are often computed with .item(); a loss must stay a tensor."""
    for value in (0.5, np.float32(0.5), torch.tensor(0.5)):
        assert float(read_tally(value, samples=4, name="metric 'accuracy'").total) == 2.0
    assert (
        float(read_tally((np.float32(3), np.int64(4)), samples=4, name="metric 'accuracy'").total)
        == 3.0
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4), r"the loss is not a scalar: it has shape \(4,\)(?s:.*)reduction='mean'"),
        (torch.zeros(0), r"not a scalar: it has shape \(0,\)"),
        (0.5, r"the loss returned float(?s:.*)scalar tensor"),
        (None, "the loss returned NoneType"),
        ("x", "the loss returned str"),
        ((torch.tensor(1.0), 1, 2), r"the loss returned tuple(?s:.*)\(sum, count\)"),
        ({"loss": torch.tensor(1.0)}, "the loss returned dict"),
        ((torch.zeros(4), 4), r"the loss returned a sum of shape \(4,\)"),
        ((torch.tensor(1.0), torch.ones(4)), r"the loss returned a count of shape \(4,\)"),
        ((torch.tensor(1.0), None), "the loss returned a count that is NoneType"),
        (("x", 1), "the loss returned a sum that is str"),
    ],
)
def test_what_is_no_loss_is_refused(value: Any, words: str):
    """The message says what the function returned and what it may return."""
    with pytest.raises(TrainingError, match=words):
        read_tally(value, samples=4)


def test_a_metric_is_named():
    """The message names the metric and not the loss."""
    with pytest.raises(TrainingError, match="metric 'f1' is not a scalar"):
        read_tally(torch.zeros(3), samples=3, name="metric 'f1'")
    with pytest.raises(TrainingError, match="metric 'f1' returned bool"):
        read_tally(True, samples=3, name="metric 'f1'")


def test_a_loss_without_gradient_is_refused():
    """A loss that backward can't start from doesn't depend on the model."""
    tally = read_tally(torch.tensor(1.0, requires_grad=True), samples=1)
    assert with_gradient(tally, None, backward_goes_on=False) is tally
    for value in (torch.tensor(1.0), (torch.tensor(0.0), 3)):
        with pytest.raises(
            TrainingError, match=r"does not depend on the model(?s:.*)hint: .*\.detach\(\)"
        ):
            with_gradient(read_tally(value, samples=1), None, backward_goes_on=True)


def test_a_loss_that_counts_nothing_needs_no_gradient():
    """Where others wait in backward it depends on the output by zero, whatever the output is."""
    tally = read_tally((torch.zeros(()), 0), samples=1)
    assert with_gradient(tally, None, backward_goes_on=False) is tally
    output = torch.tensor([torch.inf, 1.0], requires_grad=True)
    value = with_gradient(tally, {"logits": [output], "n": 3}, backward_goes_on=True).value
    value.backward()
    assert value.item() == 0
    assert output.grad.tolist() == [0.0, 0.0]
