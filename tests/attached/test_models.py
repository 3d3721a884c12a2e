"""Several models by name, and losses as functions of a batch."""

from __future__ import annotations

import pytest

from paceline.base.errors import JobError, PlanRefused, TrainingError
from paceline.launch.process.failure import RankFailed
from tests.attached.scripts import ATTACHED, OWN, SETUP, alone, assert_alike, lines, told

GAN = (
    SETUP
    + """
data = TensorDataset(torch.randn(26, 4), torch.randn(26, 2))
loader = DataLoader(data, batch_size=8, sampler=range(26))
generator, critic = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
"""
)
OWN_GAN = (
    GAN
    + """
for epoch in range(2):
    for real, noise in loader:
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(noise).detach())).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        loss = F.softplus(-critic(generator(noise))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
tell(torch.nn.ModuleDict({"generator": generator, "critic": critic}))
"""
)
ATTACHED_GAN = (
    GAN
    + """
run = pl.attach(
    {"generator": generator, "critic": critic},
    {"generator": of_generator, "critic": of_critic},
    loader,
)
for epoch in run.epochs(2):
    for real, noise in run:
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(noise).detach())).mean()
        run.backward(loss, "critic")
        run.update("critic")
        run.backward(F.softplus(-critic(generator(noise))).mean(), "generator")
        run.update("generator")
tell(torch.nn.ModuleDict({"generator": generator, "critic": critic}))
"""
)
FUNCTIONS = ATTACHED_GAN.replace(
    "        loss = F.softplus(-critic(real)).mean() + "
    "F.softplus(critic(generator(noise).detach())).mean()\n"
    '        run.backward(loss, "critic")\n',
    "        run.backward(lambda batch: F.softplus(-critic(batch[0])).mean() + "
    'F.softplus(critic(generator(batch[1]).detach())).mean(), "critic")\n',
).replace(
    'run.backward(F.softplus(-critic(generator(noise))).mean(), "generator")',
    'run.backward(lambda batch: F.softplus(-critic(generator(batch[1]))).mean(), "generator")',
)
FUNCTION = (
    SETUP
    + """
run = pl.attach(model, optimizer, loader, schedule=schedule, clip=0.3)
for epoch in run.epochs(2):
    for batch in run:
        run.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        run.update()
tell()
"""
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return told(tmp_path_factory.mktemp("own"), OWN_GAN)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2"])
def test_two_models_with_an_optimizer_each(tmp_path, own, plan):
    assert_alike(told(tmp_path, ATTACHED_GAN, plan)["weights"], own["weights"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["shard=2", "data=2 microbatches=2", "shard=2 recompute=full"])
def test_losses_of_two_models_as_functions(tmp_path, own, plan):
    assert_alike(told(tmp_path, FUNCTIONS, plan)["weights"], own["weights"])


COUNTING = """
from paceline.training.replicas.inplace_parameters import Edits

merges, merge = [], Edits.merge
Edits.merge = lambda *given, **named: merges.append(0) or merge(*given, **named)
"""


def test_an_update_between_two_backwards_is_no_edit(tmp_path):
    """An edit of a parameter by a forward costs messages of whole parameters."""
    script = ATTACHED_GAN.replace("run = pl.attach", COUNTING + "run = pl.attach")
    script = script.replace('"critic": critic}))', '"critic": critic}), merges=len(merges))')

    assert told(tmp_path, script, "data=2")["merges"] == 0


def test_a_model_that_gets_gradients_which_nothing_uses_is_named(tmp_path):
    script = ATTACHED_GAN.replace(', "generator")\n        run.update', ")\n        run.update")

    with pytest.raises(TrainingError, match=r"'critic\.bias'") as error:
        alone(tmp_path, script)

    assert "run.backward(loss, 'generator')" in error.value.hint


def test_a_clip_of_an_unknown_optimizer_is_refused(tmp_path):
    script = ATTACHED_GAN.replace("    loader,\n)", "    loader,\n    clip={'critc': 1.0},\n)")

    with pytest.raises(JobError, match="clip is given for 'critc'") as error:
        alone(tmp_path, script)

    assert "did you mean 'critic'" in error.value.hint


def test_a_loss_as_a_function_is_called_for_each_micro_batch(tmp_path):
    own = told(tmp_path / "own", OWN)

    assert_alike(
        told(tmp_path / "cut", FUNCTION, "data=2 microbatches=2")["weights"], own["weights"]
    )


LOGGED = (
    FUNCTION.replace("batch_size=8", "batch_size=5")
    .replace("lambda batch: F.cross_entropy(model(batch[0]), batch[1])", "loss_of")
    .replace(
        "for epoch",
        """
def loss_of(batch):
    rows.append((run.rows, len(batch[0])))
    run.log(first=batch[0][:, 0].mean(), total=pl.total(batch[0][:, 0].sum()))
    return F.cross_entropy(model(batch[0]), batch[1])


for epoch""",
        1,
    )
)


@pytest.mark.slow
def test_figures_of_a_micro_batch_are_weighed_by_its_rows(tmp_path):
    """Three and two rows of each batch, and of the last one a single row."""
    whole = told(tmp_path / "whole", LOGGED, "single")
    cut = told(tmp_path / "cut", LOGGED, "single microbatches=2")

    assert all(here == given for here, given in cut["rows"])
    assert lines(cut["run"], "logged") == [
        pytest.approx(figures, rel=1e-12) for figures in lines(whole["run"], "logged")
    ]


def test_a_tensor_is_refused_under_micro_batches_before_anything_is_updated(tmp_path, capfd):
    script = FUNCTION.replace(
        "run.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))",
        "before = model[0].weight.clone()\n        try:\n"
        "            run.backward(F.cross_entropy(model(batch[0]), batch[1]))\n"
        "        finally:\n            print('equal', torch.equal(before, model[0].weight))",
    )

    with pytest.raises(RankFailed, match=r"run\.backward\(function\)") as error:
        told(tmp_path, script, "single microbatches=2")

    assert error.value.failure.kind == PlanRefused.__name__
    assert "equal True" in capfd.readouterr().err


TWICE = ATTACHED.replace(
    "        run.backward(loss)",
    "        before = model[0].weight.clone()\n        run.backward(loss)\n        try:\n"
    "            run.backward(F.cross_entropy(model(x), y))\n"
    "        finally:\n            print('equal', torch.equal(before, model[0].weight))",
)


def test_a_batch_with_several_backwards_is_not_watched_for_spikes(tmp_path, capsys):
    """It is refused at the second one, before an update that may come behind it."""
    with pytest.raises(JobError, match=r"run\.backward 2 times") as error:
        alone(tmp_path, TWICE, on_spike="skip")

    assert "equal True" in capsys.readouterr().out and error.value.hint
    with pytest.raises(JobError, match=r"run\.backward 2 times"):
        alone(tmp_path, ATTACHED_GAN, on_spike="skip")


def test_two_models_go_on_under_another_plan(tmp_path, own, monkeypatch):
    script = ATTACHED_GAN.replace("run.epochs(2)", 'run.epochs(int(os.environ["EPOCHS"]))')
    run = tmp_path / "run"
    monkeypatch.setenv("EPOCHS", "1")
    told(tmp_path, script, "data=2", run=run)
    monkeypatch.setenv("EPOCHS", "2")

    assert_alike(told(tmp_path, script, "single", run=run, resume=True)["weights"], own["weights"])
