"""Runs a script and its ports, and compares their losses and weights in float64.

The original runs in one process. What both scripts must share is made alike in both texts before they run: the
order of samples, initial weights, and noise (see `Script.alike`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline as pl
from paceline.base.errors import PacelineError, UsageError
from paceline.base.fork import in_a_fork
from paceline.checkpoint import load_tensors
from paceline.runs.folder import METRICS, MODEL
from tests.corpus.sweep import REFUSALS, first_line

from .bugs import BUGS, SOUND
from .lines import changed_lines

FOLDER = Path(__file__).parent
FORMS = ("attach", "compute", "step")
PLANS = ("single", "data=2", "data=3", "shard=2", "tensor=2", "pipeline=2")
PROVEN = ("data=2", "data=3")  # under which a proof looks for bugs
EQUAL, REFUSED, WRONG = "equal", "refused", "wrong"
TOLERANCE = 1e-9  # relative to the largest number of a tensor, as in tests/corpus
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Script:
    """A script as people publish it.

    Attributes:
        title: What it trains.
        backwards: How many losses its loop goes back from in a step.
        alike: Texts with those that take their place in the original and in its ports: noise becomes a function of the
            sample, so that both compute with the same.
        names: Beginnings of the names of its weights, behind the name of the file that it saves, with those in a port.
    """

    name: str
    title: str
    backwards: int = 1
    alike: Mapping[str, str] = field(default_factory=dict, hash=False)
    names: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def original(self) -> str:
        return (FOLDER / "original" / f"{self.name}.py").read_text(encoding="utf-8")

    @property
    def source(self) -> str:
        """The address of the public script that it is like."""
        return next(
            line.removeprefix("Original: ")
            for line in self.original.splitlines()
            if line.startswith("Original: ")
        )

    @property
    def ports(self) -> tuple[Port, ...]:
        return tuple(
            Port(self, form) for form in FORMS if (FOLDER / form / f"{self.name}.py").exists()
        )

    def alike_in(self, text: str) -> str:
        """Return a text whose order and noise are those of the script's other texts."""
        text = text.replace("shuffle=True", "shuffle=False")
        for old, new in self.alike.items():
            text = text.replace(old, new)
        return text


@dataclass(frozen=True)
class Port:
    """A script with its loop kept, or as a job."""

    script: Script
    form: str

    @property
    def text(self) -> str:
        return (FOLDER / self.form / f"{self.script.name}.py").read_text(encoding="utf-8")

    @property
    def changed(self) -> list[str]:
        return changed_lines(self.script.original, self.text)


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: the loss of every step, and the weights with buffers by name."""

    losses: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """A port under a plan, beside its original."""

    port: Port
    plan: str
    verdict: str
    reason: str = ""


SCRIPTS = (
    Script("nanogpt", "a character GPT"),
    Script(
        "vae",
        "a variational autoencoder",
        alike={"torch.randn_like(std)": "torch.sin(40 * std)"},
    ),
    Script(
        "gan",
        "a DCGAN with BatchNorm",
        backwards=3,
        alike={
            "torch.randn(batch_size, nz, 1, 1, device=device)": (
                "torch.sin(40 * real_cpu.flatten(1)[:, :nz, None, None])"
            )
        },
        names={"netG.pth:": "G.", "netD.pth:": "D."},
    ),
    Script(
        "ppo",
        "an agent, by proximal policy optimisation",
        alike={
            "probs.sample()": "(1e4 * x).sum(-1).long() % 2",
            "np.random.shuffle(b_inds)": "pass",
        },
    ),
    Script("word_language_model", "an LSTM language model that carries its state"),
    Script("simclr", "a contrastive learner"),
    Script("ctc", "a speech recogniser with CTC"),
    Script("moe", "a sparse mixture of experts"),
    Script("forward_forward", "a network by forward-forward", names={"net.pt:layers.": "layer"}),
    Script("accelerate_nlp", "a BERT classifier, with Accelerate"),
    Script("accelerate_cv", "a frozen network's classifier, with Accelerate"),
    Script(
        "accelerate_gradient_accumulation",
        "accumulated gradients, with Accelerate",
        backwards=5,
    ),
    Script("accelerate_checkpointing", "a resumed run, with Accelerate"),
    Script("accelerate_tracking", "a logged run, with Accelerate"),
    Script("lightning_classifier", "a LightningModule"),
    Script("deepspeed_cifar", "DeepSpeed's CIFAR-10 network"),
)


def compare(port: Port, plan: str, folder: Path) -> Comparison:
    """Run a port under a plan and compare it with its original. folder: for both runs; empty or of an earlier call."""
    expected = original_outcome(port.script, folder)
    run = folder / f"{port.script.name}-{port.form}-{plan.replace(' ', '-')}"
    with float64():
        start = attached(port, run) if port.form == "attach" else training(port)
    try:
        with float64(), quiet():
            start(plan, devices=devices(plan), run=run, timeout_s=PATIENCE_S)
    except PacelineError as error:
        failure = getattr(error, "failure", None)
        kind = failure.kind if failure is not None else type(error).__name__
        reason = first_line(failure.message if failure is not None else error)
        if kind in REFUSALS or isinstance(error, UsageError):
            return Comparison(port, plan, REFUSED, reason)
        return Comparison(port, plan, WRONG, f"{kind}: {reason}")
    reason = difference(expected, outcome_of(run))
    return Comparison(port, plan, WRONG if reason else EQUAL, reason)


def attached(port: Port, run: Path) -> Callable[..., Any]:
    """Return a function of a plan that runs a script which keeps its loop."""
    from paceline.attached.launch import run as run_script

    path = run.with_suffix(".py")
    path.write_text(port.script.alike_in(port.text), encoding="utf-8")
    return partial(run_script, path, check=False)


def training(port: Port) -> Callable[..., Any]:
    """Return a function of a plan that trains the job of a script, from the script's initial weights."""
    (seed,) = re.findall(r"^torch.manual_seed.(\d+).$", port.script.original, re.MULTILINE)
    text = port.script.alike_in(port.text)
    text = text.replace("pl.Job(", f"pl.Job(seed=pl.like_torch({seed}), ")
    names: dict[str, Any] = {"__name__": "port"}
    exec(compile(text, f"{port.form}/{port.script.name}.py", "exec"), names)
    return partial(pl.train, replace(names["job"], precision="float64"), table=False, check=False)


def devices(plan: str) -> str:
    return f"cpu:0-{pl.Plan.parse(plan).world_size - 1}"


@cache
def original_outcome(script: Script, folder: Path) -> Outcome:
    """Run an original in a process of its own, once in a folder."""
    own = folder / f"{script.name}-original"
    own.mkdir()
    text, name = script.alike_in(script.original), script.name
    with quiet():
        losses = in_a_fork(lambda: _losses(text, name, own))
    each = script.backwards
    weights = {
        _renamed(f"{path.name}:{key}", script.names): tensor
        for path in sorted(own.glob("*.pt*"))
        for key, tensor in torch.load(path, weights_only=True).items()
    }
    return Outcome([sum(losses[i : i + each]) for i in range(0, len(losses), each)], weights)


def _losses(text: str, name: str, folder: Path) -> list[float]:
    """Run a script in this process, in a folder; return the value of every loss that it goes back from."""
    losses, backward = [], Tensor.backward

    def noted(loss: Tensor, *args: Any, **options: Any) -> None:
        losses.append(loss.item())
        backward(loss, *args, **options)

    os.chdir(folder)
    Tensor.backward = noted  # type: ignore[method-assign]
    with float64():
        code = compile(text, f"original/{name}.py", "exec")
        exec(code, {"__name__": "__main__"})
    return losses


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name.partition(":")[2]


def outcome_of(run: Path) -> Outcome:
    """Return what a run left in its folder."""
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    weights = {  # a job with a step of its own has named models
        name.removeprefix("model."): tensor for name, tensor in load_tensors(run / MODEL).items()
    }
    return Outcome([line["loss"] for line in lines if "loss" in line], weights)


def proven(script: str, folder: Path) -> list[str]:
    """Return the plans of PROVEN under which a script with its own loop computes what one device computes."""
    from paceline.attached.verify import verify_script

    path = folder / "loop.py"
    path.write_text(script, encoding="utf-8")
    with quiet():
        verdicts = verify_script(path, PROVEN)
    return [verdict.plan for verdict in verdicts if verdict.passed]


def found_bugs(folder: Path) -> dict[str, bool]:
    """Return whether a proof finds each planted bug, by name.

    Raises:
        AssertionError: it does not pass the loop without one, so it shows nothing.
    """
    assert proven(SOUND, folder) == list(PROVEN)
    return {bug.name: not proven(bug.script, folder) for bug in BUGS}


def difference(expected: Outcome, outcome: Outcome) -> str:
    """Return what is too far apart, in words; "" if nothing is."""
    if len(expected.losses) != len(outcome.losses):
        return f"{len(outcome.losses)} steps instead of {len(expected.losses)}"
    if missing := expected.weights.keys() - outcome.weights.keys():
        return f"'{min(missing)}' is not among the run's weights"
    pairs = {
        f"the loss of step {step}": (torch.tensor(a), torch.tensor(b))
        for step, (a, b) in enumerate(zip(expected.losses, outcome.losses, strict=True), 1)
    } | {name: (a, outcome.weights[name]) for name, a in expected.weights.items()}
    for name, (a, b) in pairs.items():
        off = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else math.inf
        if not off <= TOLERANCE * max(1.0, float(a.double().abs().max())):
            return f"{name} is off by {off:.2g}"
    return ""


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Let tensors that name no dtype be float64 in the block, also in ranks that are forked there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what scripts and runs print, also in forks."""
    with open(os.devnull, "w") as nothing:
        saved = os.dup(1), os.dup(2)
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            for number, each in zip((1, 2), saved, strict=True):
                os.dup2(each, number)
                os.close(each)
