"""A script that keeps its loop computes under every plan what it computes by itself."""

from __future__ import annotations

import pytest
import torch

from tests.attached.scripts import ATTACHED, OWN, SETUP, assert_alike, lines, told


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return told(tmp_path_factory.mktemp("own"), OWN)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "single",
        "data=2",
        "data=3",
        "shard=2",
        "shard=3",
        "shard=2 zero=1",
        "data=2 shares=3:1",
        "data=2 recompute=full",
    ],
)
def test_the_loop_computes_what_it_computes_by_itself(tmp_path, own, plan):
    attached = told(tmp_path, ATTACHED, plan)

    assert_alike(attached["weights"], own["weights"])
    assert lines(attached["run"], "loss") == pytest.approx(own["losses"], rel=1e-12)
    logged = [figures["loss"] for figures in lines(attached["run"], "logged")]
    assert logged == pytest.approx(own["losses"], rel=1e-12)
    assert attached["figures"]["steps"] == 8


OTHERS = """
from paceline.attached.session import ScriptProcess
if ScriptProcess.current().context.rank:
    torch.nn.init.ones_(model[0].weight)
run = pl.attach("""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_weights_begin_as_they_are_on_rank_0(tmp_path, own, plan):
    """A script without a seed builds other weights on each rank."""
    attached = told(tmp_path, ATTACHED.replace("run = pl.attach(", OTHERS), plan)

    assert_alike(attached["weights"], own["weights"])


BEGUN = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_an_optimizer_that_has_taken_steps_goes_on(tmp_path, plan):
    """It stays the script's object, with its state by name."""
    own, attached = (text.replace(SETUP, SETUP + BEGUN) for text in (OWN, ATTACHED))
    attached = attached.replace("tell()", "assert len(optimizer.state) == 4\ntell()")
    expected = told(tmp_path / "own", own)

    assert_alike(told(tmp_path / "attached", attached, plan)["weights"], expected["weights"])


BIG = """
import weakref
big = torch.nn.Linear(1, 1)
seen = weakref.ref(big)
run = pl.attach("""


def test_what_a_script_deletes_is_freed(tmp_path):
    """The run does not hold on to the variables that were there when it was attached."""
    text = ATTACHED.replace("run = pl.attach(", BIG)
    text = text.replace("tell()", "del big\nassert seen() is None\ntell()")
    assert told(tmp_path, text, "single")["figures"]["steps"] == 8


FIGURES = "run.log(mean=(x.sum(), len(x)), total=pl.total(x.sum()), odd=float('nan'))"


def test_figures_are_those_of_all_rows(tmp_path):
    """The last batch has two rows, and a rank without rows logs nothing."""
    text = ATTACHED.replace("run.log(loss=loss)", FIGURES)
    alone, split = (
        lines(told(tmp_path / plan, text, plan)["run"], "logged") for plan in ("single", "data=3")
    )

    assert all(figures.pop("odd") is None for figures in (*alone, *split))
    assert split == [pytest.approx(figures, rel=1e-12) for figures in alone]
    totals = [figures["mean"] * rows for figures, rows in zip(split, [8, 8, 8, 2] * 2, strict=True)]
    assert [figures["total"] for figures in split] == pytest.approx(totals)


NORMALISED = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
"""


def test_batch_norm_sees_the_rows_of_all_ranks(tmp_path):
    own, attached = (text.replace(SETUP, SETUP + NORMALISED) for text in (OWN, ATTACHED))
    expected = told(tmp_path / "own", own)

    attached = attached.replace("tell()", "tell(mean=model[1].running_mean.tolist())")
    attached = told(tmp_path / "attached", attached, "data=2")
    assert_alike(attached["weights"], expected["weights"])


def test_a_buffer_that_is_written_after_an_update_is_the_mean_of_all_ranks(tmp_path):
    text = ATTACHED.replace(
        "run = pl.attach", "model.register_buffer('last', torch.zeros(4))\nrun = pl.attach"
    )
    text = text.replace("        rows.append(run.rows)", "        model.last = x.mean(0)")
    text = text.replace("tell()", "tell(last=model.last.tolist())").replace("(26,", "(24,")
    text = text.replace("torch.randn(26", "torch.randn(24").replace("range(26)", "range(24)")
    expected = told(tmp_path, text, "single")["last"]

    assert told(tmp_path, text, "data=2")["last"] == pytest.approx(expected, rel=1e-12)


SUMS = ATTACHED.replace(
    "run.backward(loss)",
    "run.backward((F.cross_entropy(model(x), y, reduction='sum', ignore_index=0), (y != 0).sum()))",
)


def test_a_sum_with_its_count_is_normalised_once(tmp_path):
    own = told(tmp_path / "own", OWN.replace("model(x), y)", "model(x), y, ignore_index=0)"))

    assert_alike(told(tmp_path / "sums", SUMS, "data=2")["weights"], own["weights"])


SEEN = (
    SUMS.replace("        run.update()", "        seen.append(gradient())\n        run.update()")
    .replace(
        "run = pl.attach",
        "seen = []\n"
        "gradient = lambda: [local(p.grad).tolist() for p in model.parameters()]\n"
        "local = lambda grad: grad.full_tensor() if hasattr(grad, 'full_tensor') else grad\n"
        "run = pl.attach",
    )
    .replace("tell()", "tell(seen=seen)")
)
OWN_SEEN = (
    OWN.replace("model(x), y)", "model(x), y, ignore_index=0)")
    .replace(
        "        torch.nn.utils.clip",
        "        seen.append([p.grad.tolist() for p in model.parameters()])\n        torch.nn.utils.clip",
    )
    .replace("for epoch", "seen = []\nfor epoch", 1)
    .replace("tell()", "tell(seen=seen)")
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "is_function"),
    [("single", False), ("data=2", False), ("data=3", True), ("single microbatches=2", True)],
)
def test_gradients_before_an_update_are_those_of_the_mean(tmp_path, plan, is_function):
    """Where the loss is a sum with its count. Under data=3, a rank has no rows of the last batch."""
    own, text = told(tmp_path / "own", OWN_SEEN), SEEN
    if is_function:
        text = (
            text.replace("run.backward((", "run.backward(lambda b: (")
            .replace("model(x), y,", "model(b[0]), b[1],")
            .replace("(y != 0)", "(b[1] != 0)")
        )

    for seen, expected in zip(told(tmp_path, text, plan)["seen"], own["seen"], strict=True):
        for gradient, of_own in zip(seen, expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(gradient), torch.tensor(of_own), rtol=1e-5, atol=1e-7
            )


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([data[place] for place in range(26)])


loader = DataLoader(Stream(), batch_size=8)
"""


def test_a_stream_is_read_to_its_end_in_each_epoch(tmp_path):
    own, attached = (text.replace(SETUP, SETUP + STREAM) for text in (OWN, ATTACHED))
    expected = told(tmp_path / "own", own)

    assert_alike(told(tmp_path / "attached", attached, "data=2")["weights"], expected["weights"])


EVALUATED = ATTACHED.replace(
    "tell()",
    """
def of_labels(batch):
    x, y = batch
    right = (model(x).argmax(1) == y).double()
    return {f"label {each}": (right[y == each].sum(), (y == each).sum()) for each in y.tolist()}


model[1].eval()
measured = run.evaluate(of_labels, data)
tell(measured=measured, modes=[module.training for module in model])
""",
)


def test_figures_of_an_evaluation_are_summed_by_name(tmp_path):
    """Ranks have the labels of their rows, in the order of these."""
    alone, split = (told(tmp_path / plan, EVALUATED, plan) for plan in ("single", "data=3"))

    assert len(split["measured"]) == 3
    assert split["measured"] == pytest.approx(alone["measured"], rel=1e-12)
    assert split["modes"] == alone["modes"] == [True, False, True]


ENDED = ATTACHED.replace("tell()", "").replace(
    "run = pl",
    """
class Slow(torch.optim.SGD):
    # Weights for evaluations are others than those that are trained.
    trains = True

    def train(self):
        self.put(True)

    def eval(self):
        self.put(False)

    @torch.no_grad()
    def put(self, trains):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(trains - self.trains)
        self.trains = trains


optimizer = Slow(model.parameters(), lr=0.1)
schedule = None
run = pl""",
)


@pytest.mark.slow
def test_an_evaluation_after_the_end_leaves_the_weights_in_place(tmp_path):
    """An optimizer with modes has those of evaluations there, and trains others."""
    evaluates = "run.evaluate(lambda batch: model(batch[0]).mean(), data)\ntell()"
    ended = told(tmp_path / "ended", ENDED + "tell()", "data=2")
    evaluated = told(tmp_path / "evaluated", ENDED + evaluates, "data=2")

    assert evaluated["weights"] == ended["weights"]


RECORDS = """
from dataclasses import dataclass


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def of(cls, items):
        return cls(*torch.utils.data.default_collate(items))


loader = DataLoader(data, batch_size=8, sampler=range(26), collate_fn=Batch.of)
"""
OF_RECORDS = """
run = pl.attach(model, optimizer, loader, schedule=schedule, clip=0.3)
for epoch in run.epochs(2):
    for batch in run:
        assert type(batch) is Batch
        run.backward(lambda batch: F.cross_entropy(model(batch.x), batch.y))
        run.update()
every = DataLoader(data, batch_size=8, collate_fn=Batch.of)
mean = run.evaluate(lambda batch: batch.x.mean(), every)
tell(mean=mean, expected=data.tensors[0].mean().item())
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "single microbatches=2"])
def test_a_record_as_a_batch_stays_a_record(tmp_path, own, plan):
    attached = told(tmp_path, SETUP + RECORDS + OF_RECORDS, plan)

    assert_alike(attached["weights"], own["weights"])
    assert attached["mean"] == pytest.approx(attached["expected"], rel=1e-12)


CHANGING = """
class Scaled(torch.utils.data.Dataset):
    scale = 1.0

    def __len__(self):
        return 26

    def __getitem__(self, place):
        x, y = data[place]
        return self.scale * x, y


scaled = Scaled()
loader = DataLoader(scaled, batch_size=8, sampler=range(26), num_workers=1)
"""


@pytest.mark.slow
def test_workers_see_what_an_epoch_changes_of_the_data_set(tmp_path):
    own, attached = (
        text.replace(SETUP, SETUP + CHANGING).replace(
            "(2):\n", "(2):\n    scaled.scale = 1.0 + epoch\n"
        )
        for text in (OWN, ATTACHED)
    )
    expected = told(tmp_path / "own", own)

    assert_alike(told(tmp_path / "attached", attached, "data=2")["weights"], expected["weights"])
