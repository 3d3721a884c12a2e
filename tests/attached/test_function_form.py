"""`run.backward(function)` under plans that split the model, and the check of its first update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.attached.functions import Functions, some_rows
from paceline.attached.verify import verify_script
from paceline.base.errors import PacelineError
from paceline.checkpoint import load_tensors
from tests.attached.scripts import ATTACHED, SETUP, lines, told

TRANSFORMER = """
import json, os
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
data = TensorDataset(torch.randint(0, 13, (26, 7)))
held_out = DataLoader(TensorDataset(torch.randint(0, 13, (11, 7))), batch_size=4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (p.view(B, T, 2, 4).transpose(1, 2) for p in self.qkv(self.n1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(13, 8), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
losses, measured = [], []
run = pl.attach(model, optimizer, DataLoader(data, batch_size=8), schedule=schedule, clip=0.3)


def loss_of(batch):
    x, y, mask = batch
    each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
    return (each * mask).sum(), mask.sum()


def measure(batch):
    logits, targets = model(batch[0][:, :-1]), batch[0][:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2), targets)
    right = (logits.argmax(-1) == targets).double()
    return {"loss": loss, "right": (right.sum(), torch.ones_like(right).sum())}


for epoch in run.epochs(2):
    for (ids,) in run:
        x, y = ids[:, :-1], ids[:, 1:]
        loss = run.backward(loss_of, (x, y, (y % 3 > 0).double()))
        run.update()
        run.log(targets=(y % 3 > 0).double().mean())
        losses.append(loss.item())
    measured.append(run.evaluate(measure, held_out))
if run.is_main:
    with open(os.environ["TOLD"], "w") as file:
        json.dump({"losses": losses, "measured": measured}, file)
"""


def weights_of(ended):
    return load_tensors(ended["run"] / "model.safetensors")


def assert_same_weights(weights, others):
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-9, atol=1e-10)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return told(tmp_path_factory.mktemp("single"), TRANSFORMER, "single")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    ["tensor=2", "pipeline=2 microbatches=2", "data=2 tensor=2", "data=2 microbatches=2"],
)
def test_a_function_trains_what_one_device_trains(tmp_path, one_device, plan):
    """Its loss is a sum with a count, its batch is made in the loop, and the last batch is short."""
    ended = told(tmp_path, TRANSFORMER, plan)

    assert_same_weights(weights_of(ended), weights_of(one_device))
    assert ended["losses"] == pytest.approx(one_device["losses"], rel=1e-12)
    assert lines(ended["run"], "loss") == pytest.approx(ended["losses"], rel=1e-15)
    for measured, expected in zip(ended["measured"], one_device["measured"], strict=True):
        assert measured == pytest.approx(expected, rel=1e-10)
    for logged, expected in zip(
        lines(ended["run"], "logged"), lines(one_device["run"], "logged"), strict=True
    ):
        assert logged == pytest.approx(expected)


COUNTED = (
    SETUP
    + """
class Counter:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


counter = Counter()
run = pl.attach(model, optimizer, loader, clip=0.3, state={"counter": counter})
for x, y in run.steps(int(os.environ.get("STEPS", 8))):
    counter.count += 1
    optimizer.param_groups[0]["lr"] *= 0.9
    scale = 2.0 if counter.count > 3 else 1.0  # so that it is recorded again
    run.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]) * scale)
    run.update()
    if run.rank == 1 and run.step == 5 and not os.path.exists(os.environ["TOLD"] + ".killed"):
        if "KILL" in os.environ:
            open(os.environ["TOLD"] + ".killed", "w").close()
            os.kill(os.getpid(), 9)
tell(torch.nn.Linear(1, 1), count=counter.count, rate=optimizer.param_groups[0]["lr"])
"""
)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return told(tmp_path_factory.mktemp("counted"), COUNTED, "single")


def assert_is(ended, counted):
    assert_same_weights(weights_of(ended), weights_of(counted))
    assert (ended["count"], ended["rate"]) == (counted["count"], counted["rate"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [("tensor=2", "data=2"), ("data=2", "pipeline=2 microbatches=2")],
)
def test_a_run_goes_on_under_another_plan(tmp_path, counted, monkeypatch, before, after):
    """The loop changes the rate and its own state before the first function, which says how to lay out the model."""
    monkeypatch.setenv("STEPS", "5")
    told(tmp_path, COUNTED, before, run=tmp_path / "run")
    monkeypatch.setenv("STEPS", "8")

    assert_is(told(tmp_path, COUNTED, after, run=tmp_path / "run", resume=True), counted)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"save_every": 2}], ids=["memory", "folder"])
def test_a_killed_rank_starts_again(tmp_path, counted, monkeypatch, options):
    monkeypatch.setenv("KILL", "1")

    recovered = told(tmp_path, COUNTED, "tensor=2", restarts=2, **options)

    assert (tmp_path / "told.json.killed").exists()
    assert_is(recovered, counted)


FUNCTION = ATTACHED.replace(
    """        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
""",
    "        loss = run.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))\n",
).replace("tell()", "tell(torch.nn.Linear(1, 1))")
REFUSED = {
    "a loss that is computed": (ATTACHED, "", "", "run.backward(function, batch)"),
    "rows of all ranks": (
        ATTACHED,
        "        loss = F",
        "        run.gather(x)\n        loss = F",
        "data=N and shard=N plans gather rows",
    ),
    "rows inside of the function": (
        FUNCTION,
        "batch[1])",
        "batch[1]) * run.rows",
        "run.rows is used",
    ),
    "a figure inside of the function": (
        FUNCTION,
        "lambda batch:",
        "lambda batch: run.log(one=1.0) or",
        "run.log is used inside",
    ),
    "an evaluation before the first function": (
        FUNCTION,
        "    for x, y in run:",
        "    run.evaluate(lambda batch: model(batch[0]).mean(), data)\n    for x, y in run:",
        "after the first run.backward(function)",
    ),
    "a figure before the first function": (
        FUNCTION,
        "        loss =",
        "        run.log(one=1.0)\n        loss =",
        "run.log is called before the first",
    ),
    "a batch without a function": (
        FUNCTION,
        "        loss =",
        "        continue\n        loss =",
        "nothing was trained with the first",
    ),
    "a tensor of other rows": (
        FUNCTION,
        "batch[1]))",
        "batch[1]), (x, y[:-1]))",
        "close over what belongs to no row",
    ),
    "several models": (
        FUNCTION,
        "pl.attach(model, optimizer,",
        "pl.attach({'net': model}, {'net': optimizer},",
        "runs several models",
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("refused", REFUSED)
def test_what_a_split_model_can_not_run_is_refused_before_an_update(tmp_path, refused):
    text, old, new, message = REFUSED[refused]
    text = text.replace(old, new).replace("schedule=schedule, clip=0.3", "")

    with pytest.raises(PacelineError) as error:
        told(tmp_path, text, "tensor=2")

    assert message in str(error.value)
    metrics = tmp_path / "run-tensor=2" / "metrics.jsonl"
    assert not metrics.exists() or not lines(metrics.parent, "loss")


def test_micro_batches_of_other_lengths_are_refused(tmp_path):
    padded = FUNCTION.replace(
        "run = pl.attach(",
        "def collate(rows):\n    long = torch.stack([x for x, _ in rows])\n"
        "    return long[:, : 4 - len(rows) % 2], torch.stack([y for _, y in rows])\n\n\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=5, collate_fn=collate)\nrun = pl.attach(",
    )

    with pytest.raises(PacelineError, match=r"(?s)of several shapes.*pad all samples") as error:
        told(tmp_path, padded, "pipeline=2 microbatches=2")

    assert "2 micro-batches" in str(error.value)


def test_lambdas_that_compute_alike_are_one_function():
    functions, scale = Functions(), 1.0
    model = nn.Linear(2, 1)

    def made(number):
        return lambda batch: model(batch) * scale * number

    first = functions.called(made(1), model)

    assert functions.called(made(1), model) is first
    assert functions.called(made(2), model) is not first
    assert functions.called(lambda batch: model(batch) * scale, model) is not first
    scale = 2.0
    assert (
        functions.called(made(1), model) is first
    )  # the same variable: who records it, sees that it changed


def test_rows_of_a_batch_are_chosen_in_all_that_has_rows():
    batch = {"x": torch.arange(3), "boxes": ["a", "b", "c"], "shared": torch.arange(2), "rate": 0.5}

    assert str(some_rows(batch, 3, [2, 0])) == str(
        {"x": torch.tensor([2, 0]), "boxes": ["c", "a"], "shared": torch.arange(2), "rate": 0.5}
    )


VERIFIED = FUNCTION.replace("torch.set_default_dtype(torch.float64)\n", "").replace(
    "tell(torch.nn.Linear(1, 1))",
    "    run.evaluate(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), data)",
)


def test_a_script_is_verified_under_a_plan_that_splits_its_model(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(VERIFIED)

    verdicts = verify_script(script, ("tensor=2", "pipeline=2"))

    assert [verdict.problem for verdict in verdicts] == [None, None]
    assert all(verdict.steps == 4 for verdict in verdicts)
