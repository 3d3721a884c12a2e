"""What torch compiled in this process: which block, how long it took, and why a block had to be compiled again."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from paceline.base.logs import logger
from paceline.base.temporary import open_own
from paceline.strategies.state_tensors import SavedState, StateTensor

if TYPE_CHECKING:
    from torch._dynamo.callback import CallbackArgs

LOCK = "paceline.lock"


@dataclass(slots=True)
class Compilation:
    """One compilation of a block's forward, with its backward.

    seconds: of torch's compiler, waiting for other ranks left out. again: why a block that was compiled before was
        compiled once more, in torch's words; "" the first time.
    """

    block: str
    seconds: float
    again: str = ""


class CompilationWatch:
    """The compilations of one model's blocks.

    Ranks of one machine compile one after the other: they share torch's cache on disk, so that the second finds there
    what the first has compiled. It counts as a synchroniser that has nothing to synchronise.

    num_ranks: that train together; workers of servers have no process group.
    is_on: whether blocks run compiled code now.
    uncompiled: blocks that are left as they are, with the reason.
    """

    sent_bytes = 0.0

    def __init__(self, device: torch.device, *, num_ranks: int) -> None:
        self.device, self.num_ranks, self.is_on = device, num_ranks, True
        self.uncompiled: dict[str, str] = {}
        self.made: dict[str, Compilation] = {}
        self._known: set[str] = set()
        self._heard: dict[Any, int] = {}
        self._new_failures()
        self._block = ""
        self._lock: TextIO | None = None
        self._began_s = 0.0
        _listen(self)

    def leave_out(self, block: str, why: str) -> None:
        """A block is not compiled."""
        logger.info("'%s' is not compiled: %s", block, why)
        self.uncompiled[block] = why

    @contextmanager
    def running(self, block: str, again: str = "") -> Iterator[None]:
        """What is compiled meanwhile belongs to the block.

        again: why it is compiled if it was before, where torch does not know that it was.
        """
        before, made = self._block, len(self.made)
        self._block = block
        try:
            yield
        finally:
            self._block = before
            if len(self.made) > made:
                reason = "; ".join(self._new_failures()) or again
                for compilation in list(self.made.values())[made:]:
                    self._tell(compilation, reason)
            self._known.add(block)

    def _tell(self, compilation: Compilation, again: str) -> None:
        if compilation.block not in self._known:
            logger.info("compiled '%s' in %.1f s", compilation.block, compilation.seconds)
            return
        compilation.again = again or "torch gives no reason"
        logger.warning(
            "compiled '%s' again in %.1f s: %s",
            compilation.block,
            compilation.seconds,
            compilation.again,
        )

    def _new_failures(self) -> list[str]:
        """What did not hold of code that was compiled before, in torch's words, since this was last asked."""
        from torch._dynamo.utils import guard_failures

        failures = [
            str(reason).partition("\n")[0].partition("  # ")[0]
            for code, reasons in guard_failures.items()
            for reason in reasons[self._heard.get(code, 0) :]
        ]
        self._heard = {code: len(reasons) for code, reasons in guard_failures.items()}
        return list(dict.fromkeys(failures))

    def begin_compiling(self, compilation: CallbackArgs) -> None:
        """Waits until no other rank of this machine compiles."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        path = Path(cache_dir()) / LOCK
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(
            OSError
        ):  # another user's: ranks of this machine then compile at the same time
            self._lock = os.fdopen(
                open_own(path, os.O_WRONLY | os.O_CREAT), "w"
            )  # held until the compilation ends
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._began_s = time.perf_counter()

    def end_compiling(self, compilation: CallbackArgs) -> None:
        seconds = time.perf_counter() - self._began_s
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if (
            compilation.compile_id in self.made
        ):  # its backward, which is compiled when it is first run
            compilation_of_block = self.made[compilation.compile_id]
            compilation_of_block.seconds += seconds
            logger.info(
                "compiled the backward of '%s' in %.1f s", compilation_of_block.block, seconds
            )
        elif self._block:
            self.made[compilation.compile_id] = Compilation(self._block, seconds)

    def figures(self) -> dict[str, Any]:
        """This rank's."""
        return {
            "seconds": sum(compilation.seconds for compilation in self.made.values()),
            "compiled": len(self.made),
            "recompiled": [
                asdict(compilation) for compilation in self.made.values() if compilation.again
            ],
            "uncompiled": self.uncompiled,
        }

    def summary(self) -> Mapping[str, Any]:
        """Collective. seconds: of the rank that compiled longest."""
        ranks = (
            _of_all_ranks(self.figures(), self.device) if self.num_ranks > 1 else [self.figures()]
        )
        return {
            "compile": {
                "seconds": max(rank["seconds"] for rank in ranks),
                "compiled": max(rank["compiled"] for rank in ranks),
                "recompiled": [
                    {"rank": number, **compilation}
                    for number, rank in enumerate(ranks)
                    for compilation in rank["recompiled"]
                ],
                "uncompiled": {
                    block: why for rank in ranks for block, why in rank["uncompiled"].items()
                },
            }
        }

    def switch(self, *, on: bool) -> None:
        """The next step runs compiled code, or the blocks' own."""
        self.is_on = on

    def begin(self, *, last: bool) -> None:
        """Compiling needs no other rank."""

    def unused(self) -> set[str]:
        return set()

    def finish(self) -> None:
        """Nothing is left to do after a backward."""

    def kept(self) -> tuple[StateTensor, ...]:
        """Compiled code is in torch's cache and in no checkpoint."""
        return ()

    def restore(self, saved: SavedState) -> list[str]:
        return []


_listener: CompilationWatch | None = None


def _listen(watch: CompilationWatch) -> None:
    """Tell this one of compilations, and no longer the one of the model before."""
    from torch._dynamo.callback import callback_handler

    global _listener
    if _listener is None:
        callback_handler.register_start_callback(_begun)
        callback_handler.register_end_callback(_ended)
    _listener = watch


def _begun(compilation: CallbackArgs) -> None:
    if _listener is not None:
        _listener.begin_compiling(compilation)


def _ended(compilation: CallbackArgs) -> None:
    if _listener is not None:
        _listener.end_compiling(compilation)


def _of_all_ranks(figures: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """By rank. Collective."""
    text_here = torch.frombuffer(bytearray(json.dumps(figures).encode()), dtype=torch.uint8).to(
        device
    )
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([text_here.numel()], device=device))
    most = max(int(size) for size in sizes)
    texts = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text_here, (0, most - text_here.numel())))
    return [
        json.loads(bytes(text[: int(size)].tolist()))
        for text, size in zip(texts, sizes, strict=True)
    ]
