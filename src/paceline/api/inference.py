"""The verbs evaluate and predict: use a trained run under any plan."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import CheckpointError, UsageError, nearest
from paceline.job import Job
from paceline.job.compute import alone
from paceline.job.file import JobFile
from paceline.launch.hosts.environment import current
from paceline.launch.local.launcher import Launcher
from paceline.planner.resolve import Resolved, resolve
from paceline.runs import folder
from paceline.runs.provenance import note_edits
from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    import torch

    from paceline.checkpoint.read import Checkpoint
    from paceline.launch.process.context import RankContext
    from paceline.strategies.mesh import Mesh
    from paceline.training.evaluate import Evaluator
    from paceline.training.feed import DataShard
    from paceline.training.own_step.named_parts import ModelPart

# Default file names, for one output and for several.
_PREDICTIONS = (
    "predictions.npy",
    "predictions.safetensors",
)


@dataclass(frozen=True)
class Trained:
    """A model with a run's weights on one rank."""

    job: Job
    model: torch.nn.Module
    parts: Mapping[str, ModelPart]
    mesh: Mesh
    part: DataShard
    checkpoint: Checkpoint

    def evaluator(self, context: RankContext) -> Evaluator:
        """Return what evaluates it on this rank."""
        from paceline.training.evaluate import Evaluator

        return Evaluator(
            self.model, self.parts, self.job, self.part, self.mesh, context.device, context.beat
        )


def evaluate(
    run: str | Path,
    plan: str | Plan | None = None,
    *,
    devices: str | None = None,
    timeout_s: float = 300.0,
) -> dict[str, Any]:
    """Compute the validation loss and metrics of a run's newest checkpoint.

    Args:
        run: The folder of a trained run.
        plan: As in `train`.
        devices: As in `train`.
        timeout_s: As in `train`.

    Returns:
        {"plan", "step", "samples", "validation_loss", "metrics"}.

    Raises:
        UsageError: no run folder, or a job without validation data.
        CheckpointError: no checkpoint that fits the job.
    """
    job, resolved, place = _open(Path(run), plan, devices=devices, timeout_s=timeout_s)
    if job.validation is None:
        raise UsageError(
            "the job has no validation data to evaluate on", hint="give the Job validation="
        )

    def body(context: RankContext) -> dict[str, Any]:
        from paceline.training.determinism import repeatable
        from paceline.training.products import float32_products

        with repeatable(resolved.plan), float32_products(job, context):
            trained = load_trained(context, job, resolved, Path(run))
            figures, refused = trained.evaluator(context).figures(job.validation)
            if refused is not None:
                raise refused
        return {
            "plan": str(resolved.plan),
            "step": trained.checkpoint.step,
            "samples": trained.checkpoint.document["samples"],
            "validation_loss": figures.pop("loss"),
            "metrics": figures,
        }

    evaluated: dict[str, Any] = place.run(body, run_dir=None)
    return evaluated


def predict(
    run: str | Path,
    input: str | Path,
    plan: str | Plan | None = None,
    *,
    devices: str | None = None,
    output: str | Path | None = None,
    model: str | None = None,
    timeout_s: float = 300.0,
) -> dict[str, Any]:
    """Compute the model's outputs for the inputs in a file, in the order of the inputs.

    Numbers with a fraction, in inputs and outputs, are float64 in a float64 job and float32 in any
    other.

    Args:
        run: The folder of a trained run.
        input: A `.npy` or `.csv` file with one sample per row, or a `.npz` or `.safetensors` file with
            one tensor per argument. Rows of a `.csv` are numbers between commas, semicolons or tabs; a first
            row of names is left out. Names of tensors become keyword arguments, or positional ones
            if they are 0, 1, ...
        plan: As in `train`.
        devices: As in `train`.
        timeout_s: As in `train`.
        output: The file of the outputs, by default `DIR/predictions.npy` or `.safetensors`. A `.npy`
            holds one tensor, `.npz` and `.safetensors` any number.
        model: The model or follower that predicts, in a job with several.

    Returns:
        {"plan", "step", "samples", "output", "shapes"}.

    Raises:
        UsageError: an input can't be read, an output can't be written, or an output does not have
            one row per sample.
    """
    target = _target(Path(output) if output else None, Path(input), Path(run))
    job, resolved, place = _open(Path(run), plan, devices=devices, timeout_s=timeout_s)
    job = alone(job)
    predicting = _predicting(job, model)
    data = _Inputs(read_tensors(Path(input), float64=job.precision == "float64"))
    if len(data) == 0:
        raise UsageError(f"{input} holds no samples")
    is_text = Path(input).suffix == ".csv"
    with tempfile.TemporaryDirectory(prefix=".predict-", dir=folder.writable(Path(run))) as made:
        scratch = place.agree("predictions", lambda: made)

        def body(context: RankContext) -> dict[str, Any]:
            from paceline.checkpoint.dtypes import save_tensors
            from paceline.training.determinism import repeatable
            from paceline.training.evaluate import outputs
            from paceline.training.products import float32_products

            with repeatable(resolved.plan), float32_products(job, context):
                trained = load_trained(context, job, resolved, Path(run))
                layout = trained.parts[predicting].layout
                given = data.as_in(job) if is_text else data
                for number, tensors in enumerate(
                    outputs(
                        trained.model, layout, job, given, part=trained.part, device=context.device
                    )
                ):
                    if (
                        target is not None
                        and target.suffix == ".npy"
                        and list(tensors) != ["output"]
                    ):
                        raise UsageError(
                            f"can't write {len(tensors)} outputs to {target}, which holds one",
                            hint="a .npz or .safetensors file holds any",
                        )
                    save_tensors(
                        Path(scratch) / f"{number:08d}-{trained.part.index:05d}.safetensors",
                        tensors,
                    )
            if context.world_size > 1:
                import torch.distributed as dist

                dist.barrier()
            if context.rank:
                return {}
            shapes, path = _gather(Path(scratch), Path(run), target)
            return {
                "plan": str(resolved.plan),
                "step": trained.checkpoint.step,
                "samples": len(data),
                "output": str(path),
                "shapes": shapes,
            }

        predicted: dict[str, Any] = place.run(body, run_dir=None)
        return predicted


def _predicting(job: Job, model: str | None) -> str:
    """Return the name of the model or follower that predicts; "" if the job has one without a name."""
    names = [name for name in job.model_names if name]
    if model is None:
        first, *others = (name for name in job.model_names if name not in job.followers)
        if others:
            raise UsageError(
                f"the job has the models {', '.join(names)}: which one predicts?",
                hint="--model NAME",
            )
        return first
    if model not in names:
        raise UsageError(
            f"no model '{model}': {nearest(model, names) if names else 'the job has one without a name'}"
        )
    return model


def _open(
    run_dir: Path, plan: str | Plan | None, *, devices: str | None, timeout_s: float
) -> tuple[Job, Resolved, Launcher]:
    source = JobFile.from_dict(folder.read_document(run_dir, folder.JOB))
    forwards = Plan.read(plan if plan is not None else run_dir / folder.PLAN).of_forwards()
    note_edits(run_dir)
    job, environment = source.load(), current()
    resolved = resolve(
        job, forwards.with_(microbatches=1), devices=devices, environment=environment
    )
    return job, resolved, Launcher(environment, resolved.cluster.devices, timeout_s=timeout_s)


def load_trained(context: RankContext, job: Job, resolved: Resolved, run_dir: Path) -> Trained:
    """Build the model under the plan and read the run's newest weights into it; each rank reads
    what it holds.
    """
    from paceline.strategies.mesh import Mesh
    from paceline.training.feed import DataShard
    from paceline.training.job_state import JobState
    from paceline.training.own_step.named_parts import prepare_models
    from paceline.training.restore import choose_checkpoint, load_weights, model_mismatch

    mesh = Mesh.of(resolved.plan, context.rank)
    mesh.connect()
    prepared, parts = prepare_models(job, plan=resolved.plan, mesh=mesh, device=context.device)
    model = prepared.model
    checkpoint = choose_checkpoint(
        context, run_dir, accept=lambda saved: model_mismatch(model, saved)
    )
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", hint="train it first, or longer")
    load_weights(model, dict(prepared.layout.module.named_parameters()), checkpoint)
    deque(JobState(job).restore(checkpoint), maxlen=0)
    return Trained(
        job, model, parts, mesh, DataShard.of(resolved.plan, mesh, resolved.shares), checkpoint
    )


class _Inputs:
    """A data set of (input, nothing) from rows of tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if single := [name for name, tensor in tensors.items() if not tensor.dim()]:
            raise UsageError(f"{single[0]} is one number, not a row a sample")
        counts = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(f"the inputs have different numbers of samples: {counts}")
        self.tensors, self.count = tensors, next(iter(counts.values()), 0)

    def __len__(self) -> int:
        return self.count

    def as_in(self, job: Job) -> _Inputs:
        """Convert numbers from a text to integers if the job's own samples are integers.

        Raises:
            UsageError: the job's samples are integers, and one of these numbers is not.
        """
        import torch

        from paceline.training.feed import example_batch

        example = example_batch(job, 1).input
        if (
            not isinstance(example, torch.Tensor)
            or example.is_floating_point()
            or example.is_complex()
        ):
            return self
        ((name, numbers),) = self.tensors.items()
        if not bool((numbers == numbers.round()).all()):
            raise UsageError(
                f"the job's inputs are {str(example.dtype).removeprefix('torch.')}, and the file has "
                "numbers that are not whole"
            )
        return _Inputs({name: numbers.to(example.dtype)})

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = {name: tensor[index] for name, tensor in self.tensors.items()}
        if list(row) == ["input"]:
            return row["input"], 0
        return (
            tuple(row[str(i)] for i in range(len(row)))
            if all(name.isdigit() for name in row)
            else row
        ), 0


def read_tensors(path: Path, *, float64: bool) -> dict[str, torch.Tensor]:
    """Read the tensors of an input file by name; a single unnamed one is called "input".

    Args:
        float64: Whether floats become float64; else they become float32. Integers keep their dtype.

    Raises:
        UsageError: the file is missing, of an unknown kind, or damaged.
    """
    import numpy as np
    import torch

    kinds = (".npy", ".npz", ".csv", ".safetensors")
    if path.suffix not in kinds:
        raise UsageError(f"can't read inputs from {path}", hint=f"one of {', '.join(kinds)}")
    try:
        if path.suffix == ".safetensors":
            from paceline.checkpoint.dtypes import load_tensors

            tensors = load_tensors(path)
        elif path.suffix == ".csv":
            tensors = {
                "input": torch.from_numpy(np.loadtxt(path, ndmin=2, quotechar='"', **_manner(path)))
            }
        else:
            loaded = np.load(path, allow_pickle=False)
            named = (
                {"input": loaded}
                if path.suffix == ".npy"
                else {name: loaded[name] for name in loaded.files}
            )
            tensors = {name: torch.from_numpy(array) for name, array in named.items()}
    except Exception as error:  # each reader has its own kinds of error
        raise UsageError(
            f"can't read {path}: {error}",
            hint="rows of as many numbers each, such as 1.5,2,-3e-4"
            if path.suffix == ".csv"
            else None,
        ) from error
    dtype = torch.float64 if float64 else torch.float32
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _manner(path: Path) -> dict[str, Any]:
    """Return how to read a text of numbers, judged by its first row: the delimiter, and the rows to
    skip.

    A first row that contains only names is skipped.
    """
    with open(path, encoding="utf-8-sig") as file:
        number, first = next(
            ((n, row) for n, line in enumerate(file) if (row := line.partition("#")[0].strip())),
            (0, ""),
        )
    between = next((mark for mark in ";\t" if mark in first), ",")
    is_head = bool(first) and not any(map(_is_number, first.split(between)))
    return {"delimiter": between, "skiprows": number + 1 if is_head else 0, "encoding": "utf-8-sig"}


def _is_number(word: str) -> bool:
    try:
        float(word.strip('" '))
    except ValueError:
        return False
    return True


def _target(path: Path | None, given: Path, run_dir: Path) -> Path | None:
    """Return the file for the outputs; None if the number of outputs decides it.

    Raises:
        UsageError: nothing can be written there, or another file would be lost.
    """
    if path is not None and path.suffix not in (".npy", ".npz", ".safetensors"):
        raise UsageError(
            f"can't write outputs to {path}",
            hint="a .npy file holds one output, .npz and .safetensors any",
        )
    if path is not None and (
        path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)
    ):
        raise UsageError(
            f"can't write outputs to {path}: "
            + (
                "it is a folder"
                if path.is_dir()
                else f"there is no folder {path.parent}"
                if not path.parent.is_dir()
                else "permission denied"
            )
        )
    for each in (path,) if path is not None else map(run_dir.joinpath, _PREDICTIONS):
        for kept, name in ((given, "the input"), (run_dir / folder.MODEL, "the trained model")):
            if each.resolve() == kept.resolve():
                raise UsageError(
                    f"{kept} is {name}: outputs would take its place",
                    hint="--output names another file",
                )
    return path


def _gather(scratch: Path, run_dir: Path, output: Path | None) -> tuple[dict[str, list[int]], Path]:
    """Put the ranks' outputs together in the order of the inputs."""
    import numpy as np
    import torch

    from paceline.checkpoint.dtypes import load_tensors, save_tensors

    pieces = [load_tensors(path) for path in sorted(scratch.glob("*.safetensors"))]
    stacked = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    path = output or run_dir / _PREDICTIONS[list(stacked) != ["output"]]
    if path.suffix == ".npy":
        np.save(path, stacked["output"].numpy(), allow_pickle=False)
    elif path.suffix == ".npz":
        np.savez(
            path, allow_pickle=False, **{name: tensor.numpy() for name, tensor in stacked.items()}
        )
    else:
        save_tensors(path, stacked)
    return {name: list(tensor.shape) for name, tensor in stacked.items()}, path
