"""The controlling process's side of ranks that train or evaluate for a Trainer."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.codec import decode, encode
from paceline.base.fork import forks_can_use_cuda
from paceline.launch.hosts.environment import current
from paceline.launch.local.launcher import Launcher
from paceline.launch.process.subprocess_call import in_a_fresh_process
from paceline.training.prepare import prepare_job
from paceline.transformers.generation import told_generation
from paceline.transformers.rank import Evaluated, TrainerRank

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.launch.process.context import RankContext
    from paceline.planner.resolve import Resolved

_LOOK_S = 0.2
_LEAVE_S = 60.0
_TIMEOUT_S = 300.0
Follow = Callable[["RankContext", Path], TrainerRank]


def serve(job: Job, resolved: Resolved, follow: Follow) -> None:
    """Start ranks that hold a job's model under a plan and evaluate it, until they are told to
    end.
    """
    from paceline.planner.devices import devices_of
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
                devices=devices_of(resolved.plan, resolved.cluster),
            )
            evaluated = Evaluated(job, prepared.model, prepared.layout, mesh, context.device)
            follow(context, Path()).serve(evaluated)

    Launcher(current(), resolved.cluster.devices, timeout_s=_TIMEOUT_S).run(body, run_dir=None)


@dataclass(frozen=True)
class _Ranks:
    """Starts ranks for a trainer, each of which obeys the other end of a connection."""

    trainer: Any
    # starts the ranks and returns when they have ended
    run: Callable[[Follow], Any]
    shares: tuple[int, ...]
    prepare: Callable[[Any, Any], Any] | None  # see `TrainerRank`

    def __call__(self, connections: Sequence[Connection]) -> None:
        def follow(context: RankContext, run_dir: Path) -> TrainerRank:
            return TrainerRank(
                self.trainer, context, connections[context.rank], run_dir, self.shares, self.prepare
            )

        self.run(follow)


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
        shares: tuple[int, ...],
        world_size: int,
        step: int,
    ) -> None:
        self._pipes = [multiprocessing.Pipe() for _ in range(world_size)]
        self._error: BaseException | None = None
        self._trainer, self._generation = trainer, _generation(trainer)
        self.step, self.is_waiting, self._until = step, True, step
        ranks = _Ranks(trainer, run, shares, trainer.preprocess_logits_for_metrics)
        child_ends = [connection for _, connection in self._pipes]
        is_sent = not forks_can_use_cuda()

        def supervise() -> None:
            try:
                in_a_fresh_process(ranks, child_ends) if is_sent else ranks(child_ends)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=supervise, name="ranks", daemon=True)
        self._thread.start()
        # This waits until ranks have their copies: later changes here do not affect them.
        self.options: dict[str, Any] | None = self._hear(range(world_size))[0]["options"]

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
        report: dict[str, Any] = self._hear([0])[0]
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
        return [answer for answer in self._hear(range(len(self._pipes))) if answer]

    def counts(self) -> dict[str, float]:
        """Return floating-point operations and input tokens since the ranks were started, as
        Trainer counts them.
        """
        self._tell({"do": "count"})
        answers = self._hear(range(len(self._pipes)))
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
        self._hear(range(len(self._pipes)))

    def end(self) -> None:
        """End the run here, and wait until it has ended.

        Raises:
            RankFailed, PacelineError: the run failed.
        """
        if self.is_waiting:
            self._tell({"do": "end"})
        self._thread.join()
        self._close()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End ranks after an error in this process, and ignore their own errors."""
        self.is_waiting = True
        self._tell({"do": "abandon"})
        self._thread.join(timeout=_LEAVE_S)
        self._close()

    def _close(self) -> None:
        for parent_end, child_end in self._pipes:
            parent_end.close()
            child_end.close()

    def _tell(self, order: dict[str, Any]) -> None:
        if not self.is_waiting:
            raise RuntimeError("ranks are told something only where they wait")
        data = encode(order)
        for parent_end, _ in self._pipes:
            with suppress(OSError):  # `_hear` reports a rank that is gone
                parent_end.send_bytes(data)

    def _hear(self, ranks: Sequence[int]) -> list[Any]:
        """Return one message of each rank, in their order."""
        answers: dict[Connection, Any] = {}
        connections = [self._pipes[rank][0] for rank in ranks]
        while silent := [connection for connection in connections if connection not in answers]:
            ready = wait(silent, _LOOK_S)
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connection] = decode(connection.recv_bytes())
            if not ready and not self._thread.is_alive():
                raise self._error or RuntimeError("the ranks ended before their time")
        return [answers[connection] for connection in connections]


def _generation(trainer: Any) -> Any:
    """Return the options of the model's `generate`.

    They are a new mapping for each `evaluate` and `predict` of a `Seq2SeqTrainer`.
    """
    return getattr(trainer, "_gen_kwargs", None)
