"""Connections between processes of a run on several hosts. Each side proves that it knows the run's
secret before anything else is said.

Whoever accepts sends a challenge. Whoever connects answers with a claim (what it says of itself), a
challenge of its own and the HMAC of all that under the secret, and the accepting side proves itself
over the same. Nothing is encrypted, and what is said later is not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.base.sockets import closed_in_forks

_MAGIC = b"PLc1"  # how a challenge begins; another protocol has another one
_NONCE_BYTES = _PROOF_BYTES = 32
HANDSHAKE_S = 10.0
PLACES = 64  # a peer needs its place for a round trip
_REST_S = 0.05  # when the system has no connection to give


@dataclass(frozen=True, slots=True)
class Proven:
    """A connection whose two ends have proved themselves."""

    sock: socket.socket  # without a timeout
    claim: bytes  # what the connecting side says of itself


def connect(
    address: tuple[str, int], secret: bytes, *, claim: bytes = b"", timeout_s: float
) -> socket.socket:
    """Reach a process that accepts connections, and prove to each other that both know the secret.
    Returns the connection, without a timeout.

    Raises:
        ConnectionError: what answers there is no process of this run, or takes this one for none.
        OSError: it can't be reached.
    """
    sock = closed_in_forks(socket.create_connection(address, timeout=timeout_s))
    until_s = time.monotonic() + HANDSHAKE_S
    try:
        challenge = _read(sock, len(_MAGIC) + _NONCE_BYTES, until_s)
        if not challenge.startswith(_MAGIC):
            raise ConnectionError(
                "it speaks another protocol, as another version of Paceline does: install the same one on every host"
            )
        statement = secrets.token_bytes(_NONCE_BYTES) + claim
        sock.sendall(statement + _proof(secret, b"connects", challenge + statement))
        try:
            answer = _read(sock, _PROOF_BYTES, until_s)
        except ConnectionError as error:
            raise ConnectionError(
                "it does not take this process for one of the run: PACELINE_SECRET must be equal on all hosts"
            ) from error
        if not hmac.compare_digest(answer, _proof(secret, b"accepts", challenge + statement)):
            raise ConnectionError("it does not know the run's secret")
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(sock: socket.socket, secret: bytes, *, claim_bytes: int = 0) -> Proven:
    """Let a peer prove itself on a fresh connection.

    Args:
        claim_bytes: The length of its claim.

    Raises:
        OSError: it does not, within some seconds.
    """
    until_s = time.monotonic() + HANDSHAKE_S
    challenge = _MAGIC + secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(challenge)
    answer = _read(sock, _NONCE_BYTES + claim_bytes + _PROOF_BYTES, until_s)
    statement, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", challenge + statement)):
        raise ConnectionError("a peer does not know the run's secret")
    sock.sendall(_proof(secret, b"accepts", challenge + statement))
    sock.settimeout(None)
    return Proven(sock, statement[_NONCE_BYTES:])


def _read(sock: socket.socket, num_bytes: int, until_s: float) -> bytes:
    """Return what comes next, however it drips."""
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(1e-3, until_s - time.monotonic()))
        if not (part := sock.recv(num_bytes - len(data))):
            raise ConnectionError("the other side closed the connection")
        data += part
    return data


def _proof(secret: bytes, purpose: bytes, said: bytes) -> bytes:
    return hmac.new(secret, purpose + said, hashlib.sha256).digest()


class Acceptor:
    """Listens for peers, lets each prove itself on a thread of its own, and hands those that did to
    `welcome`, on that thread.

    A stranger costs a thread for some seconds and nothing else; `refused` counts them.
    """

    def __init__(
        self,
        listener: socket.socket,
        welcome: Callable[[Proven], None],
        *,
        secret: bytes,
        claim_bytes: int = 0,
    ) -> None:
        self.listener, self.welcome = closed_in_forks(listener), welcome
        self._secret, self._claim_bytes = secret, claim_bytes
        self.refused, self.is_closed, self.pending = 0, False, PendingPeers()
        threading.Thread(target=self._listen, name="paceline-door", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        self.is_closed = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _listen(self) -> None:
        while True:
            try:
                sock = closed_in_forks(self.listener.accept()[0])
            except OSError:
                if self.is_closed:
                    return
                time.sleep(_REST_S)  # too many files are open, or whoever came is gone
                continue
            self.pending.add(sock)  # the thread of one that loses its place finds it shut down
            threading.Thread(
                target=self._admit, args=(sock,), name="paceline-admit", daemon=True
            ).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            proven = accept(sock, self._secret, claim_bytes=self._claim_bytes)
        except Exception:  # of whatever kind: who has proved nothing ends nothing here
            sock.close()
            self.refused += 1
            return
        finally:
            self.pending.remove(sock)
        self.welcome(proven)


class PendingPeers:
    """Has a place for each connection until its peer has proved itself.

    A new connection always gets a place. If all are taken, the oldest connection of the address with
    the most of them loses its own: peers prove themselves in milliseconds, and who opens connections
    and says nothing loses them first.
    """

    def __init__(self, places: int = PLACES) -> None:
        self.places = places
        self._addresses: dict[socket.socket, str] = {}  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, sock: socket.socket) -> None:
        """Give a connection a place. One that loses its own for it is shut down."""
        try:
            address = str(sock.getpeername()[0])
        except OSError:
            address = ""  # it is gone already
        with self._lock:
            self._addresses[sock] = address
            if len(self._addresses) <= self.places:
                return
            crowded, _ = Counter(self._addresses.values()).most_common(1)[0]
            loser = next(each for each, its in self._addresses.items() if its == crowded)
            del self._addresses[loser]
        with suppress(OSError):
            loser.shutdown(socket.SHUT_RDWR)

    def remove(self, sock: socket.socket) -> None:
        """The peer has proved itself, or is gone."""
        with self._lock:
            self._addresses.pop(sock, None)
