"""Checkpoints, restarts, evaluation and what else a run has, of a script that keeps its loop."""

from __future__ import annotations

import json

import pytest

import paceline as pl
from paceline.launch.process.failure import RankFailed
from paceline.reports.record import RunRecord
from tests.attached.scripts import ATTACHED, OWN, SETUP, assert_alike, lines, told

COUNTED = (
    SETUP
    + """
class Counter:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


counter, average, seen = Counter(), copy.deepcopy(model), {"rows": [0]}
run = pl.attach(model, optimizer, loader, schedule=schedule, clip=0.3,
                state={"counter": counter, "average": average, "seen": seen})
for x, y in run.steps(int(os.environ.get("STEPS", 8))):
    loss = F.cross_entropy(model(x), y)
    run.backward(loss)
    run.update()
    counter.count += 1
    seen["rows"].append(run.step)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    with torch.no_grad():
        for mean, p in zip(average.parameters(), whole):
            mean.lerp_(p, 0.1)
    if run.rank == 1 and run.step == 5 and not os.path.exists(os.environ["TOLD"] + ".killed"):
        if "KILL" in os.environ:
            open(os.environ["TOLD"] + ".killed", "w").close()
            os.kill(os.getpid(), 9)
tell(count=counter.count, seen=seen, average=[p.tolist() for p in average.parameters()])
"""
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return told(tmp_path_factory.mktemp("whole"), COUNTED, "single")


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("STEPS", "5")
    told(tmp_path, COUNTED, "data=2", run=tmp_path / "run")
    monkeypatch.setenv("STEPS", "8")

    resumed = told(tmp_path, COUNTED, "shard=2", run=tmp_path / "run", resume=True)

    assert_alike(resumed["weights"], whole["weights"])
    assert resumed["count"] == whole["count"] == 8
    assert resumed["seen"] == whole["seen"] == {"rows": [0, *range(8)]}
    assert flat(resumed["average"]) == pytest.approx(flat(whole["average"]), rel=1e-9)
    audit = pl.audit(tmp_path / "run")
    assert audit.passed, audit.describe()


def flat(value):
    return [value] if isinstance(value, float) else [x for item in value for x in flat(item)]


def test_a_killed_rank_starts_again(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("KILL", "1")

    recovered = told(tmp_path, COUNTED, "data=2", run=tmp_path / "run", restarts=2, save_every=2)

    assert (tmp_path / "told.json.killed").exists()
    assert_alike(recovered["weights"], whole["weights"])
    assert recovered["count"] == 8


KILLED = (
    SETUP
    + """
class Counts(pl.Callback):
    def __init__(self):
        self.steps = 0

    def on_step(self, run, step):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def on_end(self, run, result):
        print("counted", self.steps)


run = pl.attach(model, optimizer, loader, callbacks=[Counts()])
for x, y in run.steps(12):
    loss = F.cross_entropy(model(x), y)
    run.backward(loss)
    run.update()
    run.log(number=loss * 0 + run.step)
    path = os.environ["TOLD"] + ".killed"
    if run.rank == 1 and run.step == 7 and not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
tell()
"""
)


def test_callbacks_and_logged_figures_go_on_from_memory(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SIGNAL", "9")

    recovered = told(tmp_path, KILLED, "data=2", restarts=2)

    output = capfd.readouterr().err
    assert "resumed from" in output and "resumed from step-" not in output
    assert "counted 12" in output
    assert lines(recovered["run"], "logged") == [{"number": step} for step in range(12)]
    assert [row["metrics"]["number"] for row in RunRecord.read(recovered["run"]).steps] == [
        *range(12)
    ]


def test_a_run_that_is_stopped_keeps_its_logged_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNAL", "15")
    run = tmp_path / "run"
    with pytest.raises(RankFailed):
        told(tmp_path, KILLED, "data=2", run=run)
    taken = len(lines(run, "loss"))
    assert taken >= 8
    assert lines(run, "logged") == [{"number": step} for step in range(taken)]

    told(tmp_path, KILLED, "data=2", run=run, resume=True)

    assert lines(run, "logged") == [{"number": step} for step in range(12)]


EVALUATED = (
    SETUP
    + """
held_out = TensorDataset(torch.randn(7, 4), torch.randint(0, 3, (7,)))
loss_of = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
run = pl.attach(model, optimizer, loader)
measured = []
assert len(run) == 4
for epoch in run.epochs(2):
    for x, y in run:
        run.backward(loss_of((x, y)))
        run.update()
    measured.append(run.evaluate(loss_of, DataLoader(held_out, batch_size=3)))
    whole = run.evaluate(
        lambda batch: {"loss": loss_of(batch), "right": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))},
        DataLoader(held_out, batch_size=3),
    )
    assert whole["loss"] == measured[-1] and model.training
with torch.no_grad():
    expected = loss_of(held_out[:]).item() if not hasattr(model[0].weight, "full_tensor") else None
tell(measured=measured, expected=expected)
"""
)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_an_evaluation_counts_each_row_once(tmp_path, plan):
    evaluated = told(tmp_path, EVALUATED, plan)

    assert len(evaluated["measured"]) == 2
    if evaluated["expected"] is not None:
        assert evaluated["measured"][-1] == pytest.approx(evaluated["expected"], rel=1e-12)
    assert lines(evaluated["run"], "evaluated")[0] == {"value": evaluated["measured"][0]}


def test_the_run_folder_is_that_of_any_run(tmp_path):
    ended = told(tmp_path, ATTACHED, "data=2", save_every=3)

    summary = json.loads((ended["run"] / "summary.json").read_text())
    assert summary["steps"] == 8 and summary["plan"] == "data=2"
    assert {path.name for path in (ended["run"] / "checkpoints").iterdir()} >= {"step-3", "step-8"}
    assert (ended["run"] / "model.safetensors").exists()


JUDGED = (
    ATTACHED.replace(
        "schedule=schedule,",
        "callbacks=[pl.EarlyStopping(patience=2), pl.KeepBest(monitor='wrong', mode='min')],",
    )
    .replace(
        "tell()",
        """    run.evaluate(lambda batch: {'loss': torch.tensor(1.0), 'wrong': torch.tensor(float(epoch))}, data)
tell()""",
    )
    .replace("epochs(2)", "epochs(9)")
)


def test_callbacks_judge_a_run_by_what_the_script_evaluates(tmp_path):
    ended = told(tmp_path, JUDGED, "data=2")

    assert ended["figures"]["steps"] == 12 and "stopped" in ended["figures"]
    best = json.loads((ended["run"] / "best.json").read_text())
    assert best["checkpoints"] == [{"step": 4, "value": 0.0}]
    assert (ended["run"] / "checkpoints" / "step-4").exists()


WATCHED = (
    ATTACHED.replace(
        "run = pl.attach(",
        """
class Watch(pl.Callback):
    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_step(self, run, step):
        self.steps.append(step.step)

    def on_evaluation(self, run, evaluation):
        self.evaluations.append(evaluation.validation_loss)
        run.stop("enough")

    def on_end(self, run, result):
        print("told", self.steps, len(self.evaluations), result["steps"])


run = pl.attach(callbacks=[Watch()], model=""",
        1,
    )
    .replace("model=model, optimizer, loader", "model=model, optimizer=optimizer, loader=loader")
    .replace(
        "tell()",
        "    run.evaluate(lambda batch: {'loss': F.cross_entropy(model(batch[0]), batch[1])}, data)\ntell()",
    )
)


def test_callbacks_hear_of_steps_and_evaluations_and_stop_the_run(tmp_path, capfd):
    ended = told(tmp_path, WATCHED, "data=2")

    assert "told [1, 2, 3, 4] 1 4" in capfd.readouterr().err
    assert ended["figures"]["stopped"] == "enough"


def spiking(text: str) -> str:
    """Return a script whose third batch has a loss that is not a number."""
    return text.replace("model(x), y)", "model(x), y) * (float('nan') if len(losses) == 2 else 1)")


SPIKING = spiking(ATTACHED).replace(
    "        rows.append(run.rows)", "        losses.append(loss.item())"
)
OWN_SPIKING = spiking(OWN).replace(
    "        optimizer.zero_grad()",
    "        if len(losses) == 2:\n            losses.append(0.0)\n            continue\n        optimizer.zero_grad()",
)


@pytest.mark.slow
def test_a_batch_that_is_a_spike_is_left_out(tmp_path):
    own = told(tmp_path / "own", OWN_SPIKING)

    skipped = told(tmp_path, SPIKING, "data=2", on_spike="skip")

    assert_alike(skipped["weights"], own["weights"])
    assert skipped["figures"]["spikes"] == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"on_spike": "stop"}])
def test_a_spike_ends_the_run_and_leaves_its_rows(tmp_path, options):
    """A loss that is not a number is one, whether it is watched for or not."""
    with pytest.raises(RankFailed, match="is not a number"):
        told(tmp_path, SPIKING, "data=2", run=tmp_path / "run", **options)

    assert list((tmp_path / "run" / "spikes" / "step-3").glob("rank-*.safetensors"))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("before", "taken"), [("        run.update()", 5), ("        run.log", 6)])
def test_one_rank_stops_the_run_on_all(tmp_path, before, taken):
    """After this step, or after the next one if the ranks have met in this one."""
    asks = f"        if run.rank == 1 and run.step == 4:\n            run.stop()\n{before}"
    stopped = told(tmp_path / "stopped", ATTACHED.replace(before, asks), "data=2")

    assert stopped["figures"]["steps"] == taken
    assert stopped["figures"]["stopped"] == "the script asked for it"
    whole = ATTACHED.replace(
        "for epoch in run.epochs(2):\n    for x, y in run:",
        f"if 1:\n    for x, y in run.steps({taken}):",
    )
    assert_alike(stopped["weights"], told(tmp_path / "whole", whole, "single")["weights"])


def test_a_loop_that_is_left_between_epochs_ends_the_run(tmp_path):
    left = told(tmp_path, ATTACHED.replace("tell()", "    break\ntell()"), "data=2")

    assert left["figures"]["steps"] == 4 and (left["run"] / "model.safetensors").exists()
