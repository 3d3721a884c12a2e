"""Evaluates a script's function on all samples of a data set, each once over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.attached.functions import Called
from paceline.base.errors import JobError, TrainingError
from paceline.base.streams import kept_streams
from paceline.job import loaders
from paceline.job.compute import WholeBatch
from paceline.training.evaluate import names_of_mesh, sums_of_all
from paceline.training.feed import DataShard, MicroBatch, evaluated_part, evaluation_feed, is_stream
from paceline.training.logged import summed
from paceline.training.loop import Loop
from paceline.training.loss import read_tally
from paceline.training.run import TrainingRun


def evaluate(loop: Loop, function: Callable[[Any], Any], data: Any) -> Any:
    """See `AttachedRun.evaluate`."""
    run, collate, batch = loop.run, None, loop.run.job.batch
    if loaders.is_loader(data):
        batch = data.batch_size or batch
        data, collate = loaders.evaluated(data, name="data")
    if not is_stream(data) and not len(data):
        raise JobError("run.evaluate is given no samples")
    part = DataShard.of(run.plan, run.mesh, run.settings.shares)
    feed = evaluation_feed(
        data, batch=batch, part=part, seed=run.job.seed, collate=WholeBatch(collate)
    )
    with _evaluating(run, evaluated_part(data, batch=batch, part=part)):
        sums = _sums(run, function, feed)
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
    return measured.get("", measured)


@contextmanager
def _evaluating(run: TrainingRun, share: float) -> Iterator[None]:
    """Let the models be in evaluation mode inside the block, with the weights that are evaluated. Collective.

    share: this replica's share of the samples.
    """
    state = run.stepper
    modes = [(module, module.training) for module in state.model.modules()]
    trained = state.trains  # not once the run has ended
    run.set_mode(trains=False)
    with kept_streams(), torch.no_grad(), state.evaluating(share, step=run.step):
        state.model.eval()
        yield
    for module, mode in modes:
        module.training = mode
    run.set_mode(trains=trained)


def _sums(
    run: TrainingRun, function: Callable[[Any], Any], feed: Iterable[MicroBatch]
) -> dict[str, torch.Tensor]:
    """Return the sum and the count of each figure over this rank's samples, on the device; the name of an
    only one is "". Collective where forwards are.
    """
    state, sums, is_known = run.stepper, dict[str, torch.Tensor](), False
    for piece in feed:
        run.beat("evaluate")
        if not piece.samples and not state.layout.meets_in_forward and is_known:
            continue
        is_known = True  # which figures there are, on the rank that has the output
        (batch,) = piece.to(state.device, run.job.input_dtype).input
        if isinstance(function, Called):
            value = state.layout.forward(MicroBatch(function.input_of(batch), None, piece.samples))
        else:
            value = function(batch)
        if value is None and not state.layout.has_output:
            continue
        for name, each in (value if isinstance(value, Mapping) else {"": value}).items():
            tally = read_tally(each, samples=piece.samples, name="the function of run.evaluate")
            figures = summed([tally] if piece.samples else [], state.device)
            sums[name] = sums[name] + figures if name in sums else figures
    return sums


def _joined(run: TrainingRun, sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the quotients of the sums of all replicas; leave out those of nothing. Collective."""
    device = run.context.device
    names = names_of_mesh(list(sums), run.mesh, device)
    here = sums if run.mesh.is_first_of_same_loss else {}
    of_all = sums_of_all(here, names, run.mesh, device)
    if not any(count for _, count in of_all.values()):
        raise TrainingError("run.evaluate counts nothing")
    return {name: total / count for name, (total, count) in of_all.items() if count}
