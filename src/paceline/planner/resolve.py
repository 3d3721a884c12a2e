"""Turn a request into a plan that can run: check counts and decide `auto` and shares, before any
rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster, names_of
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.launch.hosts.environment import Environment
from paceline.planner.devices import devices_of
from paceline.strategies import conflicts
from paceline.strategies.plan import Plan


@dataclass(frozen=True, slots=True)
class Resolved:
    """A complete plan, with the devices of this host."""

    plan: Plan
    cluster: Cluster
    shares: tuple[int, ...]  # each replica's weight in the global batch

    @property
    def rank_devices(self) -> tuple[Device, ...]:
        """The device of every rank."""
        return devices_of(self.plan, self.cluster)

    @property
    def devices(self) -> str:
        """This host's devices by name. If there are CPUs beside GPUs, the text says what each kind
        is for.
        """
        devices = self.cluster.devices
        if len({device.kind for device in devices}) == 1:
            return names_of(devices)
        servers, workers = (
            [device for device in devices if device.kind == kind] for kind in ("cpu", "cuda")
        )
        return f"{names_of(servers)} (servers) and {names_of(workers)} (workers)"


def resolve(
    job: Job | None,
    plan: str | Plan | None,
    *,
    devices: str | None = None,
    procs: int | None = None,
    memory: str | None = None,
    environment: Environment | None = None,
) -> Resolved:
    """Check a request against the devices and the job, and decide what it left open.

    Args:
        job: None if only ranks will know it; each of them calls `check_job`.
        memory: Limits of CPU ranks, see `Cluster.local`.

    Raises:
        PlanError: counts contradict each other, or there are more replicas than the job has samples
            for.
        ClusterError: a device isn't there.
    """
    settled = Plan.read(plan) if plan is not None else None
    num_ranks = (
        settled.world_size
        if settled
        else procs or (environment.world_size if environment else None)
    )
    local_ranks = environment.local_world_size if environment else num_ranks
    cluster = Cluster.local(
        devices,
        num_ranks=local_ranks,
        memory=memory,
        num_cpu_ranks=_cpu_ranks_here(settled, environment) if settled else 0,
        whole=environment is not None,
    )
    if settled is None:
        settled = default_plan(job, num_ranks or len(cluster.devices))
        if num_ranks is None and devices is None:
            cluster = Cluster.local(
                num_ranks=settled.world_size, memory=memory, whole=environment is not None
            )
    _check_counts(settled, cluster, devices=devices, procs=procs, environment=environment)
    conflicts.check(settled)
    if job is not None:
        check_job(settled, job)
    shares, count = settled.modifiers.shares, settled.modifiers.microbatches
    if isinstance(shares, str) and shares != "equal":
        from paceline.planner.rank_kinds import split_shares

        shares = split_shares(settled, cluster)
    if count == "auto" and settled.has_schedule:
        # Under 1F1B, ranks are then idle at most a third of the time.
        count = 2 * settled.num_stage_ranks
    if count == "auto" and job is None:
        raise PlanError(
            f"plan '{settled}': microbatches=auto is decided by what a job's model needs, and a script "
            "with its own loop shows it only while it runs",
            hint="microbatches=2 or another number",
        )
    if count == "auto" and job is not None:
        from paceline.cluster.gpu_use import apart_from_cuda
        from paceline.model.cost.trace import profile_job
        from paceline.planner.microbatches import fewest_microbatches
        from paceline.planner.multi_model import priced

        unsettled: Plan = settled
        count = apart_from_cuda(
            lambda: fewest_microbatches(
                profile_job(priced(job), device=cluster.first_here),
                unsettled,
                cluster,
                batch=job.batch,
            )
        )
    return Resolved(
        settled.with_(microbatches=count),
        cluster,
        shares if isinstance(shares, tuple) else (1,) * settled.replicas,
    )


def default_plan(job: Job | None, num_devices: int) -> Plan:
    """Return a plan with one replica per device, but no more replicas than samples in a step."""
    if job is None:
        return Plan.of(data=num_devices)
    return Plan.of(data=min(num_devices, job.batch, job.num_samples or job.batch))


def check_job(plan: Plan, job: Job) -> None:
    """Refuse a plan that can't run a job.

    Raises:
        PlanError: there are more replicas than samples, or the plan and the job don't compose.
    """
    _check_samples(plan, job)
    conflicts.check_job(plan, job)
    if job.own_step is not None:
        conflicts.check_own_step(plan)


def _check_counts(
    plan: Plan,
    cluster: Cluster,
    *,
    devices: str | None,
    procs: int | None,
    environment: Environment | None,
) -> None:
    needed = plan.world_size
    if environment is not None and environment.world_size != needed:
        raise PlanError(
            f"plan '{plan}' needs {needed} ranks and {environment.launcher} started "
            f"{environment.world_size}",
            hint=f"start {needed} ranks, or give a plan of {environment.world_size}",
        )
    if procs is not None and procs != needed:
        raise PlanError(
            f"plan '{plan}' needs {needed} ranks and --procs says {procs}", hint="leave --procs out"
        )
    local = environment.local_world_size if environment else needed
    if (
        (num_cpu := _cpu_ranks_here(plan, environment))
        and cluster.devices[-1].kind == "cuda"
        and len(cluster.devices) != local
    ):
        gpus, num_workers = cluster.devices[num_cpu:], local - num_cpu
        enough = (
            names_of(gpus[:num_workers]) if len(gpus) > num_workers else f"cuda:0-{num_workers - 1}"
        )
        raise PlanError(
            f"plan '{plan}' has {num_workers} workers here and --devices names {len(gpus)} GPUs",
            hint=f"one GPU a worker, and none for servers, which compute on the CPU: --devices {enough}",
        )
    if devices is not None and len(cluster.devices) != local:
        raise PlanError(
            f"plan '{plan}' needs {local} devices here and --devices names {len(cluster.devices)}",
            hint=f"one device a rank: --devices {cluster.devices[-1].kind}:0-{local - 1}",
        )


def _cpu_ranks_here(plan: Plan, environment: Environment | None) -> int:
    """Return how many of this host's ranks compute on the CPU beside others with GPUs.

    Launchers number ranks host by host.
    """
    if environment is None:
        return plan.num_cpu_ranks
    first = environment.rank - environment.local_rank
    return max(0, min(plan.num_cpu_ranks - first, environment.local_world_size))


def _check_samples(plan: Plan, job: Job) -> None:
    for subject, number in (("the data has", job.num_samples), ("a global batch has", job.batch)):
        if number is not None and number < plan.replicas:
            raise PlanError(
                f"plan '{plan}' has {plan.replicas} replicas and {subject} {number} samples: "
                "some would never have any",
                hint=f"at most {number} replicas",
            )
