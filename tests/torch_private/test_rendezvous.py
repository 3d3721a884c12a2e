"""`torch_private/rendezvous.py`: the state of torch's elastic hosts, and an agent's methods."""

from __future__ import annotations

import inspect
from datetime import datetime

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from paceline.launch.hosts.elastic import _Agent
from paceline.launch.hosts.rendezvous_state import from_json, to_json
from paceline.torch_private.rendezvous import NodeDesc, RendezvousState, stop_heartbeats


def test_a_state_has_these_fields_alone():
    """A further field would be lost between hosts."""
    state = RendezvousState()
    assert {*vars(state)} == {
        "round",
        "complete",
        "deadline",
        "closed",
        "participants",
        "wait_list",
        "redundancy_list",
        "last_heartbeats",
    }
    node = NodeDesc("host", 1, 2)
    assert (node.addr, node.pid, node.local_id) == ("host", 1, 2) and node < NodeDesc("host", 2, 0)
    state.participants, state.last_heartbeats = {node: 0}, {node: datetime.now()}
    state.wait_list = {NodeDesc("other", 1, 2)}
    assert vars(from_json(to_json(state))) == vars(state)


def test_a_handlers_heartbeats_can_be_stopped():
    """Whether they were begun or not."""
    handler = dynamic_rendezvous.DynamicRendezvousHandler.__new__(
        dynamic_rendezvous.DynamicRendezvousHandler
    )
    handler._keep_alive_timer = None
    stop_heartbeats(handler)


def test_agents_override_methods_that_torch_calls():
    """By the same arguments; that of `_shutdown` for a timeout is new in torch 2.13."""
    for name in ("_start_workers", "_stop_workers", "_shutdown", "_monitor_workers"):
        theirs, ours = (
            [*inspect.signature(getattr(kind, name)).parameters]
            for kind in (SimpleElasticAgent, _Agent)
        )
        assert ours[: len(theirs)] == theirs, name
    code = inspect.getsource(SimpleElasticAgent)
    assert "self._shutdown(" in code
    for name in ("_start_workers", "_stop_workers", "_monitor_workers"):
        assert f"self.{name}(" in code, name
