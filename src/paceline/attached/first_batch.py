"""The first batch of a run whose model is laid out when the script gives the function of its loss.

Under a plan that splits the model, what ranks run is recorded from that function. So the script gets its first batch
before there is anything to train, and the run begins with its first `run.backward(function)`. A run that goes on has
its place and the script's own state by then; its weights follow with the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from paceline.attached.turn import FUNCTION_HINT, batch_of
from paceline.base.errors import PlanRefused, TrainingError
from paceline.base.streams import seed_streams
from paceline.checkpoint.read import Checkpoint
from paceline.job import Job
from paceline.strategies.mesh import Mesh
from paceline.training.feed import DataShard, training_feed
from paceline.training.job_state import JobState
from paceline.training.parts.copied_state import open_newest
from paceline.training.prefetch import Fed, Prefetch
from paceline.training.restore import choose_checkpoint, mismatch

if TYPE_CHECKING:
    from paceline.attached.given import Given
    from paceline.attached.session import ScriptProcess


@dataclass
class Position:
    """Where a run is that has not begun."""

    job: Job
    step: int = 0
    ended: str | None = None


class FirstBatch:
    """Hands out the first batch, and is where the loop of the run will be.

    Attributes:
        run: Where the run is.
        job_state: The script's own state, restored already.
    """

    is_left = False

    def __init__(self, session: ScriptProcess, job: Job, given: Given) -> None:
        """Find out where the run is. Collective."""
        self.session, self.given, self.run = session, given, Position(job)
        self.job_state = _RestoredOnce(job, torch.nn.ModuleList(given.models.values()))
        self._options = OptimizerOptions(given)
        checkpoint = self._checkpoint()
        if checkpoint is not None:
            self.run.step = checkpoint.document["step"]
            list(self.job_state.restore(checkpoint))
            self._options.preview(checkpoint.document["optimizer"]["groups"])

    def _checkpoint(self) -> Checkpoint | None:
        """Return what the run will go on from. Collective."""
        context, settings = self.session.context, self.session.settings
        if not settings.resume or settings.run_dir is None:
            return None
        (model,) = self.given.models.values()
        (optimizer,) = self.given.optimizers.values()
        owner: Any = SimpleNamespace(model=model, job=self.run.job, optimizer=optimizer.optimizer)
        place = context, settings.run_dir, partial(mismatch, owner)
        return open_newest(*place) or choose_checkpoint(*place)

    def fetch(self) -> Fed | None:
        """Return the samples of the first step that is left; None if there is none."""
        session, job = self.session, self.run.job
        session.context.step = self.run.step + 1
        session.context.beat("input")
        windows = training_feed(
            job,
            part=self._part,
            steps=range(self.run.step, self.run.step + 1),
        )
        return Prefetch(iter(windows), session.context.device, job.input_dtype).next()

    @property
    def _mesh(self) -> Mesh:
        return Mesh.of(self.session.plan, self.session.context.rank)

    @property
    def _part(self) -> DataShard:
        return DataShard.of(self.session.plan, self._mesh, self.session.settings.shares)

    def turn(self, fed: Fed) -> FirstTurn:
        """Return the step of the first batch, until it is known what it trains."""
        seed_streams(self.run.job.seed, "step", self.run.step, self._mesh.loss_number, 0)
        return FirstTurn(fed, self.run.job, self.session.context.device)

    def refuse_tensor(self, loss: Any) -> None:
        """Refuse a loss that the script has computed.

        Raises:
            PlanRefused: nothing was trained.
        """
        if not callable(loss):
            raise PlanRefused(
                f"plan '{self.session.plan}' splits the model over ranks, and run.backward is given a loss that "
                "is computed already",
                hint=f"{FUNCTION_HINT}. data=N and shard=N plans take the loss itself",
            )

    def begins(self, build: Callable[[], None]) -> None:
        """Build what ranks hold. What the loop has set of the optimizer's groups until here stays."""
        edits = self._options.taken()
        build()
        self._options.put(edits)


class FirstTurn:
    """The step of the first batch; see `Turn`."""

    def __init__(self, fed: Fed, job: Job, device: torch.device) -> None:
        self.fed = fed
        self.pieces = [batch.to(device, job.input_dtype) for batch in fed.placed]
        self.batch = batch_of(self.pieces)
        self.rows = sum(piece.samples for piece in self.pieces)

    def update(self, optimizer: str) -> None:
        """Refuse an update.

        Raises:
            TrainingError: there is no gradient.
        """
        raise TrainingError(
            "run.update() finds no gradient of what it updates",
            hint="run.backward(function) before",
        )

    def end(self) -> None:
        """Refuse the next batch.

        Raises:
            TrainingError: nothing was trained with this one.
        """
        raise TrainingError(
            "the loop asks for the next batch, and nothing was trained with the first",
            hint="run.backward(function) and run.update() for each batch",
        )


class _RestoredOnce(JobState):
    """The state of the script's objects, which is restored before the loop sees its first batch, and not again."""

    _notes: Sequence[str] | None = None

    def restore(self, checkpoint: Checkpoint) -> Iterator[str]:
        if self._notes is None:
            self._notes = list(super().restore(checkpoint))
        return iter(self._notes)


class OptimizerOptions:
    """The options of the script's optimizer, such as its rate, while there is nothing to train yet.

    The loop sees those that the run will go on with. What it sets of them holds then.
    """

    def __init__(self, given: Given) -> None:
        self._groups = [
            g for each in given.optimizers.values() for g in each.optimizer.param_groups
        ]
        self._made = [_options(group) for group in self._groups]
        self._seen = self._made

    def preview(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Show the options of a checkpoint."""
        for group, options in zip(self._groups, saved, strict=False):
            group.update({k: v for k, v in _options(options).items() if k in group})
        self._seen = [_options(group) for group in self._groups]

    def taken(self) -> list[dict[str, Any]]:
        """Return what was set since, and leave what the script made."""
        edits = [
            {k: v for k, v in _options(group).items() if k not in seen or seen[k] != v}
            for group, seen in zip(self._groups, self._seen, strict=True)
        ]
        self.put(self._made)
        return edits

    def put(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set options of each group."""
        for group, each in zip(self._groups, options, strict=True):
            group.update(each)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are plain values, or tuples of them."""
    return {k: v for k, v in group.items() if isinstance(v, bool | int | float | tuple)}
