"""Who loses a place when all are taken."""

from __future__ import annotations

from typing import Any

from paceline.launch.hosts.pending_peers import PendingPeers


class Socket:
    def __init__(self, address: str) -> None:
        self.address, self.is_shut_down = address, False

    def getpeername(self) -> tuple[str, int]:
        return self.address, 1

    def shutdown(self, how: int) -> None:
        self.is_shut_down = True


def test_the_oldest_of_the_crowded_address_loses_its_place():
    unproven = PendingPeers(places=3)
    peer, *crowd = made = [Socket("10.0.0.1"), *(Socket("10.0.0.66") for _ in range(5))]
    losers: list[Any] = [unproven.add(sock) for sock in made]  # type: ignore[arg-type]
    assert losers == [None, None, None, *crowd[:3]]
    assert [sock.is_shut_down for sock in made] == [False, True, True, True, False, False]
    assert unproven.remove(peer) and not unproven.remove(crowd[0])  # type: ignore[arg-type]
    assert len(unproven) == 2
