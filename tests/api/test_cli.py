"""The command line calls the functions of the same names; stdout is their result alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from called import call
from commands import Command
from later import needed

import paceline
from paceline.api import pages
from paceline.base.errors import (
    ClusterError,
    MissingPackage,
    OutOfMemory,
    PacelineError,
    PeerLost,
    PlanError,
    Preempted,
    UsageError,
)
from paceline.doctor import machine
from paceline.doctor.machine import Finding

FIGURES = {
    "plan": "data=2",
    "world_size": 2,
    "steps": 1200,
    "samples": 38400,
    "samples_per_s": 12345.6,
    "final_loss": 0.25,
    "validation_loss": None,
    "metrics": {"accuracy": 0.97},
    "wall_s": 3.2,
    "peak_memory_bytes": 3 * 2**20,
    "predicted": {"step_s": 0.002, "peak_memory_bytes": 2**20},
    "run": "runs/a",
}

JOINED = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@dataclass
class Summary:
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.figures


@dataclass
class Certificate:
    plan: str
    passed: bool
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan, "passed": self.passed}

    def describe(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'} {self.plan}"


class Verb:
    """Stands for paceline.train and its like: remembers how it was called, returns or raises what it is told."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.given: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.given, self.options = given, options
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Verb]:
    def put(name: str, outcome: Any) -> Verb:
        made = Verb(outcome)
        monkeypatch.setitem(vars(paceline), name, made)
        return made

    return put


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "digits.py"
    path.write_text("raise AssertionError('the command line does not run the job itself')\n")
    return str(path)


# --- train ------------------------------------------------------------------------------------------------------


def test_train_hands_every_option_on(verb: Any, job_file: str):
    """Each option reaches the function's parameter of its name."""
    train = verb("train", Summary(FIGURES))
    result = call(
        "train",
        f"{job_file}:other",
        "--plan",
        "data=2",
        "--devices",
        "cpu:0,cpu:1",
        "--procs",
        "2",
        "--on",
        "ray",
        "--steps",
        "9",
        "--set",
        "lr=0.1",
        "--set",
        "name=a=b",
        "--save-every",
        "5",
        "--run",
        "there",
        "--resume",
        "--loader-workers",
        "3",
        "--timeout",
        "60",
        "--trace",
        "2",
        "--memory",
        "1GiB",
        "--restarts",
        "4",
        "--log",
        "tensorboard",
        "--keep",
        "3",
        "--on-spike",
        "skip",
        "--check",
        "no",
    )
    assert result.exit_code == 0, result.stderr
    job, plan = train.given
    assert (str(job.path), job.function, job.settings) == (
        job_file,
        "other",
        {"lr": "0.1", "name": "a=b"},
    )
    assert plan == "data=2"
    assert train.options == {
        "devices": "cpu:0,cpu:1",
        "on": "ray",
        "procs": 2,
        "memory": "1GiB",
        "steps": 9,
        "save_every": 5,
        "keep": 3,
        "run": "there",
        "trace": 2,
        "resume": True,
        "loader_workers": 3,
        "timeout_s": 60.0,
        "restarts": 4,
        "on_spike": "skip",
        "check": False,
        "log": ["tensorboard"],
        "table": False,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("s.py --keep 3", "--keep is one of paceline train"),
        ("s.py --on-spke skip", "did you mean --on-spike?"),
        ("--plam data=2 s.py", "did you mean --plan?"),
        ("--rate 2 s.py", "paceline run has no option --rate\n"),
    ],
)
def test_run_refuses_options_that_would_be_lost_on_the_script(words: str, said: str):
    result = call("run", *words.split())
    assert result.exit_code == 2
    assert said in result.stderr and "paceline run SCRIPT -- --" in result.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train job.py --spares 1", "hint: after a GPU has failed, --resume --devices NAMES"),
        ("report runs/a --other-plans no", "hint: leave it out: paceline plan JOB prices"),
        ("doctor --between-hosts", "hint: python scripts/check-hosts"),
        ("doctor --host", "hint: paceline doctor --help"),
    ],
)
def test_an_option_that_is_gone_says_what_to_do_instead(words: str, hint: str):
    result = call(*words.split())
    assert result.exit_code == 2
    assert "has no option" in result.stderr and hint in result.stderr


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("s.py --lr 0.1 --plan data=2 --test -1 --step=3", "--lr 0.1 --test -1 --step=3"),
        ("--plan data=2 s.py -- --keep 3 --plan x", "--keep 3 --plan x"),
    ],
)
def test_run_gives_the_script_its_own_arguments(
    words: str, arguments: str, monkeypatch: pytest.MonkeyPatch
):
    given = {}
    monkeypatch.setattr(
        "paceline.attached.launch.run",
        lambda script, plan, **options: given.update(options, script=script, plan=plan) or FIGURES,
    )
    assert call("run", *words.split()).exit_code == 0
    assert (given["script"], given["plan"]) == ("s.py", "data=2")
    assert given["arguments"] == arguments.split()


def test_hosts_that_come_and_go_are_not_those_of_ray(verb: Any, job_file: str):
    verb("train", Summary(FIGURES))
    result = call("train", job_file, "--on", "ray", "--hosts", "2:4")
    assert result.exit_code == 2 and "leave --hosts out" in result.stderr


def test_train_without_options_leaves_the_defaults_to_the_function(verb: Any, job_file: str):
    """What isn't given is not passed."""
    train = verb("train", Summary(FIGURES))
    assert call("train", job_file).exit_code == 0
    assert train.given[1] is None
    assert train.options == {"restarts": None, "table": False}


def test_train_prints_a_table(verb: Any, job_file: str):
    """The figures are readable; what there isn't is left out."""
    verb("train", Summary(FIGURES))
    rows = dict(line.split("  ", 1) for line in call("train", job_file).stdout.splitlines())
    assert {label: value.strip() for label, value in rows.items()} == {
        "plan": "data=2 (2 ranks)",
        "steps": "1,200",
        "samples": "38,400",
        "samples/s": "12,346",
        "final loss": "0.25",
        "accuracy": "0.97",
        "time": "3.2 s",
        "peak memory": "3 MiB a rank",
        "predicted step": "2 ms",
        "predicted memory": "1 MiB a rank",
        "run": "runs/a",
    }


def test_json_is_the_whole_summary(verb: Any, job_file: str):
    """--json prints what the function returned, with null for what JSON can't say."""
    verb(
        "train",
        Summary({**FIGURES, "final_loss": float("nan"), "metrics": {"worst": [float("inf")]}}),
    )
    assert json.loads(call("train", job_file, "--json").stdout, parse_constant=pytest.fail) == {
        **FIGURES,
        "final_loss": None,
        "metrics": {"worst": [None]},
    }


@pytest.mark.slow
def test_stdout_is_the_result_alone(job_file: str):
    """What the job, its child processes and libraries print goes to stderr."""
    code = (
        "import os, sys, paceline; from paceline.cli import main\n"
        "class Summary:\n"
        "    def to_dict(self): return {'steps': 3}\n"
        "def train(*given, **options):\n"
        "    print('from the job'); os.write(1, b'from C\\n'); os.system('echo from a child'); return Summary()\n"
        f"paceline.train = train; sys.argv = ['paceline', 'train', {job_file!r}, '--json']; main()"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=buffered
    )
    assert json.loads(ran.stdout) == {"steps": 3}
    assert sorted(ran.stderr.splitlines()) == ["from C", "from a child", "from the job"]


def test_the_end_of_the_process_loses_nothing():
    """What others do at exit is done, what they print is written, and the exit code stays. libtorch's destructors,
    which come after all that, do not run."""
    code = (
        "import atexit, sys; from paceline.cli import main\n"
        "class Late:\n"
        "    def __del__(self): sys.__stderr__.write('destroyed'); sys.__stderr__.flush()\n"
        "sys.late = Late(); sys.argv = ['paceline', 'train', 'nothing.py']\n"
        "try: main()\n"
        "finally: atexit.register(print, 'at exit')"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=buffered
    )
    assert (ran.returncode, ran.stdout) == (UsageError.exit_code, "at exit\n")
    assert "there is no file nothing.py" in ran.stderr and "destroyed" not in ran.stderr


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
    ],
)
def test_only_the_first_rank_prints(
    verb: Any,
    job_file: str,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    printed: bool,
):
    """Under torchrun every rank is a command of its own; one of them speaks."""
    for name, value in ({**JOINED, **variables} if variables else {}).items():
        monkeypatch.setenv(name, value)
    verb("train", Summary(FIGURES))
    result = call("train", job_file, "--json")
    assert (result.exit_code, bool(result.stdout)) == (0, printed)


@pytest.mark.parametrize(("rank", "told"), [("0", True), ("1", False)])
def test_a_wrong_request_is_told_once(
    verb: Any, job_file: str, monkeypatch: pytest.MonkeyPatch, rank: str, told: bool
):
    """Every rank finds the same fault with a request; the first one tells it, and all exit with its code."""
    for name, value in {**JOINED, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    verb("train", PlanError("no such plan"))
    result = call("train", job_file)
    assert (result.exit_code, bool(result.stderr)) == (2, told)


@pytest.mark.parametrize(("local_rank", "told"), [("0", True), ("1", False)])
def test_what_is_missing_on_a_host_is_told_by_it(
    verb: Any, job_file: str, monkeypatch: pytest.MonkeyPatch, local_rank: str, told: bool
):
    of_the_second = {"WORLD_SIZE": "4", "RANK": str(2 + int(local_rank)), "LOCAL_RANK": local_rank}
    for name, value in {**JOINED, **of_the_second}.items():
        monkeypatch.setenv(name, value)
    verb("train", MissingPackage("--log mlflow", "mlflow", install="it"))
    result = call("train", job_file)
    assert (result.exit_code, bool(result.stderr)) == (2, told)


def test_a_broken_launcher_is_a_usage_error(verb: Any, monkeypatch: pytest.MonkeyPatch):
    """A rank beyond the world size gives a message, not a traceback."""
    for name, value in {**JOINED, "RANK": "5", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    verb("evaluate", ClusterError("torchrun gave rank 5 of 2"))
    result = call("evaluate", "runs/a")
    assert (result.exit_code, result.stdout, result.stderr) == (
        2,
        "",
        "error: torchrun gave rank 5 of 2\n",
    )


# --- The other commands -----------------------------------------------------------------------------------------


def test_evaluate_hands_its_options_on_and_prints(verb: Any):
    """Metrics come one a line, or as JSON."""
    evaluate = verb(
        "evaluate", {"plan": "single", "validation_loss": 0.5, "metrics": {"accuracy": 0.9}}
    )
    result = call("evaluate", "runs/a", "--plan", "data=2", "--devices", "cpu:0-1")
    assert result.stdout.splitlines() == [
        "plan             single",
        "validation loss  0.5",
        "accuracy         0.9",
    ]
    assert evaluate.options == {"run": "runs/a", "plan": "data=2", "devices": "cpu:0-1"}
    assert json.loads(call("evaluate", "runs/a", "--json").stdout) == evaluate.outcome


def test_predict_hands_its_options_on_and_prints(verb: Any):
    """The place of the outputs is printed."""
    predict = verb("predict", {"samples": 3, "output": "out.npy", "shapes": {"output": [3, 2]}})
    result = call(
        "predict",
        "runs/a",
        "in.npy",
        "--plan",
        "data=2",
        "--devices",
        "cpu:0-1",
        "--output",
        "out.npy",
        "--model",
        "teacher",
    )
    assert result.stdout.splitlines() == [
        "samples        3",
        "output         out.npy",
        "output shapes  [3, 2]",
    ]
    assert predict.options == {
        "run": "runs/a",
        "input": "in.npy",
        "plan": "data=2",
        "devices": "cpu:0-1",
        "output": "out.npy",
        "model": "teacher",
    }
    assert json.loads(call("predict", "runs/a", "in.npy", "--json").stdout) == predict.outcome


@pytest.mark.parametrize(("passed", "code"), [([True, True], 0), ([True, False], 1)])
def test_verify_fails_when_one_plan_fails(verb: Any, job_file: str, passed: list[bool], code: int):
    """Every plan has its line, or its JSON, and the exit code tells a script."""
    plans = ["data=2", "shard=2"]
    verify = verb("verify", [Certificate(*pair) for pair in zip(plans, passed, strict=True)])
    words = [
        "verify",
        job_file,
        "--plan",
        "data=2",
        "--plan",
        "shard=2",
        "--steps",
        "7",
        "--set",
        "lr=1",
        "--run",
        "runs/a",
        "--devices",
        "cuda:0-3",
    ]
    result = call(*words)
    assert result.exit_code == code
    assert result.stdout.splitlines() == [certificate.describe() for certificate in verify.outcome]
    assert verify.options.pop("job").settings == {"lr": "1"}
    assert verify.options == {
        "plans": plans,
        "steps": 7,
        "run": "runs/a",
        "devices": "cuda:0-3",
    }
    result = call(*words, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == [certificate.to_dict() for certificate in verify.outcome]


def test_a_file_that_is_no_text_has_a_place(tmp_path: Path):
    """A file in Latin-1 is a mistake in the job, which is told with its line."""
    (tmp_path / "job.py").write_bytes(b'name = "caf\xe9"\n')
    result = call("verify", tmp_path / "job.py")
    assert result.exit_code == 2 and "job.py:1: SyntaxError" in result.stderr


def test_verify_leaves_the_choice_of_plans_to_the_function(verb: Any, job_file: str):
    """Without --plan, no plan is named; without --run, the certificate goes to a new folder in runs/."""
    verify = verb("verify", [])
    result = call("verify", job_file)
    assert result.exit_code == 0
    run = verify.options.pop("run")
    assert (run.parent, run.name.startswith(f"verify-{Path(job_file).stem}-")) == (
        Path("runs"),
        True,
    )
    assert f"certificate {run}" in result.stderr and result.stdout == "\n"
    assert verify.options.keys() == {"job"}


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("bad", 1)])
def test_doctor_fails_when_something_is_bad(
    monkeypatch: pytest.MonkeyPatch, status: Any, code: int
):
    """A warning is no failure."""
    findings = [Finding("torch", "ok", "2.13"), Finding("gloo", status, "?", "pray")]
    monkeypatch.setattr(machine, "examine", lambda: findings)
    result = call("doctor")
    assert result.exit_code == code
    assert result.stdout.splitlines() == [
        "ok    torch  2.13",
        f"{status:<4}  gloo   ?",
        "             -> pray",
    ]
    result = call("doctor", "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout) == {
        "passed": code == 0,
        "findings": [
            {"name": "torch", "status": "ok", "detail": "2.13", "fix": None},
            {"name": "gloo", "status": status, "detail": "?", "fix": "pray"},
        ],
    }


# --- Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("no such plan", hint="data=2"), 2),
        (PacelineError("no such plan", hint="data=2"), 1),
        (OutOfMemory("no such plan", hint="data=2"), 3),
        (PeerLost("no such plan", hint="data=2"), 4),
        (Preempted("no such plan", hint="data=2"), 5),
    ],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_error_is_a_message_and_an_exit_code(
    verb: Any, job_file: str, error: PacelineError, code: int, as_json: list[str]
):
    """What went wrong and what to do is on stderr, nothing is on stdout."""
    verb("train", error)
    result = call("train", job_file, *as_json)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == "error: no such plan\n\nhint: data=2\n"


def test_a_bug_of_our_own_shows_its_traceback(verb: Any, job_file: str):
    """What isn't an error of the user says so."""
    verb("train", KeyError("bucket"))
    result = call("train", job_file, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Traceback" in result.stderr and "KeyError: 'bucket'" in result.stderr
    assert result.stderr.endswith(
        "error: this is a bug in paceline; please report it with the lines above\n"
    )


def test_ctrl_c_exits_with_130(verb: Any, job_file: str):
    """The shell's convention for an interrupted command."""
    verb("train", KeyboardInterrupt())
    result = call("train", job_file)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_exit_of_a_following_rank_keeps_its_code(verb: Any, job_file: str):
    """A rank that leaves because another one has told the reason says nothing more."""
    verb("train", SystemExit(2))
    result = call("train", job_file)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "")


def test_a_missing_job_file_is_found_before_anything_starts(verb: Any, tmp_path: Path):
    """The file is looked for first."""
    train = verb("train", Summary(FIGURES))
    result = call("train", str(tmp_path / "digits.py"))
    assert result.exit_code == 2 and "there is no file" in result.stderr
    assert train.given == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "x.py", "--porcs", "2"], "--procs"),
        (["trian", "x.py"], "train"),
        (["trian", "--help"], "paceline has no command trian; did you mean 'train'?"),
        (["train"], "required: FILE[:FUNCTION]"),
        (["search", "x.py"], "required: --trials"),
        (["train", "x.py", "--procs", "two"], "--procs: two is not a whole number of at least 0"),
        (["train", "x.py", "--procs", "-1"], "--procs: -1 is not a whole number"),
        (["train", "x.py", "--timeout", "nan"], "--timeout: nan is not a number"),
        (["train", "x.py", "--plan"], "--plan: expected one argument"),
        (["train", "x.py", "--plan", "--json"], "--plan: expected one argument"),
        (["train", "x.py", "--run", ""], "--run: the value is empty"),
        (["train", ""], "FILE[:FUNCTION]: the value is empty"),
        (["train", "x.py", "--json=yes"], "--json: ignored explicit argument 'yes'"),
        (["train", "x.py", "--on-spike", "go"], "choose from 'stop', 'skip')"),
        (["launch", "sky", "--tim", "1"], "did you mean --time?"),
        (["--halp"], "paceline has no command --halp"),
        (["predict", "runs/a"], "required: INPUT"),
        (["verify", "x.py", "--set", "lr"], "--set lr is not NAME=VALUE"),
        (["train", "x.py", "--set", "=1"], "NAME=VALUE"),
        (["train", "x.py", "--set", "lr=1", "--set", "lr=2"], "--set lr is given twice: 1 and 2"),
        (
            ["train", "x.py", "data=2", "tensor=2", "lr=1"],
            "no argument takes data=2 tensor=2 lr=1\n\nhint: the keys of a plan follow --plan",
        ),
        (["report", "runs/a", ""], "no argument takes ''"),
        (["plan", "x.py", "data=2"], "paceline plan --help lists all options"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words: list[str], message: str, tmp_path: Path):
    """Misspelled options, wrong values and missing arguments exit with 2 and name the nearest."""
    result = call(*[str(tmp_path / word) if word == "x.py" else word for word in words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


# --- plan -------------------------------------------------------------------------------------------------------


@dataclass
class Planned(Summary):
    """What `plan` and `scale` return, as far as the command line looks at it."""

    chosen: str | None = "single"
    first: str | None = "point"

    def describe(self) -> str:
        return "a table"

    def plot(self, path: Path) -> Path:
        path.write_text("drawn")
        return path


def test_plan_hands_every_option_on(verb: Any, job_file: str):
    """What isn't given is left to the function."""
    plan = verb("plan", Planned(FIGURES))
    assert call("plan", job_file).stdout == "a table\n"
    assert plan.options.keys() == {"job"}
    call(
        "plan",
        job_file,
        "--cluster",
        "8xH100",
        "--relaxed",
        "--price-per-hour",
        "2.5",
        "--calibrate",
        "0",
        "--mtbf-hours",
        "1e4",
    )
    assert plan.options.pop("job").function == "job"
    assert plan.options == {
        "cluster": "8xH100",
        "calibrate_s": 0.0,
        "relaxed": True,
        "price_per_hour": 2.5,
        "mtbf_hours": 1e4,
    }
    verb("plan", Planned(FIGURES, chosen=None))
    assert call("plan", job_file).exit_code == 1


def test_plan_draws_a_scale(verb: Any, job_file: str, tmp_path: Path):
    """The drawing's place goes to stderr, the table or the document to stdout."""
    needed("matplotlib")
    scale, file = verb("scale", Planned(FIGURES)), tmp_path / "scale.svg"
    result = call(
        "plan",
        job_file,
        "--cluster",
        "8xH100",
        "--scale",
        "1..64",
        "--plot",
        str(file),
        "--relaxed",
    )
    assert (result.stdout, file.read_text()) == (
        "a table\n",
        "drawn",
    ) and f"drawn {file}" in result.stderr
    assert scale.options.pop("job").settings == {}
    assert scale.options == {"cluster": "8xH100", "counts": "1..64", "relaxed": True}
    assert json.loads(call("plan", job_file, "--scale", "1..64", "--json").stdout) == FIGURES
    verb("scale", Planned(FIGURES, first=None))
    assert call("plan", job_file, "--scale", "1..64").exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "a.png"], "add --scale"),
        (["--scale", "1..4", "--price", "2"], "--price-per-hour: --scale ranks by time alone"),
        (["--scale", "1..4", "--plot", "a.pdf"], "can't draw to a.pdf"),
        (["--html", __file__], "there is something else of that name"),
    ],
)
def test_options_of_plan_that_need_another(
    verb: Any, job_file: str, words: list[str], message: str
):
    """Nothing is planned."""
    plan, scale = verb("plan", Planned(FIGURES)), verb("scale", Planned(FIGURES))
    result = call("plan", job_file, *words)
    assert result.exit_code == 2 and message in result.stderr
    assert plan.options == scale.options == {}


# --- Help -------------------------------------------------------------------------------------------------------


def test_help_loads_no_torch():
    """`paceline --help` answers at once: nothing heavy is imported, and every command is listed."""
    code = (
        "import sys; from paceline.cli import main; sys.argv = ['paceline', '--help']\n"
        "heavy = {'torch', 'numpy', 'rich', 'psutil', 'msgspec'}\n"
        "try: main()\n"
        "finally: print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stderr) == (0, "\n")
    listed = [line.split()[0] for line in ran.stdout.split("Commands:")[1].splitlines() if line]
    assert listed == [
        "train",
        "run",
        "evaluate",
        "predict",
        "plan",
        "verify",
        "search",
        "report",
        "compare",
        "rehearse",
        "audit",
        "replay",
        "launch",
        "doctor",
        "docs",
    ]


def test_docs_says_where_a_page_is():
    """Messages name pages in this way; all pages are listed with their titles."""
    found = call("docs", "job")
    assert Path(found.stdout.strip()).read_text(encoding="utf-8").startswith("# ")
    assert call("docs", "docs/strategies/data.md").stdout.strip().endswith("strategies/data.md")
    assert re.search(r"^job  +\S", call("docs").stdout, re.MULTILINE)
    unknown = call("docs", "own-stepp")
    assert unknown.exit_code == 2 and "did you mean 'own-step'?" in unknown.stderr


def test_docs_of_a_wheel_are_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An installation without pages says so."""
    monkeypatch.setattr(pages, "_PLACES", (tmp_path / "docs",))
    assert "has no pages" in call("docs", "job").stderr
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Get started\n")
    assert call("docs", "index").stdout.strip() == str(tmp_path / "docs" / "index.md")


def test_the_version_is_printed():
    """--version says which paceline this is."""
    assert call("--version").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "closed", "gone", "is_new"),
    [
        ("single", (0, 1, 2), (), True),
        ("data=2", (2,), (), False),
        ("data=2", (1,), (2,), False),
        ("single", (), (2,), False),
    ],
)
def test_training_goes_on_without_a_display(
    plan: str, closed: tuple[int, ...], gone: tuple[int, ...], is_new: bool, tmp_path: Path
):
    """Streams may be closed from the start, where a log or a checkpoint would take their number, or lose their
    reader. is_new: in a new interpreter, which takes as long as three forks."""
    (tmp_path / "tiny.py").write_text(
        "import paceline as pl, torch\n"
        "def job():\n"
        "    print('from the job')\n"
        "    return pl.Job(model=lambda: torch.nn.Linear(2, 1), data=(torch.ones(8, 2), torch.ones(8, 1)), steps=3,\n"
        "                  loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=4)"
    )

    def change_streams() -> None:
        for number in gone:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
        for number in closed:
            os.close(number)

    words = ["train", str(tmp_path / "tiny.py"), "--plan", plan, "--run", str(tmp_path / "run")]
    words += ["--check", "no", "--json"]
    if is_new:
        ran = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            cwd=tmp_path,
            preexec_fn=change_streams,
            stdout=subprocess.PIPE,
            timeout=200,
            check=False,
        )
        code, printed = ran.returncode, ran.stdout.decode()
    else:
        command = Command(words, os.environ, tmp_path / "command", change_streams=change_streams)
        code, printed = command.wait(), command.stdout.read_text()
    assert code == 0
    assert (1 in closed) or json.loads(printed)["steps"] == 3  # and nothing else
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    assert "from the job" not in "".join(
        each.read_text() for each in (tmp_path / "run").glob("*.json*")
    )


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs Linux's /dev/full, a file that is always full"
)
def test_an_output_without_room_is_an_error():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "paceline", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: the output can't be written: No space left on device\n",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_sees_no_error(unbuffered: str):
    """As under `| head`: the command fails in silence, when it prints or at its end."""
    receiver, sender = os.pipe()
    os.close(receiver)
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=sender,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    os.close(sender)
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform == "darwin", reason="needs Linux: macOS has only UTF-8 names of files"
)
def test_names_of_files_need_not_be_text(tmp_path: Path):
    """A run in a folder whose name is Latin-1 is trained, checked, reported and printed."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "job.py").write_text(
        "import paceline as pl, torch\n"
        "def job():\n"
        "    return pl.Job(model=lambda: torch.nn.Linear(2, 1), data=[(torch.ones(2), torch.ones(1))] * 8,\n"
        "                  loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "                  batch=4, steps=2)\n"
    )
    for words in (
        [
            "train",
            str(folder / "job.py"),
            "--plan",
            "data=2",
            "--run",
            str(folder / "run"),
            "--check",
            "yes",
        ],
        ["report", str(folder / "run")],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=200
        )
        assert ran.returncode == 0, ran.stderr
        assert "caf\\udce9" in ran.stdout
    assert "caf\\udce9" in (folder / "run" / "report.html").read_text()
