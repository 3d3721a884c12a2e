"""A script that keeps its loop computes under every plan what it computes by itself."""

from __future__ import annotations

import pytest

from tests.attached.scripts import ATTACHED, OWN, SETUP, assert_alike, lines, told


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return told(tmp_path_factory.mktemp("own"), OWN)


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


BEGUN = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_an_optimizer_that_has_taken_steps_goes_on(tmp_path, plan):
    """It stays the script's object, with its state by name."""
    own, attached = (text.replace(SETUP, SETUP + BEGUN) for text in (OWN, ATTACHED))
    attached = attached.replace("tell()", "assert len(optimizer.state) == 4\ntell()")
    expected = told(tmp_path / "own", own)

    assert_alike(told(tmp_path / "attached", attached, plan)["weights"], expected["weights"])


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


SUMS = ATTACHED.replace(
    "run.backward(loss)",
    "run.backward((F.cross_entropy(model(x), y, reduction='sum', ignore_index=0), (y != 0).sum()))",
)


def test_a_sum_with_its_count_is_normalised_once(tmp_path):
    own = told(tmp_path / "own", OWN.replace("model(x), y)", "model(x), y, ignore_index=0)"))

    assert_alike(told(tmp_path / "sums", SUMS, "data=2")["weights"], own["weights"])


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
