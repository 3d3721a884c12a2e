"""Faults that strike the ranks of a run when a script or a seed says so: values, their text, and what a rank does.

A fault strikes once in a run, however often its ranks start again: a file in the run folder says that it did, and when.
Whatever survives a fault knows nothing of this module.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from paceline.base.errors import UsageError, nearest

FOLDER = "faults"
Kind = Literal[
    "kill", "stop", "slow", "raise", "flip", "disk_full", "preempt", "tear", "kill_launcher"
]

# What each does to its rank.
KINDS: Mapping[Kind, str] = {
    "kill": "the rank gets SIGKILL",
    "stop": "the rank gets SIGSTOP: it lives and says nothing",
    "slow": "the rank's own work takes so many times as long, from its first step on",
    "raise": "the rank raises an exception",
    "flip": "a bit of a weight flips after the rank's update, or one of a gradient before replicas sum it",
    "disk_full": "the rank can write to no file any more",
    "preempt": "the rank gets SIGTERM, as from a scheduler",
    "tear": "a file of the newest checkpoint loses its second half, if there is an older one, and the process that "
    "started the ranks is killed",
    "kill_launcher": "the process that started the ranks is killed",
}
PHASES = ("input", "forward", "backward", "reduce", "optimizer", "save")  # in which faults strike
_GRADIENTS = "gradients"  # in the place of a flip's phase: what its next backward computes
_STRIKES_IN: dict[str | None, str | None] = {_GRADIENTS: "forward"}
_AT_REST = ("input", "save")  # when nothing writes to the weights that a thread updates
_OWN_WORK = ("input", "forward", "backward", "optimizer")
_AT = re.compile(r"(\d+)@(\d+)(?::([a-z]+))?")
_TIMES = re.compile(r"(\d+):(\d+(?:\.\d+)?)x")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a rank in a step.

    step: from 1; the first of the rank's steps that is not before it counts. phase: of the step; None is its begin, and
    "gradients" says what flips.
    times: of a rank that is slow.
    """

    kind: Kind
    rank: int = 0
    step: int = 1
    phase: str | None = None
    times: float = 1.0

    @classmethod
    def parse(cls, kind: Kind, text: str) -> Fault:
        """RANK@STEP, RANK@STEP:PHASE, RANK@STEP:gradients of a flip, or RANK:TIMESx of a rank that is slow.

        Raises:
            UsageError: it is none of these.

        >>> Fault.parse("kill", "2@50:save")
        Fault(kind='kill', rank=2, step=50, phase='save', times=1.0)
        """
        if kind == "slow":
            if (match := _TIMES.fullmatch(text)) and float(match[2]) >= 1:
                return cls(kind, int(match[1]), times=float(match[2]))
            raise UsageError(
                f"--slow {text} is not RANK:TIMESx with at least 1x", hint="--slow 0:3x"
            )
        match = _AT.fullmatch(text)
        phases = (*PHASES, *([_GRADIENTS] if kind == "flip" else []))
        if match is None or int(match[2]) < 1 or match[3] not in (None, *phases):
            option = kind.replace("_", "-")
            raise UsageError(
                f"--{option} {text} is not RANK@STEP or RANK@STEP:PHASE; steps begin with 1, and phases are "
                f"{', '.join(phases)}",
                hint=f"--{option} 1@50, or --{option} 1@50:save",
            )
        return cls(kind, int(match[1]), int(match[2]), match[3])

    @classmethod
    def read(cls, text: str) -> Fault:
        """KIND and where it strikes, as `str` writes it.

        >>> str(Fault.read("slow 0:3x"))
        'slow 0:3x'
        """
        kind, _, where = text.partition(" ")
        if kind not in KINDS:
            raise UsageError(
                f"'{text}' names no fault; {nearest(kind, KINDS)}", hint="'kill 1@50', 'slow 0:3x'"
            )
        return cls.parse(cast(Kind, kind), where.strip())

    def __str__(self) -> str:
        if self.kind == "slow":
            return f"slow {self.rank}:{self.times:g}x"
        return f"{self.kind} {self.rank}@{self.step}{f':{self.phase}' if self.phase else ''}"


def draw(
    count: int, *, seed: int, world_size: int, steps: int, kinds: Sequence[Kind] = tuple(KINDS)
) -> list[Fault]:
    """So many random faults, each of any kind, on any rank, in any phase of a step after the first."""
    source = random.Random(seed)
    drawn = []
    for _ in range(count):
        kind = source.choice(kinds)
        rank, step = source.randrange(world_size), source.randint(min(2, steps), steps)
        phase = source.choice([None, *PHASES[1:5]])
        drawn.append(
            Fault(kind, rank, times=3.0) if kind == "slow" else Fault(kind, rank, step, phase)
        )
    return drawn


class FaultInjector:
    """Lets the faults of one rank strike it, as it tells what it is about to do."""

    def __init__(
        self, faults: Sequence[Fault], *, rank: int, run_dir: Path, launcher_pid: int
    ) -> None:
        """run_dir: where it is kept which faults have struck. launcher_pid: the process that started the ranks."""
        self.run_dir, self.launcher_pid = run_dir, launcher_pid
        self._waiting = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.rank == rank and (fault.kind == "slow" or not _path(run_dir, number).exists())
        }
        self._before: tuple[str, float] | None = None
        self._flips: list[
            Any
        ] = []  # weights of which a bit flips when the rank has gone on from its update
        self._updating: int | None = (
            None  # the thread that updates: a rank may serve on one and work on another
        )
        # Weights of a rank that may never update: in which step, and what it has updated since.
        self._pulled: list[tuple[int, Any, list[Any]]] = []

    def strike(self, step: int, phase: str) -> None:
        """The rank begins a phase of a step.

        Raises:
            RuntimeError: that is the fault.
        """
        if phase not in PHASES or step < 1:
            return
        if phase == "optimizer":
            self._updating = threading.get_ident()
        while self._flips and phase in _AT_REST and threading.get_ident() == self._updating:
            _flip(self._flips.pop(), 0)
        if self._pulled and phase == "backward" and step > self._pulled[-1][0] + 1:
            _, weight, updated = self._pulled.pop()
            if not updated:
                _flip(weight, 0)
        for number, fault in list(self._waiting.items()):
            if fault.kind == "slow":
                self._slow_down(number, fault, step, phase)
            elif (
                step >= fault.step
                and _STRIKES_IN.get(fault.phase, fault.phase) in (None, phase)
                and (fault.kind != "tear" or len(_complete(self.run_dir)) > 1)
            ):  # one is left to go on from
                del self._waiting[number]
                if self._note(number, fault, step, phase):
                    self._do(fault, step)

    def _slow_down(self, number: int, fault: Fault, step: int, phase: str) -> None:
        if self._before is None:
            self._note(number, fault, step, phase)
        elif self._before[0] in _OWN_WORK:
            time.sleep((fault.times - 1) * (time.monotonic() - self._before[1]))
        self._before = phase, time.monotonic()

    def _note(self, number: int, fault: Fault, step: int, phase: str) -> bool:
        """Leave word that a fault strikes; whether it had not before."""
        path = _path(self.run_dir, number)
        path.parent.mkdir(exist_ok=True)
        try:
            with path.open("x") as file:
                json.dump(
                    {**asdict(fault), "step": step, "phase": phase, "time": time.time()}, file
                )
        except FileExistsError:
            return False
        return True

    def _do(self, fault: Fault, step: int) -> None:
        if fault.kind == "raise":
            raise RuntimeError(f"a scripted fault: {fault}")
        if fault.kind == "flip" and fault.phase == _GRADIENTS:
            _at_forward(_flip_gradient)
        elif fault.kind == "flip":
            self._flip_weight(step)
        elif fault.kind == "disk_full":
            import resource

            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (0, hard)
            )  # Python ignores SIGXFSZ, so that writing fails
        else:
            if fault.kind == "tear":
                _tear(self.run_dir)
            pid = self.launcher_pid if fault.kind in ("tear", "kill_launcher") else os.getpid()
            number = {"stop": signal.SIGSTOP, "preempt": signal.SIGTERM}.get(
                fault.kind, signal.SIGKILL
            )
            os.kill(pid, number)

    def _flip_weight(self, step: int) -> None:
        """When the rank has gone on from its next update. If it makes none in a step, it pulls its weights: then one
        flips between a forward and a backward, as others come before the next forward."""
        updated: list[Any] = []

        def note(weight: Any) -> None:
            updated.append(weight)
            self._flips.append(weight)

        _after_update(note)
        _at_forward(lambda weight: self._pulled.append((step, weight, updated)))


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / FOLDER / f"{number}.json"


def struck(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By number, the faults that struck a run, with the "step", "phase" and "time" of it."""
    faults = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with suppress(ValueError, OSError):
            faults[int(path.stem)] = json.loads(path.read_text())
    return faults


def _after_update(tell: Callable[[Any], None]) -> None:
    """Tell of the first weight that this process updates next, once it has."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    has_told = False

    def updated(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal has_told
        if has_told:  # it stays registered: torch goes through all such hooks now
            return
        has_told, weight = (
            True,
            next(p for group in optimizer.param_groups for p in group["params"]).detach(),
        )
        tell(weight.to_local() if hasattr(weight, "to_local") else weight)

    register_optimizer_step_post_hook(updated)


def _at_forward(tell: Callable[[Any], None]) -> None:
    """Tell of the weight of the first module that this process calls next."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def called(module: torch.nn.Module, args: Any, output: Any) -> None:
        weight = next(
            (p for p in module.parameters() if p.requires_grad and not hasattr(p, "to_local")), None
        )
        if weight is not None and torch.is_grad_enabled():
            handle.remove()
            tell(weight)

    handle = register_module_forward_hook(called)


def _flip_gradient(weight: Any) -> None:
    """Flip such a bit of the gradient that comes next: of its greatest element, as a change of a small one may be
    rounded away where others are added."""
    import torch

    from paceline.torch_private.storage import stored_values

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        gradient = (
            gradient.clone()
            if gradient.is_sparse
            else gradient.clone(memory_format=torch.contiguous_format)
        )
        values = stored_values(gradient)
        _flip(values, int(values.abs().argmax()))
        return gradient

    handle = weight.register_hook(flip)


def _flip(tensor: Any, place: int) -> None:
    """The highest bit of the exponent but one, of an element. torch does not count it as a write."""
    import torch

    words = tensor.data.view(-1).view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    words[place] ^= 1 << (8 * tensor.element_size() - 4)


def _tear(run_dir: Path) -> None:
    """Cut the largest file of the newest complete checkpoint in half."""
    largest = max(_complete(run_dir)[-1].iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def _complete(run_dir: Path) -> list[Path]:
    """Checkpoints that are complete, the newest last."""
    return sorted(
        (path.parent for path in run_dir.glob("checkpoints/step-*/COMMIT")),
        key=lambda folder: int(folder.name.removeprefix("step-")),
    )
