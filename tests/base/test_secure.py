"""Processes of a run prove themselves to each other; strangers neither come in nor keep anybody out."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conditions import PATIENCE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base import secure
from paceline.base.secure import Acceptor, PendingPeers, Proven, connect
from paceline.base.sockets import closed_in_forks, listen, read

SECRET = b"the secret of a run"
CLAIM = b"rank 07"


class Door:
    """An acceptor with those that it welcomed on a queue."""

    def __init__(self) -> None:
        self.welcomed: queue.Queue[Proven] = queue.Queue()
        self.acceptor = Acceptor(
            listen("127.0.0.1"), self.welcomed.put, secret=SECRET, claim_bytes=len(CLAIM)
        )

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.acceptor.address, timeout=PATIENCE_S)

    def works(self) -> None:
        """A peer is let in, and both ends hear each other."""
        peer = connect(self.acceptor.address, SECRET, claim=CLAIM, timeout_s=PATIENCE_S)
        here = self.welcomed.get(timeout=PATIENCE_S)
        with peer, here.sock:
            assert here.claim == CLAIM
            peer.sendall(b"word")
            assert read(here.sock, 4) == b"word"


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    opened = Door()
    yield opened
    opened.acceptor.close()
    opened.works = None  # type: ignore[assignment]
    with pytest.raises(OSError):
        opened.stranger()


def test_another_secret(door: Door):
    """The peer learns what to look at."""
    refused = door.acceptor.refused
    with pytest.raises(ConnectionError, match="PACELINE_SECRET must be equal on all hosts"):
        connect(door.acceptor.address, b"another", claim=CLAIM, timeout_s=PATIENCE_S)
    until(lambda: door.acceptor.refused == refused + 1)
    assert door.welcomed.empty()


@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        (b"PLc1" + bytes(32), "does not know the run's secret"),
        (b"PLps" + bytes(32), "speaks another protocol"),
        (b"PL", "closed the connection"),
    ],
)
def test_who_has_the_port_and_not_the_secret(challenge: bytes, why: str):
    """Nobody talks to it."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            with impostor.accept()[0] as sock:
                sock.sendall(challenge)
                if len(challenge) == 36:
                    sock.recv(1000)
                    sock.sendall(secrets.token_bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match=why):
            connect(impostor.getsockname(), SECRET, timeout_s=PATIENCE_S)
        thread.join()


def _changed(data: bytes) -> bytes:
    """The same, but for a bit of the claim."""
    return data[:33] + bytes([data[33] ^ 1]) + data[34:]


def _proved_otherwise(data: bytes) -> bytes:
    """The same, but for a bit of the proof."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [_changed, _proved_otherwise, lambda data: data[::-1]])
def test_who_is_between_two_can_not_change_what_they_prove(
    door: Door, change: Callable[[bytes], bytes]
):
    refused = door.acceptor.refused
    with socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            with between.accept()[0] as peer, door.stranger() as there:
                peer.sendall(read(there, 36))
                there.sendall(change(read(peer, 32 + len(CLAIM) + 32)))
                assert not there.recv(1)

        thread = threading.Thread(target=pass_on)
        thread.start()
        with pytest.raises(ConnectionError, match="does not take this process"):
            connect(between.getsockname(), SECRET, claim=CLAIM, timeout_s=PATIENCE_S)
        thread.join()
    until(lambda: door.acceptor.refused == refused + 1)


@given(data=st.binary(max_size=120), is_one_by_one=st.booleans())
@settings(max_examples=30)
def test_bytes_of_a_stranger(door: Door, data: bytes, is_one_by_one: bool):
    """Any bytes at all are heard to their end and answered by an end."""
    with door.stranger() as sock:
        try:
            for part in struct.unpack(f"{len(data)}c", data) if is_one_by_one else [data]:
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        except OSError as error:  # it has hung up already
            assert not isinstance(error, TimeoutError)
    assert door.welcomed.empty()


def test_no_error_of_a_stranger_leaves_its_thread(door: Door, monkeypatch: pytest.MonkeyPatch):
    """One that did would end the process, and whoever comes has proved nothing."""

    def fail(*args: Any, **options: Any) -> None:
        raise struct.error("not enough bytes")

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with monkeypatch.context() as patch:
        patch.setattr(secure, "accept", fail)
        with door.stranger() as sock:
            assert not sock.recv(1)
    door.works()
    assert not raised


def test_a_stranger_that_drips_is_not_waited_for(door: Door, monkeypatch: pytest.MonkeyPatch):
    """A byte now and then does not prolong the time in which a peer must prove itself; nor does leaving at once."""
    monkeypatch.setattr(secure, "HANDSHAKE_S", 0.5)
    for _ in range(5):
        leaving = door.stranger()
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.close()
    with door.stranger() as sock, pytest.raises(OSError):
        for _ in range(600):
            sock.sendall(b"P")
            time.sleep(0.1)
    door.works()


def test_strangers_that_say_nothing_keep_nobody_out(door: Door):
    """They take each other's places, and a peer is let in at once."""
    strangers = [door.stranger() for _ in range(150)]
    door.works()
    assert len(door.acceptor.pending) <= secure.PLACES
    for sock in strangers:
        sock.close()
    until(lambda: not len(door.acceptor.pending))
    until(lambda: all(thread.name != "paceline-admit" for thread in threading.enumerate()))


class Socket:
    def __init__(self, address: str) -> None:
        self.address, self.is_shut_down = address, False

    def getpeername(self) -> tuple[str, int]:
        return self.address, 1

    def shutdown(self, how: int) -> None:
        self.is_shut_down = True


def test_the_oldest_of_the_crowded_address_loses_its_place():
    pending = PendingPeers(places=3)
    peer, *crowd = made = [Socket("10.0.0.1"), *(Socket("10.0.0.66") for _ in range(5))]
    for sock in made:
        pending.add(sock)  # type: ignore[arg-type]
    assert [sock.is_shut_down for sock in made] == [False, True, True, True, False, False]
    for sock in (peer, crowd[0]):
        pending.remove(sock)  # type: ignore[arg-type]
    assert len(pending) == 2


def test_a_fork_keeps_no_connection_open():
    """The other side hears of this process's end though its fork lives on."""
    here, there = socket.socketpair()
    closed_in_forks(here)
    hold, release = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    here.close()
    there.settimeout(PATIENCE_S)
    assert there.recv(1) == b""
    there.close()
    for end in (release, hold):
        os.close(end)
    os.waitpid(pid, 0)
