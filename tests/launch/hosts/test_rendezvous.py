"""The state of torch's rendezvous travels as JSON, and nothing else is read."""

from __future__ import annotations

import os
import pickle
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from paceline.launch.hosts.rendezvous_state import _KEY, JsonBackend, from_json, to_json

NODES = st.builds(_NodeDesc, st.text(max_size=9), st.integers(0, 2**22), st.integers(0, 99))
TIMES = st.datetimes(timezones=st.just(UTC))


@st.composite
def states(draw: Any) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = (
        draw(st.integers(0, 9)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    state.deadline = draw(st.none() | TIMES)
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 99), max_size=3))
    state.wait_list, state.redundancy_list = (
        draw(st.sets(NODES, max_size=2)),
        draw(st.sets(NODES, max_size=2)),
    )
    state.last_heartbeats = draw(st.dictionaries(NODES, TIMES, max_size=3))
    return state


@settings(max_examples=30)
@given(states())
def test_a_state_comes_back(state: _RendezvousState):
    assert vars(from_json(to_json(state))) == vars(state)


def test_torch_has_no_other_fields():
    """A release that adds one would lose it here."""
    assert set(vars(_RendezvousState())) == {
        "round",
        "complete",
        "deadline",
        "closed",
        "participants",
        "wait_list",
        "redundancy_list",
        "last_heartbeats",
    }


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr))
def test_anything_else_is_refused(text: str):
    with pytest.raises(RendezvousStateError, match="no state of a rendezvous"):
        from_json(text)


def store() -> Any:
    return dist.HashStore()


def test_who_writes_second_is_told():
    """As torch wants it: a write on top of what was read meanwhile is not made."""
    shared = store()
    backend, other_backend = JsonBackend(shared, timeout_s=5), JsonBackend(shared, timeout_s=5)
    assert backend.get_state() is None
    first, second = _RendezvousState(), _RendezvousState()
    first.round, second.round = 1, 2
    first.last_heartbeats = {_NodeDesc("a", 1, 0): datetime.now(UTC)}
    state, token, is_set = backend.set_state(pickle.dumps(first))
    assert is_set and pickle.loads(state).round == 1
    state, _, is_set = other_backend.set_state(pickle.dumps(second))
    assert not is_set and vars(pickle.loads(state)) == vars(first)
    assert other_backend.set_state(pickle.dumps(second), token)[2]
    assert pickle.loads(backend.get_state()[0]).round == 2


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("planted", [pickle.dumps, lambda trap: b64encode(pickle.dumps(trap))])
def test_a_pickle_in_the_store_is_not_loaded(tmp_path: Path, planted: Any):
    shared = store()
    backend = JsonBackend(shared, timeout_s=5)
    shared.set(_KEY, planted(Trap(tmp_path / "loaded")).decode("latin-1"))
    with pytest.raises((RendezvousStateError, UnicodeDecodeError)):
        backend.get_state()
    assert not (tmp_path / "loaded").exists()


def test_a_store_that_does_not_answer_is_given_up():
    class Silent:
        def compare_set(self, *arguments: str) -> bytes:
            raise dist.DistStoreError("the connection is gone")

    with pytest.raises(RendezvousConnectionError, match="no answer within 1 s"):
        JsonBackend(Silent(), timeout_s=1)  # type: ignore[arg-type]
