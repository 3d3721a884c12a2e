"""The command line: each command calls a function of Paceline and prints what it returns.

The parameters of the function are the options of the command, with their names, types, defaults
and meanings; some commands add their own. stdout is the result alone; progress, logs, errors and
whatever a job prints go to stderr. The functions load torch when they are called, so that
`paceline --help` and a mistyped option answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import paceline
from paceline.api.summary_table import card, summary_table, table
from paceline.base import command_line
from paceline.base.command_line import CommandLine
from paceline.base.document import strict
from paceline.base.errors import (
    HostError,
    PacelineError,
    UsageError,
    nearest,
    on_full_disk,
    on_windows,
    printable,
)
from paceline.base.imports import OF_RUNS, exempt_from_collector, load_modules
from paceline.base.logs import unbroken
from paceline.base.signatures import Declaration, parameters
from paceline.job.file import JobFile
from paceline.launch.hosts import environment, host_process
from paceline.launch.process.faults import KINDS, Fault
from paceline.runs.folder import fresh_name

Given = dict[str, Any]  # what the command line gives to a function, by parameter

# The headings of the help, each with its parameters of all commands.
GROUPS = {
    "Job and plan": "set_ plan plans steps step model hf lora sequence batch dtype",
    "Devices": "cluster devices on procs memory gpus ray loader_workers hosts time image volumes",
    "Choice of a plan": "relaxed price_per_hour mtbf_hours scale calibrate_s",
    "Search": "trials objective limits vary sampler pruner storage study",
    "Files": "run resume save_every keep output plot html write",
    "Checks and failures": "check restore fail_if timeout_s restarts on_spike",
    "Faults": " ".join(KINDS),
    "Random numbers": "random seed",
    "Output": "log trace json_",
}
# What stands for values in the help, where the type doesn't say it.
_VALUES: Mapping[str, str] = {
    "set_": "NAME=VALUE",
    "arguments": "[ARGUMENTS]...",
    "job": "FILE[:FUNCTION]",
    "run": "DIR",
    "on": "ray[:HOST:PORT]",
    "log": "KIND[:WHERE]",
    "hosts": "[MIN:]MAX",
    "scale": "FIRST..LAST",
    "objective": "NAME[:max]",
    "limits": "NAME<=X",
    "vary": "NAME=DOMAIN",
    "fail_if": "FIGURE>X%",
    "gpus": "[NAME:]N",
    "time": "HH:MM:SS",
    "volumes": "NAME=PATH",
    **dict.fromkeys(("output", "plot", "html", "write"), "FILE"),
    **dict.fromkeys(KINDS, "RANK@STEP[:PHASE]"),
    "slow": "RANK:TIMESx",
}
# Present options by former names, which work for one more version, as --patience does for --timeout.
# An option that is gone has a hint on what to do instead.
_OLD: Mapping[str, Mapping[str, str]] = {
    "train": {
        "--spares": "after a GPU has failed, --resume --devices NAMES continues on other ones"
    },
    "doctor": dict.fromkeys(
        ("--between-hosts", "--hosts"),
        "python scripts/check-hosts, in Paceline's checkout, checks the network between hosts",
    ),
    "plan": {
        "--gpus": "--cluster",
        "--price": "--price-per-hour",
        "--weights": "--dtype",
    },
    "verify": {"--resume": "--restore"},
    "report": dict.fromkeys(
        ("--price", "--other-plans"),
        "leave it out: paceline plan JOB prices other plans, and a report never does",
    ),
}
_TRAIN = "paceline.api.train:train"
_JSON = "paceline.cli:_shared json_"
_JOB = "paceline.cli:_shared set_ json_"


def _shared(*, set_: Mapping[str, str] = {}, json_: bool = False) -> None:
    """Options of several commands.

    Args:
        set_: A parameter of the function that makes the job, such as lr=0.01.
        json_: Print JSON, and nothing else, on stdout.
    """


@dataclass(frozen=True)
class Output:
    """The result of a command."""

    document: Any  # for --json
    text: Callable[[], str]  # for people
    passed: bool = True  # else the command exits with 1
    is_file: bool = False  # whether the text is that of a file, and is printed as it is


Run = Callable[..., Output | None]


@dataclass(frozen=True)
class Command:
    """A command, and the functions whose parameters are its options."""

    name: str
    run: Run
    # each is "MODULE:FUNCTION", with the names of parameters that are taken, or with a dash are not
    sources: Sequence[str]
    optional: Sequence[str] = ()  # arguments that can be left out

    @property
    def summary(self) -> str:
        """What the command does, in a line."""
        return (self.run.__doc__ or "").partition("\n")[0]

    @property
    def own(self) -> list[Declaration]:
        """The parameters of the command's own function."""
        return parameters(f"{__name__}:{self.run.__name__}")[1:]

    @property
    def line(self) -> CommandLine:
        """The arguments and options. What means the same as for `train` is explained there."""
        of_train = {each.name: each.text for each in parameters(_TRAIN)}
        found = [
            replace(each, text=of_train.get(each.name, each.text))
            if not each.text or each.text.startswith("As ")
            else each
            for source in self.sources
            for each in _selected(*source.split())
        ]
        return CommandLine(
            f"paceline {self.name}",
            self.summary,
            [*found, *self.own],
            optional=self.optional,
            groups=GROUPS,
            values=_VALUES,
            old={"--patience": "--timeout", **_OLD.get(self.name, {})},
            others=[*map(command_line.option, parameters(_TRAIN) if self.name == "run" else ())],
        )


def _selected(place: str, *names: str) -> list[Declaration]:
    left_out = {name[1:] for name in names if name[0] == "-"}
    return [
        each
        for each in parameters(place)
        if each.name not in left_out and (left_out or not names or each.name in names)
    ]


COMMANDS: dict[str, Command] = {}


def _command(*sources: str, optional: Sequence[str] = ()) -> Callable[[Run], Run]:
    """Make a command of a function that takes what is given for the sources, and its own options."""

    def add(run: Run) -> Run:
        name = run.__name__.strip("_")
        COMMANDS[name] = Command(name, run, sources, optional)
        return run

    return add


def main() -> None:
    """The `paceline` command. Its process ends without libtorch's destructors, which take 0.6 s of a core."""
    codes: list[int] = []
    atexit.register(_end_process, codes)  # the first to be registered is the last to run
    with unbroken():
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
        try:
            run(sys.argv[1:])
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                codes.append(end.code or 0)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
                raise
            codes.append(_report_lost_output(error))


def _end_process(codes: Sequence[int]) -> None:
    """End the process with its exit code, where that is known."""
    if codes:
        code = codes[0]
        with unbroken():
            try:
                sys.stdout.flush()
            except OSError as error:
                code = code or _report_lost_output(error)
            sys.stderr.flush()
            os._exit(code)


def _report_lost_output(error: OSError) -> int:
    """Say that the output could not be written, unless its reader went, as `head` does. Returns the exit code."""
    if error.errno != errno.EPIPE:
        print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
    return 1


def run(words: Sequence[str]) -> None:
    """Run a command line, and exit with its code."""
    if (shown := _asked_for(words)) is not None:
        _say(shown)
        raise SystemExit(0 if words else 2)
    with _reported():
        command, given = parse(words)
        as_json = given.pop("json_", False)
        if isinstance(file := given.get("job"), str):
            given["job"] = JobFile.parse(file, given.pop("set_", {}))
        own = {each.name: given.pop(each.name) for each in command.own if each.name in given}
        with _stdout_to_stderr():
            output = command.run(given, **own)
    if output is not None and output.is_file:
        print(output.text(), end="")
    elif output is not None:
        _say(_json(output.document) if as_json else output.text())
    raise SystemExit(0 if output is None or output.passed else 1)


def parse(words: Sequence[str]) -> tuple[Command, Given]:
    """Read a command line.

    Raises:
        UsageError: there is no such command or option, or something is missing.
    """
    first = words[0]
    if first not in COMMANDS:
        raise UsageError(f"paceline has no command {first}; {nearest(first, COMMANDS)}")
    command = COMMANDS[first]
    values, rest, notes = command.line.read(words[1:])
    if rest:
        raise UsageError(
            f"no argument takes {shlex.join(rest)}",
            hint="the keys of a plan follow --plan in quotes, and a parameter of the job follows --set; "
            f"paceline {first} --help lists all options",
        )
    for note in notes if _is_first_rank() else ():
        _say(f"note: {note}", err=True)
    return command, values


def _asked_for(words: Sequence[str]) -> str | None:
    """Return the help or the version, if a command line asks for it."""
    if words[:1] == ["--version"]:
        return f"paceline {paceline.__version__}"
    own = words[: words.index("--")] if "--" in words else words
    helps = {"-h", "--help"}
    if words and (not helps & {*own} or words[0] not in {*COMMANDS, *helps}):
        return None
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]].line.parser().format_help().rstrip()
    listed = "\n".join(f"  {each.name:10}{each.summary}" for each in COMMANDS.values())
    return (
        "usage: paceline [--help] [--version] COMMAND ...\n\n"
        f"{paceline.__doc__}\n\nCommands:\n{listed}"
    )


# --- Commands ---------------------------------------------------------------------------------------------------


@_command(f"{_TRAIN} -table", _JOB)
def train(given: Given, *, hosts: str | None = None) -> Output | None:
    """Train a job on one device or many.

    Args:
        hosts: Number of hosts, each of which runs this command. With MIN:MAX the run goes on with MIN
            of them if some are lost, and takes them back.
    """
    on, plan, restarts = given.get("on"), given.pop("plan", None), given.pop("restarts", None)
    if on is not None and hosts is not None:
        raise UsageError(
            f"--hosts {hosts} is about a command that each host runs; with --on {on} Ray starts ranks",
            hint="leave --hosts out: ranks of a lost node start again where there is room",
        )
    place = host_process.host(hosts=hosts) if on is None else None
    if place is not None and not place.is_elastic:
        _on_every_host(plan, given.get("procs"))
    load_modules(OF_RUNS)
    run_train: Callable[..., Any] = partial(paceline.train, given.pop("job"), **given, table=False)
    if place is not None:
        from paceline.api.hosts import train_on_hosts

        figures = train_on_hosts(
            place,
            plan,
            run_train,
            restarts=restarts,
            **{name: given[name] for name in ("run", "procs", "timeout_s") if name in given},
        )
    else:
        figures = run_train(plan, restarts=restarts).to_dict()
    if figures is None or (on is None and not _is_first_rank()):
        return None
    return Output(figures, partial(summary_table, figures))


@_command("paceline.attached.launch:run", f"{_TRAIN} devices save_every on_spike", _JSON)
def run_(given: Given) -> Output | None:
    """Run a script that has its own loop on many devices."""
    _on_every_host(given.get("plan"))
    load_modules(OF_RUNS)
    from paceline.attached.launch import run

    figures = run(**given)
    return Output(figures, partial(summary_table, figures)) if _is_first_rank() else None


@_command("paceline.api.inference:evaluate", _JSON)
def evaluate(given: Given) -> Output | None:
    """Compute a trained run's loss and metrics."""
    return _on_ranks("evaluate", given)


@_command("paceline.api.inference:predict", _JSON)
def predict(given: Given) -> Output | None:
    """Compute a trained run's outputs for an input."""
    return _on_ranks("predict", given)


def _on_ranks(verb: str, given: Given) -> Output | None:
    _on_every_host(given.get("plan"))
    figures = getattr(paceline, verb)(**given)
    return Output(figures, partial(table, figures)) if _is_first_rank() else None


_PLAN, _MODEL = "paceline.api.planning:plan", "paceline.api.fine_tuning:FineTuning"


@_command(
    f"{_PLAN} -repair_hours -checkpoint_bytes_per_s", f"{_MODEL} -hf", _JOB, optional=("job",)
)
def plan_(
    given: Given,
    *,
    hf: str | None = None,
    scale: str | None = None,
    plot: str | None = None,
    html: str | None = None,
) -> Output:
    """Rank the plans that a job allows by speed or cost.

    Args:
        hf: Instead of FILE, a Transformers model: a folder with config.json, or a type such as llama.
        scale: Find the best plan on several numbers of devices, such as 1..4096.
        plot: Draw what --scale finds to a .png or .svg.
        html: Also write a page with plans, their parts and reasons.
    """
    model = {each.name: given.pop(each.name) for each in parameters(_MODEL) if each.name in given}
    if ("job" in given) == (hf is not None):
        raise UsageError("give either FILE or --hf CONFIG", hint="paceline plan job.py")
    if hf is None and model:
        raise UsageError(
            f"--{min(model)} is about --hf", hint="a job file has its own parameters: --set"
        )
    if hf is not None and (scale is not None or "set_" in given):
        raise UsageError(
            "--hf makes one job: --scale and --set are for job files", hint="leave them out"
        )
    if scale is not None:
        return _scale(scale, given, plot, html)
    if plot is not None:
        raise UsageError("--plot draws what --scale finds", hint="add --scale 1..4096")
    _prepare_page(html)
    command = "paceline train JOB"
    if hf is not None:
        from paceline.api.fine_tuning import FineTuning

        given["job"] = FineTuning(hf, **model)
    else:
        job = given["job"]
        command = f"paceline train {os.path.relpath(job.path)}:{job.function}"
    with exempt_from_collector():  # a second of a core, and this process ends soon
        answer = paceline.plan(**given)
    if html is not None:
        _say(f"page {answer.write_html(html, command=command)}", err=True)
    return Output(answer.to_dict(), answer.describe, answer.chosen is not None)


def _prepare_page(to: str | None) -> None:
    if to is not None:
        from paceline.reports.page import prepare

        prepare(Path(to))


def _scale(counts: str, given: Given, plot: str | None, html: str | None) -> Output:
    from paceline.api.scaling import check_plot

    others = {*given} - {"job", "cluster", "relaxed"} | ({"html"} if html is not None else set())
    if others:
        line = COMMANDS["plan"].line
        named = [command_line.option(each) for each in line.parameters if each.name in others]
        raise UsageError(f"{' and '.join(named)}: --scale ranks by time alone", hint="one of both")
    if plot is not None:
        check_plot(Path(plot))
    scaling = paceline.scale(counts=counts, **{"cluster": "local", **given})
    if plot is not None:
        _say(f"drawn {scaling.plot(Path(plot))}", err=True)
    return Output(scaling.to_dict(), scaling.describe, scaling.first is not None)


@_command("paceline.api.verify:verify", _JOB)
def verify(given: Given) -> Output | None:
    """Prove that plans compute what one device computes."""
    job = given["job"]
    if (verdicts := _verified_script(given)) is not None:
        return _all_of(verdicts, all(verdict.passed for verdict in verdicts))
    speaks = _is_first_rank()
    written = given.pop("run", None) or fresh_name(f"verify-{job.path.stem}")
    certificates = paceline.verify(**given, run=written if speaks else None)
    passed = all(each.passed or (each.refused and not each.asked_for) for each in certificates)
    if not speaks:
        raise SystemExit(0 if passed else 1)
    _say(f"certificate {written}/certificate.txt", err=True)
    return _all_of(certificates, passed)


def _all_of(results: Sequence[Any], passed: bool) -> Output:
    return Output(
        [each.to_dict() for each in results],
        lambda: "\n".join(each.describe() for each in results),
        passed,
    )


def _verified_script(given: Given) -> Any:
    """Return the verdicts on a script that has its own loop; None for the file of a job."""
    from paceline.job.file import is_script

    path, settings = given["job"].path, given["job"].settings
    if not is_script(path):
        return None
    from paceline.attached.verify import verify_script

    stated = [f"--{name}" for name in given if name not in ("job", "plans", "steps", "timeout_s")]
    if stated := [*(["--set"] if settings else []), *stated]:
        raise UsageError(
            f"{' and '.join(stated)}: {path} is a script with its own loop, and not a job",
            hint="--plan and --steps are what such a proof takes",
        )
    load_modules(OF_RUNS)
    return verify_script(path, **{name: given[name] for name in given if name != "job"})


@_command("paceline.searches.search:search -settings -space", _JOB)
def search(given: Given, *, html: str | None = None) -> Output:
    """Search hyperparameters; trials are distributed runs.

    Args:
        html: Also write a page, as `paceline report DIR` does.
    """
    _prepare_page(html)
    job = given.pop("job")
    result = paceline.search(replace(job, settings={}), settings=job.settings, **given).to_dict()
    if html is not None:
        _say(f"page {paceline.report(result['run'], output=html)}", err=True)
    return Output(result, lambda: table(_best_of(result)))


@_command("paceline.api.report:report")
def report(given: Given) -> Output:
    """Write one HTML file about a run, a search or a proof."""
    written = str(paceline.report(**given))
    return Output(written, lambda: written)


@_command("paceline.api.report:compare", _JSON)
def compare(given: Given) -> Output:
    """Compare two runs; with --fail-if, for automatic checks."""
    comparison = paceline.compare(**given)
    for condition in comparison.failed:
        _say(f"failed: {condition}", err=True)
    return Output(comparison.to_dict(), comparison.describe, not comparison.failed)


@_command(
    "paceline.api.rehearsal:rehearse -faults",
    f"{_TRAIN} steps devices procs restarts",
    "paceline.launch.process.faults:KINDS",
    _JOB,
)
def rehearse(given: Given) -> Output:
    """Train a job undisturbed, then under faults."""
    faults = [Fault.parse(kind, text) for kind in KINDS for text in given.pop(kind, ())]
    load_modules(OF_RUNS)
    outcome = paceline.rehearse(faults=faults, **given)
    return Output(outcome.to_dict(), outcome.describe, outcome.passed)


@_command("paceline.api.audit:audit", _JSON)
def audit(given: Given) -> Output:
    """Prove that each sample counted in exactly one update."""
    result = paceline.audit(**given)
    return Output(result.to_dict(), result.describe, result.passed)


@_command("paceline.api.replay:replay -job", _JSON)
def replay(given: Given) -> Output:
    """Compute a step of a run again and compare it."""
    result = paceline.replay(**given)
    return Output(result.to_dict(), result.describe, result.passed)


@_command()
def launch(
    given: Given,
    *,
    kind: Literal["slurm", "k8s", "sky", "ray", "docker"],
    arguments: Sequence[str],
    hosts: int = 1,
    gpus: str = "0",
    time: str | None = None,
    image: str = "paceline",
    volumes: Mapping[str, str] = {},
    write: str | None = None,
) -> Output:
    """Write the file that starts a command on a cluster.

    Args:
        kind: For Slurm, Kubeflow Trainer, SkyPilot, KubeRay or Docker.
        arguments: What every host runs, such as: train job.py --run DIR.
        hosts: Number of hosts.
        gpus: GPUs of a host. SkyPilot needs their name, too: H100:8.
        time: Slurm's limit, after which the run is queued again.
        image: The image of Kubernetes' or Docker's containers.
        volumes: A claim, bucket, volume or folder, and where it is mounted.
        write: The file; by default the text is printed.
    """
    from paceline.api import launch_files

    request = launch_files.LaunchRequest(arguments, hosts, gpus, time, image, volumes)
    text = launch_files.text(kind, request)
    if write is None:
        return Output(text, lambda: text, is_file=True)
    path = Path(write)
    if path.suffix == ".py" and path.exists():
        raise UsageError(
            f"{write} is Python code, which the file would replace", hint="--write job.sh"
        )
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"can't write {write}: {error.strerror}") from error
    return Output(write, lambda: write)


@_command(_JSON)
def doctor(given: Given) -> Output:
    """Say what this machine has and what is wrong with it."""
    from paceline.doctor.machine import describe, examine

    findings = examine()
    passed = all(finding.status != "bad" for finding in findings)
    document = {"passed": passed, "findings": [finding.to_dict() for finding in findings]}
    return Output(document, partial(describe, findings), passed)


@_command(optional=("page",))
def docs(given: Given, *, page: str | None = None) -> Output:
    """Say where a page of the documentation is.

    Args:
        page: The name of a page, such as job; without it, all are listed.
    """
    from paceline.api import pages

    if page is None:
        titles = {name: pages.title(path) for name, path in pages.pages().items()}
        return Output(titles, lambda: table(titles))
    found = str(pages.page(page))
    return Output(found, lambda: found)


def _on_every_host(plan: str | None, procs: int | None = None) -> None:
    """Start the ranks of this host, if a cluster started this command once on each of several; then it does not return.

    Raises:
        ClusterError: see `hosts.host` and `Host.ranks`. PlanError: the plan can't be read.
    """
    if (place := host_process.host()) is None:
        return
    from paceline.api.plan_choice import is_auto
    from paceline.cluster.accelerators import gpus

    world_size = procs if plan is None or is_auto(plan) else paceline.Plan.read(plan).world_size
    command = [sys.executable, "-m", "paceline", *sys.argv[1:]]
    host_process.become_agent(place, place.ranks(world_size, len(gpus())), command)


# --- Errors and streams -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Let an error become a message on stderr and an exit code."""
    try:
        yield
    except PacelineError as error:
        if _tells(error):
            _say(f"error: {error}{_card_of(error)}", err=True)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if (refusal := on_windows(error) or on_full_disk(error)) is not None:
            _say(f"error: {refusal}", err=True)
            raise SystemExit(refusal.exit_code) from None
        traceback.print_exc()
        _say("error: this is a bug in paceline; please report it with the lines above", err=True)
        raise SystemExit(1) from None


def _card_of(error: PacelineError) -> str:
    """Five lines on a training that the error ended, or nothing."""
    run_dir: Path | None = getattr(error, "run_dir", None)
    if run_dir is None or not run_dir.exists():
        return ""
    with contextlib.suppress(PacelineError, OSError):  # the folder may be what is damaged
        return f"\n\n{card(run_dir)}"
    return ""


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep stdout for the result: a job's print(), its ranks and libraries written in C write to stderr meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _tells(error: PacelineError) -> bool:
    """Whether this process prints an error. Every rank finds the same fault with a request, and one tells it; what is
    missing on a host, one of its own ranks tells."""
    if isinstance(error, HostError):
        return _is_first_rank("local_rank")
    return not isinstance(error, UsageError) or _is_first_rank()


def _is_first_rank(number: str = "rank") -> bool:
    """Whether this process speaks for the run: under torchrun and Slurm every rank is a command of its own.

    number: "local_rank" for the first of its host.
    """
    try:
        return getattr(environment.current(), number, 0) == 0
    except (
        PacelineError
    ):  # the launcher's variables contradict each other, which every rank may tell
        return True


# --- Printing ---------------------------------------------------------------------------------------------------


def _say(text: str, *, err: bool = False) -> None:
    print(printable(text), file=sys.stderr if err else sys.stdout)


def _json(document: Any) -> str:
    return json.dumps(strict(document), indent=2, allow_nan=False)


def _best_of(study: Mapping[str, Any]) -> dict[str, Any]:
    """The winner of a search, for people."""
    best, states = study["best"], [trial["state"] for trial in study["trials"]]
    test = study["test"] or {}
    return {
        "trials": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "best": f"trial {best['trial']}",
        **best["figures"],
        **{f"test {name}": value for name, value in test.items() if name != "trial"},
        **best["params"],
        "plan": best["plan"],
        "run": study["run"],
        "train it": best["command"],
    }
