"""Which hosts of a run may go on, and who keeps the place where they meet: rules over a log that all hosts see.

The log is in the run folder (`launch/hosts/host_log.py`). Each entry follows from all before it,
and one host alone can write the next one. So starts of the ranks have an order: of two groups of
hosts that do not reach each other, one at most goes on, as each start takes more than half of the
hosts of the start before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec

Index = Annotated[int, msgspec.Meta(ge=0)]


class HostEntry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What a host did.

    kind: it opened the meeting place of an epoch, began a start of the ranks there, left the run, or ended it.
    host: its number. address, port, token: of a meeting place; the token is in its store too. hosts: that take part in
    the start, or for which the place is opened. is_anew: nobody of an earlier launch is left.
    """

    kind: Literal["open", "start", "leave", "end"]
    host: Index
    epoch: Index
    address: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=65536)] = 0
    token: str = ""
    hosts: tuple[Index, ...] = ()
    is_anew: bool = False


@dataclass(frozen=True, slots=True)
class LeaderState:
    """What the entries so far come to.

    num_entries: how many there are. epoch: how often a meeting place was opened. keeper: the host that did so last,
    with its address, port and token. members: hosts of the last start that have not left. num_starts: of this launch.
    has_ended: whether the launch has, or none has begun.
    """

    num_entries: int = 0
    epoch: int = 0
    keeper: int = 0
    address: str = ""
    port: int = 0
    token: str = ""
    members: frozenset[int] = frozenset()
    num_starts: int = 0
    has_ended: bool = True

    @property
    def is_over(self) -> bool:
        """Whether nobody goes on with this launch."""
        return self.has_ended or bool(self.num_starts and not self.members)

    @property
    def _extra(self) -> int:
        """The keeper's weight beside that of a host, of half a host: of two equal halves, the one with it goes on."""
        return int(self.keeper in self.members)

    def is_enough(self, hosts: Iterable[int]) -> bool:
        """Whether these hosts may go on without the others: more than half of the members, or half with the keeper."""
        present = self.members.intersection(hosts)
        return not self.members or 2 * len(present) + (self.keeper in present) > len(self.members)

    @property
    def least_hosts(self) -> int:
        """How many members may go on, with the keeper among them."""
        return (len(self.members) - self._extra) // 2 + 1

    def allows(self, entry: HostEntry) -> bool:
        """Whether this may be the next entry."""
        if entry.kind == "open":
            return entry.epoch == self.epoch + 1 and (
                entry.is_anew
                or (not self.is_over and (entry.host == self.keeper or self.is_enough(entry.hosts)))
            )
        if entry.kind == "leave":
            return not self.is_over and entry.host in self.members
        return (
            entry.epoch == self.epoch
            and not self.is_over
            and (entry.kind == "end" or (bool(entry.hosts) and self.is_enough(entry.hosts)))
        )

    def after(self, entry: HostEntry) -> LeaderState:
        """With one entry more."""
        now = replace(self, num_entries=self.num_entries + 1)
        if entry.kind == "open":
            now = replace(
                now,
                epoch=entry.epoch,
                keeper=entry.host,
                address=entry.address,
                port=entry.port,
                token=entry.token,
                has_ended=False,
            )
            return replace(now, members=frozenset(), num_starts=0) if entry.is_anew else now
        if entry.kind == "start":
            return replace(now, members=frozenset(entry.hosts), num_starts=self.num_starts + 1)
        if entry.kind == "leave":
            return replace(now, members=self.members - {entry.host})
        return replace(now, has_ended=True)


def successor(standing: LeaderState, voters: Iterable[int]) -> tuple[int, ...]:
    """Members that can't reach the keeper, in the order in which they may open the next meeting place; none while they
    are too few. The lowest number comes first."""
    present = tuple(sorted(standing.members.intersection(voters)))
    return present if standing.members and standing.is_enough(present) else ()
