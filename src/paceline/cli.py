"""The command line: each command calls the function of the same name and prints what it returns.

stdout is the result alone; progress, logs, errors and whatever a job prints go to stderr. The functions load torch
when they are first named, so that `paceline --help` and a mistyped option answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from typer.core import TyperCommand

import paceline
from paceline.api.summary_table import card, summary_table, table
from paceline.base.document import strict
from paceline.base.errors import (
    HostError,
    PacelineError,
    UsageError,
    on_full_disk,
    on_windows,
    printable,
)
from paceline.base.imports import OF_RUNS, load_modules
from paceline.base.logs import unbroken
from paceline.job.file import JobFile
from paceline.launch.hosts import environment, host_process
from paceline.runs.folder import fresh_name


class _Command(TyperCommand):
    """A command that names the option that a word too many belongs to."""

    allow_extra_args = True  # it refuses them itself

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = super().parse_args(ctx, args)
        if words:
            from paceline.strategies.key_registry import key

            meant: dict[str, list[str]] = {}
            for word in words:
                name = re.split(r"[\s,=]", word)[0]
                is_plan = (
                    name in ("single", "auto") or key(name) is not None or word.endswith(".json")
                )
                meant.setdefault(
                    "--plan" if is_plan else "--set" if "=" in word else "", []
                ).append(word)
            repeats = {
                option: getattr(each, "multiple", False)
                for each in self.params
                for option in each.opts
            }
            options = [
                shlex.join([option, value])
                for option, group in meant.items()
                if option in repeats
                for value in (group if repeats[option] else [" ".join(group)])
            ]
            ctx.fail(
                printable(
                    f"no argument takes {shlex.join(words)}"
                    + f"; did you mean {' '.join(options)}?" * bool(options)
                )
            )
        return words


class _ScriptCommand(_Command):
    """A command that gives a script the options that are not its own, but no misspelt or foreign ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        num_behind = len(args) - args.index("--") - 1 if "--" in args else 0
        words = super().parse_args(ctx, args)
        command = ctx.params["command"]
        train = ctx.parent.command.get_command(ctx, "train")
        own, of_train = (
            [
                option.strip("-")
                for each in command.params
                for option in each.opts
                if option[0] == "-"
            ]
            for command in (self, train)
        )
        for place, word in enumerate(command[: len(command) - num_behind]):
            if not word.startswith("-"):
                continue
            name = word.split("=")[0]
            near = difflib.get_close_matches(name.strip("-"), own, 1, _NEAR)
            foreign = difflib.get_close_matches(name.strip("-"), of_train, 1, _NEAR_OF_TRAIN)
            if near or foreign or not place:
                why = (
                    f"; did you mean --{near[0]}?"
                    if near
                    else f": --{foreign[0]} is one of paceline train."
                    if foreign
                    else "."
                )
                ctx.fail(
                    printable(
                        f"paceline run has no option {name}{why} Arguments of the script's own may come after two "
                        f"dashes: paceline run SCRIPT -- {shlex.quote(word)}"
                    )
                )
        return words


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=_Command)
# How alike (0 to 1) an unknown word and an option are that is taken for it. Scripts have --test and --step.
_NEAR, _NEAR_OF_TRAIN = 0.75, 0.9

JobSource = Annotated[
    str, typer.Argument(metavar="FILE[:FUNCTION]", help="The job: a function, `job` by default.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a trained run.")]
OnePlan = Annotated[
    str | None,
    typer.Option("--plan", metavar="PLAN", help="'single', 'data=2', ... or a plan.json."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", help="cpu:0,cpu:1 or cuda:0-3, one a rank; 2xcuda:0 is one GPU for two."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A hyperparameter.")
]
_EXAMPLES = {
    "--set": "lr=0.01 sets the parameter lr of the job",
    "--vary": "lr=1e-5..1e-1:log varies the parameter lr",
    "--volume": "runs=/runs mounts the volume runs",
}
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        "--timeout",
        metavar="SECONDS",
        min=1,
        help="How long a rank may give no sign of life.",
    ),
]
SaveEvery = Annotated[
    int | None, typer.Option(metavar="STEPS", min=1, help="Steps between checkpoints.")
]
ToLoggers = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="KIND[:WHERE]",
        help="tensorboard[:DIR], mlflow[:URI], wandb[:PROJECT], trackio[:PROJECT].",
    ),
]
ToFolder = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Where the run is written.")
]
GoesOn = Annotated[
    bool, typer.Option("--resume", help="Go on from the run's newest valid checkpoint.")
]
OnSpike = Annotated[
    Literal["stop", "skip", "rewind"] | None,
    typer.Option(help="What to do about a step whose loss is far above those before."),
]
YesOrNo = Literal["yes", "no"]
_Texts = list[str] | None
_AT = "RANK@STEP[:PHASE]"
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def main() -> None:
    """The `paceline` command. Its process ends without libtorch's destructors, which take 0.6 s of a core."""
    codes: list[int] = []
    atexit.register(_end_process, codes)  # the first to be registered is the last to run
    with unbroken():
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
        try:
            app(prog_name="paceline")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                codes.append(end.code or 0)
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
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
    """Say that the output could not be written. Returns the exit code."""
    print(f"Error: the output can't be written: {error.strerror}", file=sys.stderr)
    return 1


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plans, proves and runs distributed training of an ordinary PyTorch model."""


@_command()
def train(
    file: JobSource,
    plan: OnePlan = None,
    devices: Devices = None,
    on: Annotated[
        str | None, typer.Option(metavar="ray[:HOST:PORT]", help="On the nodes of a Ray cluster.")
    ] = None,
    procs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks; must agree with the plan.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of a CPU rank, such as 512MiB.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N optimizer steps.")
    ] = None,
    settings: Settings = None,
    save_every: SaveEvery = None,
    keep: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Newest checkpoints that stay.")
    ] = None,
    trace: Annotated[
        int, typer.Option(metavar="STEPS", min=0, help="Steps to draw: schedule.svg, trace.json.")
    ] = 0,
    run: ToFolder = None,
    resume: GoesOn = False,
    loader_workers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Data loading processes a rank.")
    ] = None,
    patience: Patience = 300.0,
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Restarts of ranks that died or hang; 100 by default."
        ),
    ] = None,
    spares: Annotated[
        int, typer.Option(metavar="N", min=0, help="GPUs kept for the places of those that fail.")
    ] = 0,
    on_spike: OnSpike = None,
    check: Annotated[
        YesOrNo, typer.Option(help="Hold the first update against one device before training.")
    ] = "yes",
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Go on with MIN of MAX hosts if some are lost, and take them back.",
        ),
    ] = None,
    log: ToLoggers = None,
    as_json: Json = False,
) -> None:
    """Train a job on one device or many."""
    with _reported():
        if on is not None and hosts is not None:
            raise UsageError(
                f"--hosts {hosts} is about a command that each host runs; with --on {on} Ray starts ranks",
                hint="leave --hosts out: ranks of a lost node start again where there is room",
            )
        place = host_process.host(hosts=hosts) if on is None else None
        if place is not None and not place.is_elastic:
            _on_every_host(plan, procs)
        job = JobFile.parse(file, _parse_settings(settings))
        load_modules(OF_RUNS)
        run_train = partial(
            paceline.train,
            job,
            devices=devices,
            procs=procs,
            memory=memory,
            steps=steps,
            save_every=save_every,
            keep=keep,
            trace=trace,
            run=run,
            resume=resume,
            loader_workers=loader_workers,
            timeout_s=patience,
            on_spike=on_spike,
            spares=spares,
            check=check == "yes",
            log=log,
            table=False,
        )
        if place is not None:
            from paceline.api.hosts import train_on_hosts

            figures = train_on_hosts(
                place, plan, run_train, run=run, procs=procs, patience_s=patience, restarts=restarts
            )
        else:
            figures = run_train(plan, on=on, restarts=restarts).to_dict()
        speaks = on is not None or _is_first_rank()
    if speaks and figures is not None:
        _say(_json(figures) if as_json else summary_table(figures))


@app.command(name="run", cls=_ScriptCommand, context_settings={"ignore_unknown_options": True})
def run_(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A Python file that calls pl.attach."),
    ],
    plan: OnePlan = None,
    devices: Devices = None,
    save_every: SaveEvery = None,
    run: ToFolder = None,
    resume: GoesOn = False,
    patience: Patience = 300.0,
    on_spike: OnSpike = None,
    log: ToLoggers = None,
    check: Annotated[
        YesOrNo,
        typer.Option(help="Hold the first update against one device, if its loss is a function."),
    ] = "yes",
    as_json: Json = False,
) -> None:
    """Run a script that has its own loop on one device or many."""
    with _reported():
        _on_every_host(plan)
        load_modules(OF_RUNS)
        from paceline.attached.launch import run as run_ranks

        figures = run_ranks(
            command[0],
            plan,
            arguments=command[1:],
            devices=devices,
            save_every=save_every,
            run=run,
            resume=resume,
            timeout_s=patience,
            on_spike=on_spike,
            log=log,
            check=check == "yes",
        )
        speaks = _is_first_rank()
    if speaks:
        _say(_json(figures) if as_json else summary_table(figures))


@_command()
def evaluate(
    run: RunFolder, plan: OnePlan = None, devices: Devices = None, as_json: Json = False
) -> None:
    """Compute a trained run's loss and metrics on its validation data."""
    with _reported():
        _on_every_host(plan)
        figures = paceline.evaluate(run, plan, devices=devices)
        speaks = _is_first_rank()
    if speaks:
        _say(_json(figures) if as_json else table(figures))


@_command()
def predict(
    run: RunFolder,
    input: Annotated[str, typer.Argument(metavar="INPUT", help="What the model is given.")],
    plan: OnePlan = None,
    devices: Devices = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the outputs are written.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of several models, the one that predicts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute a trained run's outputs for an input."""
    with _reported():
        _on_every_host(plan)
        outcome = paceline.predict(run, input, plan, devices=devices, output=output, model=model)
        speaks = _is_first_rank()
    if speaks:
        _say(_json(outcome) if as_json else table(outcome))


@_command(name="plan")
def plan_(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE[:FUNCTION]",
            help="A Python file with a function job().",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    hf: Annotated[
        str | None,
        typer.Option(
            "--hf",
            metavar="CONFIG",
            help="In place of FILE, a Transformers model: a "
            "folder with config.json, or a type such as llama.",
        ),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="With --hf: adapters by peft.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="With --hf: of a sample; 1024.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="SAMPLES", help="With --hf: of a step; 8.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="With --hf: float32, float16 or bfloat16; by default what the configuration says.",
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            "--gpus",
            metavar="CLUSTER",
            help="local, 2xcpu, 8xH100, 16x8xH100, 2x24GB, or a TOML file.",
        ),
    ] = "local",
    relaxed: Annotated[
        bool, typer.Option("--relaxed", help="A plan may be chosen that is not exact.")
    ] = False,
    price: Annotated[
        float | None, typer.Option(metavar="PER_HOUR", help="Of a device; ranks plans by cost.")
    ] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Mean time between failures of a device: how often to save, and what is lost.",
        ),
    ] = None,
    repair_hours: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Until a host, or a GPU, that failed is back; 1 by default, a guess.",
        ),
    ] = None,
    checkpoint_rate: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES_PER_S",
            help="At which a device writes a checkpoint; 120 MB/s by default.",
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="FIRST..LAST", help="The best plan on 1..4096 devices.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw --scale to a .png or .svg.")
    ] = None,
    calibrate: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="For trials of the best plans, 10 by default; 0 predicts alone.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page: plans, parts, reasons.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank the plans that a job allows by predicted speed or cost, and say why each other kind loses."""
    of_model = {"lora": lora, "sequence": sequence, "batch": batch, "weights": weights}
    stated_of_model: dict[str, Any] = {
        name: value for name, value in of_model.items() if value is not None
    }
    with _reported():
        if (file is None) == (hf is None):
            raise UsageError("give either FILE or --hf CONFIG", hint="paceline plan job.py")
        if hf is None and stated_of_model:
            raise UsageError(
                f"--{min(stated_of_model)} is about --hf",
                hint="a job file has its own parameters: --set",
            )
        if hf is not None and (scale is not None or settings):
            raise UsageError(
                "--hf makes one job: --scale and --set are for job files", hint="leave them out"
            )
    if scale is not None:
        assert file is not None
        _scale(
            file,
            settings,
            cluster,
            scale,
            relaxed=relaxed,
            plot=plot,
            as_json=as_json,
            others={
                "--price": price,
                "--mtbf-hours": mtbf_hours,
                "--repair-hours": repair_hours,
                "--checkpoint-rate": checkpoint_rate,
                "--calibrate": calibrate,
                "--html": html,
            },
        )
        return
    with _reported():
        if plot is not None:
            raise UsageError("--plot draws what --scale finds", hint="add --scale 1..4096")
        for option, value in (
            ("--checkpoint-rate", checkpoint_rate),
            ("--repair-hours", repair_hours),
        ):
            if value is not None and mtbf_hours is None:
                raise UsageError(f"{option} is about failures", hint="add --mtbf-hours")
        stated = {
            "repair_hours": repair_hours,
            "checkpoint_bytes_per_s": checkpoint_rate,
            "calibrate_s": calibrate,
        }
        options: dict[str, Any] = {
            name: value for name, value in stated.items() if value is not None
        }
        options |= {"relaxed": relaxed, "price_per_hour": price, "mtbf_hours": mtbf_hours}
        _prepare_page(html)
        if hf is not None:
            from paceline.api.fine_tuning import FineTuning

            answer = paceline.plan(FineTuning(hf, **stated_of_model), cluster, **options)
        else:
            assert file is not None
            answer = paceline.plan(
                JobFile.parse(file, _parse_settings(settings)), cluster, **options
            )
        if html is not None:
            page = answer.write_html(html, command=f"paceline train {file or 'JOB'}")
            _say(f"page {page}", err=True)
    _say(_json(answer.to_dict()) if as_json else answer.describe())
    if answer.chosen is None:
        raise typer.Exit(1)


def _prepare_page(to: Path | None) -> None:
    if to is not None:
        from paceline.reports.page import prepare

        prepare(to)


def _scale(
    file: str,
    settings: list[str] | None,
    cluster: str,
    counts: str,
    *,
    relaxed: bool,
    plot: Path | None,
    as_json: bool,
    others: Mapping[str, Any],
) -> None:
    with _reported():
        from paceline.api.scaling import check_plot

        if stated := [name for name, value in others.items() if value is not None]:
            raise UsageError(
                f"{' and '.join(stated)}: --scale ranks by time alone", hint="one of both"
            )
        if plot is not None:
            check_plot(plot)
        scaling = paceline.scale(
            JobFile.parse(file, _parse_settings(settings)), cluster, counts, relaxed=relaxed
        )
        if plot is not None:
            _say(f"drawn {scaling.plot(plot)}", err=True)
    _say(_json(scaling.to_dict()) if as_json else scaling.describe())
    if scaling.first is None:
        raise typer.Exit(1)


@_command()
def verify(
    file: JobSource,
    settings: Settings = None,
    plans: Annotated[
        list[str] | None, typer.Option("--plan", metavar="PLAN", help="A plan; may be repeated.")
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Optimizer steps that are compared.")
    ] = 4,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the certificate is written.")
    ] = None,
    resume: Annotated[
        Literal["short", "full", "no"],
        typer.Option(
            help="Which plans also go on from another plan's checkpoint: one an axis, all, none."
        ),
    ] = "short",
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="Such as cuda:0-3; the first is what plans are held against. Default: CPUs.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that plans compute what one device computes."""
    with _reported():
        verdicts = _verified_script(
            file, plans, steps, {"--set": settings, "--run": run, "--devices": devices}
        )
    if verdicts is not None:
        _say(
            _json([verdict.to_dict() for verdict in verdicts])
            if as_json
            else "\n".join(verdict.describe() for verdict in verdicts)
        )
        raise typer.Exit(not all(verdict.passed for verdict in verdicts))
    with _reported():
        job = JobFile.parse(file, _parse_settings(settings))
        speaks = _is_first_rank()
        written = (run or fresh_name(f"verify-{job.path.stem}")) if speaks else None
        certificates = paceline.verify(
            job, plans or (), steps=steps, run=written, resume=resume, devices=devices
        )
        if speaks:
            _say(f"certificate {written}/certificate.txt", err=True)
    if speaks:
        _say(
            _json([certificate.to_dict() for certificate in certificates])
            if as_json
            else "\n".join(certificate.describe() for certificate in certificates)
        )
    if not all(each.passed or (each.refused and not each.asked_for) for each in certificates):
        raise typer.Exit(1)


def _verified_script(
    file: str, plans: list[str] | None, steps: int, others: Mapping[str, Any]
) -> Any:
    """The verdicts on a script that has its own loop; None for the file of a job."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_file() or "attach(" not in path.read_text("utf-8"):
        return None
    from paceline.attached.verify import verify_script
    from paceline.job.file import is_script

    if not is_script(path):
        return None
    if stated := [name for name, value in others.items() if value]:
        raise UsageError(
            f"{' and '.join(stated)}: {file} is a script with its own loop, and not a job",
            hint="--plan and --steps are what such a proof takes",
        )
    load_modules(OF_RUNS)
    return verify_script(path, plans or ["data=2"], steps=steps)


@_command()
def search(
    file: JobSource,
    trials: Annotated[
        int, typer.Option(metavar="N", min=1, help="Trials that the study has at its end.")
    ],
    objectives: Annotated[
        list[str] | None,
        typer.Option(
            "--objective",
            metavar="NAME[:max]",
            help="What is made small (or large); may be repeated.",
        ),
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit", metavar="NAME<=X", help="On parameters, step_ms, memory_mb; may be repeated."
        ),
    ] = None,
    settings: Settings = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DOMAIN",
            help="LOW..HIGH, LOW..HIGH:STEP, LOW..HIGH:log, or OPTION,OPTION.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(metavar="FUNCTION", help="In the file: gives parameters from Optuna's trial."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Of each trial: 'single', ..., or 'auto'.")
    ] = None,
    devices: Devices = None,
    procs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks that run at a time.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of a CPU rank, such as 512MiB.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray places trials on its nodes: auto, or HOST:PORT."),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="random, tpe, cmaes, gp, nsga2 or evolution.")
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(metavar="NAME", help="none, median, halving or hyperband.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="sqlite:///..., postgresql+psycopg://...")
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="The study's name in the database.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the sampler.")] = 0,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Where all is written.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the study of the folder.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page, as `report DIR` does.")
    ] = None,
    patience: Patience = 300.0,
    as_json: Json = False,
) -> None:
    """Search hyperparameters and architectures; trials are distributed runs on slices of the devices."""
    with _reported():
        job = JobFile.parse(file)
        _prepare_page(html)
        result = paceline.search(
            job,
            trials,
            objective=objectives,
            limits=limits or (),
            settings=_parse_settings(settings),
            vary=_parse_settings(vary, "--vary"),
            space=space,
            plan=plan,
            devices=devices,
            procs=procs,
            memory=memory,
            ray=ray,
            sampler=sampler,
            pruner=pruner,
            storage=storage,
            study=study,
            seed=seed,
            run=run,
            resume=resume,
            timeout_s=patience,
        )
        if html is not None:
            _say(f"page {paceline.report(result.to_dict()['run'], to=html)}", err=True)
    _say(_json(result.to_dict()) if as_json else table(_best_of(result.to_dict())))


@_command()
def report(
    run: Annotated[
        Path, typer.Argument(metavar="DIR", help="Of a run, a search or a verification.")
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default DIR/report.html.")
    ] = None,
    price: Annotated[
        YesOrNo, typer.Option(help="Price other plans for the run's job, which loads it.")
    ] = "yes",
) -> None:
    """Write one HTML file about a run: what limits it, why, what to try next, and all its figures."""
    with _reported():
        written = paceline.report(run, to=output, price=price == "yes")
    _say(str(written))


@_command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="That of another.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE>X%", help="Exit with 1 if B's figure is worse by more; may be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Hold a run against another; with --fail-if, for continuous integration."""
    with _reported():
        comparison = paceline.compare(first, second, fail_if=fail_if or ())
    _say(_json(comparison.to_dict()) if as_json else comparison.describe())
    for condition in comparison.failed:
        _say(f"failed: {condition}", err=True)
    if comparison.failed:
        raise typer.Exit(1)


@_command()
def rehearse(
    file: JobSource,
    plan: OnePlan = None,
    kill: Annotated[
        _Texts, typer.Option(metavar=_AT, help="SIGKILL a rank; may be repeated, like all.")
    ] = None,
    stop: Annotated[_Texts, typer.Option(metavar=_AT, help="SIGSTOP a rank.")] = None,
    slow: Annotated[
        _Texts, typer.Option(metavar="RANK:TIMESx", help="A rank's work takes longer.")
    ] = None,
    raise_: Annotated[_Texts, typer.Option("--raise", metavar=_AT, help="An exception.")] = None,
    flip: Annotated[
        _Texts,
        typer.Option(
            metavar=f"{_AT[:-1]}|:gradients]",
            help="A bit of a rank's weights flips, or of its gradients before they are summed.",
        ),
    ] = None,
    disk_full: Annotated[
        _Texts, typer.Option(metavar=_AT, help="A rank can write to no file.")
    ] = None,
    preempt: Annotated[_Texts, typer.Option(metavar=_AT, help="SIGTERM a rank.")] = None,
    tear: Annotated[
        _Texts, typer.Option(metavar=_AT, help="Damage the last save, kill the launcher.")
    ] = None,
    kill_launcher: Annotated[
        _Texts, typer.Option(metavar=_AT, help="SIGKILL what started ranks.")
    ] = None,
    random: Annotated[
        int, typer.Option(metavar="N", min=0, help="So many random faults more.")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the random faults.")] = 0,
    settings: Settings = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N optimizer steps.")
    ] = None,
    devices: Devices = None,
    procs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks; must agree with the plan.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Five times a run by default.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--patience",
            "--timeout",
            metavar="SECONDS",
            min=1,
            help="How long a rank may give no sign of life.",
        ),
    ] = 10.0,
    restarts: Annotated[int | None, typer.Option(metavar="N", min=0, help="As in train.")] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where both runs are written.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a job undisturbed, then under faults: seconds lost, steps recomputed, samples lost, weights changed."""
    texts_by_kind = {
        "kill": kill,
        "stop": stop,
        "slow": slow,
        "raise": raise_,
        "flip": flip,
        "disk_full": disk_full,
        "preempt": preempt,
        "tear": tear,
        "kill_launcher": kill_launcher,
    }
    with _reported():
        from paceline.launch.process.faults import Fault, Kind

        faults = [
            Fault.parse(cast(Kind, kind), text)
            for kind, texts in texts_by_kind.items()
            for text in texts or ()
        ]
        job = JobFile.parse(file, _parse_settings(settings))
        load_modules(OF_RUNS)
        outcome = paceline.rehearse(
            job,
            plan,
            faults,
            random=random,
            seed=seed,
            run=run,
            save_every=save_every,
            timeout_s=timeout,
            restarts=restarts,
            steps=steps,
            devices=devices,
            procs=procs,
        )
    _say(_json(outcome.to_dict()) if as_json else outcome.describe())
    if not outcome.passed:
        raise typer.Exit(1)


@_command()
def audit(run: RunFolder, as_json: Json = False) -> None:
    """Prove by a run's journal that each sample counted in exactly one update of its epoch."""
    with _reported():
        result = paceline.audit(run)
    _say(_json(result.to_dict()) if as_json else result.describe())
    if not result.passed:
        raise typer.Exit(1)


@_command()
def replay(
    run: RunFolder,
    step: Annotated[
        int, typer.Option(metavar="N", min=1, help="The last step to compute again, from 1.")
    ],
    plan: OnePlan = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Compute a step of a run again, from the checkpoint before it, and compare it with the run's record."""
    with _reported():
        result = paceline.replay(run, step, plan, devices=devices)
    _say(_json(result.to_dict()) if as_json else result.describe())
    if not result.passed:
        raise typer.Exit(1)


@_command(context_settings={"ignore_unknown_options": True})
def launch(
    kind: Annotated[
        Literal["slurm", "k8s", "sky", "ray", "docker"],
        typer.Argument(help="Slurm, Kubeflow Trainer, SkyPilot, KubeRay, or Docker."),
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- train FILE ...", help="What every host runs.")
    ],
    hosts: Annotated[int, typer.Option(metavar="N", min=1, help="Hosts.")] = 1,
    gpus: Annotated[
        str, typer.Option(metavar="[NAME:]N", help="Of a host; SkyPilot needs the name: H100:8.")
    ] = "0",
    time: Annotated[
        str | None, typer.Option(metavar="HH:MM:SS", help="Slurm's limit; it is queued again.")
    ] = None,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Of Kubernetes' or Docker's containers.")
    ] = "paceline",
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A claim, bucket, volume or folder and where it is mounted; repeatable.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of printing it.")
    ] = None,
) -> None:
    """Write the file that starts a command on a cluster: a batch file, a TrainJob, a task or a compose file."""
    with _reported():
        from paceline.api import launch_files

        request = launch_files.LaunchRequest(
            command, hosts, gpus, time, image, _parse_settings(volume, "--volume")
        )
        text = launch_files.text(kind, request)
        if write is not None and write.suffix == ".py" and write.exists():
            raise UsageError(
                f"{write} is Python code, which the file would replace", hint="--write job.sh"
            )
        if write is not None:
            try:
                write.write_text(text, encoding="utf-8", errors="surrogateescape")
            except OSError as error:
                raise UsageError(f"can't write {write}: {error.strerror}") from error
    typer.echo(text if write is None else str(write), nl=write is not None)


@_command()
def doctor(
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Run on each host: what is between the hosts.")
    ] = False,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="For other hosts to come.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Say what this machine has and what is wrong with it; or, between the hosts of a run."""
    with _reported():
        from paceline.doctor.machine import describe, examine

        if hosts:
            os.environ.setdefault(
                "TORCH_CPP_LOG_LEVEL", "ERROR"
            )  # torch else prints stacks of what findings say
            from paceline.doctor.hosts import examine_hosts, place_here

            findings = examine_hosts(place_here(), timeout_s=patience)
        else:
            findings = examine()
    passed = all(finding.status != "bad" for finding in findings)
    document = {"passed": passed, "findings": [finding.to_dict() for finding in findings]}
    _say(_json(document) if as_json else describe(findings))
    if not passed:
        raise typer.Exit(1)


@_command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="Such as job; without it, all are listed.")
    ] = None,
) -> None:
    """Say where a page of the documentation is: a file of this installation."""
    with _reported():
        from paceline.api import pages

        if page is None:
            text = table({name: pages.title(path) for name, path in pages.pages().items()})
        else:
            text = str(pages.page(page))
    _say(text)


def _parse_settings(words: Iterable[str] | None, option: str = "--set") -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(
                f"{option} {word} is not NAME=VALUE", hint=f"{option} {_EXAMPLES[option]}"
            )
        if name in settings:
            raise UsageError(f"{option} {name} is given twice: {settings[name]} and {value}")
        settings[name] = value
    return settings


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
    """Run a command's work; an error becomes a message on stderr and an exit code, and stdout stays empty."""
    try:
        with _stdout_to_stderr():
            yield
    except PacelineError as error:
        if _tells(error):
            _say(f"error: {error}{_card_of(error)}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except Exception as error:
        if (refusal := on_windows(error) or on_full_disk(error)) is not None:
            _say(f"error: {refusal}", err=True)
            raise typer.Exit(refusal.exit_code) from None
        traceback.print_exc()
        typer.echo(
            "error: this is a bug in paceline; please report it with the lines above", err=True
        )
        raise typer.Exit(1) from None


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
    typer.echo(printable(text), err=err)


def _json(document: Any) -> str:
    return json.dumps(strict(document), indent=2, allow_nan=False)


def _best_of(study: Mapping[str, Any]) -> dict[str, Any]:
    """The winner of a search, for people."""
    best, states = study["best"], [trial["state"] for trial in study["trials"]]
    test = {name: value for name, value in (study["test"] or {}).items() if name != "trial"}
    return {
        "trials": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "best": f"trial {best['trial']}",
        **best["figures"],
        "test": test or None,
        **best["params"],
        "plan": best["plan"],
        "run": study["run"],
        "train it": best["command"],
    }
