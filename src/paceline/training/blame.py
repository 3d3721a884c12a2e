"""Adds a note to an error that names the samples on which a job's own code failed. The rank's
report shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from paceline.base.errors import PacelineError
from paceline.base.nested import map_tensors, tensors_in
from paceline.job import Job
from paceline.job.batches import in_short
from paceline.job.order import Order, Window
from paceline.training.feed import DataShard, MicroBatch, example_batch, is_stream

_PAIRS = "let the data set, or collate=, give (input, target), such as (x, y) or ({'x': x}, y)"


@contextmanager
def blaming(
    job: Job, part: DataShard, window: Window, batches: list[MicroBatch], latest: Callable[[], int]
) -> Iterator[None]:
    """Add a note to an error of the job's own code that names the samples of the micro-batch that
    was computed.

    latest: gives the micro-batch whose forward began last.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        names = sample_names(job, part, window, latest())
        if len(names) == batches[latest()].samples:
            error.add_note(
                f"in micro-batch {latest() + 1} of {len(batches)} of this rank, of the samples "
                f"{in_short(names)} of the data"
            )
        raise


def sample_names(job: Job, part: DataShard, window: Window, microbatch: int) -> list[int]:
    """Return the indices of a micro-batch's samples, or their places in a stream; empty if they are
    not known.
    """
    with suppress(Exception):  # another error is being raised, and that one counts
        cut = part.cuts(window.count)[microbatch]
        positions = window.positions[cut.start : cut.stop]
        if is_stream(job.data):
            return list(positions)
        return Order.of(job).indices(window.epoch, positions)
    return []


def note_columns(error: TypeError, job: Job) -> None:
    """Add a note to an error of a call that says how a sample that is a mapping reaches the model."""
    if any(words in str(error) for words in ("keyword argument", "required positional argument")):
        with suppress(Exception):  # as above
            columns = example_batch(job, 1).input
            if isinstance(columns, Mapping):
                named = ", ".join(f"{column}=" for column in columns)
                error.add_note(
                    f"a sample is a {type(columns).__name__}, so the model is called with {named}:\n{_PAIRS}"
                )


def note_sample(
    error: Exception,
    criterion: Callable[[Any, Any], Any],
    output: Any,
    target: Any,
    names: Sequence[int],
) -> None:
    """Add a note to an error of a loss that names the first sample on which it fails alone.

    This works only on the CPU, because a GPU whose kernel failed computes nothing more.

    names: names of the samples along dim 0.
    """
    if isinstance(target, Mapping):
        error.add_note(
            f"the target is a {type(target).__name__} of {', '.join(map(str, target))}:\n{_PAIRS}"
        )
    outputs, targets, samples = list(tensors_in(output)), list(tensors_in(target)), len(names)
    if not (outputs and targets) or not all(
        tensor.device.type == "cpu" and tensor.ndim and len(tensor) == samples
        for tensor in (*outputs, *targets)
    ):
        return
    for place in range(samples):

        def sample(tensor: torch.Tensor, place: int = place) -> torch.Tensor:
            return tensor[place : place + 1]

        try:
            with torch.no_grad():
                criterion(map_tensors(sample, output), map_tensors(sample, target))
        except Exception as alone:
            if type(alone) is type(error):
                shown = (
                    f": its target is {target[place].item()}"
                    if (isinstance(target, torch.Tensor) and target[place].numel() == 1)
                    else ""
                )
                error.add_note(
                    f"the loss fails on sample {names[place]} of the data by itself{shown}"
                )
                return
