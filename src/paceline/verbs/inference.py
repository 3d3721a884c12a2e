"""The verbs evaluate and predict: a trained run under any plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, UsageError, nearest
from paceline.job import Job
from paceline.jobfile import JobFile
from paceline.launch.environment import current
from paceline.launch.launcher import Launcher
from paceline.planner.resolve import Resolved, resolve
from paceline.plans import Plan
from paceline.runtime import folder

if TYPE_CHECKING:
    import torch

    from paceline.launch.context import RankContext
    from paceline.runtime.checkpoint.read import Checkpoint
    from paceline.runtime.feed import DataShard
    from paceline.runtime.named_parts import ModelPart
    from paceline.strategies.layout import Layout
    from paceline.strategies.mesh import Mesh


@dataclass(frozen=True)
class Trained:
    """A model with a run's weights on one rank."""

    model: torch.nn.Module
    layout: Layout
    mesh: Mesh
    part: DataShard
    checkpoint: Checkpoint
    parts: Mapping[str, ModelPart]


def evaluate(run: str | Path, plan: str | Plan | None = None, *, devices: str | None = None,
             timeout_s: float = 300.0) -> dict[str, Any]:
    """The validation loss and metrics of a run's newest checkpoint.

    Returns:
        {"plan", "step", "samples", "validation_loss", "metrics"}.

    Raises:
        UsageError: no run folder, or a job without validation data.
        CheckpointError: no checkpoint that fits the job.
    """
    job, resolved, place = _open(Path(run), plan, devices=devices, timeout_s=timeout_s)
    if job.validation is None:
        raise UsageError("the job has no validation data to evaluate on", hint="give the Job validation=")

    def body(context: RankContext) -> dict[str, Any]:
        from paceline.runtime.determinism import repeatable
        from paceline.runtime.evaluate import evaluate as evaluate_rank
        from paceline.runtime.evaluate import evaluate_step
        from paceline.runtime.products import float32_products

        with repeatable(resolved.plan), float32_products(job, context):
            trained = load_trained(context, job, resolved, Path(run))
            options: Any = {"part": trained.part, "mesh": trained.mesh, "device": context.device, "beat": context.beat}
            figures = (evaluate_step(trained.model, trained.parts, job, job.validation, **options) if job.models else
                       evaluate_rank(trained.model, trained.layout, job, job.validation, **options))
        return {"plan": str(resolved.plan), "step": trained.checkpoint.step,
                "samples": trained.checkpoint.document["samples"],
                "validation_loss": figures.pop("loss"), "metrics": figures}

    evaluated: dict[str, Any] = place.run(body, run_dir=None)
    return evaluated


def predict(run: str | Path, input: str | Path, plan: str | Plan | None = None, *, devices: str | None = None,
            output: str | Path | None = None, model: str | None = None, timeout_s: float = 300.0) -> dict[str, Any]:
    """The model's outputs for the inputs in a file, in their order.

    Numbers with a fraction, of inputs and outputs, are float64 in a float64 job and float32 in any other.

    Args:
        input: `.npy` or `.csv` with one sample a row; `.npz` or `.safetensors` with one tensor an argument: names
            become keyword arguments, or positional ones if they are 0, 1, ...
        output: Where outputs go: `.npy` for one tensor, `.safetensors` for any; by default
            `DIR/predictions.npy` or `.safetensors`.
        model: Of a job with several, the model or follower that predicts; by default its only one.

    Returns:
        {"plan", "step", "samples", "output", "shapes"}.

    Raises:
        UsageError: an input that can't be read.
    """
    job, resolved, place = _open(Path(run), plan, devices=devices, timeout_s=timeout_s)
    predicting = _predicting(job, model)
    data = _Inputs(read_tensors(Path(input), float64=job.precision == "float64"))
    if len(data) == 0:
        raise UsageError(f"{input} holds no samples")
    with tempfile.TemporaryDirectory(prefix=".predict-", dir=run) as made:
        scratch = place.agree("predictions", lambda: made)

        def body(context: RankContext) -> dict[str, Any]:
            from paceline.runtime.checkpoint.dtypes import save_tensors
            from paceline.runtime.determinism import repeatable
            from paceline.runtime.evaluate import outputs
            from paceline.runtime.products import float32_products

            with repeatable(resolved.plan), float32_products(job, context):
                trained = load_trained(context, job, resolved, Path(run))
                layout = trained.parts[predicting].layout if predicting else trained.layout
                for number, outputs_of_batch in enumerate(outputs(trained.model, layout, job, data, part=trained.part,
                                                                  device=context.device)):
                    file = Path(scratch) / f"{number:08d}-{trained.part.index:05d}.safetensors"
                    save_tensors(file, _named(outputs_of_batch))
            if context.world_size > 1:
                import torch.distributed as dist

                dist.barrier()
            if context.rank:
                return {}
            shapes, path = _gather(Path(scratch), Path(run), Path(output) if output else None, trained.part)
            return {"plan": str(resolved.plan), "step": trained.checkpoint.step,
                    "samples": len(data), "output": str(path),
                    "shapes": shapes}

        predicted: dict[str, Any] = place.run(body, run_dir=None)
        return predicted


def _predicting(job: Job, model: str | None) -> str | None:
    """The model or follower by name that predicts; None where the job has one model without a name."""
    names = [*job.models, *job.followers]
    if model is None and len(job.models) > 1:
        raise UsageError(f"the job has the models {', '.join(names)}: which one predicts?", hint="--model NAME")
    if model is not None and model not in names:
        raise UsageError(f"no model '{model}': {nearest(model, names) if names else 'the job has one without a name'}")
    return model if model is not None else next(iter(job.models), None)


def _open(run_dir: Path, plan: str | Plan | None, *, devices: str | None,
          timeout_s: float) -> tuple[Job, Resolved, Launcher]:
    source = JobFile.from_dict(folder.read_document(run_dir, folder.JOB))
    forwards = Plan.read(plan if plan is not None else folder.read_document(run_dir, folder.PLAN)["plan"]).of_forwards()
    job, environment = source.load(), current()
    resolved = resolve(job, forwards.with_microbatches(1), devices=devices, environment=environment)
    return job, resolved, Launcher(environment, resolved.cluster.devices, timeout_s=timeout_s)


def load_trained(context: RankContext, job: Job, resolved: Resolved, run_dir: Path) -> Trained:
    """Build the model under the plan and read the run's newest weights into it; each rank reads what it holds."""
    from paceline.runtime import state
    from paceline.runtime.loop import part_of
    from paceline.runtime.named_parts import prepare_models
    from paceline.runtime.prepare import prepare_job
    from paceline.strategies.mesh import Mesh

    mesh = Mesh.of(resolved.plan, context.rank)
    mesh.connect()
    options: Any = {"plan": resolved.plan, "mesh": mesh, "device": context.device}
    prepared, parts = prepare_models(job, **options) if job.models else (prepare_job(job, **options), {})
    model, layout = prepared.model, prepared.layout
    checkpoint = state.choose_checkpoint(context, run_dir, accept=lambda saved: state.model_mismatch(model, saved))
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", hint="train it first, or longer")
    state.load_weights(model, dict(layout.module.named_parameters()), checkpoint)
    return Trained(model, layout, mesh, part_of(resolved.plan, mesh, resolved.shares), checkpoint, parts)


class _Inputs:
    """Rows of some tensors as a data set of (input, nothing)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        counts = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(f"the inputs have different numbers of samples: {counts}")
        self.tensors, self.count = tensors, next(iter(counts.values()), 0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = {name: tensor[index] for name, tensor in self.tensors.items()}
        if list(row) == ["input"]:
            return row["input"], 0
        return (tuple(row[str(i)] for i in range(len(row))) if all(name.isdigit() for name in row) else row), 0


def read_tensors(path: Path, *, float64: bool) -> dict[str, torch.Tensor]:
    """The tensors of an input file by name; a single unnamed one is called "input".

    float64: what floats come as; else as float32. Integers stay what they are.

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
            from paceline.runtime.checkpoint.dtypes import load_tensors

            tensors = load_tensors(path)
        elif path.suffix == ".csv":
            tensors = {"input": torch.from_numpy(np.loadtxt(path, delimiter=",", ndmin=2))}
        else:
            loaded = np.load(path, allow_pickle=False)
            named = {"input": loaded} if path.suffix == ".npy" else {name: loaded[name] for name in loaded.files}
            tensors = {name: torch.from_numpy(array) for name, array in named.items()}
    except Exception as error:  # each reader has its own kinds of error
        raise UsageError(f"can't read {path}: {error}") from error
    dtype = torch.float64 if float64 else torch.float32
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _named(value: Any, name: str = "output") -> dict[str, torch.Tensor]:
    """Tensors of an output by name; tuples and mappings are flattened with dots."""
    import torch

    if isinstance(value, torch.Tensor):
        return {name: value.contiguous().clone()}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple | list) else ()
    return {key: tensor for index, item in items for key, tensor in _named(item, f"{name}.{index}").items()}


def _gather(scratch: Path, run_dir: Path, output: Path | None, part: DataShard) -> tuple[dict[str, list[int]], Path]:
    """Put the ranks' outputs together in the order of the inputs."""
    import numpy as np
    import torch

    from paceline.runtime.checkpoint.dtypes import load_tensors, save_tensors

    pieces = [load_tensors(path) for path in sorted(scratch.glob("*.safetensors"))]
    stacked = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    single = list(stacked) == ["output"]
    path = output or run_dir / ("predictions.npy" if single else "predictions.safetensors")
    if path.suffix == ".npy" and single:
        np.save(path, stacked["output"].numpy(), allow_pickle=False)
    elif path.suffix == ".safetensors":
        save_tensors(path, stacked)
    else:
        raise UsageError(f"can't write {len(stacked)} outputs to {path}",
                         hint="a .npy file holds one, .safetensors any")
    return {name: list(tensor.shape) for name, tensor in stacked.items()}, path
