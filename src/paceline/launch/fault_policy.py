"""What the ranks of a run are to each other."""

from __future__ import annotations

from dataclasses import dataclass

RESTARTS = 100  # of ranks in a run, if the user doesn't say
FRUITLESS_RESTARTS = 2  # of one rank in a row, without a step that was not taken before


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How ranks meet and which of them the others can do without.

    uses_process_group: whether all of them form a process group of torch's; without one they find each other in the
        store.
    optional_ranks: ranks that may be killed while the others go on.
    """

    uses_process_group: bool = True
    optional_ranks: frozenset[int] = frozenset()


ALL_NEEDED = FaultPolicy()  # ranks that all need each other
