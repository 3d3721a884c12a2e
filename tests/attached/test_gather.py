"""Rows of all ranks in a script's loop: a loss over them is that of one device, with its gradients."""

from __future__ import annotations

import pytest

from paceline.attached.verify import verify_script
from paceline.base.errors import PlanRefused, TrainingError
from paceline.launch.process.failure import RankFailed
from tests.attached.scripts import SETUP, alone, assert_alike, lines, told

LOSSES = (
    SETUP
    + """
def contrastive(z):
    similar = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T / 0.2
    return F.cross_entropy(similar, torch.arange(len(z)).roll(1))


def among(z, every):
    return (z @ every.T).logsumexp(1).mean() - z.mean()
"""
)
OWN = (
    LOSSES
    + """
def of_epoch(epoch, x, y):
    z = model(x)
    if epoch < 2:
        return contrastive(z)
    if epoch == 2:
        return among(z, z)
    if epoch == 3:
        return contrastive(z) + F.cross_entropy(z, y)
    return contrastive(z) * F.cross_entropy(z, y)


for epoch in range(5):
    for x, y in loader:
        loss = of_epoch(epoch, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
tell()
"""
)
ATTACHED = (
    LOSSES
    + """
def of_epoch(epoch, x, y):
    z = model(x)
    every = run.gather(z)
    if epoch == 0:
        return contrastive(every)
    if epoch == 1:
        return contrastive(every) * len(every), torch.tensor(float(len(every)))
    if epoch == 2:
        return among(z, every)
    if epoch == 3:
        return contrastive(every) + F.cross_entropy(z, y)
    return contrastive(every) * F.cross_entropy(run.gather(model(x)), run.gather(y))


run = pl.attach(model, optimizer, loader)
for epoch in run.epochs(5):
    for x, y in run:
        run.backward(of_epoch(epoch, x, y))
        run.update()
tell()
"""
)
FUNCTION = ATTACHED.replace("of_epoch(epoch, x, y))", "lambda batch: of_epoch(epoch, *batch))")
VALUES = (
    SETUP
    + """
run = pl.attach(model, optimizer, loader)
seen = []
for epoch in run.epochs(1):
    for x, y in run:
        every = run.gather({"x": x, "rest": (y, [y > 0, x.float().half()])})
        (label, (flag, half)) = every["rest"]
        assert label.dtype is y.dtype and flag.dtype is torch.bool and half.dtype is torch.half
        first = 8 * run.step
        assert torch.equal(every["x"], data.tensors[0][first : first + 8])
        assert torch.equal(label, data.tensors[1][first : first + 8])
        assert torch.equal(flag, label > 0) and torch.equal(half, every["x"].float().half())
        assert not every["x"].requires_grad
        run.backward(F.cross_entropy(model(x), y))
        run.update()
        seen.append(len(label))
assert seen == [8, 8, 8, 2]
tell()
"""
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["single", "data=2", "data=3", "shard=2", "shard=3", "data=2 shares=3:1"]
)
def test_a_loss_over_gathered_rows_has_the_gradients_of_one_device(tmp_path, plan):
    """Of all rows on each rank, as a mean and as a sum, of this rank's rows among all, of both, and of rows that
    are gathered twice; also in a last batch of two rows, in which a rank of three has none.
    """
    own = told(tmp_path / "own", OWN)

    attached = told(tmp_path / "attached", ATTACHED, plan)

    assert lines(attached["run"], "loss") == pytest.approx(own["losses"], rel=1e-11)
    assert_alike(attached["weights"], own["weights"], rtol=1e-9)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "shard=3"])
def test_a_loss_that_is_a_function_may_gather_where_all_ranks_call_it(tmp_path, plan):
    own = told(tmp_path / "own", OWN)

    attached = told(tmp_path / "attached", FUNCTION, plan)

    assert_alike(attached["weights"], own["weights"], rtol=1e-9)


@pytest.mark.parametrize(
    ("plan", "words"), [("single microbatches=2", "in 2 micro-batches"), ("data=2", "only where")]
)
def test_a_function_that_gathers_is_refused_where_ranks_would_wait(tmp_path, plan, words):
    with pytest.raises(RankFailed, match=words) as error:
        told(tmp_path, FUNCTION, plan)

    assert error.value.failure.kind == PlanRefused.__name__


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", ["single", "data=3", "data=2 microbatches=2"])
def test_rows_have_the_order_of_the_batch_of_all_ranks(tmp_path, plan):
    """Numbers of all kinds, in nested values."""
    script = VALUES
    if "microbatches" in plan:
        script = script.replace(
            "F.cross_entropy(model(x), y))",
            "lambda batch: F.cross_entropy(model(batch[0]), batch[1]))",
        )

    assert told(tmp_path, script, plan)["figures"]["steps"] == 4


def test_a_tensor_without_a_row_for_each_of_the_batch_is_refused(tmp_path):
    script = ATTACHED.replace("run.gather(z)", "run.gather(torch.cat([z, z]))")

    with pytest.raises(TrainingError, match=r"shape \(16, 3\), and this rank has 8 rows") as error:
        alone(tmp_path, script)

    assert "chunk(2)" in error.value.hint


def test_rows_of_other_shapes_on_other_ranks_are_refused(tmp_path):
    script = ATTACHED.replace("run.gather(z)", "run.gather(z[:, : 2 + run.rank])")

    with pytest.raises(RankFailed, match="ranks gather different tensors"):
        told(tmp_path, script, "data=2")


def test_an_evaluation_gathers_nothing(tmp_path):
    script = ATTACHED.replace(
        "        run.update()",
        "        run.update()\n        run.evaluate(lambda batch: run.gather(batch[0]).mean(), data)",
    )

    with pytest.raises(TrainingError, match=r"run\.gather is called where"):
        alone(tmp_path, script)


@pytest.mark.slow
def test_a_proof_holds_gathered_rows_to_one_device(tmp_path):
    """It finds the loss that only has this rank's rows."""
    script = tmp_path / "script.py"
    verdicts = []
    for text in (ATTACHED, ATTACHED.replace("every = run.gather(z)", "every = z")):
        script.write_text(text.replace("\ntell()", ""))
        verdicts += verify_script(script, ["data=3"])

    assert [verdict.passed for verdict in verdicts] == [True, False], verdicts[0].describe()
