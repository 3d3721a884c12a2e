"""Where the hosts of a run meet: a store that one of them keeps, and another one opens anew if that host is lost.

The host with number 0 keeps the first one. Hosts that can't reach the keeper say so in the run folder. Once these are a
majority of the last start, the lowest of them opens a meeting place of its own, and all go there by what the log in the
run folder says (`launch/hosts/leader_log.py`). A keeper that was cut off reads the same there, and
comes as any other host."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from paceline.base.errors import PacelineError
from paceline.launch.hosts.environment import address_towards
from paceline.launch.hosts.host_log import HostLog, HostSign
from paceline.launch.hosts.host_process import Host
from paceline.launch.hosts.leader_log import HostEntry, LeaderState, successor
from paceline.launch.hosts.liveness import silence_s
from paceline.launch.process.watchdog import within

_CONNECT_S = 5.0  # for one attempt to reach a meeting place, and for an answer there
_AGAIN_S = 2.0  # for the attempt after it gave no answer
_BEAT_S = 1.0  # between signs of life, each with a look at the log
_QUIET_S = (
    5.0  # without signs of life of an earlier launch's hosts, after which none of them is left
)
_GRACE_S = 2.0  # for the host that comes before this one to open a meeting place
_LOOK_S = 0.2


class FolderUnusable(RendezvousConnectionError):
    """The run folder can't be read or written."""


class RunOver(Exception):
    """The run in which this host took part has ended."""


class MeetingPlace:
    """This host's way to the meeting place of its run.

    address: at which others find this host; None if it has no way to the first one's.
    epoch: of the meeting place where it takes part; 0 before it has found one.
    """

    def __init__(self, place: Host, run_dir: Path, *, patience_s: float) -> None:
        self.place, self.log = place, HostLog(run_dir)
        self.silence_s = silence_s(patience_s)
        self.address = place.address if place.index == 0 else address_towards(place.address)
        self.epoch = 0
        self._beats = self._lost = 0
        self._kept_store: tuple[int, Any] | None = None  # its epoch and its store
        self._failed_s: tuple[int, float] | None = (
            None  # the epoch that can't be reached, and since when
        )
        self._enough_s: float | None = None  # since when enough hosts can't
        self._is_watching = threading.Event()

    @property
    def answer_s(self) -> float:
        """For an answer of the store."""
        return max(self.silence_s, _CONNECT_S)

    @property
    def standing(self) -> LeaderState:
        """As the log was read last."""
        return self.log.standing

    @property
    def is_kept_here(self) -> bool:
        return self._kept_store is not None and self._kept_store[0] == self.standing.epoch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Give signs of life and read the log meanwhile, on a thread."""
        self._is_watching.set()
        threading.Thread(target=self._watch, name="paceline-meeting", daemon=True).start()
        try:
            yield
        finally:
            self._is_watching.clear()

    def _watch(self) -> None:
        while self._is_watching.is_set():
            with suppress(OSError, PacelineError):  # who needs the folder meets the error there
                self._tell()
                self.log.read()
            time.sleep(_BEAT_S)

    def _tell(self) -> None:
        self._beats += 1
        self.log.sign(
            self.place.index, HostSign(beats=self._beats, joined=self.epoch, lost=self._lost)
        )

    def check(self) -> None:
        """
        Raises:
            RendezvousConnectionError: the hosts meet elsewhere by now.
        """
        if self.standing.epoch > self.epoch:
            raise RendezvousConnectionError(
                f"host {self.standing.keeper} keeps the meeting place now"
            )

    def meet(self) -> Any:
        """The store at the meeting place.

        Raises:
            RendezvousConnectionError: there is none, or it can't be reached. RunOver: there will be none.
        """
        standing = self._read()
        if standing.is_over and self.epoch:
            raise RunOver("the run has ended")
        if standing.is_over:
            store = self._open(standing, is_anew=True) if self.place.index == 0 else None
        else:
            store = (
                self._store_kept(standing) or self._reached(standing) or self._taken_over(standing)
            )
        if store is None:
            raise RendezvousConnectionError(self.why_not())
        if self.epoch and self.epoch != self.standing.epoch:
            keeper = "this host" if self.is_kept_here else f"host {self.standing.keeper}"
            print(
                f"host {self.place.index}: {keeper} keeps the meeting place now, {_where(self.standing)}",
                file=sys.stderr,
                flush=True,
            )
        self.epoch, self._lost, self._failed_s, self._enough_s = self.standing.epoch, 0, None, None
        return store

    def why_not(self) -> str:
        """What this host waits for while it finds no meeting place."""
        standing = self.standing
        if standing.is_over:
            return f"host 0 has opened no meeting place yet, by {self.log.folder}, which all hosts must see"
        if self.epoch and standing.epoch > self.epoch:
            return f"host {standing.keeper} keeps the meeting place now"
        others = sorted(standing.members - {standing.keeper})
        why = f"host {standing.keeper}, which keeps the meeting place {_where(standing)}, gives no answer"
        if not others:
            return why
        if standing.is_enough(others):
            return f"{why}; the others go on without it, once more than half of the hosts say so"
        hosts = f"host{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        return (
            f"{why}, and without it {hosts} may not go on: no majority of the {len(standing.members)} hosts of the "
            "last start, who can't tell whether it was lost or they were cut off"
        )

    def start(self, hosts: Sequence[int]) -> int:
        """Begin a start of the ranks on these hosts. Returns its number; 0 if they may not go on without the others."""
        is_allowed = self._append(
            HostEntry(kind="start", host=self.place.index, epoch=self.epoch, hosts=tuple(hosts))
        )
        return self.standing.num_starts if is_allowed else 0

    def leave(self, *, ends_run: bool) -> None:
        """This host takes part no more; or nobody does."""
        with suppress(RendezvousConnectionError):
            self._append(
                HostEntry(
                    kind="end" if ends_run else "leave", host=self.place.index, epoch=self.epoch
                )
            )

    # --- Opening one ------------------------------------------------------------------------------------------------

    def _store_kept(self, standing: LeaderState) -> Any:
        return (
            self._kept_store[1]
            if self._kept_store is not None and self._kept_store[0] == standing.epoch
            else None
        )

    def _reached(self, standing: LeaderState) -> Any:
        """The store that another host keeps; None if it gives no answer, or is not that of this epoch."""
        limit_s = _AGAIN_S if self.epoch == standing.epoch else _CONNECT_S
        try:  # torch's own attempt prints a stack for each failure
            with socket.create_connection((standing.address, standing.port), timeout=limit_s):
                pass
            store = within(
                _CONNECT_S,
                lambda: dist.TCPStore(
                    standing.address,
                    standing.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=_CONNECT_S),
                ),
            )
        except OSError:
            return None
        if store is None or not within(_CONNECT_S, lambda: store.check([_key(standing.token)])):
            return None
        store.set_timeout(timedelta(seconds=self.answer_s))
        return store

    def _taken_over(self, standing: LeaderState) -> Any:
        """The store that this host opens because the keeper gives no answer; None as long as it may not."""
        if not self.epoch and self.place.index in (0, standing.keeper):
            if self._is_quiet():
                return self._open(standing, is_anew=True)
            if (
                self.place.index == standing.keeper
            ):  # its process was lost, and this one takes its place
                return self._open(standing)
        now_s = time.monotonic()
        if self._failed_s is None or self._failed_s[0] != standing.epoch:
            self._failed_s, self._enough_s = (standing.epoch, now_s), None
        if self.epoch != standing.epoch and now_s - self._failed_s[1] < self.silence_s:
            return None  # who has met the keeper has waited for its answer already
        self._lost = standing.epoch
        self._tell_soon()
        voters = [host for host, sign in self._signs().items() if sign.lost == standing.epoch]
        candidates = successor(standing, voters)
        if self.place.index not in candidates:
            self._enough_s = None
            return None
        self._enough_s = now_s if self._enough_s is None else self._enough_s
        is_all = standing.members <= {*candidates, standing.keeper}
        wait_s = _GRACE_S * (candidates.index(self.place.index) + (not is_all))
        return self._open(standing, voters=candidates) if now_s - self._enough_s >= wait_s else None

    def _open(
        self, standing: LeaderState, *, is_anew: bool = False, voters: Sequence[int] = ()
    ) -> Any:
        """Keep the meeting place of the next epoch; None if another host was first."""
        if self.address is None:
            return None
        store, token = self._new_store(self.address), secrets.token_hex(16)
        store.set(_key(token), "open")
        entry = HostEntry(
            kind="open",
            host=self.place.index,
            epoch=standing.epoch + 1,
            address=self.address,
            port=store.port,
            token=token,
            hosts=tuple(voters),
            is_anew=is_anew,
        )
        if not self._append(entry):
            return None
        self._kept_store = (entry.epoch, store)
        return store

    def _new_store(self, address: str) -> Any:
        """At the port that all hosts know, or another one if a lost process still has it."""
        for port in (self.place.port, 0):
            try:
                return dist.TCPStore(
                    address,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=self.answer_s),
                )
            except dist.DistError:
                if not port:
                    raise
        raise AssertionError

    def _is_quiet(self) -> bool:
        """Whether no host that took part shows that it lives."""

        def beats() -> dict[int, int]:
            return {host: sign.beats for host, sign in self._signs().items() if sign.joined}

        before, until_s = beats(), time.monotonic() + _QUIET_S
        while before and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            if beats() != before:
                return False
        return True

    # --- The folder -------------------------------------------------------------------------------------------------

    def _read(self) -> LeaderState:
        with _as_unreached():
            return self.log.read()

    def _append(self, entry: HostEntry) -> bool:
        with _as_unreached():
            return self.log.append(entry)

    def _tell_soon(self) -> None:
        with _as_unreached():
            self._tell()

    def _signs(self) -> dict[int, HostSign]:
        with _as_unreached():
            return self.log.signs()


@contextmanager
def _as_unreached() -> Iterator[None]:
    """
    Raises:
        FolderUnusable: as it says.
    """
    try:
        yield
    except OSError as error:
        raise FolderUnusable(f"the run folder can't be used: {error}") from error


def _where(standing: LeaderState) -> str:
    return f"{standing.address}:{standing.port}"


def _key(token: str) -> str:
    return f"paceline/meeting/{token}"
