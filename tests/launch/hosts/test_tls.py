"""Connections under TLS on which one thread sends while another one receives."""

from __future__ import annotations

import fcntl
import hashlib
import random
import shutil
import socket
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conditions import until
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import MissingPackage, UsageError
from paceline.launch.hosts import tls
from paceline.launch.hosts.tls import Identity, PlainPeer, TlsSocket


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    for sock in (here, there):
        sock.settimeout(10)
    yield here, there
    here.close()
    there.close()


def _met(
    here: socket.socket, there: socket.socket, identity: Identity
) -> tuple[TlsSocket, TlsSocket]:
    """A server and a client, after the handshake."""
    server, client = TlsSocket(here, identity), TlsSocket(there, None)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(server.handshake)
        assert client.handshake() == seen.result(20) == identity.fingerprint
    for sock in (server, client):
        sock.settimeout(None)
    return server, client


def test_the_certificate_is_this_launch_s_own(
    sockets: tuple[socket.socket, socket.socket], identity: Identity
):
    server, client = _met(*sockets, identity)
    assert server._tls.version() == client._tls.version() == "TLSv1.3"
    assert Identity.make().fingerprint != identity.fingerprint
    assert client._outgoing.pending == server._incoming.pending == 0


@given(
    st.lists(st.integers(1, 400_000), min_size=1, max_size=4),
    st.lists(st.integers(1, 400_000), max_size=4),
    st.integers(0, 2**32),
)
@settings(max_examples=15)
def test_both_send_and_receive_at_once(
    identity: Identity, here_sizes: list[int], there_sizes: list[int], seed: int
):
    """Frames of any sizes, in any pieces, arrive as they were sent."""
    here, there = socket.socketpair()
    ends, draw = _met(here, there, identity), random.Random(seed)
    frames = [[draw.randbytes(size) for size in sizes] for sizes in (here_sizes, there_sizes)]

    def send(end: TlsSocket, data: list[bytes]) -> None:
        for each in data:
            view, cut = memoryview(each), draw.randrange(len(each))
            assert end.sendmsg([view[:cut], view[cut:]]) == len(each)

    def receive(end: TlsSocket, data: list[bytes]) -> bool:
        for each in data:
            buffer = memoryview(bytearray(len(each)))
            cut = draw.randrange(len(each))
            for part in (buffer[:cut], buffer[cut:]):
                assert end.recv_into(part) == len(part)
            if buffer != each:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(send, ends[side], frames[side]) for side in (0, 1)]
        same = [pool.submit(receive, ends[side], frames[1 - side]) for side in (0, 1)]
        assert [each.result() for each in same] == [True, True]
        assert [each.result() for each in work] == [None, None]
    here.close()
    there.close()


def test_nobody_waits_for_whoever_sends(
    sockets: tuple[socket.socket, socket.socket], identity: Identity
):
    """Both send more than the system takes, and neither has begun to receive."""
    ends, size = _met(*sockets, identity), 8 * 2**20
    data = memoryview(random.Random(0).randbytes(size))
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(end.sendmsg, [data]) for end in ends]
        time.sleep(0.3)
        assert not any(each.done() for each in sent)
        for end in ends:
            buffer = memoryview(bytearray(size))
            assert end.recv_into(buffer) == size
            assert hashlib.sha256(buffer).digest() == hashlib.sha256(data).digest()
        assert [each.result() for each in sent] == [size, size]


def test_new_keys_in_the_middle(identity: Identity):
    """A peer renews its keys and wants ours renewed: the answer goes out, though another thread is about to send.
    Python's ssl asks for none, so OpenSSL's own client does."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt install openssl")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        client = subprocess.Popen(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_3"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert client.stdin and client.stdout
        sock = listener.accept()[0]
    server = TlsSocket(sock, identity)
    sock.settimeout(200)
    server.handshake()
    _say(client, "one\n")
    assert _heard(server, 4) == b"one\n"
    with server._sending:  # as by a thread whose peer takes nothing
        for line in ("K\n", "two\n"):
            _say(client, line)
            until(lambda: not _unread(client))  # else it takes both for text
        assert _heard(server, 4) == b"two\n"
    server.sendmsg([memoryview(b"three\n")])
    assert any(line == "three\n" for line in client.stdout)
    _say(client, "four\n")
    assert _heard(server, 5) == b"four\n"
    sock.close()
    client.communicate(timeout=200)


def _say(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin
    client.stdin.write(line)
    client.stdin.flush()


def _unread(client: subprocess.Popen[str]) -> int:
    """How many bytes of its pipe a process has not read."""
    assert client.stdin
    return int.from_bytes(fcntl.ioctl(client.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)


def _heard(server: TlsSocket, size: int) -> bytes:
    buffer = bytearray(size)
    assert server.recv_into(memoryview(buffer)) == size
    return bytes(buffer)


@pytest.mark.parametrize("is_server", [True, False])
def test_a_peer_without_tls(
    sockets: tuple[socket.socket, socket.socket], identity: Identity, is_server: bool
):
    sockets[1].sendall(b"PLps and so on")
    with pytest.raises(PlainPeer):
        TlsSocket(sockets[0], identity if is_server else None).handshake()


def test_an_older_tls(sockets: tuple[socket.socket, socket.socket], identity: Identity):
    """Refused, and the peer hears why."""
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with ThreadPoolExecutor(1) as pool:
        handshake = pool.submit(old.wrap_socket, sockets[1])
        with pytest.raises(ssl.SSLError):
            TlsSocket(sockets[0], identity).handshake()
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            handshake.result()


@pytest.mark.parametrize("drips", [False, True])
def test_a_handshake_has_an_end(
    sockets: tuple[socket.socket, socket.socket], identity: Identity, drips: bool
):
    """Whoever says nothing, or a byte now and then, is not waited for."""
    sockets[0].settimeout(0.3)
    is_over, all_dripped = threading.Event(), threading.Event()

    def drip() -> None:
        for byte in b"\x16\x03\x01\x20\x00" + bytes(5000):
            if is_over.wait(0.05):
                return
            sockets[1].sendall(bytes([byte]))
        all_dripped.set()

    with ThreadPoolExecutor(1) as pool:
        if drips:
            pool.submit(drip)
        with pytest.raises(TimeoutError):
            TlsSocket(sockets[0], identity).handshake()
        is_over.set()
        assert not all_dripped.is_set()


@pytest.mark.parametrize(
    ("change", "size"),
    [(lambda data: data[:-20], 0), (lambda data: data[:-1] + bytes([data[-1] ^ 1]), -1)],
)
def test_bytes_that_are_cut_off_or_changed(
    sockets: tuple[socket.socket, socket.socket],
    identity: Identity,
    size: int,
    change: Callable[[bytes], bytes],
):
    """Nothing of a record is handed out before all of it is there and proves right."""
    server, client = _met(*sockets, identity)
    with client._calling:
        client._tls.write(b"x" * 100)
        data = change(client._outgoing.read())
    sockets[1].sendall(data)
    sockets[1].shutdown(socket.SHUT_WR)
    buffer = memoryview(bytearray(100))
    if size < 0:
        with pytest.raises(ssl.SSLError):
            server.recv_into(buffer)
    else:
        assert server.recv_into(buffer) == size
    assert bytes(buffer) == bytes(100)


@pytest.mark.parametrize(("text", "expected"), [("", False), ("0", False), ("1", True)])
def test_whether_it_is_asked_for(text: str, expected: bool):
    assert tls.is_asked_for({"PACELINE_TLS": text}) == expected
    assert not tls.is_asked_for({})


def test_a_value_that_is_neither():
    with pytest.raises(UsageError, match="PACELINE_TLS=on is neither 1 nor 0"):
        tls.is_asked_for({"PACELINE_TLS": "on"})


def test_without_the_package_for_certificates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingPackage, match=r"PACELINE_TLS=1 needs the package 'cryptography'(.|\n)*'\.\[tls\]'"
    ):
        Identity.make()
