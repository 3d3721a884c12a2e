"""A whole search: trials of one and of many ranks, pruning, failures, and what is left of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
from jobs.studies import WORKS

import paceline as pl
from paceline.base.errors import JobError, PacelineError, UsageError
from paceline.job.file import JobFile
from paceline.runs import folder
from paceline.searches.storage import open_storage


def states(study: Any) -> list[str]:
    return [trial["state"] for trial in study["trials"]]


def test_a_search_finds_the_best_and_leaves_all_that_is_promised(job: str, tmp_path: Path):
    """study.json, the winner's test figures, figures to look at, and a configuration that trains to the same value."""
    run = tmp_path / "run"
    study = pl.search(job, 8, settings=WORKS, procs=2, run=run, seed=1)
    document = json.loads((run / "study.json").read_text())
    assert len(document["trials"]) == 8 and set(states(document)) <= {"complete", "pruned"}
    complete = [trial for trial in document["trials"] if trial["state"] == "complete"]
    best = document["best"]
    assert best["value"] == min(trial["value"] for trial in complete)
    assert (
        set(best["params"]) == {"lr", "width", "net.act"}
        and study["best"]["params"] == best["params"]
    )
    kept = [path.parent.name for path in run.glob(f"trials/*/{folder.MODEL}")]
    assert kept == [str(best["trial"])]  # the weights of the best alone
    assert document["test"]["loss"] > 0 and set(document["importances"]) == {
        "lr",
        "width",
        "net.act",
    }

    trained = pl.train(JobFile.parse(job, best["settings"]), best["plan"], run=tmp_path / "again")
    assert trained["validation_loss"] == best["value"]
    assert pl.evaluate(run / "trials" / str(best["trial"]))["validation_loss"] == pytest.approx(
        best["value"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "trials", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(550)])]
)
def test_trials_of_one_and_of_two_ranks_see_the_same_parameters_on_every_rank(
    job: str, tmp_path: Path, trials: int
):
    """Three devices, packed; what each rank built is in its log."""
    run, began_s = tmp_path / "run", time.monotonic()
    study = pl.search(
        job,
        trials,
        settings=WORKS,
        procs=3,
        run=run,
        pruner="none",
        sampler="random",
        plan=lambda params: "data=2" if params["width"] % 2 else "single",
    )
    print(f"{trials} trials in {time.monotonic() - began_s:.1f} s")
    assert states(study) == ["complete"] * trials
    plans = {trial["number"]: trial["plan"] for trial in study["trials"]}
    assert set(plans.values()) == {"data=2", "single"}
    for trial in study["trials"]:
        logs = sorted((run / "trials" / str(trial["number"]) / "logs").glob("rank-*.log"))
        built = {
            line
            for log in logs
            for line in log.read_text().splitlines()
            if line.startswith("built")
        }
        kind = {"relu": "ReLU", "tanh": "Tanh"}[trial["params"]["net.act"]]
        assert len(logs) == (2 if plans[trial["number"]] == "data=2" else 1)
        assert built == {f"built {trial['params']['width']} {kind}"}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "data=2"])
def test_a_pruned_trial_ends_on_all_ranks_long_before_its_end(job: str, tmp_path: Path, plan: str):
    """And the next trial begins on the same devices."""
    from optuna.pruners import ThresholdPruner

    run = tmp_path / "run"
    with pytest.raises(PacelineError, match="no trial was trained to its end: 3 pruned"):
        pl.search(
            job,
            3,
            settings={**WORKS, "epochs": 100_000, "pause_s": 0.005},
            procs=2,
            plan=plan,
            run=run,
            pruner=ThresholdPruner(upper=1e-9),
        )
    study = json.loads((run / "study.json").read_text())
    assert states(study) == ["pruned"] * 3
    for number in range(3):
        lines = [
            *map(
                json.loads,
                (run / "trials" / str(number) / "metrics.jsonl").read_text().splitlines(),
            )
        ]
        assert lines[-1]["step"] < 10_000  # of 100,000 epochs, and 50 s of steps or more


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.005, 0.2, 0.4, 1.5])
@pytest.mark.parametrize("plan", ["single", "data=2", "data=3"])
def test_all_ranks_of_a_pruned_trial_have_ended_a_second_after_the_pruner_said_so(
    job: str, tmp_path: Path, plan: str, pause_s: float
):
    """Whether a step takes them less or more than they have."""
    from optuna.pruners import ThresholdPruner

    pruned_at: dict[int, datetime] = {}

    class Noted(ThresholdPruner):
        def prune(self, study: Any, trial: Any) -> bool:
            is_pruned = super().prune(study, trial)
            if is_pruned:
                pruned_at[trial.number] = datetime.now()
            return is_pruned

    run, num_trials = tmp_path / "run", 3
    with pytest.raises(PacelineError, match=f"{num_trials} pruned"):
        pl.search(
            job,
            num_trials,
            settings={**WORKS, "epochs": 10_000, "pause_s": pause_s},
            procs=3,
            plan=plan,
            run=run,
            pruner=Noted(upper=1e-9),
        )
    ended = {
        trial.number: trial.datetime_complete
        for trial in optuna.load_study(study_name="run", storage=open_storage(None, run)).trials
    }
    slowest_s = max(
        (ended[number] - pruned_at[number]).total_seconds() for number in range(num_trials)
    )
    print(f"{plan}, {pause_s} s a batch: ended {slowest_s:.3f} s after the pruner said so, at most")
    assert slowest_s < 1.0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("how", "cause"), [("nan", "not a number|nan"), ("error", "no such luck"), ("dies", "SIGKILL")]
)
def test_trials_that_fail_are_marked_and_the_others_go_on(
    job: str, tmp_path: Path, how: str, cause: str
):
    """Under one rank and under two."""
    import re

    study = pl.search(
        job,
        6,
        vary={"fails": f"no,{how}"},
        sampler="random",
        procs=2,
        run=tmp_path / "run",
        seed=4,
        plan=lambda params: "data=2" if params["width"] % 2 else "single",
        pruner="none",
    )
    for trial in study["trials"]:
        assert trial["state"] == ("complete" if trial["params"]["fails"] == "no" else "failed")
        assert trial["state"] == "complete" or re.search(cause, trial["reason"])
    assert {"complete", "failed"} == set(states(study))


def test_when_all_trials_are_refused_a_limit_is_named(job: str, tmp_path: Path):
    """With what it was of the last one."""
    with pytest.raises(
        PacelineError, match=r"3 refused, the last because parameters is .* and may be 1 at most"
    ):
        pl.search(job, 3, settings=WORKS, procs=2, run=tmp_path / "run", limits=["parameters<=1"])


def test_when_all_trials_fail_their_common_cause_is_told_once(job: str, tmp_path: Path):
    """And the search gives up before its budget is spent."""
    with pytest.raises(PacelineError) as caught:
        pl.search(job, 50, settings={"fails": "error"}, procs=2, run=tmp_path / "run")
    message = str(caught.value)
    assert (
        "trials all failed" in message
        and message.count("no such luck") == 1
        and "net.py:" in message
    )
    assert len(json.loads((tmp_path / "run" / "study.json").read_text())["trials"]) < 12


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "reason",
    [
        'f"no such luck: {lr} at {os.getcwd()}/trial-{width}/x.txt, {object()}"',
        'f"{lr!r} is no {width}"',
        """f"there is no '{'ab'[width % 2]}' in /tmp/{width}\"""",
    ],
)
def test_one_reason_is_one_reason_whatever_numbers_and_paths_it_has(
    job: str, tmp_path: Path, reason: str
):
    Path(job).write_text(Path(job).read_text().replace('"no such luck"', reason))
    with pytest.raises(PacelineError, match="trials all failed"):
        pl.search(job, 15, settings={"fails": "error"}, procs=1, run=tmp_path / "run")
    assert len(json.loads((tmp_path / "run" / "study.json").read_text())["trials"]) < 8


def test_a_space_and_a_job_may_prune_a_trial(
    job: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """With Optuna's own exception, as its users do; the search goes on. What is not varied is said."""
    Path(job).write_text(
        Path(job)
        .read_text()
        .replace(
            "    def judged(",
            """    if width == 5:
        import optuna
        raise optuna.TrialPruned("too wide")
    def judged(""",
        )
    )

    def space(trial: Any) -> dict[str, Any]:
        if trial.number % 3 == 2:
            raise optuna.TrialPruned
        return {"width": 4 + trial.number % 3}

    study = pl.search(job, 7, settings=WORKS, space=space, procs=2, run=tmp_path / "run")
    reasons = [None, "the job pruned it: too wide", "the space pruned it: "]
    assert [trial.get("refused") for trial in study["trials"]] == [
        reasons[number % 3] for number in range(7)
    ]
    assert states(study) == ["refused" if number % 3 else "complete" for number in range(7)]
    assert "not varied" not in capfd.readouterr().err
    pl.search(job, 1, settings=WORKS, procs=1, run=tmp_path / "more")
    assert "not varied: epochs=3 pause_s=0; --vary" in capfd.readouterr().err


def test_an_objective_may_have_any_name_that_a_metric_can_have(job: str, tmp_path: Path):
    """With a colon, which also parts it from its direction, and with a slash, which also parts folders."""
    Path(job).write_text(Path(job).read_text().replace('"worst":', '"val/top:1":'))
    for objective in ("val/top:1", ["val/top:1:max", "loss"]):
        study = pl.search(
            job,
            2,
            settings=WORKS,
            objective=objective,
            procs=1,
            run=tmp_path / f"run-{len(objective)}",
        )
        assert study["objectives"][0]["name"] == "val/top:1"
        assert study["objectives"][0]["direction"] == (
            "maximize" if isinstance(objective, list) else "minimize"
        )


def test_a_figure_that_is_not_a_number_for_a_while_does_not_prune(job: str, tmp_path: Path):
    """A pruner would give it up; its last value counts."""
    text = Path(job).read_text()
    early = (
        text.replace(
            '{"worst": lambda output, target: (output[:, 0] - target).abs().mean()}',
            '{"worst": Early()}',
        )
        + """
class Early:
    seen = 0

    def __call__(self, output, target):
        self.seen += 1
        return (output[:, 0] - target).abs().mean() + (float("nan") if self.seen < 3 else 0.0)
"""
    )
    assert early.count("Early()") == 1
    Path(job).write_text(early)
    study = pl.search(
        job,
        6,
        settings={**WORKS, "epochs": 4},
        procs=1,
        run=tmp_path / "run",
        objective="worst",
        pruner=optuna.pruners.ThresholdPruner(upper=1e9),
    )
    assert states(study) == ["complete"] * 6


@pytest.mark.slow
def test_trials_that_fail_at_once_do_not_end_a_search_while_an_older_one_runs(
    job: str, tmp_path: Path
):
    """A trial that works takes longer than ten that fail."""
    study = pl.search(
        job,
        10,
        procs=2,
        run=tmp_path / "run",
        vary={"lr": "0.01,0.02"},
        pruner="none",
        space=lambda trial: (
            {"fails": "error", "pause_s": 0.0} if trial.number else {"fails": "no", "pause_s": 0.3}
        ),
    )
    assert states(study) == ["complete"] + ["failed"] * 9


@pytest.mark.slow
def test_limits_refuse_before_training_and_predictions_are_objectives(job: str, tmp_path: Path):
    """A refused trial has no training in its folder; the Pareto front weighs loss and size."""
    run = tmp_path / "run"
    study = pl.search(
        job,
        6,
        settings=WORKS,
        procs=2,
        run=run,
        objective=["validation_loss", "parameters"],
        limits=["parameters<=60", "step_ms<=1000"],
        sampler="random",
    )
    for trial in study["trials"]:
        size = 6 * trial["params"]["width"] + 1
        assert trial["figures"]["parameters"] == size and trial["state"] == (
            "complete" if size <= 60 else "refused"
        )
        assert (run / "trials" / str(trial["number"]) / "metrics.jsonl").exists() == (size <= 60)
        assert size <= 60 or trial["refused"] == f"parameters is {size} and may be 60 at most"
    assert {"complete", "refused"} == set(states(study))
    front = [trial["values"] for trial in study["pareto"]]
    assert front and not any(a[0] < b[0] and a[1] < b[1] for a in front for b in front)


def test_a_space_can_have_conditions(job: str, tmp_path: Path):
    """A function of Optuna's trial gives what depends on each other."""

    def space(trial: Any) -> dict[str, Any]:
        width = trial.suggest_int("width", 2, 4)
        return {
            "width": width,
            "lr": trial.suggest_float("lr", 0.01, 0.1) if width > 2 else 0.05,
        }

    study = pl.search(
        job, 6, settings=WORKS, space=space, procs=2, run=tmp_path / "run", sampler="random"
    )
    for trial in study["trials"]:
        assert trial["params"]["width"] <= 4
        assert (trial["params"]["lr"] == 0.05) == (trial["params"]["width"] == 2)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            lambda trial: {"width": trial.suggest_int("width", 8, 2)},
            "the space raised ValueError at .*test_search.py",
        ),
        (
            lambda trial: {"widht": 3},
            "the space gave widht; it must return a dict of parameters of job",
        ),
        (lambda trial: 3, "the space gave int"),
    ],
)
def test_a_space_that_is_wrong_is_blamed(job: str, tmp_path: Path, space: Any, message: str):
    """With its place, or with what it may give."""
    with pytest.raises(JobError, match=message):
        pl.search(job, 2, settings=WORKS, space=space, procs=1, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "at least 1 trial"),
        ({"objective": "accuracy"}, "reports no 'accuracy', known: validation_loss, worst, loss"),
        ({"objective": "worst:most"}, "NAME, NAME:min or NAME:max"),
        ({"objective": ["worst", "worst:max"]}, "given twice"),
        ({"limits": ["worst<=1"]}, "limits can't be on 'worst'"),
        ({"limits": ["step_ms"]}, "NAME<=NUMBER"),
        (
            {"settings": {"lr": 1, "width": 2, "fails": "no", "net.act": "relu"}},
            "nothing to search",
        ),
        ({"settings": {"lrr": 1}}, "did you mean 'lr'"),
        ({"vary": {"lr": "1..0"}}, "low is above high"),
        ({"sampler": "tpf"}, "did you mean 'tpe'"),
        ({"pruner": "medien"}, "did you mean 'median'"),
        ({"objective": ["worst", "loss"], "pruner": "median"}, "goes by one objective"),
        ({"objective": ["worst", "loss"], "sampler": "cmaes"}, "can't weigh 2 objectives"),
        ({"plan": "data=4"}, "needs 4 devices a trial and the search has 2"),
        ({"plan": "dada=2"}, "dada"),
        ({"storage": "study.db"}, "not a URL"),
        ({"settings": {"fails": object()}}, "settings must be numbers"),
        ({"resume": True}, "needs the run folder"),
        ({"space": "spaces"}, "takes a function of Optuna's trial, and got str"),
    ],
)
def test_requests_that_make_no_sense(
    job: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each is refused with what was given and what is allowed; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    arguments = {"trials": 2, "procs": 2, **options}
    with pytest.raises(UsageError, match=message):
        pl.search(job, arguments.pop("trials"), **arguments)
    assert not list(tmp_path.glob("runs/*/trials/*/metrics.jsonl"))


@pytest.mark.slow
def test_the_planner_gives_a_trial_the_devices_whose_memory_holds_it(job: str, tmp_path: Path):
    """A wide net is sharded over both; without the planner it runs out of memory, and the others go on."""
    options = {
        "settings": {**WORKS, "epochs": 1, "net.act": "relu", "lr": 0.01},
        "vary": {"width": "8,1200000"},
        "procs": 2,
        "memory": "200MiB",
        "sampler": "random",
        "seed": 2,
    }
    study = pl.search(job, 4, plan="auto", run=tmp_path / "auto", **options)
    plans = {trial["params"]["width"]: trial["plan"] for trial in study["trials"]}
    assert states(study) == ["complete"] * 4 and set(plans) == {8, 1200000}
    assert plans[8] == "single" and plans[1200000] != "single"

    for trial in _apart(job, 4, run=str(tmp_path / "single"), **{**options, "memory": "60MiB"}):
        small = trial["params"]["width"] == 8
        assert (trial["state"], trial.get("kind")) == (
            ("complete", None) if small else ("failed", "OutOfMemory")
        )


def _apart(job: str, trials: int, **options: Any) -> Any:
    """The trials of a search in a process of its own: ranks may use what the heap they are forked with has free."""
    script = (
        "import json, sys, paceline; job, trials, options = json.loads(sys.argv[1]);"
        "print(json.dumps(paceline.search(job, trials, **options)['trials']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([job, trials, options])],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])  # what ranks print comes before it


def test_a_sampler_that_has_no_more_ends_the_study(job: str, tmp_path: Path):
    """As Optuna's grid does, before the budget is used up; a device that is free first takes a point of it again."""
    from optuna.samplers import GridSampler

    grid = {"width": [2, 4], "net.act": ["relu", "tanh"]}
    study = pl.search(
        job,
        9,
        settings={**WORKS, "lr": 0.01},
        procs=2,
        run=tmp_path / "run",
        sampler=GridSampler(grid, seed=0),
        pruner="none",
    )
    assert states(study) in (["complete"] * 4, ["complete"] * 5)
    assert {
        (trial["params"]["width"], trial["params"]["net.act"]) for trial in study["trials"]
    } == {(width, act) for width in grid["width"] for act in grid["net.act"]}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "shard=2", "pipeline=2", "servers=1 workers=1"])
def test_a_trial_equals_the_training_of_its_settings(job: str, tmp_path: Path, plan: str):
    """To the last bit, under the same plan; the process that runs it has run others before."""
    study = pl.search(
        job, 3, settings=WORKS, plan=plan, procs=2, run=tmp_path / "run", pruner="none"
    )
    assert states(study) == ["complete"] * 3
    trained = pl.train(JobFile.parse(job, study["best"]["settings"]), plan, run=tmp_path / "again")
    assert trained["validation_loss"] == study["best"]["value"]


@pytest.mark.slow
def test_many_short_trials_of_one_and_of_two_ranks_leave_no_device_idle_for_ever(
    job: str, tmp_path: Path
):
    """With pruning, failures and deaths among them."""
    study = pl.search(
        job,
        40,
        settings={"epochs": 2},
        vary={"fails": "no,nan,dies"},
        procs=3,
        run=tmp_path / "run",
        sampler="random",
        seed=1,
        plan=lambda params: "data=2" if params["width"] % 2 else "single",
    )
    assert len(study["trials"]) == 40 and set(states(study)) >= {"complete", "failed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("data=3", "plan 'data=3' needs 3 devices and 2 is the most that a trial can have"),
        ("dada=2", "dada"),
        (lambda: 1 / 0, "plan= raised ZeroDivisionError at .*test_search.py"),
    ],
)
def test_a_plan_that_makes_no_sense_fails_its_own_trial(
    job: str, tmp_path: Path, plan: Any, reason: str
):
    """Of a function of the parameters; the others go on."""
    import re

    study = pl.search(
        job,
        6,
        settings=WORKS,
        vary={"width": "2,3"},
        procs=2,
        run=tmp_path / "run",
        sampler="random",
        seed=1,
        pruner="none",
        plan=lambda params: (
            (plan() if callable(plan) else plan) if params["width"] == 2 else "data=2"
        ),
    )
    for trial in study["trials"]:
        assert trial["state"] == ("failed" if trial["params"]["width"] == 2 else "complete")
        assert trial["state"] == "complete" or re.search(reason, trial["reason"])
    assert {"complete", "failed"} == set(states(study))
