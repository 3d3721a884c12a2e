"""The controlling process's side of ranks that train or evaluate for a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.codec import send
from paceline.base.fork import forks_can_use_cuda
from paceline.launch.hosts.environment import current
from paceline.launch.local.launcher import Launcher
from paceline.launch.process.apart import Apart
from paceline.training.feed import DataShard
from paceline.training.prepare import prepare_job
from paceline.transformers.generation import told_generation
from paceline.transformers.rank import Evaluated, TrainerRank

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.launch.process.context import RankContext
    from paceline.planner.resolve import Resolved

_LEAVE_S = 60.0
_TIMEOUT_S = 300.0
Follow = Callable[["RankContext", Path], TrainerRank]


def serve(job: Job, resolved: Resolved, follow: Follow) -> None:
    """Start ranks that hold a job's model under a plan and evaluate it, until they are told to
    end.
    """
    from paceline.strategies.compose import load
    from paceline.strategies.mesh import Mesh
    from paceline.training.products import float32_products

    load(resolved.plan)

    def body(context: RankContext) -> None:
        mesh = Mesh.of(resolved.plan, context.rank)
        mesh.connect()
        with float32_products(job, context):
            prepared = prepare_job(
                job,
                plan=resolved.plan,
                mesh=mesh,
                device=context.device,
                devices=resolved.rank_devices,
            )
            part = DataShard.of(resolved.plan, mesh, resolved.shares)
            evaluated = Evaluated(job, prepared.model, prepared.layout, mesh, context.device, part)
            follow(context, Path()).serve(evaluated)

    Launcher(current(), resolved.cluster.devices, timeout_s=_TIMEOUT_S).run(body, run_dir=None)


def _work(
    trainer: Any,
    run: Callable[[Follow], Any],
    connections: Sequence[Connection],
) -> Callable[[], Any]:
    """Return what starts ranks for a trainer and returns when they have ended. Each obeys the other end of a
    connection.
    """

    def follow(context: RankContext, run_dir: Path) -> TrainerRank:
        return TrainerRank(trainer, context, connections[context.rank], run_dir)

    return partial(run, follow)


class Session:
    """Controls ranks that work.

    They are started and supervised on a thread, so that callbacks run on the caller's own thread.
    They are forks of this process, or of a fresh one if this process has used CUDA.

    Attributes:
        step: The last step that the ranks have reported.
        is_waiting: Whether they wait for orders.
        options: Of their optimizer and schedule when they began; None for ranks that only evaluate.
    """

    def __init__(
        self,
        trainer: Any,
        run: Callable[[Follow], Any],
        *,
        world_size: int,
        step: int,
    ) -> None:
        self._trainer, self._generation = trainer, _generation(trainer)
        self.step, self.is_waiting, self._until = step, True, step
        self._apart = Apart(
            partial(_work, trainer, run), world_size, is_sent=not forks_can_use_cuda()
        )
        try:  # This waits until ranks have their copies: later changes here do not affect them.
            self.options: dict[str, Any] | None = self._hear_all()[0]["options"]
        except BaseException:
            self.abandon()
            raise

    def go(self, until: int) -> None:
        """Let the ranks take steps up to this one, after which they wait."""
        self._tell({"do": "go", "until": until})
        self._until, self.is_waiting = until, False

    def next_step(self) -> dict[str, Any]:
        """Wait for the next step, and return its report.

        The report contains step, loss, grad_norm (None if the step was skipped), the figures that
        the script's `compute_loss` logged, the options of optimizer and schedule after the step, and
        its `EpochPlace` in a stream.
        """
        report: dict[str, Any] = self._hear(0)
        place = report["place"]
        self.step = report["step"]
        self.is_waiting = self.step >= self._until or (place is not None and place.is_last)
        return report

    def evaluate(self, inputs: Any, **options: Any) -> list[dict[str, Any]]:
        """Return the answers of the ranks that have outputs, each for its part of a batch, in the
        order of the samples.
        """
        before, self._generation = self._generation, _generation(self._trainer)
        generation = None if self._generation is before else told_generation(self._generation)
        self._tell({"do": "evaluate", "inputs": inputs, "generation": generation, **options})
        return [answer for answer in self._hear_all() if answer]

    def counts(self) -> dict[str, float]:
        """Return floating-point operations and input tokens since the ranks were started, as
        Trainer counts them.
        """
        self._tell({"do": "count"})
        answers = self._hear_all()
        return {
            name: sum(answer.get(name, 0) for answer in answers)
            for name in ("operations", "tokens")
        }

    def change(self, told: dict[str, Any]) -> None:
        """Send the result of `Lent.changes` to the ranks; it holds from the next step on."""
        self._tell({"do": "change", "told": told})

    def save(self) -> None:
        """Let the ranks write a checkpoint and the model."""
        self._tell({"do": "save"})
        self._hear_all()

    def end(self) -> None:
        """End the run here, and wait until it has ended.

        Raises:
            RankFailed, PacelineError: the run failed.
        """
        if self.is_waiting:
            self._tell({"do": "end"})
        with closing(self._apart):
            self._apart.answer()

    def abandon(self) -> None:
        """End ranks after an error in this process, and ignore their own errors."""
        self.is_waiting = True
        self._tell({"do": "abandon"})
        with suppress(Exception):
            self._apart.answer(_LEAVE_S)
        self._apart.close(0.0)

    def _tell(self, order: dict[str, Any]) -> None:
        if not self.is_waiting:
            raise RuntimeError("ranks are told something only where they wait")
        for connection in self._apart.connections:
            with suppress(OSError):  # `_hear` reports a rank that is gone
                send(connection, order)

    def _hear(self, rank: int) -> Any:
        """Return one message of a rank."""
        try:
            return self._apart.receive(self._apart.connections[rank])
        except (EOFError, OSError):
            self._apart.answer()
            raise RuntimeError("the ranks ended before their time") from None

    def _hear_all(self) -> list[Any]:
        """Return one message of each rank, in their order."""
        return [self._hear(rank) for rank in range(len(self._apart.connections))]


def _generation(trainer: Any) -> Any:
    """Return the options of the model's `generate`.

    They are a new mapping for each `evaluate` and `predict` of a `Seq2SeqTrainer`.
    """
    return getattr(trainer, "_gen_kwargs", None)
