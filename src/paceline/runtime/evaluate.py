"""Losses and metrics over a data set: every sample once, sums and counts reduced, divided at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.job import Job
from paceline.runtime.feed import DataShard, evaluation_feed, map_tensors
from paceline.runtime.loss import read_tally
from paceline.runtime.prepare import autocast
from paceline.runtime.streams import kept_streams
from paceline.strategies.layout import Layout
from paceline.strategies.mesh import Mesh


def evaluate(model: torch.nn.Module, layout: Layout, job: Job, data: Any, *, part: DataShard, mesh: Mesh,
             device: torch.device, beat: Callable[[str], None] = lambda phase: None) -> dict[str, float]:
    """The loss (as "loss") and every metric of the job on the data. Collective over all ranks.

    model: what the layout runs, to be put into evaluation mode meanwhile.
    """
    sums = evaluation_sums(model, layout, job, data, part=part, mesh=mesh, device=device, beat=beat)
    if mesh.world_size > 1:
        dist.all_reduce(sums)
    return quotients(job, sums)


def quotients(job: Job, sums: torch.Tensor) -> dict[str, float]:
    """What the sums of all ranks come to: the loss (as "loss") and every metric."""
    return dict(zip(["loss", *job.metrics], (sums[:, 0] / sums[:, 1]).tolist(), strict=True))


def evaluation_sums(model: torch.nn.Module, layout: Layout, job: Job, data: Any, *, part: DataShard, mesh: Mesh,
                    device: torch.device, beat: Callable[[str], None] = lambda phase: None) -> torch.Tensor:
    """Sum and count of the loss and of every metric over this rank's part of the data, float64 (functions, 2)."""
    functions = {"the loss": job.criterion, **{f"metric '{name}'": f for name, f in job.metrics.items()}}
    sums = torch.zeros(len(functions), 2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with kept_streams(), torch.no_grad():
        for batch in evaluation_feed(data, batch=job.batch, part=part, seed=job.seed, collate=job.evaluation_collate):
            beat("evaluate")
            if not batch.samples and not layout.meets_in_forward:
                continue
            moved = batch.to(device, torch.float64 if job.precision == "float64" else None)
            with autocast(job, device):
                output = layout.forward(moved)
                if not layout.has_output or not mesh.is_first_of_same_loss:
                    continue
                for row, (name, function) in enumerate(functions.items()):
                    tally = read_tally(function(output, moved.target), samples=batch.samples or 1, name=name)
                    if batch.samples:
                        sums[row] += torch.stack([
                            torch.as_tensor(part, dtype=torch.float64, device=device)
                            for part in (tally.total, tally.count)])
    model.train(was_training)
    return sums


def outputs(model: torch.nn.Module, layout: Layout, job: Job, data: Any, *, part: DataShard,
            device: torch.device) -> Iterator[Any]:
    """The model's outputs for this rank's part of the data, micro-batch by micro-batch, on the CPU.

    Collective; gives nothing where another rank has the model's output. Their dtype is float64 in a float64 job, else
    float32.
    """
    dtype = torch.float64 if job.precision == "float64" else torch.float32
    model.eval()
    with torch.no_grad():
        for batch in evaluation_feed(data, batch=job.batch, part=part, seed=job.seed):
            with autocast(job, device):
                output = layout.forward(batch.to(device))
            if layout.has_output:
                yield map_tensors(lambda tensor, samples=batch.samples: tensor[:samples].to(dtype).cpu(), output)
