"""`plan`: which strategy is the fastest that fits, how fast and how sure that is, and why the others lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster import Cluster, Link, Network, Nodes
from paceline.errors import PlanError
from paceline.job import Job
from paceline.jobfile import JobFile
from paceline.planner.estimate import Estimate, NotPriced, estimate, least_missing_bytes, splits_model
from paceline.planner.pieces import Pieces
from paceline.planner.rank import Candidate, Change, Found, best_of_each_kind, flips, reason, search
from paceline.planner.space import Limits, Shape
from paceline.plans import Plan
from paceline.profile.profile import Profile

SHOWN = 16  # plans of the table
MOST_TENSOR = 8
TIMES = 4  # by which links are made faster and slower, to see what flips the choice


@dataclass(frozen=True)
class Answer:
    """What `plan` found.

    cluster: as it was asked for. batch: samples a step. flips: changes of hardware, and the plan that then is best.
    notes: which figures are rough, and why.
    """

    cluster: str
    batch: int
    found: Found
    flips: tuple[tuple[str, Candidate], ...]
    notes: tuple[str, ...]

    @property
    def chosen(self) -> Plan | None:
        """The fastest exact plan that fits; None if none does."""
        return self.found.chosen.plan if self.found.chosen is not None else None

    def to_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        chosen = self.found.chosen
        return {"cluster": self.cluster, "chosen": str(chosen.plan) if chosen is not None else None,
                "tried": self.found.num_tried, "notes": list(self.notes),
                "flips": [{"change": name, "plan": str(one.plan)} for name, one in self.flips],
                "refused": dict(self.found.refused),
                "plans": [self._row(one) for one in (*self.found.ranked, *self.found.too_large)]}

    def _row(self, one: Candidate) -> dict[str, Any]:
        found, chosen = one.estimate, self.found.chosen
        return {"plan": str(one.plan), "fits": found.fits, "step_s": found.step_s, "step_s_low": found.low_s,
                "step_s_high": found.high_s, "samples_per_s": self.batch / found.step_s,
                "memory_bytes": found.peak_memory_bytes, "breakdown": dict(found.breakdown),
                "relaxed": one.plan.relaxed is not None, "reason": reason(one, chosen or one)}

    def describe(self) -> str:
        """For people: at most 100 columns."""
        return "\n".join(_lines(self))


def plan(job: Job | JobFile, cluster: Cluster | str = "local") -> Answer:
    """Rank the plans that a job allows on a cluster by predicted speed.

    Args:
        cluster: What there is, or a word for it: "local", "2xcpu", "8xH100", "16x8xH100", or a TOML file. On this
            machine plans may leave devices out.

    Raises:
        JobError: the job makes no sense. ClusterError: the cluster can't be read.
        PlanError: nothing could be priced.
    """
    from paceline.profile import profile_job

    loaded = job.load() if isinstance(job, JobFile) else job
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    profile = profile_job(loaded)
    pieces = Pieces(loaded, profile)
    num_devices = len(where.devices)
    limits = Limits(min(loaded.batch, loaded.num_samples or loaded.batch),
                    layers=pieces.count() if num_devices > 1 else 0,
                    tensor=MOST_TENSOR if num_devices > 1 and pieces.count() else 1,
                    parts=num_devices if num_devices > 1 and pieces.count() else 1)
    per_node = min(len(kind.devices) for kind in where.nodes) if where.nodes else num_devices
    shape = Shape(num_devices, per_node, may_be_fewer=not where.nodes)

    def priced(on: Cluster) -> Any:
        return lambda plan: _price(profile, plan, on, loaded, pieces)

    found = search(priced(where), limits, shape, lambda plan: _least(profile, plan, where, loaded, pieces))
    if not found.ranked and not found.too_large:
        why = "; ".join(f"{kind}: {text}" for kind, text in found.refused.items())
        raise PlanError(f"no plan could be priced: {why}")
    changes = [Change(name, priced(changed)) for name, changed in _changes(where)]
    notes = list(dict.fromkeys([*profile.notes, *(note for one in found.ranked for note in one.estimate.notes)]))
    if pieces.problem:
        notes.append(f"plans that split the model are left out: {pieces.problem}")
    return Answer(cluster if isinstance(cluster, str) else f"{num_devices} devices", loaded.batch, found,
                  tuple(flips(found, changes, limits, shape)), tuple(notes))


def _price(profile: Profile, plan: Plan, cluster: Cluster, job: Job, pieces: Pieces) -> Estimate:
    if cluster.nodes and plan.axes.parts > 1:
        raise NotPriced(f"plan '{plan}' places modules, which is priced on devices that are here alone")
    if cluster.nodes and splits_model(plan):
        profile = pieces.layers()
    used = cluster if cluster.nodes or plan.world_size >= len(cluster.devices) else replace(
        cluster, devices=cluster.devices[:plan.world_size])
    return estimate(profile, plan, used, batch=job.batch, precision=job.precision, split=pieces, snapshot=False)


def _least(profile: Profile, plan: Plan, cluster: Cluster, job: Job, pieces: Pieces) -> int:
    if not cluster.nodes or plan.axes.pipeline == 1:
        return 0
    return least_missing_bytes(pieces.layers(), plan, cluster, batch=job.batch, precision=job.precision)


def _changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """The cluster with other links, and with other memory."""
    if len(cluster.devices) == 1:
        return
    for name, times in ((f"links {TIMES} times as fast", TIMES), (f"links a {_PART} as fast", 1 / TIMES)):
        yield name, _with_links(cluster, times)
    if cluster.nodes:
        yield "twice the memory", replace(cluster, nodes=tuple(_with_memory(kind, 2) for kind in cluster.nodes))
    else:
        yield "twice the memory", replace(cluster, devices=tuple(
            replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices))


_PART = {4: "quarter"}[TIMES]


def _with_links(cluster: Cluster, times: float) -> Cluster:
    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * times)

    def on(network: Network) -> Network:
        return replace(network, inside=faster(network.inside), across=network.across and faster(network.across))

    if not cluster.nodes:
        return replace(cluster, link=faster(cluster.link))
    return Cluster.of(tuple(replace(kind, network=on(kind.network)) for kind in cluster.nodes))


def _with_memory(kind: Nodes, times: float) -> Nodes:
    return replace(kind, devices=tuple(replace(device, memory_bytes=round(times * device.memory_bytes))
                                       for device in kind.devices))


def _lines(answer: Answer) -> Iterator[str]:
    found, chosen = answer.found, answer.found.chosen
    if chosen is None:
        nearest = found.too_large[0]
        yield from _wrapped(f"nothing fits on {answer.cluster}; nearest is '{nearest.plan}': "
                            f"{reason(nearest, nearest)}")
    else:
        yield f"chosen: {chosen.plan}"
        yield from _wrapped(f"  {_speed(chosen, answer.batch)}: {reason(chosen, chosen)}")
        if found.tied:
            tied = "; ".join(str(one.plan) for one in found.tied[:4])
            yield from _wrapped(f"  as fast, for all that is known: {tied}")
    for name, one in answer.flips:
        yield from _wrapped(f"  with {name}: {one.plan}")
    yield ""
    yield f"{'plan':<44} {'s/step':>8} {'samples/s':>10} {'MiB':>8}  why not"
    for one in _shown(found):
        yield from _row(one, chosen or one, answer.batch)
    yield f"{found.num_tried} plans were priced on {answer.cluster}"
    for kind, why in found.refused.items():
        yield from _wrapped(f"not priced: {kind}: {why}")
    for note in answer.notes:
        yield from _wrapped(f"rough: {note}")


def _shown(found: Found) -> list[Candidate]:
    """The best of each kind, then the fastest of all, in order."""
    kept = [*best_of_each_kind(found.ranked), *found.too_large]
    more = [one for one in found.ranked if one not in kept]
    listed = [*kept, *more[:max(0, SHOWN - len(kept))]]
    return sorted(listed, key=lambda one: (not one.estimate.fits, one.estimate.step_s))


def _row(one: Candidate, chosen: Candidate, batch: int) -> Iterator[str]:
    found = one.estimate
    why = "chosen" if one.plan == chosen.plan and found.fits else reason(one, chosen)
    mark = "~" if one.plan.relaxed is not None else ""
    name, rest = _cut(f"{mark}{one.plan}", 44)
    said, more = _cut(why, 25)
    yield (f"{name:<44} {found.step_s:>8.3g} {batch / found.step_s:>10.4g} "
           f"{found.peak_memory_bytes / 2**20:>8.0f}  {said}")
    while rest or more:
        name, rest = _cut(rest, 42)
        said, more = _cut(more, 25)
        yield f"  {name:<42} {'':>8} {'':>10} {'':>8}  {said}".rstrip()


def _cut(text: str, width: int) -> tuple[str, str]:
    """What fits a column, at a space, and what is left."""
    if len(text) <= width:
        return text, ""
    at = text.rfind(" ", 0, width + 1)
    return (text[:at], text[at + 1:]) if at > 0 else (text[:width], text[width:])


def _wrapped(text: str) -> Iterator[str]:
    while text:
        line, text = _cut(text, 98)
        yield line
        text = text and f"  {text}"


def _speed(one: Candidate, batch: int) -> str:
    found = one.estimate
    interval = f" (80 %: {found.low_s:.3g} to {found.high_s:.3g})" if found.low_s < found.high_s else ""
    return (f"{found.step_s:.3g} s a step{interval}, {batch / found.step_s:.4g} samples/s, "
            f"{found.peak_memory_bytes / 2**20:,.0f} MiB")
