"""The state in which torch's elastic hosts meet.

Private names: `torch.distributed.elastic.rendezvous.dynamic_rendezvous` with `_NodeDesc` and
`_RendezvousState`, `DynamicRendezvousHandler._stop_heartbeats`. Tested with torch 2.11 and 2.13.

torch's own backend pickles the state whole, so that its fields may change in any release:
`paceline/launch/hosts/rendezvous_state.py` names each one. `paceline/launch/hosts/elastic.py`
overrides methods of `SimpleElasticAgent` whose underscore means that only subclasses call them;
torch's LocalElasticAgent is one.
"""

from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDesc
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _RendezvousState as RendezvousState,
)


def stop_heartbeats(handler: Any) -> None:
    """End the thread that says that this host is there, which would outlive the run."""
    handler._stop_heartbeats()
