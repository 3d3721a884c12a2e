"""What a launch is told besides job and plan, and who may look on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.cluster.devices import Device
from paceline.training.feed import MicroBatch
from paceline.training.parts.spikes import SpikeAction
from paceline.training.state import StateOwner

if TYPE_CHECKING:
    from paceline.launch.process.faults import Fault


# `Requests` as a mapping; "callbacks" has their state, if the ranks asked for it.
Answer = dict[str, Any]


class Observer(Protocol):
    """Sees what a rank computes. Called on every rank at the same points, so it may enter collectives."""

    def initial(self, stepper: StateOwner) -> None:
        """The launch's first forward is next; workers of servers, which have no weights yet, don't tell of it."""

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        """The micro-batches this rank is about to use, on the CPU."""

    def gradients(self, step: int, stepper: StateOwner) -> None:
        """Gradients are complete and not yet clipped."""

    def weights(self, step: int, stepper: StateOwner, loss: float) -> bool | None:
        """The update is done. Returns whether the run ends here, alike on every rank."""


class Controlling(Protocol):
    """The object that controls a run; `callbacks.controller.RunController`.

    hooks: methods that its callbacks have.
    """

    @property
    def hooks(self) -> frozenset[str]: ...
    def on_report(self) -> Answer | None: ...
    def on_question(
        self, event: Mapping[str, Any], exchange: Callable[[dict[str, Any]], Any]
    ) -> Answer: ...
    def states(self) -> list[dict[str, Any]]: ...
    def tell_slow(self, after_s: float) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What a launch is told besides job and plan."""

    run_dir: Path | None
    shares: tuple[int, ...]  # weight of each replica in the global batch
    save_every: int | None = None  # steps
    keep_checkpoints: int | None = None  # how many of the newest ones stay, beside the best; or all
    resume: bool = False
    save_on_stop: bool = True  # whether a run that is asked to stop saves where it is
    # Asked on every rank after the last evaluation, and answered alike: whether to save what was
    # trained.
    keep: Callable[[], bool] | None = None
    loader_workers: int = 0
    devices: tuple[Device, ...] = ()  # of each rank: a model is cut by their memory and speed
    trace_steps: int = 0  # how many steps to trace, after the first of this launch
    observer: Observer | None = None  # looks on without changing anything
    # Told of each evaluation on rank 0: the step, and "validation_loss" and every metric.
    on_evaluation: Callable[[int, Mapping[str, float]], None] | None = None
    # What callbacks hear of the run, and what they ask of it, goes through this.
    controller: Controlling | None = None
    faults: tuple[Fault, ...] = ()  # that strike ranks
    on_spike: SpikeAction | None = None  # what happens in a step whose loss is far above the others
    # Whether steps are timed or compared, and what follows from evaluations is left out.
    is_trial: bool = False
