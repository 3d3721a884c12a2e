"""Replicas that differ are found, and tensor and rank are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.base.errors import DriftError, JobError
from paceline.checkpoint import open_checkpoint
from paceline.job import Job
from paceline.strategies.compose import load
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.loop import train_rank
from paceline.training.parts.drift import check_replicas, fingerprint
from paceline.training.settings import Settings

TENSORS = [
    torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    torch.arange(6),
    torch.tensor(1.5),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(5, dtype=torch.bool),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=str)
def test_every_bit_counts(tensor: torch.Tensor):
    """Changing any one bit of a tensor changes its fingerprint."""
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    bytes_ = tensor.clone().reshape(-1).view(torch.uint8)
    for place in range(len(bytes_)):
        for bit in range(8):
            changed = bytes_.clone()
            changed[place] ^= 1 << bit
            assert fingerprint(changed.view(tensor.dtype).reshape(tensor.shape)) != before


def test_the_order_of_elements_counts():
    """Two elements that changed places are a difference, though their sum is not."""
    assert fingerprint(torch.tensor([1.0, 2.0, 3.0])) != fingerprint(torch.tensor([2.0, 1.0, 3.0]))


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(8.0).view(2, 4).t(),
        torch.arange(9, dtype=torch.bfloat16)[1:],
        torch.arange(9, dtype=torch.int8)[3:],
        torch.zeros(0),
        torch.arange(8.0).requires_grad_(),
    ],
    ids=["transposed", "odd bfloat16", "odd int8", "empty", "parameter"],
)
def test_any_layout_of_memory_will_do(view: torch.Tensor):
    """A view has the fingerprint of its copy."""
    assert fingerprint(view) == fingerprint(view.detach().clone())


def differing(
    run_ranks: Callable[..., Any], sizes: dict[str, int], change: dict[int, int], step: int = 4
) -> list[str]:
    """What each rank says when element `change[rank]` of tensor "b" is another on these ranks."""

    def body(context: Any) -> str:
        tensors = {"a": torch.ones(5), "b": torch.ones(4), "c": torch.ones(3)}
        if context.rank in change:
            tensors["b"][change[context.rank]] += 1e-7
            tensors["c"][0] += 1
        mesh = Mesh(sizes, context.rank)
        mesh.connect()
        try:
            check_replicas(tensors, mesh=mesh, step=step)
        except DriftError as error:
            return str(error)
        return ""

    count = sizes["data"] * sizes["shard"]
    return run_ranks(body, count)


def test_equal_replicas_pass(run_ranks: Any):
    """Nothing is said when nothing differs."""
    assert differing(run_ranks, {"data": 2, "shard": 1}, {}) == ["", ""]


def test_a_model_with_other_tensors_on_a_rank(run_ranks: Any):
    """No rank compares what others do not have: each says which tensor it is."""

    def body(context: Any) -> None:
        mesh = Mesh({"data": 3, "shard": 1}, context.rank)
        mesh.connect()
        tensors = {"a": torch.ones(5), **({"b": torch.ones(4)} if context.rank else {})}
        with pytest.raises(JobError, match="has no 'b' on rank 0, and others"):
            check_replicas(tensors, mesh=mesh, step=0)

    run_ranks(body, 3)


@pytest.mark.parametrize("odd", [0, 2])
def test_the_rank_that_differs_is_named(run_ranks: Any, odd: int):
    """Every rank names the first tensor that differs, and the rank that is in the minority, also when it is 0."""
    messages = differing(run_ranks, {"data": 3, "shard": 1}, {odd: 2})
    assert len(set(messages)) == 1
    assert (
        f"replicas differ after step 4: 'b' on rank {odd} is not what the others hold"
        in messages[0]
    )
    assert "2 of 3 tensors differ" in messages[0]


def test_initial_weights_are_spoken_of_as_such(run_ranks: Any):
    """Before the first step the cause is another than after it."""
    assert (
        "replicas differ before the first step: 'b' differs between rank 0 and rank 1, and nothing shows"
        in differing(run_ranks, {"data": 2, "shard": 1}, {1: 0}, step=0)[0]
    )


@pytest.mark.slow
def test_shards_are_compared_with_the_same_shards(run_ranks: Any):
    """Ranks that hold other shards may hold other values; only ranks along the data axis are replicas."""
    assert differing(run_ranks, {"data": 2, "shard": 2}, {1: 0, 3: 0}) == ["", "", "", ""]
    messages = differing(run_ranks, {"data": 2, "shard": 2}, {3: 0})
    assert ["between rank 1 and rank 3" in text for text in messages] == [False, True, False, True]


def test_no_replicas_nothing_to_compare(run_ranks: Any):
    """Without a data axis no collective is entered."""
    assert differing(run_ranks, {"data": 1, "shard": 2}, {1: 0}) == ["", ""]


def reported(
    run_ranks: Callable[..., Any],
    disturb: Callable[[Any, int, int], None],
    *,
    steps: int = 3,
    settings: Settings | None = None,
) -> str:
    """What a run of two replicas ends with in which `disturb(stepper, step, rank)` is called after each update."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=lambda: torch.nn.Linear(4, 4),
        data=TensorDataset(x, x),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.1),
        batch=8,
        steps=steps,
    )

    class Disturbing:
        def initial(self, stepper: Any) -> None: ...

        def samples(self, step: int, batches: Any) -> None: ...

        def gradients(self, step: int, stepper: Any) -> None: ...

        def weights(self, step: int, stepper: Any, loss: float) -> None:
            with torch.no_grad():
                disturb(stepper, step, stepper.mesh.rank)

    def body(context: Any) -> str:
        try:
            train_rank(
                context,
                job,
                Plan.parse("data=2"),
                replace(settings or Settings(None, (1, 1)), observer=Disturbing()),
            )
        except DriftError as error:
            return str(error)
        return ""

    load(Plan.parse("data=2"))
    first, second = run_ranks(body, 2)
    assert first == second
    return first


def test_no_checkpoint_holds_what_replicas_do_not_agree_on(run_ranks: Any, tmp_path: Path):
    """A bit of the optimizer's state that flips before a save is found by it, though no weight has changed yet, and
    before the next update."""

    def disturb(stepper: Any, step: int, rank: int) -> None:
        (tmp_path / f"updated-{step}").touch()
        if rank == 0 and step == 3:
            stepper.optimizer.state[stepper.model.weight]["exp_avg"].view(torch.int32)[1, 2] ^= 1

    message = reported(
        run_ranks, disturb, steps=6, settings=Settings(tmp_path, (1, 1), save_every=2)
    )
    assert (
        "replicas differ after step 4: 'optimizer/weight/exp_avg' differs between rank 0 and rank 1"
        in message
    )
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]
    assert open_checkpoint(tmp_path / "checkpoints" / "step-2").document["compared"] == 2
    assert len(list(tmp_path.glob("updated-*"))) == 4


def test_a_write_between_steps_is_found(run_ranks: Any):
    """The hint says what may have made it."""

    def disturb(stepper: Any, step: int, rank: int) -> None:
        if rank == 1 and step == 1:
            stepper.model.weight.add_(1)

    message = reported(run_ranks, disturb)
    assert "after step 3: 'weight' differs between rank 0 and rank 1" in message
    assert "a data set or a thread that writes to weights" in message


def test_the_first_step_is_compared(run_ranks: Any):
    """What goes wrong in every step is found after one, and not after a hundred."""
    message = reported(run_ranks, lambda stepper, step, rank: stepper.model.bias.data.add_(rank))
    assert "after step 1: 'bias'" in message
    assert "replicas were equal when the run began" in message
