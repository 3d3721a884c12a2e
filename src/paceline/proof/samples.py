"""Check whether a data set gives the same sample whatever was read before.

This matters because ranks and loader workers each read only a part of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import Subset

from paceline.base.errors import PacelineError, PlanRefused
from paceline.base.fork import in_a_fork
from paceline.base.nested import map_tensors
from paceline.base.streams import key_to_seed
from paceline.job import Job
from paceline.job.arrays import rows_of
from paceline.job.batches import Collate
from paceline.job.order import Order
from paceline.job.phases import value_at
from paceline.training.feed import fetch, is_stream
from paceline.training.parts.drift import fingerprint

_TIMEOUT_S = 60.0  # at most


def refuse_memory(job: Job, readers: str, *, timeout_s: float) -> None:
    """Refuse a data set with a memory of its own, such as a cache that is filled at first touch, or
    a generator.

    One fork reads some samples as a run does in its last epoch. A second fork reads the same
    samples after it has read these and others as in earlier epochs. If a third fork does not repeat
    the first one's samples, nothing is refused, because no seed fixes them.

    Args:
        readers: The processes that read the data, in words.
        timeout_s: Seconds that a fork may take.

    Raises:
        PlanRefused: the samples differ.
    """
    for name, data, collate, seed in (
        ("data", job.data, job.collate, partial(key_to_seed, job.seed, "sample")),
        (
            "validation",
            job.validation,
            job.evaluation_collate,
            lambda epoch: key_to_seed(job.seed, "evaluation"),
        ),
    ):
        if data is None or is_stream(data) or _is_in_memory(data):
            continue
        is_again = name == "validation" or (job.total_steps or 0) > Order.of(job).epoch_end(0)
        places = sorted({len(data) // 2, len(data) - 1})
        others = sorted({0, len(data) // 3} - {*places})
        last = (places, seed(int(is_again)))
        alone = partial(_contents, data, value_at(collate, 0, 0), [last])
        after = partial(
            _contents,
            data,
            value_at(collate, 0, 0),
            [(others, seed(0)), *[(places, seed(0))] * is_again, last],
        )
        try:
            first, second = (
                in_a_fork(work, timeout_s=min(timeout_s, _TIMEOUT_S)) for work in (alone, after)
            )
            if first == second or first != in_a_fork(alone, timeout_s=min(timeout_s, _TIMEOUT_S)):
                continue
        except (PacelineError, RuntimeError) as error:  # the run says more of it
            print(
                f"note: whether {name} gives its samples alike in each epoch is not known: "
                f"{str(error).splitlines()[0]}",
                file=sys.stderr,
            )
            continue
        raise PlanRefused(
            f"{name} gives other samples after some were read before: it has a memory of its own, such as a cache with "
            f"random changes in it or a generator that goes on. {readers} would each have another one",
            hint="cache samples as they are before they are changed at random, and draw from the generators of torch, "
            "random or NumPy, which are seeded for each sample. 'single' with at most one loader worker trains "
            "it as it is; --check no trains all the same",
        )


def _contents(
    data: Any, collate: Collate | None, reads: Sequence[tuple[list[int], int]]
) -> list[int]:
    """Return fingerprints of the samples that are read last.

    Args:
        reads: The places of the samples, and a seed, for each read.
    """
    from paceline.base.logs import redirect

    redirect(None)  # hide what the job's own code prints; it prints all of it again in the run
    batches = [
        fetch(data, places, places, seed=seed, collate=collate) for places, seed in reads if places
    ]
    prints: list[int] = []
    map_tensors(lambda tensor: prints.append(int(fingerprint(tensor))), batches[-1])
    return prints


def _is_in_memory(data: Any) -> bool:
    while type(data) is Subset:
        data = data.dataset
    return rows_of(data) is not None
