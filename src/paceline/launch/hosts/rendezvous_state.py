"""The state of torch's rendezvous in a store, as JSON. torch's own backend keeps a pickle there, and whoever can write
to the store could have every host run what they like."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from paceline.launch.process.outside_watch import within
from paceline.torch_private.rendezvous import NodeDesc, RendezvousState

_KEY, _NOTHING = "paceline/rendezvous", "none"

Token = Any  # torch's word: what was read, so that a write can tell whether that has changed


class _Node(msgspec.Struct, array_like=True, frozen=True):
    address: str
    pid: int
    number: int

    @classmethod
    def of(cls, node: NodeDesc) -> _Node:
        return cls(node.addr, node.pid, node.local_id)

    def to_torch(self) -> NodeDesc:
        return NodeDesc(self.address, self.pid, self.number)


class _State(msgspec.Struct, forbid_unknown_fields=True):
    """As torch's has it; participants have their ranks, and heartbeats their times."""

    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    participants: list[tuple[_Node, int]]
    wait_list: list[_Node]
    redundancy_list: list[_Node]
    last_heartbeats: list[tuple[_Node, datetime]]


def to_json(state: RendezvousState) -> str:
    """torch's state as text, equal for equal states."""
    return msgspec.json.encode(
        _State(
            state.round,
            state.complete,
            state.deadline,
            state.closed,
            [(_Node.of(node), rank) for node, rank in sorted(state.participants.items())],
            [_Node.of(node) for node in sorted(state.wait_list)],
            [_Node.of(node) for node in sorted(state.redundancy_list)],
            [(_Node.of(node), time) for node, time in sorted(state.last_heartbeats.items())],
        )
    ).decode()


def from_json(text: str) -> RendezvousState:
    """
    Raises:
        RendezvousStateError: it is no such text.
    """
    try:
        read = msgspec.json.decode(text, type=_State)
    except msgspec.DecodeError as error:
        raise RendezvousStateError(
            f"what is in the store is no state of a rendezvous: {error}"
        ) from error
    state = RendezvousState()
    state.round, state.complete, state.deadline, state.closed = (
        read.round,
        read.complete,
        read.deadline,
        read.closed,
    )
    state.participants = {node.to_torch(): rank for node, rank in read.participants}
    state.wait_list = {node.to_torch() for node in read.wait_list}
    state.redundancy_list = {node.to_torch() for node in read.redundancy_list}
    state.last_heartbeats = {node.to_torch(): time for node, time in read.last_heartbeats}
    return state


class JsonBackend(RendezvousBackend):
    """Keeps the state of one rendezvous in a store.

    torch hands its state over as a pickle and takes it back so; both are made and read in this process alone.

    Raises:
        RendezvousConnectionError: from each method, the store can't be reached.
    """

    def __init__(self, store: Store, *, timeout_s: float) -> None:
        """
        Args:
            timeout_s: For an answer of the store. A connection whose other end has vanished gives none for minutes.
        """
        self._store, self._timeout_s = store, timeout_s
        self._call("compare_set", _KEY, "", _NOTHING)

    @property
    def name(self) -> str:
        return "paceline"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._read(self._call("get", _KEY).decode())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        text = to_json(pickle.loads(state))
        now = self._call("compare_set", _KEY, token or _NOTHING, text).decode()
        read = self._read(now)
        return None if read is None else (*read, now == text)

    def _read(self, text: str) -> tuple[bytes, Token] | None:
        return None if text == _NOTHING else (pickle.dumps(from_json(text)), text)

    def _call(self, operation: str, *arguments: str) -> Any:
        return asked(self._timeout_s, partial(getattr(self._store, operation), *arguments))


def asked(timeout_s: float, ask: Callable[[], Any]) -> Any:
    """Return what the store where hosts meet says, which is not None.

    Raises:
        RendezvousConnectionError: it gives no answer in time.
    """
    answer = within(timeout_s, ask)
    if answer is None:
        raise RendezvousConnectionError(f"the meeting place gives no answer within {timeout_s:g} s")
    return answer
