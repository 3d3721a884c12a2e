"""Evaluates a script's function on all samples of a loader, each once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from paceline.attached.given import RawBatches
from paceline.base.errors import JobError, TrainingError
from paceline.base.streams import kept_streams
from paceline.job import loaders
from paceline.training.feed import DataShard, evaluated_part, evaluation_feed
from paceline.training.loop import Loop
from paceline.training.loss import LossSum, read_tally
from paceline.training.run import TrainingRun


def evaluate(loop: Loop, function: Callable[[Any], Any], loader: Any) -> Any:
    """See `AttachedRun.evaluate`."""
    if not loaders.is_loader(loader):
        raise JobError(
            f"run.evaluate is given a {type(loader).__name__}",
            hint="a torch.utils.data.DataLoader over the samples to measure",
        )
    run, state = loop.run, loop.run.stepper
    data, collate = loaders.evaluated(loader, name="the loader of run.evaluate")
    part = DataShard.of(run.plan, run.mesh, run.settings.shares)
    batch = loader.batch_size or run.job.batch
    sums: dict[str, torch.Tensor] = {}
    modes = [(module, module.training) for module in state.model.modules()]
    dtype = torch.float64 if run.job.precision == "float64" else None
    run.set_mode(trains=False)
    run.before_update()
    is_alone = False
    share = evaluated_part(data, batch=batch, part=part)
    with ExitStack() as stack:
        stack.enter_context(kept_streams())
        stack.enter_context(torch.no_grad())
        stack.enter_context(state.evaluating(share, step=run.step))
        state.model.eval()
        for piece in evaluation_feed(
            data, batch=batch, part=part, seed=run.job.seed, collate=RawBatches(collate)
        ):
            run.beat("evaluate")
            if not piece.samples and not state.layout.meets_in_forward and sums:
                continue
            placed = piece.to(state.device, dtype)
            value = function(placed.input)
            is_alone = not isinstance(value, Mapping)
            named = {"": value} if is_alone else value
            for name, each in named.items():
                tally = read_tally(each, samples=piece.samples, name="the function of run.evaluate")
                if not piece.samples:
                    tally = LossSum(torch.zeros(()), 0.0, tally.is_mean)
                figures = torch.stack(
                    [
                        tally.total.to(state.device),
                        torch.as_tensor(
                            tally.count, dtype=torch.float64, device=state.device
                        ).reshape(()),
                    ]
                )
                sums[name] = sums[name] + figures if name in sums else figures
    for module, mode in modes:
        module.training = mode
    run.set_mode(trains=True)
    measured = _joined(run, sums)
    run.note(evaluated={name or "value": value for name, value in measured.items()})
    if "loss" in measured:
        metrics = {name: value for name, value in measured.items() if name != "loss"}
        run.log.note_evaluation(run.step, measured)
        loop.callbacks.tell(
            "on_evaluation",
            "evaluation",
            epoch=run.epoch,
            validation_loss=measured["loss"],
            metrics=metrics,
        )
    return measured[""] if is_alone else measured


def _joined(run: TrainingRun, sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the quotients of the sums of all replicas. Collective."""
    together = torch.stack(list(sums.values()))
    if not run.mesh.is_first_of_same_loss:
        together.zero_()
    if run.context.world_size > 1:
        dist.all_reduce(together)
    figures = {}
    for name, (total, count) in zip(sums, together.tolist(), strict=True):
        if not count:
            raise TrainingError(f"run.evaluate counts nothing{f' for {name}' if name else ''}")
        figures[name] = total / count
    return figures
