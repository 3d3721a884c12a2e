"""What ranks exchange in a split layer, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.base.errors import PlanRefused
from paceline.strategies.mesh import Mesh
from paceline.strategies.tensor.cut import Cut
from paceline.strategies.tensor.dry_run import Counted, PaperMesh
from paceline.strategies.tensor.exchange import Exchanges, Placement, Sum
from paceline.strategies.tensor.program import ProgramRecorder

PLACEMENTS: tuple[Placement, ...] = (None, Cut(0), Cut(1), Cut(2), Cut(1, 2), Sum(), Sum(mean=True))


def shard_of(whole: Tensor, placement: Placement, exchanges: Exchanges) -> Tensor:
    """What a rank has of a tensor; of sums each has an unequal share."""
    if isinstance(placement, Cut):
        return exchanges.local_slice(placement)(whole)
    if isinstance(placement, Sum):
        return whole * (0.25 + 0.5 * exchanges.rank) * (exchanges.size if placement.mean else 1)
    return whole


@pytest.mark.slow
def test_every_move_keeps_the_value_and_its_gradient(run_ranks: Callable[..., Any]) -> None:
    """A part's gradient is a part; that of a whole value or of a sum is whole, and that of a mean divided."""

    def body(context: Any) -> list[str]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        exchanges = Exchanges(mesh.devices("cpu")["tensor"])
        whole = torch.sin(torch.arange(64, dtype=torch.float64)).view(4, 8, 2)
        weight = torch.cos(torch.arange(64, dtype=torch.float64)).view(4, 8, 2)
        wrong = []
        for before in PLACEMENTS:
            for after in PLACEMENTS:
                try:
                    move = exchanges.between(before, after)
                except PlanRefused:
                    continue
                given = shard_of(whole, before, exchanges).clone().requires_grad_()
                moved = move(given)
                gradient = shard_of(weight, after, exchanges) if isinstance(after, Cut) else weight
                (moved * gradient).sum().backward()
                expected = (
                    shard_of(weight, before, exchanges) if isinstance(before, Cut) else weight
                )
                if isinstance(before, Sum) and before.mean:
                    expected = expected / 2
                total = (
                    exchanges.summed()(moved.detach()) if isinstance(after, Sum) else moved.detach()
                )
                value = shard_of(whole, after, exchanges) if isinstance(after, Cut) else whole
                if not torch.allclose(total, value) or not torch.allclose(given.grad, expected):  # type: ignore
                    wrong.append(f"{before} -> {after}")
        return wrong

    assert run_ranks(body, 2) == [[], []]


def test_what_cannot_run_in_parts_names_plans_that_can() -> None:
    """A dim that ranks can't share alike, and a mean, which no rank can make a part of."""
    recorder = ProgramRecorder(Counted(PaperMesh(2)))
    value = recorder.input(recorder.empty((3, 4), torch.ones(1)), None, trained=False)

    with pytest.raises(PlanRefused, match=r"\(3, 4\) doesn't divide by 2 along dim 0") as of_a_dim:
        recorder.moved(value, Cut(0))
    with pytest.raises(PlanRefused, match="no exchange from") as of_a_mean:
        recorder.moved(value, Sum(mean=True))
    assert (
        of_a_dim.value.hint
        == of_a_mean.value.hint
        == "data=N and shard=N plans run the model as it is"
    )


def test_a_whole_value_that_parts_use_has_the_sum_of_their_gradients(
    run_ranks: Callable[..., Any],
) -> None:
    """One by one, gathered, or several in one message, of which one has no gradient."""

    def body(context: Any) -> list[list[float]]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        exchanges = Exchanges(mesh.devices("cpu")["tensor"])
        part = float(1 + context.rank)
        summed, other, unused, cut = (torch.ones(2, requires_grad=True) for _ in range(4))
        (exchanges.summing_gradients()(summed) * part).sum().backward()
        first = summed.grad.tolist()  # type: ignore[union-attr]
        used, _ = exchanges.sum_all_gradients(other, unused)
        (used * part).sum().backward()
        (exchanges.gather_summing_gradients(Cut(0))(cut) * part).sum().backward()
        assert unused.grad is None
        return [first, other.grad.tolist(), cut.grad.tolist()]  # type: ignore[union-attr]

    assert run_ranks(body, 2) == [[[3.0, 3.0]] * 3] * 2


def test_only_what_nothing_else_reads_is_summed_in_place(run_ranks: Callable[..., Any]) -> None:
    """A product that is read after it was summed stays as it is, and so does a gradient that is another one's, too."""

    def body(context: Any) -> list[Any]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        aten, recorder = torch.ops.aten, ProgramRecorder(Exchanges(mesh.devices("cpu")["tensor"]))
        like, factor = torch.ones(1), 1 + context.rank
        x = recorder.input(recorder.empty((2, 3), like), None, trained=True)
        weight = recorder.input(recorder.empty((3, 3), like), Cut(0), trained=True)
        whole = recorder.input(recorder.empty((2, 3), like), None, trained=True)
        share = recorder.input(recorder.empty((2, 3), like), Sum(), trained=True)
        product = recorder.run(aten.linear.default, x, weight, placement=Sum())
        total = recorder.moved(product, None)
        doubled = recorder.run(aten.mul.Tensor, product, 2.0, placement=Sum())
        tripled = recorder.run(aten.mul.Tensor, share, 3.0, placement=Sum())
        both = recorder.run(aten.add.Tensor, whole, tripled, placement=Sum())
        run = recorder.program([total, *(recorder.moved(value, None) for value in (doubled, both))])
        values = torch.ones(2, 3), torch.eye(3) * factor, torch.ones(2, 3), torch.ones(2, 3)
        given = [value.requires_grad_() for value in values]
        outputs = run(*given)
        torch.autograd.backward(outputs, [torch.ones(2, 3)] * 3)
        gradients = [given[at].grad for at in (0, 2, 3)]
        return [tensor.unique().tolist() for tensor in (*outputs, *gradients)]  # type: ignore[union-attr]

    # Ranks multiply by 1 and 2, so that x is multiplied by 3; each adds the whole to three times its share of 1.
    # Gradients of x are 3 and 6, by the product and its double; that of the whole is 1 from each rank.
    assert run_ranks(body, 2) == [[[3.0], [6.0], [8.0], [9.0], [2.0], [3.0]]] * 2


def test_only_new_tensors_sum_their_own_gradients(run_ranks: Callable[..., Any]) -> None:
    """What nothing but products with parts reads has a hook; a dropout that drops nothing gives back what it took,
    which others read, too."""

    def body(context: Any) -> list[Any]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        aten, recorder = torch.ops.aten, ProgramRecorder(Exchanges(mesh.devices("cpu")["tensor"]))
        like = torch.ones(1)
        x, other = (
            recorder.input(recorder.empty((2, 3), like), None, trained=True) for _ in range(2)
        )
        weight = recorder.input(recorder.empty((3, 3), like), Cut(0), trained=True)
        doubled, read_twice = (recorder.run(aten.mul.Tensor, value, 2.0) for value in (x, other))
        undropped = recorder.run(aten.dropout.default, read_twice, 0.5, False)
        products = [
            recorder.run(aten.linear.default, value, weight, placement=Cut(1))
            for value in (doubled, undropped)
        ]
        tripled = recorder.run(aten.mul.Tensor, read_twice, 3.0)
        run = recorder.program([*(recorder.moved(product, None) for product in products), tripled])
        given = [torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)]
        outputs = run(*given, torch.eye(3) * (1 + context.rank))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        hooks = [
            target
            for target in run.__globals__.values()
            if getattr(target, "__name__", "") == "hook_summing_gradients"
        ]
        return [len(hooks), *(tensor.grad.unique().tolist() for tensor in given)]  # type: ignore[union-attr]

    # Ranks multiply by 1 and 2: gradients through products are 3, doubled 6. The other one gets 2 * 3 more.
    assert run_ranks(body, 2) == [[1, [6.0], [12.0]]] * 2


def test_a_sum_that_does_not_lie_in_one_piece(run_ranks: Callable[..., Any]) -> None:
    """It is not made where it is, as ranks send what lies in one piece."""

    def body(context: Any) -> list[list[float]]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        exchanges = Exchanges(mesh.devices("cpu")["tensor"])
        given = torch.ones(2, 2, requires_grad=True)
        turned = (given * (1 + context.rank)).t()
        total = exchanges.sum_in_place(turned)
        total.sum().backward()
        return [total.unique().tolist(), turned.unique().tolist(), given.grad.unique().tolist()]  # type: ignore

    assert run_ranks(body, 2) == [[[3.0], [1.0], [1.0]], [[3.0], [2.0], [2.0]]]


def test_what_is_scattered_stays_as_it_is(run_ranks: Callable[..., Any]) -> None:
    """Whether its parts lie one after the other, where no copy is needed to send them, or not."""

    def body(context: Any) -> list[Any]:
        mesh = Mesh({"pipeline": 1, "data": 1, "shard": 1, "tensor": 2}, context.rank)
        mesh.connect()
        exchanges = Exchanges(mesh.devices("cpu")["tensor"])
        results = []
        for dim, mode in product((0, 1), (torch.no_grad, torch.inference_mode)):
            with mode():
                x = torch.arange(8.0).reshape(2, 4) * (context.rank + 1)
                before = x.clone()
                part = exchanges.scatter(Cut(dim))(x)
            total = torch.arange(8.0).reshape(2, 4) * 3
            results += [
                torch.equal(x, before),
                torch.equal(part, total.chunk(2, dim)[context.rank]),
            ]
        return results

    assert run_ranks(body, 2) == [[True] * 8] * 2
