"""Where the hosts of a run meet: a store that the first host keeps for the whole run, as torchrun's does.

The other hosts can't go on without the keeper, so two groups of hosts never continue one run. They wait for it: if the
same command runs on the first host again, it opens the store at the same port, and all go on from the copies in the
memory of the hosts that waited."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from paceline.launch.hosts.environment import address_towards
from paceline.launch.hosts.host_process import Host
from paceline.launch.hosts.liveness import silence_s
from paceline.launch.process.outside_watch import within

_CONNECT_S = 5.0  # for one attempt to reach the keeper, and for an answer of its store


class MeetingPlace:
    """This host's way to the store of its run.

    address: at which others find this host; None if it has no way to the keeper.
    is_kept_here: whether this host is the keeper.
    """

    def __init__(self, place: Host, *, patience_s: float) -> None:
        self.place, self.silence_s = place, silence_s(patience_s)
        self.is_kept_here = place.index == 0
        self.address = place.address if self.is_kept_here else address_towards(place.address)
        self._kept_store: Any = None

    @property
    def listens_at(self) -> str:
        """The address at which this host listens for others: the one that faces the keeper.

        It is "", for all addresses, where the keeper's own name leads it to loopback, as on Debian.
        """
        here = address_towards(self.place.address) or ""
        return here if not here.startswith("127.") or here == self.place.address else ""

    @property
    def answer_s(self) -> float:
        """The seconds in which the store must answer."""
        return max(self.silence_s, _CONNECT_S)

    def meet(self) -> Any:
        """Return the store.

        Raises:
            RendezvousConnectionError: it can't be opened here, or the keeper gives no answer.
        """
        if not self.is_kept_here:
            return self._reached()
        try:
            self._kept_store = self._kept_store or self._store(is_master=True)
        except dist.DistError as error:
            raise RendezvousConnectionError(
                f"port {self.place.port}, where the hosts meet, can't be opened on this host: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
        return self._kept_store

    def _reached(self) -> Any:
        try:  # torch's own attempt prints a stack for each failure
            with socket.create_connection(
                (self.place.address, self.place.port), timeout=_CONNECT_S
            ):
                pass
            store = within(_CONNECT_S, lambda: self._store(is_master=False))
        except OSError:
            store = None
        if store is None:
            raise RendezvousConnectionError(self.why_not())
        return store

    def _store(self, *, is_master: bool) -> Any:
        return dist.TCPStore(
            self.place.address,
            self.place.port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.answer_s),
        )

    def why_not(self) -> str:
        """Say what this host waits for while it can't meet the others."""
        return (
            f"host 0, which keeps the meeting place {self.place.address}:{self.place.port}, gives "
            "no answer"
        )
