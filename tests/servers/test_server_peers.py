"""Peers that know the secret and misbehave: each is dismissed with its name, and the run goes on or ends in words."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conditions import until
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.servers import shared
from paceline.servers.coordinator import Coordinator
from paceline.servers.messages import checked
from paceline.servers.roles import RankTask, Rendezvous
from paceline.servers.server_state import build
from paceline.servers.shard_memory import bytes_of
from paceline.servers.wire import Connection, Header, Kind, Peer, Role, Uplink, WireError, connect
from paceline.servers.worker import Worker
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings

SECRET = b"s" * 32
STEPS = 6
PATIENCE_S = 200  # no peer is given up for its silence
FIGURES = {
    "peak_memory_bytes": 1,
    "core_wait_s": 0.0,
    "waited_for_step_s": 0.5,
    "waited_for_weights_s": 0.5,
    "pushed_bytes": 1,
    "pulled_bytes": 2,
}
GOOD: list[tuple[Role, dict[str, Any]]] = [
    (Role.CONTROL, {"idle": True, "deaths": 0, "measured": ["error"]}),
    (Role.CONTROL, {"alive": True}),
    (Role.CONTROL, {"told": 1, "loss": 0.5, "count": 3.0, "is_mean": True, "digest": 5}),
    (Role.CONTROL, {"finished": 1, "version": 2, "unused": ["w"], "stop": False}),
    (
        Role.CONTROL,
        {
            "sums": 1,
            "names": ["loss", "error"],
            "values": [[1.0, 2.0], [float("nan"), 1.0]],
            "refused": ["error is no mean"],
            "stop": False,
        },
    ),
    (Role.CONTROL, {"figures": 3, "values": [0.5, float("inf")]}),
    (Role.CONTROL, {"update": 4, "optimizer": "critic", "unused": ["critic.w"]}),
    (Role.CONTROL, {"left": FIGURES}),
    (Role.SERVER, {"held": 3, "squares": float("nan")}),
    (Role.SERVER, {"lost": 1, "incarnation": 5, "why": "it left"}),
    (Role.SERVER, {"alive": True}),
    (Role.SERVER, {"left": {"peak_memory_bytes": 3, "core_wait_s": 0.0}}),
]
words = st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(("role", "message"), GOOD)
def test_what_peers_say_passes(role: Role, message: dict[str, Any]):
    """Every kind there is."""
    assert checked(role, message) == message


@pytest.mark.parametrize(("role", "message"), GOOD)
def test_what_lacks_something_or_has_something_else_is_refused(role: Role, message: dict[str, Any]):
    """Each key left out, another one, and each value of each other type."""
    for key, value in message.items():
        bad = [{k: v for k, v in message.items() if k != key}, {**message, "joined": value}]
        for other in (None, True, 3, 0.5, "text", [], ["text"], {}, {"text": 3}):
            if type(other) is not type(value) and not {type(other), type(value)} <= {int, float}:
                bad.append({**message, key: other})
        for bad_message in bad:
            with pytest.raises(WireError, match="it sent a message"):
                checked(role, bad_message)


@pytest.mark.slow
@given(st.sampled_from(GOOD), st.data())
def test_what_they_do_not_say_is_refused(good: tuple[Role, dict[str, Any]], data: st.DataObject):
    """Without a key, with another one, or with a value of another type: refused and never anything else."""
    role, message = good
    key = data.draw(st.sampled_from(sorted(message)))
    lacking = {k: v for k, v in message.items() if k != key}
    other = data.draw(
        values.filter(
            lambda value: (
                type(value) is not type(message[key])
                and not (type(value) in (int, float) and type(message[key]) in (int, float))
            )
        )
    )
    for bad in (lacking, {**message, "joined": other}, {**message, key: other}):
        with pytest.raises(WireError, match="it sent a message"):
            checked(role, bad)


@given(
    st.sampled_from([Role.CONTROL, Role.SERVER]),
    st.dictionaries(
        st.sampled_from(
            [
                "idle",
                "told",
                "finished",
                "sums",
                "figures",
                "update",
                "left",
                "held",
                "lost",
                "version",
                "joined",
            ]
        ),
        values,
    ),
)
def test_anything_at_all(role: Role, message: dict[str, Any]):
    """It passes or is refused."""
    with suppress(WireError):
        checked(role, message)


class Table(nn.Module):
    """A layer and a table of which rows travel."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 3, sparse=True), nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids).sum(1))


def _job() -> paceline.Job:
    ids = torch.randint(0, 20, (24, 5), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(ids, ids.sum(1) % 3)
    return paceline.Job(
        model=Table,
        data=data,
        loss=F.cross_entropy,
        validation=data,
        batch=8,
        epochs=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


class Run:
    """Server 0 on a thread of this process, and peers that are played here."""

    def __init__(self, plan: str, *, timeout_s: float = PATIENCE_S) -> None:
        self.plan, self.job, store = Plan.parse(plan), _job(), dist.HashStore()
        world = self.plan.world_size
        self.shares = (1,) * self.plan.sync.num_replicas(self.plan.axes)
        self.contexts = [
            RankContext(
                rank,
                world,
                world,
                torch.device("cpu"),
                store,
                HeartbeatTable(1),
                0,
                "try",
                secret=SECRET,
                timeout_s=timeout_s,
                deaths=(0,) * world,
                restarts=3,
            )
            for rank in range(world)
        ]
        model, shards = build(self.job, self.plan)
        self.coordinator = Coordinator(self.task(0), number=0, model=model, shards=shards)
        self.shard = shards[0]
        self.ended: queue.Queue[Any] = queue.Queue()
        self.opened: list[Connection] = []
        self._start(self.coordinator.serve)

    def task(self, rank: int) -> RankTask:
        return RankTask(
            self.contexts[rank],
            self.job,
            self.plan,
            Settings(None, self.shares),
            Rendezvous(self.contexts[rank], "servers/1"),
            Uplink(),
        )

    def _start(self, work: Callable[[], Any]) -> None:
        def ends() -> None:
            try:
                self.ended.put(work())
            except BaseException as error:
                self.ended.put(error)

        threading.Thread(target=ends, daemon=True).start()

    def reach(self, role: Role, number: int, incarnation: int) -> Connection:
        self.opened.append(
            connect(
                self.coordinator.door.address,
                Peer(role, number, incarnation),
                secret=SECRET,
                layout=self.coordinator.layout,
                timeout_s=PATIENCE_S,
            )
        )
        self.opened[-1].sock.settimeout(PATIENCE_S)
        return self.opened[-1]

    def work(self, number: int) -> None:
        """A worker that behaves begins, on a thread."""
        worker = Worker(self.task(number + 1), number=number)
        threading.Thread(target=worker.run, daemon=True).start()

    def end(self) -> Any:
        """What the coordinator returns or raises."""
        return self.ended.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.coordinator.close()
        for connection in self.opened:
            connection.close()


@pytest.fixture
def started() -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def start(plan: str) -> Run:
        runs.append(Run(plan))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_runs_across_hosts_reach_the_same_weights(monkeypatch: pytest.MonkeyPatch):
    """All elements travel in frames, as between hosts, or through shared memory."""
    weights = []
    for is_apart in (False, True):
        if is_apart:
            monkeypatch.setattr(shared, "mapped", lambda address: None)
        run = Run("servers=1 workers=2")
        run.work(0)
        run.work(1)
        assert run.end()["steps"] == STEPS
        weights.append(
            {name: view.clone() for name, view in run.coordinator.exchange.views.items()}
        )
        run.close()
    together, apart = weights
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in together)


def _hears(connection: Connection) -> dict[str, Any]:
    """The next order that is not merely a sign of life."""
    while "alive" in (order := connection.receive_message()):
        pass
    return order


def _is_closed(connection: Connection) -> bool:
    with pytest.raises(WireError) as raised:
        while True:
            connection.receive_message()
    return "timed out" not in str(raised.value)


IDLE = {"idle": True, "deaths": 0, "measured": []}
TOLD = {"told": 0, "loss": 1.0, "count": 8.0, "is_mean": True, "digest": 5}
SUMS = {"sums": 1, "names": ["loss"], "values": [[1.0, 1.0]], "refused": [], "stop": False}
FINISHED = {"finished": 0, "version": 0, "unused": [], "stop": False}


def _check_dismissed(run: Run, why: str) -> None:
    """Worker 1 was given up with this reason, and worker 0 does all the steps."""
    run.work(0)
    summary = run.end()
    assert summary["steps"] == STEPS and summary["workers_lost"] == [1]
    (event,) = (
        event for event in run.coordinator.membership_log.events if event["event"] == "worker_lost"
    )
    assert why in event["why"]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([b"{no"], "a message that is no JSON"),
        ([b"[" * 100_000], "a message that is no JSON"),
        ([b"[1]"], "a message that is a list"),
        ([{}], "unknown kind ''"),
        ([{"joined": True}], "unknown kind 'joined'"),
        ([{"held": 0, "squares": 1.0}], "unknown kind 'held'"),
        ([{"idle": True}], "'idle' with idle where idle, deaths, measured are due"),
        ([{**IDLE, "deaths": 10**12}], "it says that it died 1000000000000 times"),
        ([IDLE, IDLE, IDLE, IDLE], "said 'idle' and was not asked"),
        ([IDLE, {**TOLD, "told": 10**15}], "'told' of update 1000000000000000"),
        ([IDLE, {**TOLD, "loss": float("nan")}], "whose 'loss' is nan"),
        ([IDLE, {**TOLD, "count": 10**400}], "whose 'count' is 1000"),
        ([IDLE, TOLD, TOLD], "'told' of update 0"),
        ([IDLE, FINISHED], "'finished' of update 0"),
        ([IDLE, TOLD, {**FINISHED, "version": 99}], "weights of version 99 when there were 0"),
        ([IDLE, {**SUMS, "values": [[1.0, 1.0]] * 3}], "it evaluated 3 figures of 1"),
        ([{**SUMS, "values": [["a", 1.0]]}], "whose 'values' is"),
        ([IDLE, {**SUMS, "names": ["other"]}], "other where loss are due"),
        ([IDLE, {"figures": 0, "values": [1.0]}], "'figures', which is for steps of a job's own"),
        ([IDLE, {"left": FIGURES}], "it left before the run was over"),
    ],
)
def test_messages_that_make_no_sense(started: Callable[[str], Run], messages: list[Any], why: str):
    """Their worker is given up with the reason, and the other one does all the steps."""
    run = started("servers=1 workers=2 staleness=inf")
    control = run.reach(Role.CONTROL, 1, 7)
    for before, message in zip([None, *messages], messages, strict=False):
        if before is IDLE and message is not IDLE:
            assert _hears(control)["lease"] == 0
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        control.send(Header(Kind.MESSAGE, len(data)), data)
    assert _is_closed(control)
    _check_dismissed(run, why)


def test_without_staleness_such_a_message_ends_the_run(started: Callable[[str], Run]):
    """The worker is named."""
    run = started("servers=1 workers=2")
    run.reach(Role.CONTROL, 1, 7).send_message({"finished": 1})
    with pytest.raises(
        WireError, match="worker 1 is gone: it sent a message 'finished' with finished where"
    ):
        raise run.end()


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (Peer(Role.CONTROL, 2, 7), "worker 2, and workers=2 count from 0"),
        (Peer(Role.DATA, 60_000, 7), "worker 60000, and"),
        (Peer(Role.SERVER, 1, 0), "server 1, which is here already or none of servers=1"),
    ],
)
def test_peers_that_a_run_does_not_have(started: Callable[[str], Run], peer: Peer, why: str):
    """Refused at the door, in words."""
    run = started("servers=1 workers=2 staleness=inf")
    with pytest.raises(WireError, match=why):
        run.reach(peer.role, peer.number, peer.incarnation)
    run.work(0)
    assert run.end()["workers_lost"] == []


def _chunks(run: Run, worker: int, incarnation: int, update: int) -> list[tuple[Header, bytes]]:
    """Everything that a worker sends of an update."""
    table = len(run.shard.chunks)
    assert not table or all(chunk.dtype == "float32" for chunk in run.shard.chunks)
    pushes = [
        (
            Header(Kind.PUSH, chunk.num_bytes, "float32", worker, incarnation, update, number),
            bytes(chunk.num_bytes),
        )
        for number, chunk in enumerate(run.shard.chunks)
    ]
    return [*pushes, (Header(Kind.PUSH_ROWS, 0, "float32", worker, incarnation, update, 0), b"")]


def _rows(kind: Kind, *places: int, dtype: str = "none", step: int = 0) -> tuple[Header, bytes]:
    width = 0 if kind == Kind.PULL_ROWS else 12
    data = bytes_of(torch.tensor(places, dtype=torch.int64)).tobytes() + bytes(width * len(places))
    return Header(kind, len(data), dtype, 1, 7, step, 0), data


@pytest.mark.sweep(7)
@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (
            lambda run: [
                frame
                for update in range(10**12, 10**12 + 9)
                for frame in _chunks(run, 1, 7, update)
            ],
            "update 1000000000008 while 8 others",
        ),
        (
            lambda run: [_chunks(run, 1, 7, update)[0] for update in range(50, 60)],
            "update 58 while 8 others",
        ),
        (lambda run: _chunks(run, 1, 7, -1), "worker 1 sent a gradient of update -1"),
        (
            lambda run: [(Header(Kind.PULL, 0, "none", 1, 7, 10**12), b"")],
            "asks for version 1000000000000, and the last",
        ),
        (lambda run: [_rows(Kind.PULL_ROWS, 1, 2, step=10**12)], "asks for version 1000000000000"),
        (
            lambda run: [_rows(Kind.PULL_ROWS, 1, 2, step=5)] * 3,
            "asked for rows before it had those",
        ),
        (
            lambda run: [_rows(Kind.PULL_ROWS, 3, 20)],
            "rows that are not on this server, which has 20",
        ),
        (lambda run: [_rows(Kind.PULL_ROWS, -(2**63))], "rows that are not on this server"),
        (
            lambda run: [_rows(Kind.PUSH_ROWS, 5)],
            "sent rows of none where the table has torch.float32",
        ),
        (lambda run: [_rows(Kind.PUSH_ROWS, 5, dtype="float32")] * 2, "of update 0 twice"),
        (
            lambda run: [(Header(Kind.PUSH_ROWS, 13, "float32", 1, 7, 0, 0), b"")],
            "sent 13 bytes of rows, each of 20",
        ),
        (
            lambda run: [(Header(Kind.PUSH_ROWS, 2**50, "float32", 1, 7, 0, 0), b"")],
            "bytes where 0 to 400 are allowed",
        ),
        (
            lambda run: [(Header(Kind.PULL_ROWS, 8, "none", 1, 7, 0, 4), b"")],
            "asks for table 4 of 1",
        ),
    ],
)
def test_gradients_that_make_no_sense(
    started: Callable[[str], Run], why: str, frames: Callable[[Run], list[tuple[Header, bytes]]]
):
    """Their worker is given up with the reason, nothing of them is kept, and the other one does all the steps."""
    run = started("servers=1 workers=2 staleness=inf")
    control, data = run.reach(Role.CONTROL, 1, 7), run.reach(Role.DATA, 1, 7)
    for header, payload in frames(run):
        with suppress(WireError):  # it may have heard enough
            data.send(header, payload)
    assert _is_closed(control)
    exchange = run.coordinator.exchange
    until(lambda: not exchange.gatherings and not exchange.connections)
    _check_dismissed(run, why)


def test_a_fault_that_comes_before_its_worker(started: Callable[[str], Run]):
    """A worker has two connections, and which is heard first is chance: it is given up all the same."""
    run = started("servers=1 workers=2 staleness=inf")
    data = run.reach(Role.DATA, 1, 7)
    data.send(*_rows(Kind.PULL_ROWS, 3, 20))
    assert _is_closed(data)
    assert _is_closed(run.reach(Role.CONTROL, 1, 7))
    _check_dismissed(run, "rows that are not on this server")


def test_two_workers_that_send_one_update(started: Callable[[str], Run]):
    """A server can't tell whose it is: neither is heard any more, and the update is made by another."""
    run = started("servers=1 workers=3 staleness=inf")
    controls = [run.reach(Role.CONTROL, worker, 7) for worker in (1, 2)]
    links = [run.reach(Role.DATA, worker, 7) for worker in (1, 2)]
    for number, link in enumerate(links):
        link.send(*_chunks(run, number + 1, 7, 0)[0])
        until(lambda number=number: number or 0 in run.coordinator.exchange.gatherings)
    assert all(map(_is_closed, controls))
    run.work(0)
    assert sorted(run.end()["workers_lost"]) == [1, 2]
    events = [
        event for event in run.coordinator.membership_log.events if event["event"] == "worker_lost"
    ]
    assert all("workers 1 and 2 both sent update 0" in event["why"] for event in events)


def test_gradients_of_whom_nobody_knows(started: Callable[[str], Run]):
    """A peer that never joined may send what it likes: when it leaves, nothing is left of it."""
    run = started("servers=1 workers=2 staleness=inf")
    for incarnation in (7, 8):
        data = run.reach(Role.DATA, 1, incarnation)
        for frame in _chunks(run, 1, incarnation, 40 + incarnation):
            data.send(*frame)
        data.send(Header(Kind.PULL))
        assert data.receive().kind == Kind.WEIGHTS
        data.close()
    until(lambda: not run.coordinator.exchange.gatherings)
    run.work(0)
    assert run.end()["workers_lost"] == []


def test_a_worker_that_was_given_up_is_not_let_in_again(started: Callable[[str], Run]):
    """Nor has one that is there two connections."""
    run = started("servers=1 workers=2 staleness=inf")
    control, data = run.reach(Role.CONTROL, 1, 7), run.reach(Role.DATA, 1, 7)
    until(lambda: run.coordinator.exchange.connections)  # it is let in before the second comes
    second = run.reach(Role.DATA, 1, 7)
    second.sock.settimeout(PATIENCE_S / 4)
    assert _is_closed(second)
    data.send(Header(Kind.PULL))
    assert data.receive().kind == Kind.WEIGHTS
    control.send_message({})
    assert _is_closed(data) and _is_closed(run.reach(Role.DATA, 1, 7))
    run.work(0)
    assert run.end()["workers_lost"] == [1]


@pytest.fixture(scope="module")
def attacked() -> Iterator[Run]:
    """One run for many peers that say anything."""
    run = Run("servers=1 workers=2 staleness=inf", timeout_s=400)
    yield run
    run.close()


def _without_stop(message: dict[str, Any]) -> dict[str, Any]:
    """Any worker may ask a run to stop."""
    return {**message, "stop": False} if "stop" in message else message


_controls = st.sampled_from([message for role, message in GOOD if role == Role.CONTROL])
_messages = (
    st.one_of(
        _controls,
        st.builds(
            lambda message, key, value: {**message, key: value},
            _controls,
            st.sampled_from(
                ["told", "finished", "sums", "version", "deaths", "idle", "unused", "values"]
            ),
            values | st.integers(0, 20),
        ),
        st.dictionaries(words, values, max_size=3),
    )
    .map(_without_stop)
    .map(json.dumps)
    .map(str.encode)
)


@given(st.lists(_messages | st.binary(max_size=60), min_size=1, max_size=6), st.booleans())
@settings(max_examples=60)
def test_a_worker_that_says_anything(attacked: Run, messages: list[bytes], stays: bool):
    """It is heard to its end, whatever it says, and its connection ends."""
    control = attacked.reach(Role.CONTROL, 1, 7)
    with suppress(WireError):
        for data in messages:
            control.send(Header(Kind.MESSAGE, len(data)), data)
        control.send(Header(Kind.WELCOME if stays else Kind.MESSAGE))  # nothing may begin so
    assert _is_closed(control)


def test_the_run_after_all_that(attacked: Run):
    """Another worker does all steps."""
    attacked.work(0)
    summary = attacked.end()
    assert summary["steps"] == STEPS and set(summary["workers_lost"]) == {1}
