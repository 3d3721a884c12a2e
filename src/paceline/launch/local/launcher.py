"""Where ranks run: forked here, or the one rank that torchrun or Slurm made of this process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError
from paceline.cluster.devices import Device
from paceline.launch.hosts.environment import Environment
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.fault_policy import ALL_NEEDED, RESTARTS, FaultPolicy
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.rank_process import Body

if TYPE_CHECKING:
    from paceline.launch.hosts.launcher_rank import JoinedRank
    from paceline.launch.local.ranks import Listener


class Launcher:
    """Runs a body as every rank it is responsible for; the same calls inside and outside a launcher.

    environment: what a launcher said, or None.
    devices: one a rank that is started here; inside a launcher, one a local rank.
    """

    def __init__(
        self,
        environment: Environment | None,
        devices: Sequence[Device],
        *,
        timeout_s: float,
        fault_policy: FaultPolicy = ALL_NEEDED,
    ) -> None:
        self.environment, self.devices, self.timeout_s = environment, devices, timeout_s
        self.fault_policy = fault_policy
        self._store: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run."""
        return self.environment is None or self.environment.rank == 0

    def agree(self, key: str, make: Callable[[], str]) -> str:
        """A text made once, known to every process of the run. Collective inside a launcher."""
        if self.environment is None:
            return make()
        from paceline.launch.hosts.launcher_rank import agree, join

        if self._store is None:
            self._store = join(self.environment, timeout_s=self.timeout_s)
        return agree(self._store, self.environment, key, make, timeout_s=self.timeout_s)

    def run(
        self,
        body: Body,
        *,
        run_dir: Path | None,
        idle: Callable[[HeartbeatTable], None] | None = None,
        restarts: int | None = 0,
        listener: Listener | None = None,
        ended: Callable[[RankFailed], None] = lambda failed: None,
    ) -> Any:
        """Run the body as every rank and return rank 0's result (inside a launcher, this rank's).

        idle: called in a fork of this process while forked ranks work, with their signs of life.
        restarts: how often ranks that died are started again; None for the usual number.
        listener: hears forked rank 0; inside a launcher that is this process, which needs nobody to hear it.
        ended: called where a failure is told, before anything is raised.

        Raises:
            RankFailed: a rank failed. UsageError: restarts are asked for inside a launcher, which starts ranks itself.
        """
        if self.environment is None:
            from paceline.launch.local.ranks import run_local

            try:
                return run_local(
                    body,
                    self.devices,
                    run_dir=run_dir,
                    timeout_s=self.timeout_s,
                    idle=idle,
                    fault_policy=self.fault_policy,
                    restarts=RESTARTS if restarts is None else restarts,
                    listener=listener,
                )[0]
            except RankFailed as failed:
                ended(failed)
                raise
        if restarts:
            raise UsageError(
                f"restarts={restarts}: {self.environment.launcher} started this rank, not Paceline",
                hint="torchrun --max-restarts N starts ranks again; give the command --resume with it",
            )
        from paceline.launch.hosts.launcher_rank import run_joined

        rank, device = self.joined(ended)
        return run_joined(body, rank, device, run_dir=run_dir, fault_policy=self.fault_policy)

    def joined(
        self, ended: Callable[[RankFailed], None] = lambda failed: None
    ) -> tuple[JoinedRank, Device]:
        """Join the other ranks of a launcher. Collective.

        ended: called on the rank that tells of a failure.
        """
        from paceline.launch.hosts.launcher_rank import JoinedRank

        assert self.environment is not None
        attempt = self.agree("attempt", lambda: uuid.uuid4().hex[:12])
        device = self.devices[self.environment.local_rank % len(self.devices)]
        rank = JoinedRank(
            self.environment,
            device,
            store=self._store,
            attempt=attempt,
            timeout_s=self.timeout_s,
            fault_policy=self.fault_policy,
            ended=ended,
        )
        return rank, device
