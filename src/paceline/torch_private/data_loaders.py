"""Workers and iterators of torch's DataLoader.

Private names: `torch.utils.data._utils.worker` with `_worker_info` and `_worker_loop`,
`torch.utils.data._utils.fetch`, `DataLoader._get_iterator`. Tested with torch 2.11 and 2.13.

Importing this file does not import torch. If torch keeps a worker's information elsewhere,
`get_worker_info` shows where.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WORKER_LOOP = "_worker_loop"  # the function that a worker runs until it ends
FETCH = "torch/utils/data/_utils/fetch.py"  # where it makes a batch


@contextmanager
def as_worker(dataset: Any) -> Iterator[None]:
    """Let `get_worker_info` answer as in a lone worker that reads this data set."""
    from torch.utils.data._utils import worker

    worker._worker_info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
    try:
        yield
    finally:
        worker._worker_info = None


def has_own_iterator(kind: Any) -> bool:
    """Whether a class of loaders goes through its batches in another way than torch."""
    from torch.utils.data import DataLoader

    return kind._get_iterator is not DataLoader._get_iterator
