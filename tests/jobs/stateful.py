"""Jobs whose models keep state or edit themselves, in float64, and how two plans' results compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from jobs.data import regression
from paceline.cluster.cluster import Cluster
from paceline.launch.local.ranks import run_local
from paceline.proof.reference_loop import BatchCut, PlainRun, Variation
from paceline.strategies.compose import load
from paceline.training.drivers import train_rank
from paceline.training.settings import Settings


def stateful_job(
    model: Callable[[], nn.Module], *, samples: int = 36, **changes: Any
) -> paceline.Job:
    """A regression from 8 numbers to 4, in batches of 12 and with plain SGD."""
    fields: dict[str, Any] = {
        "model": model,
        "data": regression(samples),
        "loss": F.mse_loss,
        "batch": 12,
        "steps": 6,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "precision": "float64",
    }
    return paceline.Job(**{**fields, **changes})


def trained(job: paceline.Job, plan: str, folder: Path) -> dict[str, Tensor]:
    """The weights and buffers that a run under the plan ends with."""
    run = folder / plan.replace(" ", "-").replace("=", "")
    paceline.train(job, plan, run=run, timeout_s=60)
    return load_file(run / "model.safetensors")


def by_one_device(job: paceline.Job, plan: str = "single") -> dict[str, Tensor]:
    """The weights and buffers that a plain loop on one device ends with, in this process. plan: how each batch is cut
    over replicas and micro-batches."""
    read = paceline.Plan.parse(plan)
    run = PlainRun(job, Variation(cut=BatchCut((1,) * read.replicas, read.num_microbatches)))
    for _ in run.steps(job.total_steps or 0):
        pass
    return {
        name: tensor.detach()
        for name, tensor in (
            *run.model.named_parameters(remove_duplicate=False),
            *run.model.named_buffers(remove_duplicate=False),
        )
    }


def assert_alike(
    job: paceline.Job, plan: str, folder: Path, *, reference: str = "single"
) -> dict[str, Tensor]:
    """The plan ends with one device's weights and buffers, to rounding; those are returned.

    reference: a plan that cuts batches as one device is to do.
    """
    expected = by_one_device(job, reference)
    assert_same(trained(job, plan, folder), expected, plan)
    return expected


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], plan: str) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=1e-11,
            atol=1e-12,
            msg=lambda text, name=name: f"{name} under {plan}: {text}",
        )


def in_turn(job: Callable[..., paceline.Job], *, reference: str = "single") -> Callable[[Any], Any]:
    """Makes a test that a run ends with one device's weights and buffers, as `assert_alike`; see the fixture `ends`.

    job: of the test's parameters, of which one is the plan.
    """

    def decorate(described: Any) -> Any:
        def test(ends: dict[str, dict[str, Tensor]], request: Any, **given: Any) -> None:
            assert_same(
                ends[request.node.nodeid], by_one_device(job(**given), reference), given["plan"]
            )

        names = [*inspect.signature(job).parameters, "ends", "request"]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        test.__name__, test.__doc__, test.__module__ = (
            described.__name__,
            described.__doc__,
            described.__module__,
        )
        test.job = job  # type: ignore[attr-defined]
        return test

    return decorate


def _resolved(plan: str) -> paceline.Plan:
    parsed = paceline.Plan.parse(plan)
    return (
        parsed.with_(microbatches=2)
        if parsed.has_schedule and parsed.modifiers.microbatches == "auto"
        else parsed
    )


def trained_in_turn(items: Iterable[Any], folder: Path) -> dict[str, dict[str, Tensor]]:
    """What the runs of such tests end with, by their names. Those of as many ranks are made by the same ranks, one
    after the other: to start ranks takes longer than to train."""
    runs = [
        (
            item.nodeid,
            item.function.job(**item.callspec.params),
            _resolved(item.callspec.params["plan"]),
        )
        for item in items
    ]
    folders = {nodeid: folder / str(number) for number, (nodeid, *_) in enumerate(runs)}
    for world_size in {plan.world_size for *_, plan in runs}:
        alike = [run for run in runs if run[2].world_size == world_size]

        def body(context: Any, alike: Any = alike) -> None:
            for nodeid, job, plan in alike:
                try:
                    train_rank(context, job, plan, Settings(folders[nodeid], (1,) * plan.replicas))
                except Exception as error:
                    error.add_note(f"in {nodeid}")
                    raise

        for nodeid, _, plan in alike:
            load(plan)
            folders[nodeid].mkdir()
        run_local(
            body,
            Cluster.local("cpu:0" if world_size == 1 else f"cpu:0-{world_size - 1}").devices,
            timeout_s=60,
        )
    return {nodeid: load_file(folders[nodeid] / "model.safetensors") for nodeid, *_ in runs}


class Codebook(nn.Module):
    """Vector quantisation with a codebook of moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        quantised = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(z)
                self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
                self.sums.mul_(0.9).add_(0.1 * chosen.t() @ z)
                self.codes.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
        return self.decode(z + (quantised - z).detach())


class Attributes(nn.Module):
    """State in plain attributes: a counter, a tensor that is replaced, a list, one that is made late."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.history = nn.Linear(8, 8), 0, []
        self.center = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.center
        if not hasattr(self, "first"):
            self.first = y.detach().mean(0)
        if self.training:
            self.count += 1
            self.center = self.center * 0.9 + 0.1 * y.detach().mean(0)
            self.history.append(y.detach().mean())
        return torch.tanh(y * min(1.0, self.count / 8) + sum(self.history[-3:]) + self.first)


class MomentumTarget(nn.Module):
    """BYOL's way: a frozen copy follows the trained layer, by a step in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.data.lerp_(p, 0.1)  # no version counter tells of this
        return torch.tanh(self.online(x) + self.target(x))
