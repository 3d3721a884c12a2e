"""The group of ranks that share memory gives what gloo's gives, and ends when a rank is lost."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import PeerLost, RanksDisagree
from paceline.base.fork import in_a_fork
from paceline.launch.collectives import barrier, group, memory
from paceline.launch.collectives.barrier import AWAKE_S, SMALL_BYTES
from paceline.launch.collectives.group import all_gather, allocate, reduce_scatter, shares_memory
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.messages import Line
from paceline.torch_private.dispatch import OperatorMode
from paceline.torch_private.fake_tensors import FakeTensorMode

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
# Nothing, a scalar, what fits into a slot and what does not, and parts that do not divide.
SHAPES = ((0, 4), (), (5,), (2, 3), (SMALL_BYTES // 8 + 3,), (3, 40_001))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors need several parts and blocks."""
    monkeypatch.setattr(group, "_PART_BYTES", 2**17)
    monkeypatch.setattr(group, "_BLOCK_BYTES", 2**14)


def made(shape: Any, dtype: torch.dtype, rank: int, *, shared: bool) -> Tensor:
    """A tensor whose values depend on the rank, in shared memory or elsewhere."""
    numbers = torch.Size(shape).numel()
    values = ((torch.arange(numbers) % 5 + 1) * (rank + 1)).to(dtype).view(shape)
    if not shared:
        return values
    tensor = allocate(values.nbytes, dist.group.WORLD).view(dtype).view(shape)
    return tensor.copy_(values)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_gives_what_gloo_gives(
    run_ranks: Callable[..., list[Any]], small_parts: None, ranks: int
) -> None:
    """Of all shapes and kinds of numbers, from shared and other memory, again and again."""

    def body(context: Any) -> list[str]:
        gloo, rank, wrong = dist.new_group(backend="gloo"), context.rank, []
        assert shares_memory(dist.group.WORLD) and not shares_memory(gloo)
        for turn, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in DTYPES):
            shared = bool(turn % 2) if rank else turn % 3 == 0
            for op in OPS[: 1 if dtype.is_complex else None]:
                here, there = (made(shape, dtype, rank, shared=s) for s in (shared, False))
                dist.all_reduce(here, op)
                dist.all_reduce(there, op, group=gloo)
                if not torch.equal(here, there):
                    wrong.append(f"all_reduce {op} {shape} {dtype}")
            part = made(shape, dtype, rank, shared=shared).reshape(-1)
            parts = [made(shape, dtype, r, shared=False).reshape(-1) for r in range(ranks)]
            whole = made((ranks * len(part),), dtype, rank, shared=not shared)
            all_gather(whole, part)
            if not torch.equal(whole, torch.cat(parts)):
                wrong.append(f"all_gather {shape} {dtype}")
            reduce_scatter(part, whole)
            if not torch.equal(part, ranks * parts[rank]):
                wrong.append(f"reduce_scatter {shape} {dtype}")
        return wrong

    assert run_ranks(body, ranks) == [[]] * ranks


def test_strided_tensors_and_inference(run_ranks: Callable[..., list[Any]]) -> None:
    def body(context: Any) -> list[Any]:
        strided = torch.arange(8.0)[::2] * (context.rank + 1)
        dist.all_reduce(strided)
        with torch.inference_mode():
            inference = torch.ones(3)
            dist.all_reduce(inference)
        trained = torch.ones(2, requires_grad=True)
        version = trained._version
        dist.all_reduce(trained)  # as torch's own, no change for autograd
        return [strided.tolist(), inference.tolist(), trained.tolist(), trained._version - version]

    assert run_ranks(body, 2) == [[[0.0, 6.0, 12.0, 18.0], [2.0] * 3, [2.0] * 2, 0]] * 2


def test_ranks_without_shared_memory_exchange_messages(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ranks of several hosts: one that can't map the others decides for all."""
    own_memory = memory.own_memory
    monkeypatch.setattr(
        group, "own_memory", lambda: own_memory() if os.environ["RANK_HERE"] == "0" else None
    )
    monkeypatch.setattr(group, "_create", _create_by_rank)

    def body(context: Any) -> list[Any]:
        tensor, whole, part = torch.ones(3), torch.zeros(4), torch.zeros(2)
        dist.all_reduce(tensor)
        all_gather(whole, torch.full((2,), float(context.rank)))
        reduce_scatter(part, torch.arange(4.0))
        empty = torch.zeros(0)
        all_gather(empty, empty)
        return [
            shares_memory(dist.group.WORLD),
            tensor.tolist(),
            whole.tolist(),
            part.tolist(),
            allocate(8, dist.group.WORLD).tolist(),
        ]

    for rank, result in enumerate(run_ranks(body, 2)):
        sums = [4.0 * rank, 4.0 * rank + 2.0]
        assert result == [False, [2.0] * 3, [0.0, 0.0, 1.0, 1.0], sums, [0] * 8]


def _create_by_rank(given: Any, options: Any) -> Any:
    os.environ["RANK_HERE"] = str(given.group_rank)
    return group.SharedMemoryGroup(given.store, given.group_rank, given.group_size, given.timeout)


def test_another_hosts_process_of_the_same_number_is_not_taken() -> None:
    """The mark in the memory is another."""
    own = memory.own_memory()
    assert own is not None
    assert memory.mapped(own.address) is not None
    assert memory.mapped(own.address._replace(mark=own.address.mark + 1)) is None


def test_memory_is_given_back_when_nothing_uses_it() -> None:
    """A view keeps it. What is reserved stays."""
    own = memory.own_memory()
    assert own is not None
    start, tensor = own.reserve(100), own.allocate(2**20)
    assert start is not None and tensor is not None
    assert not tensor.any() and own.offset_of(tensor) is not None
    assert own.offset_of(torch.zeros(1)) is None

    def pages() -> int:
        return os.fstat(own.address.descriptor).st_blocks * 512 // 4096

    held, view = pages(), tensor.view(torch.float32)[5:]
    del tensor
    assert pages() == held
    del view
    assert pages() == held - 256


def test_a_lack_of_memory_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    own = memory.own_memory()
    assert own is not None
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert own.allocate(100) is None and own.reserve(100) is None


def test_each_group_has_its_own_exchanges(run_ranks: Callable[..., list[Any]]) -> None:
    def body(context: Any) -> list[float]:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        values = []
        for number, pair in enumerate(pairs):
            if context.rank in (number, number + 1):
                assert shares_memory(pair)
                tensor = torch.tensor([float(context.rank)])
                dist.all_reduce(tensor, group=pair)
                values.append(tensor.item())
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return [*values, everyone.item()]

    assert run_ranks(body, 3) == [[1.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0]]


def test_other_messages_travel_over_gloo(run_ranks: Callable[..., list[Any]]) -> None:
    def body(context: Any) -> list[Any]:
        sent, received = torch.full((2,), float(context.rank)), torch.zeros(2)
        if context.rank:
            dist.recv(received, 0)
        else:
            dist.send(sent + 5, 1)
        dist.broadcast(sent, 1)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": context.rank})
        dist.barrier()
        return [received.tolist(), sent.tolist(), objects]

    objects = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(body, 2) == [
        [[0.0, 0.0], [1.0, 1.0], objects],
        [[5.0, 5.0], [1.0, 1.0], objects],
    ]


def test_modes_see_an_exchange_as_one_operator(run_ranks: Callable[..., list[Any]]) -> None:
    """As with torch's own groups: capturing refuses models that send messages. Fake tensors send none."""

    def body(context: Any) -> list[Any]:
        seen = []

        class Mode(OperatorMode):
            def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
                seen.append(func.name())
                return func(*args, **kwargs)

        tensor, whole = torch.ones(2), torch.ones(4)
        with Mode():
            dist.all_reduce(tensor)
            all_gather(whole, tensor)
            reduce_scatter(tensor, whole)
        with FakeTensorMode():
            dist.all_reduce(torch.ones(context.rank + 1))
        return [seen, tensor.tolist()]

    names = [f"c10d_shared::{name}_" for name in ("allreduce", "allgather", "reduce_scatter")]
    assert run_ranks(body, 2) == [[names, [4.0, 4.0]]] * 2


@pytest.mark.parametrize("cores", [1, 64])
def test_a_rank_that_is_late_is_waited_for(
    run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """Longer than its peers stay awake, and by ranks that do not."""
    monkeypatch.setattr(group, "usable_cores", lambda: cores)

    def body(context: Any) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if context.rank:
            time.sleep(20 * AWAKE_S)
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(body, 2) == [4.0, 4.0]


def test_who_is_done_first_may_write_for_the_next(run_ranks: Callable[..., list[Any]]) -> None:
    """Before a slower rank has read."""

    def slow_sum(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        time.sleep(0.1)
        return torch.add(a, b, out=out)

    def body(context: Any) -> list[float]:
        if context.rank:
            group._COMBINE[dist.ReduceOp.SUM] = slow_sum
        first, second = torch.ones(1), torch.full((1,), 10.0)
        dist.all_reduce(first)
        dist.all_reduce(second)
        return [first.item(), second.item()]

    assert run_ranks(body, 2) == [[2.0, 20.0]] * 2


def test_what_was_gathered_may_change_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    """Also where a rank reads it late from the memory of another."""

    def body(context: Any) -> list[float]:
        whole = allocate(2 * 4 * 100_000, dist.group.WORLD).view(torch.float32)
        part = whole.view(2, -1)[context.rank].fill_(context.rank + 1.0)
        if context.rank:
            view = group._Exchange._view

            def late(*arguments: Any) -> Tensor:
                time.sleep(0.1)
                return view(*arguments)

            group._Exchange._view = late  # type: ignore[method-assign]
        all_gather(whole, part)
        sums = [float(half.mean()) for half in whole.view(2, -1)]
        whole.fill_(7.0)
        return sums

    assert run_ranks(body, 2) == [[1.0, 2.0]] * 2


def test_ranks_that_come_with_different_tensors_are_told(
    run_ranks: Callable[..., list[Any]],
) -> None:
    """gloo ends such ranks too; nobody goes on with what belongs elsewhere."""

    def body(context: Any) -> str:
        with pytest.raises(RanksDisagree) as caught:
            dist.all_reduce(torch.ones(1 + context.rank))
        return str(caught.value.args[0])

    expected = (
        "ranks exchange different tensors: all_reduce RedOpType.SUM of 1 torch.float32, "
        "all_reduce RedOpType.SUM of 2 torch.float32"
    )
    assert run_ranks(body, 2) == [expected] * 2


def test_a_rank_that_is_killed_is_not_waited_for(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """The others hear of it; who sees why it ended says more. The watchdog would speak after a minute."""

    def body(context: Any) -> None:
        dist.all_reduce(torch.ones(1))
        if context.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost, match="another rank of the 2 that share memory") as caught:
            dist.all_reduce(torch.ones(1))
        (tmp_path / "heard").write_text(str(caught.value.heard))  # type: ignore[attr-defined]

    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(body, 2)
    assert (tmp_path / "heard").read_text() == "True"


def test_a_rank_that_never_comes_is_told_after_the_limit() -> None:
    counters = [memoryview(bytearray(8)) for _ in range(2)]
    waiting = barrier.SharedBarrier(counters, [os.getpid()] * 2, 0, awake_s=0.0, timeout_s=0.01)
    with pytest.raises(PeerLost, match="did not come within"):
        waiting.wait()


@pytest.mark.parametrize(("machine", "expected"), [("x86_64", True), ("aarch64", False)])
def test_where_ranks_can_wait_for_counters(
    monkeypatch: pytest.MonkeyPatch, machine: str, expected: bool
) -> None:
    """On ARM a counter may be seen before what was written ahead of it."""
    monkeypatch.setattr("platform.machine", lambda: machine)

    assert barrier.is_possible() == expected


@contextmanager
def many_files() -> Iterator[None]:
    """Have more files open than `select` knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as files:
        while files.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_with_many_open_files() -> None:
    """They look at each other's processes, and at the process that listens."""
    with many_files():
        counters = [memoryview(bytearray(8)) for _ in range(2)]
        waiting = barrier.SharedBarrier(counters, [os.getpid()] * 2, 0, awake_s=0.0, timeout_s=0.01)
        with pytest.raises(PeerLost, match="did not come within"):
            waiting.wait()
        here, there = multiprocessing.Pipe()
        with here, there:
            assert Line(here).is_writable
        assert in_a_fork(lambda: 3, timeout_s=60.0) == 3
