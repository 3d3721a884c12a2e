"""The figures, history and trained model of a run that has just ended, or of a run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.outcome import Outcome
from paceline.base.errors import CheckpointError, UsageError
from paceline.job.compute import alone
from paceline.job.file import JobFile
from paceline.runs import folder
from paceline.runs.provenance import note_edits

if TYPE_CHECKING:
    import torch

    from paceline.checkpoint.read import Checkpoint
    from paceline.job import Job


class TrainedModel:
    """The model of one step of a run."""

    run: Path
    job: Job | None
    step: int | None  # None for the newest step that is there

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole weights, in this process's memory, under the names of the model's own
        `state_dict`.

        A tensor that the model has under several names is there under each, but only once in
        memory.

        Raises:
            CheckpointError: the weights are not on the disk.
            OutOfMemory: the weights would not fit.
        """
        from paceline.checkpoint.assemble import whole_state

        return whole_state(self.checkpoint())

    def model(self) -> torch.nn.Module:
        """Build the model on the CPU with these weights, in evaluation mode.

        Raises:
            UsageError: the job is not known here.
            CheckpointError, OutOfMemory: see `state_dict`.
        """
        import torch

        from paceline.checkpoint.assemble import check_fits
        from paceline.training.restore import load_weights, model_mismatch

        if self.job is None:
            raise UsageError(
                f"{self.run} does not say which job it is of, so its model can't be built",
                hint="pl.open(run, job=...) takes the job",
            )
        checkpoint = self.checkpoint()
        check_fits(checkpoint)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.job.seed)
            model: torch.nn.Module = alone(self.job).model()
        if self.job.precision == "float64":
            model = model.double()
        if (why := model_mismatch(model, checkpoint)) is not None:
            raise CheckpointError(f"{checkpoint.path} is of another model: {why}")
        load_weights(model, dict(model.named_parameters()), checkpoint)
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the model with its own `save_pretrained`, which models of Transformers have. Return
        the folder.

        Raises:
            UsageError: the model has no such method; also see `model`.
        """
        model: Any = self.model()
        if not hasattr(model, "save_pretrained"):
            raise UsageError(
                f"a {type(model).__name__} has no save_pretrained",
                hint="result.export('model.safetensors') writes the weights of any model",
            )
        model.save_pretrained(str(folder))
        return Path(folder)

    def export(self, path: str | Path) -> Path:
        """Write the weights to a safetensors file, tensor by tensor, whatever their size. Return
        its path.

        Raises:
            UsageError: the path does not end in .safetensors.
            CheckpointError: see `state_dict`.
        """
        from paceline.checkpoint.assemble import own_names, write_model

        target, checkpoint = Path(path), self.checkpoint()
        if target.suffix != ".safetensors":
            raise UsageError(f"can't export to {target}: the file must end with .safetensors")
        write_model(target, checkpoint, own_names(checkpoint))
        return target

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint that holds the weights."""
        from paceline.base.logs import logger
        from paceline.checkpoint.read import newest_checkpoint, open_checkpoint

        if self.step is None:
            newest = newest_checkpoint(
                self.run, accept=lambda checkpoint: None, warn=logger.warning
            )
            if newest is None:
                raise CheckpointError(
                    f"{self.run} has no checkpoint", hint="train it first, or longer"
                )
            return newest
        path = folder.checkpoint_of(self.run, self.step)
        if not path.exists():
            raise CheckpointError(
                f"{self.run} holds no weights of step {self.step}",
                hint="callbacks=[pl.KeepBest(...)] keeps the best checkpoints",
            )
        return open_checkpoint(path)


@dataclass(frozen=True)
class Best(TrainedModel):
    """The best evaluation of a run, and its model if a checkpoint of that step was kept."""

    run: Path
    job: Job | None = field(repr=False)
    step: int
    monitor: str  # the figure by which it is the best
    value: float  # of that figure
    metrics: dict[str, float]  # "validation_loss" and all metrics


@dataclass(frozen=True)
class Result(Outcome, TrainedModel):
    """The result of a run and its newest model. `result["final_loss"]` is an item of
    `DIR/summary.json`.

    Times are in seconds. Memory is that of the fullest rank, in bytes. Devices are those of the
    first rank's host. A run that did not end only has "plan" and "steps".
    """

    step = None
    job: Job | None = field(default=None, repr=False)  # None if it is not known

    @property
    def run_dir(self) -> Path:
        return self.run

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one mapping each.

        There are lines of steps ("loss", "lr", ...), of evaluations ("validation_loss", "metrics"),
        and of checkpoints ("saved").
        """
        from paceline.runs.metrics import read_history

        return read_history(self.run)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the last evaluation by name: "validation_loss" and the job's metrics;
        empty without validation data.
        """
        evaluations = _evaluations(self.history)
        return evaluations[-1][1] if evaluations else {}

    @property
    def best(self) -> Best | None:
        """The best evaluation by the figure that `KeepBest` monitors, else by the validation loss;
        None without evaluations.
        """
        from paceline.callbacks.keep_best import ranking_of
        from paceline.callbacks.monitor import Monitor

        monitor = ranking_of(self.run) or Monitor("validation_loss")
        return self.best_by(monitor.name, monitor.mode)

    def best_by(self, monitor: str, mode: Any = None) -> Best | None:
        """Return the best evaluation by another figure.

        Args:
            mode: "min" or "max"; see `EarlyStopping`.
        """
        from paceline.callbacks.monitor import Monitor

        judge, best = Monitor(monitor, mode), None
        for step, figures in _evaluations(self.history):
            if monitor not in figures:
                raise UsageError(
                    f"{self.run} has no figure {monitor!r}; it has {', '.join(figures)}"
                )
            if judge.is_better(figures[monitor], None if best is None else best.value):
                best = Best(self.run, self.job, step, monitor, figures[monitor], figures)
        return best


def _evaluations(history: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    return [
        (line["step"], {"validation_loss": line["validation_loss"], **line.get("metrics", {})})
        for line in history
        if "validation_loss" in line
    ]


def open(run: str | Path, *, job: Job | JobFile | None = None) -> Result:
    """Open a finished or interrupted run; the result is as `pl.train` returned or would have
    returned it.

    Args:
        job: The trained job, if the run folder does not name a job file; only `model` needs it.

    Raises:
        UsageError: there is no run folder.
    """
    run_dir = Path(run)
    plan = folder.read_document(run_dir, folder.PLAN)
    if job is None and (run_dir / folder.JOB).exists():
        note_edits(run_dir)
        job = JobFile.from_dict(folder.read_document(run_dir, folder.JOB))
    figures = folder.read_summary(run_dir)
    if not figures:
        from paceline.runs.metrics import read_history

        steps = [line["step"] for line in read_history(run_dir)]
        figures = {"plan": plan["plan"], "steps": max(steps, default=0)}
    return Result(figures, run_dir, job.load() if isinstance(job, JobFile) else job)
