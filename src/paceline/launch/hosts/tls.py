"""TLS 1.3 for the connections of a run between hosts, on which one thread sends while another one receives.

OpenSSL takes one call at a time for a connection, and a call that waits for the network would keep the other thread
out. So its calls are made on memory, under a lock, and return at once; each thread moves the bytes between that memory
and the socket by itself.

Nobody vouches for a certificate: whoever listens makes its own. Who it is, both sides prove by the run's secret, and
what they sign has the hash of the certificate as each of them sees it. So somebody between them who ends TLS with a
certificate of his own, and passes on what they say, proves nothing to either (RFC 5929 has such a binding,
tls-server-end-point).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from paceline.base.errors import HostError, MissingPackage, UsageError, with_extra
from paceline.launch.hosts.environment import Environment
from paceline.launch.process import host_context
from paceline.launch.process.fault_policy import FaultPolicy

_WRITE_BYTES = 256 * 2**10  # that are encrypted in one call, while the other thread waits
_READ_BYTES = 64 * 2**10  # that are taken from the system at a time
_RECORDS = range(
    20, 24
)  # first byte of a record of TLS: a change of ciphers, an alert, a handshake, data
_VALID = timedelta(days=3650)  # a date that nobody checks


class PlainPeer(ConnectionError):
    """The peer does not speak TLS."""


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether connections between hosts must be encrypted.

    Raises:
        UsageError: PACELINE_TLS says something else than yes or no.
    """
    text = environ.get("PACELINE_TLS", "")
    if text not in ("", "0", "1"):
        raise UsageError(
            f"PACELINE_TLS={text} is neither 1 nor 0",
            hint="PACELINE_TLS=1 on every host of the run",
        )
    return text == "1"


def is_used(environment: Environment, fault_policy: FaultPolicy) -> bool:
    """Whether what ranks send each other is encrypted: where it is asked for, and they lie on several hosts, or may
    come to.

    Raises:
        UsageError: it is asked for, and can't be.
    """
    is_one_host = (
        environment.local_world_size == environment.world_size and host_context.this_rank() is None
    )
    if not is_asked_for() or is_one_host:
        return False
    if fault_policy.uses_process_group:
        raise UsageError(
            "PACELINE_TLS=1: ranks of several hosts talk by gloo or NCCL here, which encrypt nothing",
            hint="a plan with server=S workers=W, whose connections Paceline encrypts; or a network that "
            "encrypts by itself, such as WireGuard, without PACELINE_TLS",
        )
    if not os.environ.get("PACELINE_SECRET"):
        raise HostError(
            "PACELINE_TLS=1 and no PACELINE_SECRET: whoever reaches the hosts' meeting place could "
            "pass for one of them",
            hint="PACELINE_SECRET, as `openssl rand -hex 32` makes one, the same on every host",
        )
    check_available()
    return True


def check_available() -> None:
    """
    Raises:
        MissingPackage: certificates can't be made.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise MissingPackage(
            "PACELINE_TLS=1", "cryptography", install=f"{with_extra('tls')}, on all hosts"
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process that listens has of its own. fingerprint: SHA-256 of its certificate."""

    context: ssl.SSLContext
    fingerprint: bytes

    @classmethod
    def make(cls) -> Identity:
        """
        Raises:
            MissingPackage: see `check_available`.
        """
        check_available()
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paceline")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
            .sign(key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nobody comes back with one
        password = secrets.token_hex(
            32
        ).encode()  # ssl reads files alone: the key is not readable in this one
        with tempfile.NamedTemporaryFile(suffix=".pem") as file:
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.BestAvailableEncryption(password),
                )
            )
            file.write(certificate.public_bytes(serialization.Encoding.PEM))
            file.flush()
            context.load_cert_chain(file.name, password=password)
        return cls(context, certificate.fingerprint(hashes.SHA256()))


class TlsSocket:
    """A connected socket under TLS, with those of a socket's methods that a connection needs.

    One thread at a time may send, and one receive. The end of a frame ends what it says, and peers take leave in
    frames: TLS's own farewell is neither sent nor waited for, and a stream that ends is a peer that is gone.
    """

    def __init__(self, sock: socket.socket, identity: Identity | None) -> None:
        """identity: of the side that listens; None on the other one."""
        self._sock, self._identity = sock, identity
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _client_context() if identity is None else identity.context
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=identity is not None
        )
        self._calling = threading.Lock()  # of OpenSSL, and of its memory
        self._sending = (
            threading.Lock()
        )  # from when bytes leave that memory until the system has them: in their order
        self._arrived = memoryview(bytearray(_READ_BYTES))
        self._timeout_s: float | None = sock.gettimeout()

    def handshake(self) -> bytes:
        """Agree on keys, within the timeout. Returns the hash of the certificate of the side that listens.

        Raises:
            PlainPeer: the peer speaks something else. OSError: it can't, or is gone.
        """
        deadline_s, is_first = self._deadline_s(), True
        while True:
            try:
                with self._calling:
                    self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the peer learns why
                raise
            if not self._fill(deadline_s, must_be_tls=is_first):
                raise ConnectionError("the peer closed its connection")
            is_first = False
        self._flush()
        if self._identity is not None:
            return self._identity.fingerprint
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None  # TLS 1.3 has none without
        return hashlib.sha256(certificate).digest()

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send all of the buffers; returns their bytes."""
        with self._sending:
            for buffer in buffers:
                offset = 0
                while offset < len(buffer):
                    with self._calling:
                        offset += self._tls.write(buffer[offset : offset + _WRITE_BYTES])
                        is_much = self._outgoing.pending >= _WRITE_BYTES
                    if is_much:
                        self._drain()
            self._drain()
        self._flush()
        return sum(map(len, buffers))

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Fill the buffer, as a socket does with MSG_WAITALL; less than that if the peer is gone."""
        deadline_s, got = self._deadline_s(), 0
        while got < len(buffer):
            try:
                with self._calling:
                    while got < len(buffer):
                        count = self._tls.read(len(buffer) - got, buffer[got:])
                        if not count:
                            return got  # TLS's farewell
                        got += count  # type: ignore[operator]
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill(deadline_s):
                    break
        return got

    def settimeout(self, seconds: float | None) -> None:
        """For each call, however the bytes drip."""
        self._timeout_s = seconds
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def _deadline_s(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _fill(self, deadline_s: float | None, *, must_be_tls: bool = False) -> bool:
        """Wait for bytes and have OpenSSL see them; False if the peer is gone."""
        if deadline_s is not None:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(left_s)
        count = self._sock.recv_into(self._arrived)
        if count and must_be_tls and self._arrived[0] not in _RECORDS:
            raise PlainPeer("the peer does not speak TLS")
        with self._calling:
            self._incoming.write(self._arrived[:count])
        return count > 0

    def _drain(self) -> None:
        """Send what OpenSSL has to send, while `_sending` is held."""
        with self._calling:
            data = self._outgoing.read()
        if data:
            self._sock.sendall(data)

    def _flush(self) -> None:
        """Have sent what OpenSSL has to send, such as an answer to what came. Who receives never waits for whoever
        sends, who flushes too when he is done."""
        while self._has_output() and self._sending.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._sending.release()

    def _has_output(self) -> bool:
        with self._calling:
            return self._outgoing.pending > 0


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # the run's secret is what proves
    return context
