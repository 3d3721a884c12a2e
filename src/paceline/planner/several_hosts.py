"""The ways in which a run on several hosts outlives the loss of a rank or a host: `paceline train
--hosts MIN:MAX`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from paceline.base.errors import PlanError
from paceline.cluster.software import PACELINE
from paceline.launch.hosts.liveness import MOST_SILENCE_S
from paceline.launch.process.fault_policy import JOIN_S
from paceline.launch.process.memory_store import TIME_SHARE
from paceline.planner.resized import resized
from paceline.planner.survival import (
    COPIED_BYTES_PER_S,
    FailingRun,
    NoSurvival,
    Survival,
    SurvivalName,
    fitting_step_s,
)
from paceline.simulate.failures import Failures
from paceline.simulate.outages import Outages, spares_for
from paceline.strategies.mesh import Mesh, hosts_of_parts
from paceline.strategies.plan import Plan

# Seconds until the ranks of several hosts that start again compute: after a rank was killed; after
# a host was given up; and with a host that has joined, after the save. Medians measured on two
# cores: 3.7 to 3.9 s; 9.9 and 10.3 s with a patience of 4 s; 4.2 s.
REPLACED_S, LEFT_S, JOINED_S = 3.8, 6.1, 4.2
SILENCE_S = MOST_SILENCE_S  # seconds until a host is given up: the default of --timeout
MOST_FEWER = 8  # most hosts that a run may lack; a plan is priced for each number
MANY_RANKS = 512  # Larger runs may lack only one host: `resized` takes 2 to 12 s for 16,000 ranks.


@dataclass(frozen=True)
class _Hosts:
    """The hosts of a run."""

    run: FailingRun
    num_ranks: int
    # bytes of the state that the ranks of a host hold; what several of them hold counts once
    held_bytes: float
    # whether hosts also keep copies of others, because some part of the state is on one host only
    is_sent: bool

    @classmethod
    def of(cls, run: FailingRun) -> _Hosts:
        """Find out which parts of the state the hosts of a run hold.

        Raises:
            NoSurvival: the plan's ranks are not placed on hosts in the required way.
        """
        plan, num_ranks = run.plan, len(run.cluster.nodes[0].devices)
        if (
            any(len(kind.devices) != num_ranks for kind in run.cluster.nodes)
            or plan.world_size % num_ranks
        ):
            raise NoSurvival("--hosts asks for as many ranks on each host as on any other")
        mesh = Mesh.of(plan, 0)
        if mesh.world_size != plan.world_size:
            raise NoSurvival("hosts keep no copies of servers")
        hosts = hosts_of_parts(mesh, num_ranks)
        num_held = sum(0 in of_part for of_part in hosts.values())  # the other hosts hold as many
        part_bytes = run.state_bytes / len(hosts)
        if plan.relaxed is not None:  # each replica has its own state
            return cls(run, num_ranks, num_ranks * part_bytes, True)
        return cls(
            run,
            num_ranks,
            num_held * part_bytes,
            any(len(of_part) == 1 for of_part in hosts.values()),
        )

    @property
    def count(self) -> int:
        return self.run.plan.world_size // self.num_ranks

    @property
    def part_out(self) -> float:
        """The part of the time that a host is out."""
        return self.run.rates.repair_s / (self.run.rates.repair_s + self.run.mtbf_s * self.count)

    @property
    def copied_s(self) -> float:
        """The seconds that ranks wait at a copy."""
        return max(self.held_bytes / self.num_ranks / COPIED_BYTES_PER_S, 1e-3)

    @property
    def copies_every_s(self) -> float:
        return max(self.copied_s / TIME_SHARE, self.run.step_s)

    @property
    def sent_s(self) -> float:
        """The seconds to send what a host holds from one process to another."""
        return self.held_bytes / min(
            self.run.cluster.link.bytes_per_s, PACELINE.process_bytes_per_s
        )

    @property
    def resumed_s(self) -> float:
        """The seconds that are lost if too few hosts are left: those wait for a while, and then the
        run ends.
        """
        return self.lost[0].restart_s if self.run.rates.repair_s <= JOIN_S else self.run.resumed_s

    @cached_property
    def lost(self) -> tuple[Failures, float]:
        """The figures of a run that loses hosts, and how many seconds it goes back at most.

        It goes back to copies, or to a checkpoint if that is newer. Without the first host it goes
        back to the newest checkpoint: a restart takes the mean over the hosts.
        """
        every_s = (
            max(self.copies_every_s, self.sent_s / TIME_SHARE)
            if self.is_sent
            else self.copies_every_s
        )
        saving, saved_every_s = self.run.saving(SILENCE_S + LEFT_S)
        if saved_every_s < every_s:
            return replace(saving, restart_s=self._mean_s(saving.restart_s)), saved_every_s
        # For all copies until the next one that is sent.
        waited_s = self.copied_s * every_s / self.copies_every_s
        return Failures(
            self.run.mtbf_s,
            waited_s + self.is_sent * self.sent_s,
            self._mean_s(SILENCE_S + LEFT_S + self.sent_s),
            blocked_s=waited_s,
        ), every_s

    def _mean_s(self, restart_s: float) -> float:
        """Return the mean seconds of a restart, if each host but the first costs `restart_s`."""
        return restart_s + (self.run.resumed_s - restart_s) / self.count

    def check_alike(self) -> None:
        """Check that the loss of any host has the same effect.

        Raises:
            NoSurvival: whether the others go on, and how fast, depends on which host is lost.
        """
        if len(self.run.cluster.nodes) > 1:
            raise NoSurvival(
                "the hosts are not alike, and how fast the others are depends on which one is lost"
            )
        if self.count == 2:
            raise NoSurvival("of two hosts, only the first goes on alone")


def ways(run: FailingRun) -> Iterator[tuple[SurvivalName, Callable[[], Survival]]]:
    """Yield the ways that exist on several hosts; building one may still raise `NoSurvival`."""
    yield "copies", partial(_copies, run)
    yield "fewer", partial(_fewer, run)
    yield "spare", partial(_spare, run)


def _copies(run: FailingRun) -> Survival:
    hosts = _Hosts.of(run)
    return Survival.of(
        "copies",
        f"ranks are replaced on their hosts (--hosts {hosts.count}), which stay, and go on from copies in "
        "memory",
        Failures(run.mtbf_s, hosts.copied_s, REPLACED_S + hosts.copied_s),
        hosts.copies_every_s,
        options={"options": f"--hosts {hosts.count}"},
    )


def _fewer(run: FailingRun) -> Survival:
    """Price a smaller plan, under which the other hosts go on until a lost host is back."""
    hosts = _Hosts.of(run)
    hosts.check_alike()
    smaller = _smaller(hosts)
    outages = Outages(
        hosts.count,
        repair_s=run.rates.repair_s,
        speeds=(1.0, *(min(1.0, run.step_s / step_s) for _, step_s in smaller)),
        joining_s=JOINED_S + run.copied_s + 2 * run.read_s,
        resumed_s=hosts.resumed_s,
    )
    option, (plan, step_s) = f"--hosts {hosts.count - len(smaller)}:{hosts.count}", smaller[0]
    return Survival.of(
        "fewer",
        f"until a lost host is back the others go on ({option}), under {plan} with one less, {step_s:.3g} s a "
        "step",
        *hosts.lost,
        outages=outages,
        options={
            "options": option,
            "plans": [str(plan) for plan, _ in smaller],
            "step_s": [step_s for _, step_s in smaller],
            "repair_s": run.rates.repair_s,
        },
    )


def _smaller(hosts: _Hosts) -> list[tuple[Plan, float]]:
    """Return the plans with one host less, two less and so on, each with the seconds of its step.

    The number of plans covers the hosts that are out on average and two standard deviations more,
    as far as the others may go on without so many, one after the other.
    """
    mean = hosts.count * hosts.part_out
    most = max(1, math.ceil(mean + 2 * math.sqrt(mean * (1 - hosts.part_out))))
    most = min(most, hosts.count - 2, MOST_FEWER if hosts.run.plan.world_size <= MANY_RANKS else 1)
    smaller: list[tuple[Plan, float]] = []
    for lacking in range(1, 1 + most):
        try:
            plan = resized(hosts.run.plan, (hosts.count - lacking) * hosts.num_ranks)
            smaller.append((plan, fitting_step_s(hosts.run, plan)))
        except (PlanError, NoSurvival) as error:
            if not smaller:
                raise NoSurvival(str(error).partition("\n")[0]) from error
            break
    return smaller


def _spare(run: FailingRun) -> Survival:
    """Price spare hosts: as many as are out on average and two standard deviations more."""
    hosts = _Hosts.of(run)
    hosts.check_alike()
    num_spares = (
        spares_for(hosts.count, hosts.part_out) if hosts.part_out < 0.5 else hosts.count + 1
    )
    if num_spares > hosts.count:
        raise NoSurvival("more hosts would wait, or be under repair, than train")
    num_all = hosts.count + num_spares
    outages = Outages(hosts.count, num_spares, run.rates.repair_s, resumed_s=hosts.resumed_s)
    return Survival.of(
        "spare",
        f"{num_spares} more {'host waits' if num_spares == 1 else 'hosts wait'} for the place of one that is "
        f"lost (--hosts {hosts.count}, on {num_all})",
        *hosts.lost,
        outages=outages,
        used=hosts.count / num_all,
        options={
            "options": f"--hosts {hosts.count}",
            "spares": num_spares,
            "repair_s": run.rates.repair_s,
        },
    )
