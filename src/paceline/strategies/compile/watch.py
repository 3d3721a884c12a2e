"""Records torch's compilations in this process: the block, the duration, and the reason of
recompilations."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from paceline.base.logs import logger
from paceline.base.temporary import open_own
from paceline.launch.collectives.values import values_of_all
from paceline.strategies.synchroniser import Synchroniser
from paceline.torch_private.inductor import cache_folder

if TYPE_CHECKING:
    from paceline.torch_private.dynamo import CallbackArgs

LOCK = "paceline.lock"


@dataclass(slots=True)
class Compilation:
    """One compilation of a block's forward, with its backward."""

    block: str
    seconds: float  # of torch's compiler, without waiting for other ranks
    # torch's reason for compiling a block again; "" for the first compilation.
    again: str = ""


class CompilationWatch(Synchroniser):
    """The compilations of one model's blocks.

    Ranks of one machine compile one after the other. They share torch's cache on disk, so that the
    second rank finds the code that the first one has compiled. This class is also a synchroniser,
    but synchronises nothing.

    Args:
        num_ranks: The number of ranks that train together. Workers of parameter servers have no
            process group.
    """

    def __init__(self, device: torch.device, *, num_ranks: int) -> None:
        self.device, self.num_ranks = device, num_ranks
        self.uncompiled: dict[str, str] = {}  # reason by block
        self.made: dict[str, Compilation] = {}
        self._known: set[str] = set()
        self._heard: dict[Any, int] = {}
        self._new_failures()
        self._block = ""
        self._lock: TextIO | None = None
        self._began_s = 0.0
        _listen(self)

    def leave_out(self, block: str, why: str) -> None:
        """Record that a block is not compiled."""
        logger.info("'%s' is not compiled: %s", block, why)
        self.uncompiled[block] = why

    @contextmanager
    def running(self, block: str, again: str = "") -> Iterator[None]:
        """Attribute compilations to the block while the context is entered.

        again: the reason of a further compilation, if torch does not know that the block was
        compiled before.
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
        """Return torch's descriptions of guards that have failed since the last call."""
        from paceline.torch_private.dynamo import guard_failures

        failures = [
            str(reason).partition("\n")[0].partition("  # ")[0]
            for code, reasons in guard_failures.items()
            for reason in reasons[self._heard.get(code, 0) :]
        ]
        self._heard = {code: len(reasons) for code, reasons in guard_failures.items()}
        return list(dict.fromkeys(failures))

    def begin_compiling(self, compilation: CallbackArgs) -> None:
        """Wait until no other rank of this machine compiles."""
        path = Path(cache_folder()) / LOCK
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file may belong to another user; ranks of this machine then compile at the same time.
        with suppress(OSError):
            # The lock is held until the compilation ends.
            self._lock = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._began_s = time.perf_counter()

    def end_compiling(self, compilation: CallbackArgs) -> None:
        seconds = time.perf_counter() - self._began_s
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        # A known compilation now compiles the block's backward, when that first runs.
        if compilation.compile_id in self.made:
            compilation_of_block = self.made[compilation.compile_id]
            compilation_of_block.seconds += seconds
            logger.info(
                "compiled the backward of '%s' in %.1f s", compilation_of_block.block, seconds
            )
        elif self._block:
            self.made[compilation.compile_id] = Compilation(self._block, seconds)

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures."""
        return {
            "seconds": sum(compilation.seconds for compilation in self.made.values()),
            "compiled": len(self.made),
            "recompiled": [
                asdict(compilation) for compilation in self.made.values() if compilation.again
            ],
            "uncompiled": self.uncompiled,
        }

    def summary(self) -> Mapping[str, Any]:
        """Return the figures of all ranks. Collective.

        The seconds are those of the rank that compiled longest.
        """
        ranks = (
            values_of_all(self.figures(), device=self.device)
            if self.num_ranks > 1
            else [self.figures()]
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


_listener: CompilationWatch | None = None


def _listen(watch: CompilationWatch) -> None:
    """Report compilations to this watch, and no longer to the previous model's."""
    from paceline.torch_private.dynamo import callback_handler

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
