"""From samples to a batch: pairs, inputs alone, and what a job collates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.base.errors import TrainingError
from paceline.base.nested import map_batch
from paceline.job.batches import collated, describe
from paceline.training.feed import MicroBatch


@dataclass
class Record:
    x: torch.Tensor
    name: str = "a"


def test_pairs_are_stacked():
    """An item of two is (input, target), also as a list."""
    inputs, targets = collated([(torch.zeros(2), 1), [torch.ones(2), 0]])
    assert inputs.tolist() == [[0, 0], [1, 1]]
    assert targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    "item", [torch.zeros(2), (torch.zeros(2),), {"x": torch.zeros(2)}, Record(torch.zeros(2))]
)
def test_an_input_alone_is_its_own_target(item: Any):
    """Tensors, mappings and dataclasses are inputs; what holds one of them is that one."""
    inputs, targets = collated([item, item, item])
    assert inputs is targets
    assert (inputs["x"] if isinstance(inputs, dict) else inputs).shape == (3, 2)


def test_a_collate_makes_the_batch():
    """It is given the samples in a list, and its pair or input is taken as it is."""
    assert collated([3, 5], lambda items: (sum(items), max(items))) == (8, 5)
    inputs, targets = collated([3, 5], lambda items: {"all": items})
    assert inputs is targets and inputs == {"all": [3, 5]}
    assert collated([3], lambda items: Record(torch.ones(1)))[0]["name"] == "a"


@pytest.mark.parametrize(
    ("batch", "kind"), [(None, "NoneType"), ((1, 2, 3), "tuple of 3"), ([], "list of 0")]
)
def test_a_collate_that_returns_no_batch_is_refused(batch: Any, kind: str):
    """The message says what came."""
    with pytest.raises(
        TrainingError, match=rf"collate returned a {kind} and not \(input, target\)"
    ):
        collated([1, 2], lambda items: batch)


def test_a_collate_that_fails_is_named_with_its_samples():
    """Three samples at most, by what the caller calls them."""
    with pytest.raises(
        TrainingError, match="collate failed on the samples 7, 1, 4 and 1 more: KeyError: 'x'"
    ):
        collated([{}, {}, {}, {}], lambda items: items[0]["x"], names=[7, 1, 4, 2])


def test_samples_that_do_not_stack_are_told_of_collate():
    """Samples of other lengths are what collate= is for."""
    with pytest.raises(
        TrainingError, match=r"sample 1 is \{t: 3\} and others are \{t: 2\}(?s:.*)collate="
    ):
        collated([{"t": torch.zeros(2)}, {"t": torch.zeros(3)}])


def test_a_target_that_is_the_input_stays_that():
    """It is moved and cast once."""
    inputs, targets = map_batch(lambda leaf: leaf + 1, collated([{"x": torch.zeros(1)}]))
    assert inputs is targets


def test_describe():
    """Shapes and types of a sample, in a line."""
    sample = ({"a": torch.zeros(2, 3), "b": 1.5}, [torch.tensor(1), "x"])
    assert describe(sample) == "({a: 2x3, b: float}, (scalar, str))"


@dataclass
class Graphs:
    """A batch of graphs, as an argument of its own."""

    nodes: Any
    edges: Any


class Applying:
    """As torch_geometric's batches are."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Applying:
        return self.apply(lambda tensor: tensor.to(device))

    def apply(self, function: Any) -> Applying:
        self.x = function(self.x)
        return self


def test_a_dataclass_inside_of_an_input_stays_one():
    graphs = Graphs(torch.zeros(5, 2), torch.zeros(2, 7, dtype=torch.long))

    (argument,), target = collated([0, 1], lambda samples: ((graphs,), torch.ones(2)))
    moved = MicroBatch((argument,), target, 2).to(torch.device("cpu"), torch.float64)

    assert argument is graphs
    assert moved.input[0].nodes.dtype is torch.float64 and moved.input[0].edges.dtype is torch.long
    assert graphs.nodes.dtype is torch.float32
    assert set(collated([0], lambda samples: (graphs, torch.ones(1)))[0]) == {"nodes", "edges"}


def test_packed_sequences_and_batches_of_graphs_are_moved():
    """Lengths of packed sequences stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence(
        [torch.zeros(2, 3), torch.zeros(4, 3)], enforce_sorted=False
    )
    graphs = Applying(torch.zeros(2))

    moved = MicroBatch((packed, graphs), None, 2).to(torch.device("meta"), torch.float64)

    assert moved.input[0].data.is_meta and moved.input[0].data.dtype is torch.float64
    assert moved.input[0].batch_sizes.device.type == "cpu" and moved.input[0].sorted_indices.is_meta
    assert moved.input[1].x.is_meta and not graphs.x.is_meta


def test_a_sequence_as_an_argument_is_told_of_a_tuple():
    """`tuple(zip(*batch))`, as detection's own scripts collate."""
    with pytest.raises(TypeError) as caught:
        MicroBatch((1, 2, 3), None, 3).call(lambda images: images)

    assert "passed as 3 arguments" in caught.value.__notes__[0]
