"""Checks of the network of a run's hosts: names, network cards, and reachability, bandwidth and
latency of each pair.

The same command runs once on each host, as a training does (`launch/hosts/host_process.py`,
`launch/hosts/environment.py`). The first host keeps a store where the others meet. Pairs take
turns, each host with one other at a time.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import paceline
from paceline.base import sockets
from paceline.base.errors import ClusterError, PeerLost
from paceline.base.fork import in_a_fork
from paceline.base.secure import Acceptor, Proven, connect
from paceline.doctor.machine import Finding
from paceline.launch.hosts import environment, host_process
from paceline.launch.hosts.environment import address_towards, interface_towards
from paceline.launch.hosts.run_keys import run_key

PINGS = 20  # for each pair; the median counts
SEND_S = 0.4  # how long a host sends as fast as it can to another
SEND_MOST_BYTES = 256 * 2**20
CHUNK_BYTES = 2**20
CONNECT_S = 5.0
# Part of the median pair's bandwidth below which a pair is reported: a ring is as fast as its
# slowest link.
SLOW_PART = 0.5
GIVE_UP_S = (
    15.0  # after the time that torch was given: an error of torch's takes seconds on a busy machine
)


@dataclass(frozen=True)
class HostPlace:
    """The number of this host among the hosts of a run, and the address where they meet."""

    index: int
    num_hosts: int
    address: str
    port: int


@dataclass(frozen=True)
class PairLink:
    """The link from one host to another."""

    other: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str | None = None  # the reason why the other host was not reached


@dataclass(frozen=True)
class HostReport:
    """The findings of one host."""

    index: int
    name: str
    meets_at: str | None  # address that it finds for the meeting place's name; None if none
    interface: str | None  # on which it listens
    address: str | None  # on which it listens
    chosen_by: str
    versions: Mapping[str, str]
    links: Sequence[PairLink] = field(default_factory=tuple)  # to each other host

    @classmethod
    def decode(cls, text: str | bytes) -> HostReport:
        document = json.loads(text)
        return cls(**{**document, "links": tuple(PairLink(**link) for link in document["links"])})


def place_here() -> HostPlace:
    """Return the place of this host, from the variables of the launcher.

    Raises:
        ClusterError: no launcher says which host this is, or its variables contradict each other.
    """
    if (host := host_process.host()) is not None:
        return HostPlace(host.index, host.num_hosts, host.address, host.port)
    if (started := environment.current()) is not None:
        return HostPlace(
            started.rank, started.world_size, started.master_address, started.master_port
        )
    raise ClusterError(
        "--between-hosts is about several hosts, and nothing says which one this is",
        hint="run it on each host as you run train: inside Slurm, Kubeflow or SkyPilot, or with "
        "PET_NNODES=2 PET_NODE_RANK=0 PET_MASTER_ADDR=HOST PET_MASTER_PORT=29500",
    )


def examine_hosts(place: HostPlace, *, timeout_s: float) -> list[Finding]:
    """Meet the other hosts, measure the links, and find what is wrong.

    The first host returns the findings on all hosts, any other host only those that it sees itself.

    Raises:
        PeerLost: hosts did not come, which the message names, or the first host is gone.
        ClusterError: another host has the same number, or was told another number of hosts.
    """
    import torch.distributed as dist

    meets_at = _looked_up(place.address)
    if meets_at is None:
        return [
            Finding(
                "name lookup",
                "bad",
                f"{place.address}, where hosts meet, has no address on {socket.gethostname()}",
                "an entry in DNS or /etc/hosts, or the address in place of the name",
            )
        ]
    store = _store(place, timeout_s)
    if isinstance(store, str):
        return [
            Finding(
                "meeting place",
                "bad",
                f"host {place.index} can't use {place.address}:{place.port}: {store}",
                "is a firewall between them, or the port in use? the first host must be the one at this "
                "address",
            )
        ]
    try:
        _enter(place, store)
        return _examined(place, store, meets_at, timeout_s)
    except dist.DistError as error:
        raise PeerLost(
            f"host 0, where hosts meet, is gone: {str(error).partition(chr(10))[0]}",
            hint="what it printed says why; then start the command on every host",
        ) from None


def _enter(place: HostPlace, store: Any) -> None:
    """Register this host in the store.

    Raises:
        ClusterError: the host's place contradicts that of a host that has registered before.
    """
    others = int(store.compare_set("number of hosts", "", str(place.num_hosts)))
    if others != place.num_hosts:
        raise ClusterError(
            f"host {place.index} was told of {place.num_hosts} hosts and another one of {others}",
            hint="the launcher's number of hosts (PET_NNODES) is the same on each host",
        )
    if store.add(f"hosts {place.index}", 1) > 1:
        raise ClusterError(
            f"another host is host {place.index} too",
            hint="each host has a number of its own (PET_NODE_RANK), from 0",
        )


def _store(place: HostPlace, timeout_s: float) -> Any:
    """Return the store where hosts meet, or the reason as text if it can't be used."""
    import torch.distributed as dist

    def meet(address: str, is_first: bool = False) -> Any:
        return dist.TCPStore(
            address,
            place.port,
            place.num_hosts,
            is_master=is_first,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

    try:
        kept = (
            meet("127.0.0.1", is_first=True) if place.index == 0 else None
        )  # it listens on all addresses
        return _refusal(meet, place.address, timeout_s) or kept or meet(place.address)
    except dist.DistError as error:
        return str(error).partition("\n")[0]


def _refusal(meet: Callable[[str], Any], address: str, timeout_s: float) -> str | None:
    """Explain why no store answers at the address; None if one answers.

    A fork tries it, because torch would wait without end if another program takes the connection
    and does not answer. The fork also hides the stacks that torch prints.
    """

    def attempt() -> str | None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            meet(address)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    try:
        refusal: str | None = in_a_fork(attempt, timeout_s=timeout_s + GIVE_UP_S)
    except RuntimeError:
        return "what listens there takes the connection and doesn't answer as a store"
    return refusal


def _examined(place: HostPlace, store: Any, meets_at: str, timeout_s: float) -> list[Finding]:
    own_report = _report(place, meets_at)
    nonce = secrets.token_hex(16)
    listener = sockets.listen(own_report.address or "")
    with closing(Acceptor(listener, _answer, secret=run_key("links", nonce))) as acceptor:
        store.set(f"at/{place.index}", json.dumps([own_report.address, acceptor.address[1], nonce]))
        everyone = range(place.num_hosts)
        _await(store, [f"at/{index}" for index in everyone], timeout_s)
        doors = {index: json.loads(store.get(f"at/{index}")) for index in everyone}
        links = []
        for number, pairs in enumerate(rounds(place.num_hosts)):
            links += [
                measured(second, *doors[second]) for first, second in pairs if first == place.index
            ]
            store.set(f"round {number}/{place.index}", "over")
            _await(store, [f"round {number}/{index}" for index in everyone], timeout_s)
        report = HostReport(**{**vars(own_report), "links": tuple(links)})
        store.set(f"report/{place.index}", json.dumps(asdict(report)))
        reports = [report]
        if place.index == 0:
            _await(store, [f"report/{index}" for index in everyone], timeout_s)
            reports = [HostReport.decode(store.get(f"report/{index}")) for index in everyone]
            store.set("read", "")
        else:
            with suppress(PeerLost, RuntimeError):  # the first host may be gone by then
                _await(store, ["read"], timeout_s)
    return findings_of(reports, place)


def _await(store: Any, keys: Sequence[str], timeout_s: float) -> None:
    """Wait until the store has these keys.

    Raises:
        PeerLost: hosts did not come; the message has their numbers.
    """
    deadline_s = time.monotonic() + timeout_s
    while missing := [key.rpartition("/")[2] for key in keys if not store.check([key])]:
        if time.monotonic() > deadline_s:
            raise PeerLost(
                f"nothing was heard of host {', '.join(missing)} for {timeout_s:g} s",
                hint="start the command on every host; --timeout SECONDS waits longer",
            )
        time.sleep(0.05)


def rounds(num_hosts: int) -> list[list[tuple[int, int]]]:
    """Return all ordered pairs of hosts, in rounds in which each host is in one pair at most.

    The pairs come from the circle method, and each round is followed by its reverse.

    >>> rounds(3)
    [[(1, 2)], [(2, 1)], [(0, 2)], [(2, 0)], [(0, 1)], [(1, 0)]]
    >>> rounds(4)[:2]
    [[(0, 3), (1, 2)], [(3, 0), (2, 1)]]
    """
    ring: list[int | None] = [*range(num_hosts), *([None] if num_hosts % 2 else [])]
    played = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [
            (a, b)
            for a, b in zip(ring[:half], reversed(ring[half:]), strict=True)
            if a is not None and b is not None
        ]
        there = sorted((min(pair), max(pair)) for pair in pairs)
        played += [there, [(second, first) for first, second in there]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return played


# --- One host ---------------------------------------------------------------------------------------------------


def _report(place: HostPlace, meets_at: str) -> HostReport:
    import torch

    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    interface = chosen or interface_towards(meets_at)
    return HostReport(
        place.index,
        socket.gethostname(),
        meets_at,
        interface,
        _address_of(interface) if chosen else address_towards(meets_at),
        "GLOO_SOCKET_IFNAME" if chosen else f"it faces {meets_at}",
        {
            "paceline": paceline.__version__,
            "torch": torch.__version__.partition("+")[0],
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
    )


def _looked_up(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _address_of(interface: str | None) -> str | None:
    import psutil

    return next(
        (
            each.address
            for each in psutil.net_if_addrs().get(interface or "", ())
            if each.family == socket.AF_INET
        ),
        None,
    )


# --- A pair -----------------------------------------------------------------------------------------------------


def _answer(proven: Proven) -> None:
    """Send back each byte of a ping, then receive data until it ends, and send the number of bytes
    that came.
    """
    with proven.sock as other, suppress(OSError):
        other.settimeout(CONNECT_S)
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            other.sendall(sockets.read(other, 1))
        count, chunk = 0, bytearray(CHUNK_BYTES)
        while size := other.recv_into(chunk):
            count += size
        other.sendall(count.to_bytes(8, "big"))


def measured(other: int, address: str | None, port: int, nonce: str) -> PairLink:
    """Measure the link to another host."""
    try:
        key = run_key("links", nonce)
        with connect((address or "", port), key, timeout_s=CONNECT_S).sock as there:
            there.settimeout(CONNECT_S)
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times_s = [_ping_s(there) for _ in range(PINGS)]
            begin_s, sent, chunk = time.perf_counter(), 0, bytes(CHUNK_BYTES)
            while time.perf_counter() - begin_s < SEND_S and sent < SEND_MOST_BYTES:
                there.sendall(chunk)
                sent += len(chunk)
            there.shutdown(socket.SHUT_WR)
            there.settimeout(
                max(CONNECT_S, 60 * SEND_S)
            )  # what buffers hold comes at the link's own pace
            received_bytes = int.from_bytes(sockets.read(there, 8), "big")
            return PairLink(
                other, statistics.median(times_s), received_bytes / (time.perf_counter() - begin_s)
            )
    except OSError as error:
        return PairLink(other, error=f"{error.strerror or error} at {address}:{port}")


def _ping_s(there: socket.socket) -> float:
    begin_s = time.perf_counter()
    there.sendall(b".")
    sockets.read(there, 1)
    return time.perf_counter() - begin_s


# --- All hosts --------------------------------------------------------------------------------------------------


def findings_of(reports: Sequence[HostReport], place: HostPlace) -> list[Finding]:
    """Return the findings that follow from the reports of hosts."""
    findings = [
        Finding(
            f"host {each.index}",
            "ok" if each.address else "bad",
            f"{each.name}, {each.interface or 'no network card'} {each.address or ''} ({each.chosen_by})",
            None
            if each.address
            else "GLOO_SOCKET_IFNAME=NAME names a network card that has an address",
        )
        for each in reports
    ]
    if len(reports) < place.num_hosts:
        return [
            *findings,
            *_links(reports),
            Finding("others", "ok", "host 0 says what all hosts found"),
        ]
    return [*findings, _names(reports, place), _versions(reports), *_links(reports)]


def _names(reports: Sequence[HostReport], place: HostPlace) -> Finding:
    first, *others = reports
    answers: dict[str | None, list[int]] = {}
    for each in others:
        answers.setdefault(each.meets_at, []).append(each.index)
    seen = "; ".join(
        f"{answer} on host {', '.join(map(str, where))}" for answer, where in answers.items()
    )
    if len(answers) > 1:
        return Finding(
            "name lookup",
            "warn",
            f"{place.address} is {seen}",
            "the hosts met all the same; the address in place of the name makes them agree",
        )
    if (first.address or "").startswith("127.") and not place.address.startswith("127."):
        return Finding(
            "name lookup",
            "bad",
            f"host 0 takes its own name {place.address} for {first.meets_at}, where no other host reaches "
            f"it; it is {seen}",
            "the address in place of the name, or GLOO_SOCKET_IFNAME=NAME on host 0",
        )
    return Finding("name lookup", "ok", f"{place.address} is {seen}")


def _versions(reports: Sequence[HostReport]) -> Finding:
    differing = {name: {each.versions[name] for each in reports} for name in reports[0].versions}
    wrong = [
        f"{name} {' and '.join(sorted(versions))}"
        for name, versions in differing.items()
        if len(versions) > 1
    ]
    if wrong:
        return Finding(
            "versions", "bad", "; ".join(wrong), "install the same versions on all hosts"
        )
    return Finding(
        "versions",
        "ok",
        ", ".join(f"{name} {version}" for name, version in reports[0].versions.items()),
    )


def _links(reports: Sequence[HostReport]) -> list[Finding]:
    links = [(each.index, link) for each in reports for link in each.links]
    typical = statistics.median(
        [link.bytes_per_s for _, link in links if link.error is None] or [0.0]
    )
    return [_link(index, link, typical) for index, link in links]


def _link(index: int, link: PairLink, typical: float) -> Finding:
    name = f"{index} to {link.other}"
    if link.error is not None:
        return Finding(
            name,
            "bad",
            f"host {index} can't reach host {link.other}: {link.error}",
            "open all ports between the hosts: ranks listen on ports that the system chooses; "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another network card",
        )
    detail = f"{link.bytes_per_s / 1e6:,.3g} MB/s, {1e3 * link.latency_s:.3g} ms there and back"
    if link.bytes_per_s < SLOW_PART * typical:
        return Finding(
            name,
            "warn",
            detail,
            f"the middle of all links has {typical / 1e6:,.3g} MB/s, and all-reduces "
            "go at the pace of the slowest",
        )
    return Finding(name, "ok", detail)
