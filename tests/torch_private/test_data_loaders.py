"""`torch_private/data_loaders.py`: what a data set learns of its worker, and where it works."""

from __future__ import annotations

import traceback
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.torch_private.data_loaders import FETCH, WORKER_LOOP, as_worker, has_own_iterator


def test_a_data_set_can_be_told_that_it_is_in_a_worker():
    items = [1, 2]
    assert get_worker_info() is None
    with as_worker(items):
        worker: Any = get_worker_info()
        assert (worker.id, worker.num_workers, worker.dataset) == (0, 1, items)
    assert get_worker_info() is None


class Frames(Dataset[Any]):
    """Items are the functions and files that ask for them."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[tuple[str, str]]:
        return [(frame.name, frame.filename) for frame in traceback.extract_stack()]


def test_a_worker_makes_batches_in_known_code():
    ((frames,),) = [*DataLoader(Frames(), num_workers=1, collate_fn=lambda items: items)]
    assert WORKER_LOOP in {name for name, _ in frames}
    assert any(FETCH in file for _, file in frames)


def test_loaders_with_another_iterator_are_known():
    class Own(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    assert has_own_iterator(Own) and not has_own_iterator(DataLoader)
    (batch,) = [*Own([1, 2], batch_size=2)]  # which torch asks for the iterator
    assert batch.tolist() == [1, 2]
