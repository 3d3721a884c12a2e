"""A rank that torchrun or Slurm started: it joins the others instead of making them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.base import signals
from paceline.base.errors import ClusterError, PacelineError, PeerLost
from paceline.base.logs import leave_live_line
from paceline.base.waiting import waiting
from paceline.cluster.devices import Device
from paceline.launch.hosts.environment import Environment, address_towards, interface_towards
from paceline.launch.hosts.liveness import Hub, Liveness, Spoke
from paceline.launch.hosts.run_keys import run_key
from paceline.launch.process import host_context
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, RankFailed, left_in
from paceline.launch.process.fault_policy import ALL_NEEDED, FaultPolicy
from paceline.launch.process.heartbeats import HeartbeatTable, signs_of_life
from paceline.launch.process.outside_watch import OutsideWatch, SeenByAll, be_watched, within
from paceline.launch.process.rank_process import Body, run_rank, set_up_device

_HEARD_S = 5.0  # how long a rank that fell with others looks for the cause in the store
_TOLD_S = 30.0  # how long a rank that does not tell waits for the one that does, which may look for what fits
# Rank 0 keeps the store, and leaves after the others have read there why. A rank that does not tell leaves after the
# one that does: torchrun's agent ends all ranks once one has ended.
_LEAVE_S = 2.0
_POLL_S = 0.01  # of the store, while rank 0 makes what the others wait for


def join(environment: Environment, *, timeout_s: float) -> Any:
    """Meet the other ranks at the launcher's address. Returns the store they share.

    Sets GLOO_SOCKET_IFNAME, if it is not set, to the interface that faces the meeting place.

    Raises:
        ClusterError: on rank 0, something else has the port. PeerLost: the others can't be met there.
    """
    import torch.distributed as dist

    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(environment.master_address)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        store = dist.TCPStore(
            environment.master_address,
            environment.master_port,
            environment.world_size,
            is_master=environment.rank == 0
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",  # which the agent keeps
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,  # a process may train twice
        )
    except dist.DistError as error:
        raise _unmet(environment, str(error).partition("\n")[0]) from error
    return dist.PrefixStore(f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _unmet(environment: Environment, why: str) -> PacelineError:
    """What a rank says that can't meet the others."""
    port = environment.master_port
    if "EADDRINUSE" in why:
        return ClusterError(
            f"MASTER_PORT={port}, where the ranks meet, is in use by another program on this host",
            hint="MASTER_PORT=N with another N, the same for every rank; 1024 to 65535 are allowed",
        )
    return PeerLost(
        f"rank {environment.rank} can't meet the {environment.world_size} ranks of this run at "
        f"{environment.master_address}:{port}: {why}",
        hint="MASTER_ADDR must be the host of rank 0 and MASTER_PORT free there before the start; "
        "--timeout SECONDS waits longer for ranks that start late",
    )


def agree(
    store: Any, environment: Environment, key: str, make: Callable[[], str], *, timeout_s: float
) -> str:
    """A text that rank 0 makes and every rank learns. What rank 0 raises, the others learn as a failure too.

    timeout_s: how long the others wait without a sign of rank 0, which may take longer than that.

    Raises:
        PeerLost: on the others, there was none.
    """

    def count() -> None:
        with suppress(RuntimeError):  # the store's, of which the others hear too
            store.add(f"{key}/signs", 1)

    if environment.rank == 0:
        try:
            with signs_of_life(count, every_s=timeout_s / 8):
                text = json.dumps([True, make()])
        except BaseException as error:
            store.set(key, json.dumps([False, str(error)]))
            raise
        store.set(key, text)
    else:
        _wait(store, environment, key, timeout_s=timeout_s)
    is_agreed, value = json.loads(store.get(key))
    if not is_agreed:
        sys.exit(2)  # rank 0 has said why
    return str(value)


def _wait(store: Any, environment: Environment, key: str, *, timeout_s: float) -> None:
    latest_signs, deadline_s = -1, 0.0
    with waiting:
        while not store.check([key]):
            if (signs := store.add(f"{key}/signs", 0)) != latest_signs:
                latest_signs, deadline_s = signs, time.monotonic() + timeout_s
            elif time.monotonic() > deadline_s:
                raise PeerLost(
                    f"rank {environment.rank} has waited {timeout_s:g} s for rank 0, which gave no sign of "
                    "life",
                    hint="its own log says why, if it has ended; --timeout SECONDS waits longer",
                )
            time.sleep(_POLL_S)


def run_joined(
    body: Body,
    joined: JoinedRank,
    device: Device,
    *,
    run_dir: Path | None,
    fault_policy: FaultPolicy = ALL_NEEDED,
) -> Any:
    """Run `body(context)` as this rank and return its result.

    Raises:
        RankFailed: on the rank that tells of a failure; the others leave with the exit codes of their own failures.
    """

    def request(number: int) -> None:
        if (
            not joined.context.was_stoppable
        ):  # else it tells why it ends, which an agent would cut off
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with signals.handled(signals.PREEMPTING, request):
        result, failure, log = run_rank(
            body,
            joined.context,
            device,
            make_store=lambda: joined.store,
            run_dir=run_dir,
            report=joined.report_end,
            fault_policy=fault_policy,
        )
        joined.end(failure, log)
    return result


class JoinedRank:
    """This process among the ranks that a launcher started, from their meeting to its end."""

    def __init__(
        self,
        environment: Environment,
        device: Device,
        *,
        store: Any,
        attempt: str,
        timeout_s: float,
        fault_policy: FaultPolicy = ALL_NEEDED,
        ended: Callable[[RankFailed], None] = lambda failed: None,
    ) -> None:
        self.environment, self.store, self.ended = environment, store, ended
        # The watchdog tells in a thread of its own, while the body may end for the same reason.
        self._telling = threading.RLock()
        self.hosted_rank = host_context.this_rank()
        # What is later printed to descriptor 2 goes to the rank's log.
        self._terminal = os.dup(2)
        hosted_rank = self.hosted_rank
        nonce = agree(
            store,
            environment,
            f"nonce/{attempt}",
            lambda: secrets.token_hex(16),
            timeout_s=timeout_s,
        )
        # Servers and their workers, who form no group, hear of each other's death by themselves, and may go on.
        need_each_other = fault_policy.uses_process_group and environment.world_size > 1
        self.liveness = (
            _join_liveness(store, environment, attempt, nonce, timeout_s)
            if need_each_other
            else None
        )
        # What the host's process looks at.
        hosts_board = hosted_rank.board if hosted_rank is not None else None
        self.board, slot = (
            (hosts_board, hosted_rank.slot)
            if hosted_rank is not None and hosts_board is not None
            else (
                HeartbeatTable.of_launch(attempt, environment.world_size),
                environment.rank,
            )
        )
        self.board.write(slot, 0, "build")  # it is watched from here on
        if hosts_board is None:
            be_watched(self.board, slot)
        self.context = RankContext(
            environment.rank,
            environment.world_size,
            environment.local_world_size,
            set_up_device(device, environment.local_world_size),
            None,
            self.board,
            slot,
            attempt,
            timeout_s=timeout_s,
            secret=run_key("servers", nonce),
            host=address_towards(environment.master_address) or "127.0.0.1",
            num_starts=environment.num_starts,
            deaths=(0,) * environment.world_size,
            lost=self.liveness.lost if self.liveness else [],
            unreachable=self.liveness.unreachable if self.liveness else [],
            hosts=_hosts_of_ranks(store, environment, attempt),
        )
        if fault_policy.uses_process_group and not device.is_limit:
            _give_copies(self.context)
        if hosts_board is None:
            self.context.watch = self._watch(need_each_other)

    def _watch(self, need_each_other: bool) -> OutsideWatch:
        """What looks at the ranks of this host, of which one has a turn; at this one alone where others can do without
        it, or can't read its table."""
        context, hosts = self.context, self.context.hosts
        local_ranks = [context.rank]
        if need_each_other and self.board.is_shared:
            here = hosts and hosts[context.rank]
            local_ranks = [r for r in range(context.world_size) if not hosts or hosts[r] == here]
        return OutsideWatch(
            self.board,
            {rank: rank for rank in local_ranks},
            patience_s=context.timeout_s,
            sees_all=need_each_other or context.world_size == 1,
            seen_by_all=SeenByAll(self.store, context.world_size)
            if need_each_other and len(local_ranks) < context.world_size
            else None,
        )

    def _report(self, failure: Failure) -> None:
        if self.hosted_rank is not None:
            self.hosted_rank.report(failure)  # the hosts' processes tell each other
            return
        key = f"failure/{self.environment.rank}"
        within(_HEARD_S, lambda: self.store.set(key, failure.to_json()))
        _tell_elastic_agent(failure)

    def report_end(self, failure: Failure) -> None:
        """Tell of a failure that ends the process at once."""
        self._report(failure)
        with self._telling:
            if self.hosted_rank is None and not self._is_told(failure):
                error = self._tell(failure)
                print(text := f"error: {error}", file=sys.stderr, flush=True)
                # Rank 0 writes to its log and to the terminal at once; what others print goes to their logs alone.
                if self.environment.rank:
                    os.write(self._terminal, f"{text}\n".encode(errors="backslashreplace"))
                else:
                    leave_live_line()  # its own: this process ends at once

    def end(self, failure: Failure | None, log: Path | None) -> None:
        """Leave the others.

        Raises:
            RankFailed: this rank failed, and the others follow from that.
        """
        if failure is not None:
            self._report(failure)
        if self.context.watch is not None:
            self.board.set_process(self.context.slot, 0)
        self.board.remove()
        if self.liveness:
            self.liveness.close(farewell=failure is None or failure.is_stop)
        if failure is None:
            return
        with self._telling:
            if self.hosted_rank is None and self._is_told(failure):
                sys.exit(failure.exit_code)
            error = self._tell(failure, log)
        raise error

    def _tell(self, failure: Failure, log: Path | None = None) -> RankFailed:
        """Have the run's folder say why it ended; the others leave a moment later. Return what this process says.

        Where the process of a host tells, the rank that failed writes it there, and none of those that only heard.
        """
        error = RankFailed(failure, log)
        if self.hosted_rank is None or not failure.heard:
            self.ended(error)
        leave_live_line(self._terminal)
        if self.hosted_rank is None:
            within(_HEARD_S, lambda: self.store.set("is told", "1"))
        return error

    def _is_told(self, failure: Failure) -> bool:
        """Whether another rank tells what ended the run. Of several that failed by themselves, the first one does."""
        if failure.heard:
            is_told = _cause_elsewhere(self.store, self.environment, _HEARD_S)
        else:
            is_told = bool(within(_HEARD_S, lambda: self.store.add("told", 1) != 1))
        if is_told:
            within(_TOLD_S, lambda: self.store.wait(["is told"], timedelta(seconds=_TOLD_S)))
        if is_told or self.environment.rank == 0:
            time.sleep(_LEAVE_S)
        return is_told


def _give_copies(context: RankContext) -> None:
    """Let a rank that the host's process started keep copies in its memory."""
    hosted_rank = host_context.this_rank()
    if hosted_rank is not None and hosted_rank.copies is not None:
        context.host_copies, context.copies = hosted_rank.copies, hosted_rank.copies.memory


def _join_liveness(
    store: Any, environment: Environment, attempt: str, nonce: str, timeout_s: float
) -> Liveness | None:
    """Hear of ranks that die. None where rank 0 can't be reached for it, which is told."""
    hubs: list[Hub] = []

    def make() -> str:
        host = address_towards(environment.master_address) or environment.master_address
        hubs.append(Hub(host, secret=run_key("liveness", nonce), patience_s=timeout_s))
        return json.dumps([host, hubs[0].port])

    address, port = json.loads(
        agree(store, environment, f"liveness/{attempt}", make, timeout_s=timeout_s)
    )
    if hubs:
        return hubs[0]
    try:
        return Spoke(
            environment.rank,
            (address, port),
            secret=run_key("liveness", nonce),
            patience_s=timeout_s,
        )
    except OSError as error:
        print(
            f"warning: rank {environment.rank} can't reach rank 0 at {address}:{port} ({error}): "
            f"it notices after --timeout {timeout_s:g} s, not at once, if a rank dies",
            file=sys.stderr,
            flush=True,
        )
        return None


def _hosts_of_ranks(store: Any, environment: Environment, attempt: str) -> tuple[str, ...]:
    """The name of each rank's host. Collective."""
    if environment.local_world_size == environment.world_size:
        return ()
    keys = [f"host/{attempt}/{rank}" for rank in range(environment.world_size)]
    store.set(keys[environment.rank], socket.gethostname())
    with waiting:
        return tuple(host.decode() for host in store.multi_get(keys))


def _cause_elsewhere(store: Any, environment: Environment, patience_s: float) -> bool:
    """Whether another rank reports a failure of its own within some seconds, or has said what all saw."""
    others = [r for r in range(environment.world_size) if r != environment.rank]
    deadline_s = time.monotonic() + patience_s

    def ask() -> bool:
        while time.monotonic() < deadline_s:
            if not all(failure.heard for failure in left_in(store, others)):
                return True
            time.sleep(0.2)
        return bool(
            store.add("loss told", 1) != 1
        )  # nobody knows the cause: the first says what all saw

    return bool(within(2 * patience_s, ask))  # nothing is known where the store is gone


def _tell_elastic_agent(failure: Failure) -> None:
    """Leave the report where torchrun looks for it, so that its own summary shows the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            message = {
                "message": failure.describe(),
                "extraInfo": {"py_callstack": failure.trace, "timestamp": str(int(failure.time_s))},
            }
            Path(path).write_text(json.dumps({"message": message}))
