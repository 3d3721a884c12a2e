"""The planning problem: a job, its cost, and the plans that it allows on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Nodes
from paceline.cluster.links import Link, Network
from paceline.cluster.software import PACELINE
from paceline.job import Job, Precision
from paceline.model.cost.profile import Profile, folded
from paceline.planner.corrections import Corrections
from paceline.planner.estimate import Estimate, NotPriced, estimate
from paceline.planner.pieces import LazyPieces
from paceline.planner.pipelines import least_missing_bytes
from paceline.planner.search import Candidate, Change, RankedPlans, Rent, flips, search
from paceline.simulate.play import Rates
from paceline.strategies import conflicts
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.limits import DeviceCounts, Limits
from paceline.strategies.plan import Plan

MOST_TENSOR = 8
TIMES = 4  # links are made this many times faster and slower, to see whether the choice changes
_PART = {4: "quarter"}[TIMES]
MORE_MEMORY = "twice the memory"
HOUR_S = 3600.0


@dataclass(frozen=True)
class PlanningProblem:
    """A job with its cost."""

    job: Job
    profile: Profile
    pieces: LazyPieces
    # The price of a device, by which plans are ranked. None ranks them by time, unless all devices
    # of a cluster state their own price.
    price_per_hour: float | None = None
    may_be_fewer: bool = True  # whether plans may leave out devices that are here
    may_split: bool = True  # whether the model may be cut; finding out how takes seconds
    # What trials have shown of prices on this machine; corrects every price.
    corrections: Corrections = field(default_factory=Corrections)

    @classmethod
    def of(
        cls,
        job: Job,
        price_per_hour: float | None = None,
        *,
        device: str = "cpu",
        like: PlanningProblem | None = None,
    ) -> PlanningProblem:
        """Trace a job. This reads the first samples of its data.

        Args:
            device: See `profile_job`.
            like: The problem of the same job in another precision with the same weights. Its
                corrections hold for this one, too.
        """
        from paceline.model.cost.trace import fake_model, profile_job
        from paceline.planner.multi_model import priced

        job = priced(job)
        built = fake_model(job) if like is None else like.pieces.built
        profile = profile_job(
            job, device=device, like=None if like is None else like.profile, built=built
        )
        corrections = Corrections() if like is None else like.corrections
        pieces = LazyPieces(job, profile, built)
        return cls(job, profile, pieces, price_per_hour, corrections=corrections)

    @cached_property
    def folded(self) -> Profile:
        """The job's cost on described devices, where equal layers are simulated once."""
        return folded(self.profile)

    @cached_property
    def computes_in(self) -> Precision:
        """The precision of most products. Without autocast it is that of the weights."""
        half_bytes = sum(
            p.num_bytes * p.count
            for p in self.profile.parameters
            if p.dtype in ("bfloat16", "float16")
        )
        is_half = self.job.precision == "float32" and 2 * half_bytes > self.profile.parameter_bytes
        return "bf16" if is_half else self.job.precision

    def limits(self, cluster: Cluster) -> Limits:
        """Return how far the job can be divided."""
        job = self.job
        batch = min(job.batch, job.num_samples or job.batch)
        num_devices = len(cluster.devices)
        whole = Limits(batch, compiled_steps=self._compiled_steps(cluster))
        if num_devices == 1 or not self.may_split:
            return whole
        if not (layers := self.pieces.count(each=not cluster.nodes)):
            return whole
        return replace(whole, layers=layers, tensor=MOST_TENSOR, parts=num_devices)

    def _compiled_steps(self, cluster: Cluster) -> int | None:
        """Return the run's steps if compiling can be tried here, else None.

        The gain of compiling is only known after a trial, and trials run only on CPUs of this
        machine.
        """
        if cluster.nodes or any(device.kind != "cpu" for device in cluster.devices):
            return None
        return self.job.total_steps

    def shape(self, cluster: Cluster) -> DeviceCounts:
        """Return the numbers of devices that a plan may use.

        Devices may be left out on this machine, and on clusters where they have a price.
        """
        num_devices = len(cluster.devices)
        per_node = (
            min(len(kind.devices) for kind in cluster.nodes) if cluster.nodes else num_devices
        )
        may_be_fewer = self.is_priced(cluster) if cluster.nodes else self.may_be_fewer
        return DeviceCounts(num_devices, per_node, may_be_fewer=may_be_fewer)

    def is_priced(self, cluster: Cluster) -> bool:
        return (
            self.price_per_hour is not None
            or cluster.price_per_hour(len(cluster.devices)) is not None
        )

    def rent(self, cluster: Cluster) -> Rent:
        """Return a function that gives the price of a plan's devices per second; 1 if nothing has a
        price.
        """

        def rent_of(plan: Plan) -> float:
            count = plan.num_workers
            stated = cluster.price_per_hour(count) if self.is_priced(cluster) else None
            if self.price_per_hour is not None:
                return self.price_per_hour * count / HOUR_S
            return 1.0 if stated is None else stated / HOUR_S

        return rent_of

    def price(
        self,
        plan: Plan,
        cluster: Cluster,
        *,
        rates: Rates | None = None,
        snapshot: bool = False,
    ) -> Estimate:
        """Predict the step of a plan, corrected by the trials.

        Args:
            rates: See `estimate`.
            snapshot: Whether checkpoints are written while training goes on.

        Raises:
            PlanError: the plan can't be on this cluster.
            NotPriced: the plan can be on this cluster, but its cost is not known.
        """
        conflicts.check_job(plan, self.job)
        check_step(self.job, plan)
        if cluster.nodes and (
            unpriced := [s.name for s in ActivePlan(plan).strategies if not s.is_priced_on_paper]
        ):
            raise NotPriced(
                f"plan '{plan}' has {' and '.join(unpriced)}, "
                "which is priced on devices that are here alone"
            )
        profile = self.profile
        if cluster.nodes:
            profile = self.pieces.layers() if plan.splits_model else self.folded
        used = (
            cluster
            if cluster.nodes or plan.world_size >= len(cluster.devices)
            else replace(cluster, devices=cluster.devices[: plan.world_size])
        )
        predicted = estimate(
            profile,
            plan,
            used,
            batch=self.job.batch,
            precision=self.computes_in,
            rates=rates,
            split=self.pieces,
            snapshot=snapshot,
        )
        return self.corrections.apply(plan, predicted) if self.corrections else predicted

    def least_missing_bytes(self, plan: Plan, enough_bytes: float, *, cluster: Cluster) -> int:
        """Return the least bytes by which a plan exceeds memory; see `planner.pipelines`."""
        if not cluster.nodes or not plan.has_schedule:
            return 0
        return least_missing_bytes(
            self.pieces.layers(),
            plan,
            cluster,
            batch=self.job.batch,
            precision=self.computes_in,
            enough_bytes=enough_bytes,
        )

    def search(
        self, cluster: Cluster, *, may_relax: bool = False, most_refined: int | None = None
    ) -> RankedPlans:
        """Rank the plans that the job allows on a cluster."""
        more = {} if most_refined is None else {"most_refined": most_refined}
        return search(
            lambda plan: self.price(plan, cluster),
            self.limits(cluster),
            self.shape(cluster),
            partial(self.least_missing_bytes, cluster=cluster),
            rent=self.rent(cluster),
            may_relax=may_relax,
            **more,
        )

    def flips(self, ranking: RankedPlans, cluster: Cluster) -> list[tuple[str, Candidate]]:
        """Return changes of hardware that change the best plan, each with the plan that then is
        best.
        """
        changes = [
            Change(
                name,
                partial(self.price, cluster=changed),
                partial(self.least_missing_bytes, cluster=changed),
                has_same_memory=name != MORE_MEMORY,
                # On devices that are here, the cut of a model depends on their memory.
                has_same_speed=name == MORE_MEMORY and bool(cluster.nodes),
                least_s=least_s,
            )
            for name, changed, least_s in _changes(cluster)
        ]
        return flips(
            ranking, changes, self.limits(cluster), self.shape(cluster), rent=self.rent(cluster)
        )


def check_step(job: Job, plan: Plan) -> None:
    """Refuse a plan that can't run the job's own step.

    Args:
        job: The job in the form whose cost was traced.

    Raises:
        PlanError: the job has its own step, which can't run under the plan.
    """
    from paceline.model.cost.shaped_samples import step_of
    from paceline.training.own_step.recorded import refuse_to_split

    if (step := step_of(job)) is None:
        return
    conflicts.check_own_step(plan)
    if plan.splits_model:
        refuse_to_split(step.job, plan, step.seen)


def _changes(cluster: Cluster) -> Iterator[tuple[str, Cluster, Callable[[Estimate], float]]]:
    """Yield the cluster with other links and with other memory.

    Each comes with a function from the estimate without the change to the least seconds of a step
    under the change.
    """
    if len(cluster.devices) == 1:
        return
    yield f"links {TIMES} times as fast", _with_links(cluster, TIMES), _busy_s
    yield (
        f"links a {_PART} as fast",
        _with_links(cluster, 1 / TIMES),
        lambda estimate: estimate.step_s,
    )
    if cluster.nodes:
        more = replace(cluster, nodes=tuple(with_memory(kind, 2) for kind in cluster.nodes))
    else:
        more = replace(
            cluster,
            devices=tuple(
                replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices
            ),
        )
    yield MORE_MEMORY, more, lambda estimate: 0.0


def _busy_s(estimate: Estimate) -> float:
    """Return the seconds of a step that do not depend on links: computing and the optimizer.

    The slowdown that concurrent collectives may have caused in computing is taken out.
    """
    return estimate.breakdown["compute"] / (1 + PACELINE.slowdown) + estimate.breakdown["optimizer"]


def _with_links(cluster: Cluster, times: float) -> Cluster:
    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * times)

    def with_faster(network: Network) -> Network:
        return replace(
            network, inside=faster(network.inside), across=network.across and faster(network.across)
        )

    if not cluster.nodes:
        return replace(
            cluster,
            link=faster(cluster.link),
            links=tuple((count, faster(link)) for count, link in cluster.links),
        )
    return Cluster.of(
        tuple(replace(kind, network=with_faster(kind.network)) for kind in cluster.nodes)
    )


def with_memory(kind: Nodes, times: float) -> Nodes:
    """Return nodes whose devices have this many times the memory."""
    return replace(
        kind,
        devices=tuple(
            replace(device, memory_bytes=round(times * device.memory_bytes))
            for device in kind.devices
        ),
    )
