"""Copies of the state of ranks in the memory of hosts: a host that stays has its own, and those of its neighbour.

The memory belongs to the host's process, which outlives its ranks. Where no other host holds the same, the process
also takes over copies of the host before it, beside the ranks, so that they are there if that host is lost. Ranks say
where that host is (`keep_for`) and which copies it may take (`offer`). They offer no newer ones before all hosts have
taken those over, and keep the last ones that all have (`sent_step`) until then.
"""

from __future__ import annotations

import json
import mmap
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace

from paceline.base.errors import PeerLost
from paceline.launch.hosts.copy_service import CopyAddress, CopyReader, CopyServer, index_of
from paceline.launch.process.memory_store import NOTHING, PIECE_BYTES, SLOTS, StateCopies

_WORD_BYTES, _NUM_WORDS = 8, 5
_SENT, _OFFERED, _TAKEN, _TOOK_US, _ORDER = range(
    _NUM_WORDS
)  # words; the last says how long the text of the order is
_ORDER_BYTES = 1024
_FAILED = -2  # in place of a step
_LOOK_S = 0.1  # between looks for an order, and for copies to take over
_REMEMBERED, _KNOWN = (
    5,
    3,
)  # copies that were taken over: whose time counts, and from how many on it is known
_TIMEOUT_S = 30.0  # for an answer of the neighbour


class HostCopies:
    """What this host keeps, made before its process forks ranks.

    memory: for copies; this host's ranks have the first slots, and the neighbour's the others.
    address: where it serves them.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.memory = StateCopies(
            2 * num_ranks, num_slots=SLOTS + 1
        )  # one more, for what is being sent
        self.address = CopyAddress("", 0, secrets.token_hex(16))
        shared = mmap.mmap(-1, _NUM_WORDS * _WORD_BYTES + _ORDER_BYTES)
        self._words = memoryview(shared)[: _NUM_WORDS * _WORD_BYTES].cast("q")
        self._text = memoryview(shared)[_NUM_WORDS * _WORD_BYTES :]
        self._server: CopyServer | None = None
        self._keeper: CopyReader | None = None
        self._rounds, self._is_closed = 0, False
        self.sent_step = NOTHING
        self._lock = threading.Lock()
        self.rest()

    # --- In the host's process --------------------------------------------------------------------------------------

    def serve(self, address: str, listens_at: str | None = None) -> None:
        """Begin to serve copies, and to keep those of the neighbour.

        Args:
            address: At which others find this host.
            listens_at: The address here, if it is another one; "" for all of them.
        """
        self._server = CopyServer(
            self.memory,
            self.address.key,
            host=address if listens_at is None else listens_at,
            offered=self.offered,
            taken=self.taken,
        )
        self.address = replace(self.address, host=address, port=self._server.port)
        threading.Thread(target=self._keep, name="paceline-keep", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        self.rest()
        if self._server is not None:
            self._server.close()

    def rest(self) -> None:
        """No ranks run: what is here stays as it is until new ones have begun."""
        with self._lock:
            self._rounds += 1
            self._words[_ORDER], self._words[_TOOK_US] = 0, 0
            self._words[_OFFERED] = self._words[_TAKEN] = NOTHING
            if self._keeper is not None:
                self._keeper.close()

    def offered(self) -> int:
        step = self._words[_OFFERED]
        is_there = all(step in self.memory.steps(slot) for slot in range(self.num_ranks))
        return step if is_there else NOTHING

    def taken(self, step: int, took_us: int) -> None:
        self._words[_TOOK_US], self._words[_TAKEN] = took_us, step

    def _keep(self) -> None:
        done = 0
        while not self._is_closed:
            time.sleep(_LOOK_S)
            rounds, length = self._rounds, self._words[_ORDER]
            if length and rounds != done:
                # The neighbour is lost, which others will say, or was not to be reached yet.
                with suppress(PeerLost):
                    self._keep_for(CopyAddress(**json.loads(bytes(self._text[:length]))), rounds)
                    done = rounds

    def _keep_for(self, address: CopyAddress, rounds: int) -> None:
        """Take over copies of the neighbour as it makes them, until its ranks rest or there is no memory for them."""
        reader, kept_step = CopyReader(address, timeout_s=_TIMEOUT_S), NOTHING
        latest_s: deque[float] = deque(maxlen=_REMEMBERED)
        with closing(reader):
            with self._lock:
                self._keeper = reader if self._rounds == rounds else None
            while self._rounds == rounds:
                step = reader.offered()
                if step in (kept_step, NOTHING):
                    time.sleep(_LOOK_S)
                    continue
                began_s = time.perf_counter()
                try:
                    self._take(reader, step)
                except OSError:  # this host has no memory for them
                    reader.tell_taken(_FAILED, 0)
                    return
                kept_step = step
                latest_s.append(time.perf_counter() - began_s)
                # The first ones are slow, and what other work on a machine delays is no cost of the run.
                reader.tell_taken(
                    step, round(1e6 * min(latest_s)) if len(latest_s) >= _KNOWN else 0
                )

    def _take(self, reader: CopyReader, step: int) -> None:
        for slot in range(self.num_ranks):
            index = index_of(reader, slot, step)
            parts = _parts(reader, slot, step, reader.extent(slot, step)[0])
            self.memory.write(self.num_ranks + slot, step, parts, index)

    # --- In ranks ---------------------------------------------------------------------------------------------------

    @property
    def sent_step(self) -> int:
        """Of the last copies that were taken over on all hosts, and stay until newer ones are; -1 if there are none."""
        return self._words[_SENT]

    @sent_step.setter
    def sent_step(self, step: int) -> None:
        self._words[_SENT] = step

    def offer(self, step: int) -> None:
        """Let another host take over the copies of a step, as soon as all ranks have made theirs."""
        self._words[_OFFERED] = step

    def keep_for(self, neighbour: CopyAddress) -> None:
        """Have the host's process keep copies for that host."""
        text = json.dumps(asdict(neighbour)).encode()
        self._text[: len(text)] = text
        self._words[_ORDER] = len(text)

    def give_back_kept(self) -> None:
        """Nothing is kept for a neighbour any more, and nothing is sent."""
        self.sent_step = NOTHING
        for slot in range(self.num_ranks, 2 * self.num_ranks):
            self.memory.give_back(slot)

    @property
    def taken_step(self) -> int:
        """The step of the newest copies of this host that its neighbour has; -1 if it has none."""
        return self._words[_TAKEN]

    @property
    def has_failed(self) -> bool:
        """Whether the neighbour can't keep copies."""
        return self._words[_TAKEN] == _FAILED

    @property
    def took_s(self) -> float:
        """How long the neighbour needs to take copies over; 0 until it has done so a few times."""
        return 1e-6 * self._words[_TOOK_US]


def _parts(reader: CopyReader, slot: int, step: int, end: int) -> Iterator[memoryview]:
    """Yield what a copy holds up to a place in it, in bounded pieces."""
    piece = memoryview(bytearray(min(PIECE_BYTES, end)))
    for offset in range(0, end, PIECE_BYTES):
        part = piece[: end - offset]
        reader.read_into(slot, step, offset, part)
        yield part
