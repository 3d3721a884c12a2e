"""Embeddings with sparse gradients train under replicas as on one device; only rows that occur are updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs.stateful import by_one_device, in_turn, stateful_job, trained
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies.data.sparse import SparseGradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]  # torch's Adagrad says so

ROWS, WORDS = 40, 3
REPLICAS = [
    "data=2",
    "data=3",
    "data=2 shares=3:1",
    "data=2 microbatches=2 recompute=full",
    "shard=2 zero=1",
    "shard=2 zero=2 microbatches=2",
    "shard=2",
    "data=2 shard=2",
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "Adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "SparseAdam": lambda named: torch.optim.SparseAdam(named, lr=0.05, eps=1e-3),
}


class Tables(nn.Module):
    """Tables alone: SparseAdam takes no dense gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).tanh().mean(1) + self.bags(x)


class UnderDense(nn.Module):
    """A table under dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 8, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).mean(1)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.last(h)


class TableBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 8, sparse=True)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.narrow(torch.tanh(self.wide(h + self.words(x).mean(1))))


class OfBlocks(nn.Module):
    """Each block looks into a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(ROWS, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([TableBlock() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).mean(1)
        for block in self.blocks:
            h = block(x, h)
        return self.last(h)


class Tied(UnderDense):
    """The table's weight is that of the last layer, too: its gradient is dense as soon as that one is used."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x) @ self.last.weight, self.words.weight)


class SometimesDense(UnderDense):
    """For some samples the last layer is the table's weight: gradients are sparse on some ranks and dense on others."""

    def forward(self, x: Tensor) -> Tensor:
        y, few = super().forward(x), (x[:, 0] < 8)[:, None]
        if not bool(few.any()):
            return y
        return y + few * (y @ self.words.weight[:4, :4].T)


class RarelyUsed(UnderDense):
    """A second table that few samples look into."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Embedding(ROWS, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y, wanted = super().forward(x), x[:, 0] < 4
        if not bool(wanted.any()):
            return y
        return y.index_add(0, wanted.nonzero()[:, 0], self.rare(x[wanted]).sum(1))


def table_job(
    model: Callable[[], nn.Module],
    optimizer: Any = "SGD",
    *,
    samples: int = 36,
    outputs: int = 4,
    **changes: Any,
) -> paceline.Job:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, ROWS, (samples, WORDS), generator=generator)
    targets = torch.randn(samples, outputs, generator=generator)
    return stateful_job(
        model,
        data=TensorDataset(words, targets),
        **{"optimizer": OPTIMIZERS.get(optimizer, optimizer), **changes},
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        *(("SparseAdam", plan) for plan in REPLICAS),
        ("SGD", "data=3"),
        ("SGD", "shard=2"),
        ("Adagrad", "data=2 shard=2"),
    ],
)
@in_turn(lambda optimizer, plan: table_job(Tables, optimizer))
def test_tables_alone():
    """Nothing else is trained."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        *REPLICAS,
        "data=2 tensor=2",
        "pipeline=2 data=2",
        "pipeline=2 shard=2",
        "pipeline=2 data=2 schedule=zero-bubble",
        "shard=2 tensor=2",
    ],
)
@in_turn(lambda plan: table_job(UnderDense, "Adagrad"))
def test_a_table_under_dense_layers():
    """Gradients of both kinds travel."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["tensor=2", "data=2 tensor=2", "shard=2", "pipeline=2 shard=2"])
@in_turn(lambda plan: table_job(OfBlocks, "Adagrad"))
def test_tables_inside_of_blocks():
    """Where the other layers of a block are split or sharded, its table stays whole."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "data=3 microbatches=2",
        "shard=2",
        "data=2 shard=2",
        "pipeline=2",
        "pipeline=2 data=2",
        "pipeline=2 shard=2",
    ],
)
@in_turn(lambda plan: table_job(Tied, outputs=ROWS))
def test_a_weight_that_another_layer_uses():
    """Sparse and dense gradients add up to a dense one, on one device, over replicas and over stages."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["data=2 microbatches=6", "data=3 microbatches=4", "shard=3 zero=2 microbatches=4"]
)
@pytest.mark.parametrize("model", [SometimesDense, RarelyUsed])
@in_turn(lambda model, plan: table_job(model, "Adagrad"))
def test_ranks_whose_gradients_differ_in_kind():
    """Dense here and sparse there; or none at all where no sample looks into a table."""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 microbatches=3",
        "data=3",
        "shard=3",
        "shard=2 zero=2 microbatches=3",
        "data=2 shard=2",
    ],
)
@in_turn(lambda plan: table_job(Tables, "SparseAdam", samples=25))
def test_short_windows():
    """Windows of 12, 12 and 1 samples: ranks without samples take part."""


class Drawn(Tables):
    """Each sample looks into a row that is drawn, too."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Embedding(6, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.drawn(torch.randint(0, 6, (len(x),)))


def rows_moved(before: Tensor, after: Tensor) -> int:
    """By more than rounding."""
    return int(((before - after).abs() > 1e-9).any(1).sum())


def test_rows_of_a_stand_in_are_not_updated(tmp_path: Path):
    """The third window has one sample, whose rank draws one row; two other ranks run a stand-in and draw others."""
    two = by_one_device(table_job(Drawn, "SparseAdam", samples=25, steps=2), "data=3")
    three = trained(table_job(Drawn, "SparseAdam", samples=25, steps=3), "shard=3", tmp_path)
    assert rows_moved(two["drawn.weight"], three["drawn.weight"]) == 1


@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_only_rows_that_occur_are_updated(plan: str, tmp_path: Path):
    """SparseAdam leaves all other rows alone, though they have moments; Adam on zeros would move them."""
    job = table_job(Tables, "SparseAdam", samples=24, batch=12, steps=2)
    before, after = by_one_device(replace(job, steps=1)), trained(job, plan, tmp_path)
    assert 0 < rows_moved(before["bags.weight"], after["bags.weight"]) < ROWS


class TwoOptimizers(torch.optim.Optimizer):
    """SparseAdam for the tables and AdamW for the rest."""

    def __init__(self, named: Any) -> None:
        pairs = list(named)
        super().__init__([p for _, p in pairs], {})
        self.sparse = torch.optim.SparseAdam(
            [p for name, p in pairs if name.startswith("words")], lr=0.05
        )
        self.dense = torch.optim.AdamW(
            [p for name, p in pairs if not name.startswith("words")], lr=0.01
        )

    def step(self, closure: Any = None) -> None:
        self.sparse.step()
        self.dense.step()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_an_optimizer_for_tables_and_one_for_the_rest(
    plan: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """It is tried on sparse gradients beforehand; its state goes on under another plan."""
    job, whole = (
        table_job(UnderDense, optimizer=TwoOptimizers),
        by_one_device(table_job(UnderDense, TwoOptimizers)),
    )
    paceline.train(replace(job, steps=3), plan, run=tmp_path, timeout_s=60)
    assert "could not be tried" not in capfd.readouterr().err
    paceline.train(job, "data=3", run=tmp_path, resume=True, timeout_s=60)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-12)


def loss_of_some(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counts = target[:, 0] > 0
    return (output - target)[counts].square().sum(), counts.sum()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["shard=2 microbatches=2", "data=3"])
@in_turn(lambda plan: table_job(Tables, "SparseAdam", loss=loss_of_some))
def test_a_loss_with_a_count():
    """Sparse gradients are divided by the window's count, too."""


@pytest.mark.parametrize(
    "plan",
    ["data=2", "shard=2", "pipeline=2", pytest.param("pipeline=2 data=2", marks=pytest.mark.slow)],
)
@in_turn(lambda plan: table_job(UnderDense, clip=0.05))
def test_clipping():
    """Rows count once in the norm, after they were added up."""


def test_one_device_clips_as_if_dense(tmp_path: Path):
    """torch itself takes no norm of a sparse gradient."""

    class Dense(UnderDense):
        def __init__(self) -> None:
            super().__init__()
            self.words.sparse = False

    expected = by_one_device(table_job(Dense, clip=0.05))
    for name, value in trained(table_job(UnderDense, clip=0.05), "single", tmp_path).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["data=2 compress=int8", "data=2 compress=topk", "data=2 compress=powersgd"]
)
@in_turn(lambda plan: table_job(Tables, "SparseAdam"))
def test_sparse_gradients_are_not_compressed():
    """Rows travel as they are."""


def test_replicas_with_steps_of_their_own(tmp_path: Path):
    """Each updates the rows that its own samples look into; the tables' changes meet as all weights do."""
    ends = trained(table_job(Tables, "SparseAdam"), "data=2 local=3 outer=average", tmp_path)
    assert all(bool(value.isfinite().all()) for value in ends.values())


def test_a_run_goes_on(tmp_path: Path):
    """The moments of rows are saved and brought back, under another plan."""
    whole = by_one_device(table_job(Tables, "SparseAdam"))
    paceline.train(table_job(Tables, "SparseAdam", steps=3), "data=2", run=tmp_path, timeout_s=60)
    paceline.train(
        table_job(Tables, "SparseAdam"), "shard=2", run=tmp_path, resume=True, timeout_s=60
    )
    for name, value in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-12)


DRAWS, COMPLEX = (
    torch.tensor([[0.1, 1.7], [0.3, -2.1], [0.7, 0.9], [1e-3, 3.3], [2.9, 0.11]]),
    3 + 4j,
)


def _rows(rows: list[int], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64).view(1, -1), values, shape, check_invariants=True
    )


def _gradients(rank: int) -> list[Tensor | None]:
    """Rows that occur twice, ranks without any, dtypes of other sizes, a dense gradient."""
    half = torch.ones(1, 3, dtype=torch.bfloat16)
    return [
        [_rows([4, 1, 4], DRAWS[:3], (6, 2)), _rows([0], half, (5, 3)), None, None],
        [
            None,
            _rows([], half[:0], (5, 3)),
            None,
            _rows([2, 0], torch.full((2, 1), COMPLEX), (3, 1)),
        ],
        [_rows([1, 5], DRAWS[3:], (6, 2)), 2 * half.expand(5, 3).clone(), None, None],
    ][rank]


def _summed(context: Any) -> list[Any]:
    parameters = [
        nn.Parameter(torch.zeros(6, 2)),
        nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(4)),
        nn.Parameter(torch.zeros(3, 1, dtype=torch.complex64)),
    ]
    for p, gradient in zip(parameters, _gradients(context.rank), strict=True):
        p.grad = gradient
    gradients = SparseGradients(parameters, dist.group.WORLD)
    gradients.finish()
    first, second, third, fourth = (p.grad for p in parameters)
    assert third is None and first.is_sparse and fourth.is_sparse and not second.is_sparse
    return [
        first.coalesce().indices().tolist(),
        first.coalesce().values().tolist(),
        second.tolist(),
        torch.view_as_real(fourth.to_dense()).tolist(),
        gradients.sent_bytes,
    ]


def test_the_sum_of_sparse_gradients(run_ranks: Callable[..., Any]):
    """Each row once and in order; a gradient that is dense on one rank is dense on all; equal bits everywhere."""
    ends = run_ranks(_summed, 3)
    assert ends[0] == ends[1] == ends[2]
    rows, values, dense, of_complex, _ = ends[0]
    assert rows == [[1, 4, 5]]
    torch.testing.assert_close(
        torch.tensor(values), torch.stack([DRAWS[1] + DRAWS[3], DRAWS[0] + DRAWS[2], DRAWS[4]])
    )
    assert dense == [[3.0] * 3, *[[2.0] * 3] * 4]
    assert of_complex == [[[3.0, 4.0]], [[0.0, 0.0]], [[3.0, 4.0]]]
