"""What the ranks of a run are to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.cluster.devices import Device

RESTARTS = 100  # of ranks in a run, if the user doesn't say
# For enough hosts to come, or for a host that lost the others to find them again; torch's own default.
JOIN_S = 600.0
FRUITLESS_RESTARTS = 2  # of one rank in a row, without a step that was not taken before


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How ranks meet, which of them the others can do without, and what takes the place of devices that fail.

    uses_process_group: whether all of them form a process group of torch's; without one they find each other in the
        store.
    optional_ranks: ranks that may be killed while the others go on.
    spares: devices without a rank. If a device fails, one of them takes its place, and all ranks start again.
    """

    uses_process_group: bool = True
    optional_ranks: frozenset[int] = frozenset()
    spares: Sequence[Device] = ()


ALL_NEEDED = FaultPolicy()  # ranks that all need each other
