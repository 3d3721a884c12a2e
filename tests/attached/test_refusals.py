"""What a loop does wrong is said in words, with what to write instead."""

from __future__ import annotations

import pytest
import torch

from paceline.attached.given import Given
from paceline.attached.session import ScriptProcess
from paceline.base.errors import JobError, PacelineError, PlanError, TrainingError
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings
from tests.attached.scripts import ATTACHED, SETUP, alone

LOOP = ATTACHED.partition("run = ")[2]
WRONG = {
    "no update": ("        run.update()\n", "", "no run.update() has used"),
    "its own update": (
        "        run.update()",
        "        optimizer.step()\n        optimizer.zero_grad()",
        "no run.update() has used a gradient of step 1",
    ),
    "no backward": (
        "        run.backward(loss)\n        run.update()\n",
        "",
        "nothing was trained",
    ),
    "its own backward": ("run.backward(loss)", "loss.backward()", "finds no gradient"),
    "a loss of another model": (
        "        loss = F.cross_entropy(model(x), y)",
        "        loss = F.cross_entropy(copy.deepcopy(model)(x), y)",
        "no loss of this batch uses what run.update() updates, such as '0.bias'",
    ),
    "a scaler of losses": (
        "pl.attach(",
        "(scaler := torch.amp.GradScaler('cpu')) and pl.attach(",
        "scales its losses by 'scaler'",
    ),
    "gradients removed": (
        "        run.update()",
        "        optimizer.zero_grad()\n        run.update()",
        "were removed before run.update()",
    ),
    "leaves an epoch": (
        "        run.log(loss=loss)",
        "        break",
        "leaves epoch 0 before its end",
    ),
    "a second pass in an epoch": (
        "    for x, y in run:",
        "    for x, y in run:\n        run.backward(F.cross_entropy(model(x), y))\n        run.update()\n"
        "    for x, y in run:",
        "a second time in epoch 0",
    ),
    "a data set that grows": (
        "for epoch in run.epochs(2):",
        "for epoch in run.epochs(2):\n"
        "    data.tensors = tuple(torch.cat([t, t[:epoch]]) for t in data.tensors)",
        "has 27 items at the beginning of epoch 1, and had 26",
    ),
    "batches without epochs": (
        "for epoch in run.epochs(2):",
        "if True:",
        "outside of the run's epochs",
    ),
    "an optimizer of other parameters": (
        "run = pl.attach",
        "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.zeros(3))]})\nrun = pl.attach",
        "1 parameters that are not of the model, the first of shape (3,)",
    ),
    "a list of batches": ("optimizer, loader,", "optimizer, list(loader),", "a list as loader"),
    "an optimizer that evaluates": (
        "run = pl.attach",
        "optimizer = torch.optim.LBFGS(model.parameters())\nrun = pl.attach",
        "LBFGS evaluates the loss itself",
    ),
    "a schedule of another optimizer": (
        "run = pl.attach",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nrun = pl.attach",
        "the schedule is of another optimizer",
    ),
    "state without state_dict": (
        "clip=0.3)",
        "clip=0.3, state={'file': object()})",
        "state 'file' is of object, without state_dict",
    ),
    "twice": (
        "run = pl.attach",
        "pl.attach(model, optimizer, loader)\nrun = pl.attach",
        "a second time",
    ),
    "DataParallel": (
        "pl.attach(model",
        "pl.attach(torch.nn.DataParallel(model)",
        "divides batches itself",
    ),
    "verbs outside of a batch": (
        "    for x, y in run:",
        "    run.update()\n    for x, y in run:",
        "no batch",
    ),
    "an unknown optimizer": ("run.update()", "run.update('critic')", "no optimizer 'critic'"),
    "a loss that is no scalar": ("run.backward(loss)", "run.backward(model(x))", "is not a scalar"),
    "never attached": (
        "run = pl.attach",
        "raise SystemExit\nrun = pl.attach",
        "without a run of its own",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_named(tmp_path, wrong):
    old, new, message = WRONG[wrong]
    assert old in SETUP + LOOP or old in ATTACHED

    with pytest.raises(PacelineError) as error:
        alone(tmp_path, ATTACHED.replace(old, new))

    assert message in str(error.value)
    assert isinstance(error.value, JobError | TrainingError) and error.value.hint


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("servers=1 workers=1", "in a loop of its own"),
        ("data=2 local=4", "in a loop of its own"),
        ("data=30", "30 replicas and the data has 26 samples"),
    ],
)
def test_a_plan_that_can_not_run_a_loop_is_refused(plan, why):
    context = RankContext(0, 2, 2, torch.device("cpu"), None, HeartbeatTable(1), 0, "test")
    session = ScriptProcess(context, Plan.read(plan), Settings(None, (1, 1)))
    data = torch.utils.data.TensorDataset(torch.zeros(26, 4))
    model = torch.nn.Linear(4, 1)
    given = Given(model, torch.optim.SGD(model.parameters(), lr=0.1), None)

    with pytest.raises(PlanError, match=why):
        session.check(
            given.job(torch.utils.data.DataLoader(data, batch_size=40), state={}, steps=1)
        )
