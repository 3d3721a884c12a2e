"""A strategy of another package works like a built-in one: `examples/strategies/gossip`, by its entry point."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.classification import classification_job
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.job.order import split
from paceline.planner.search import kind_of
from paceline.planner.space import offered
from paceline.proof.order import whole_batches
from paceline.strategies import conflicts
from paceline.strategies.axes import Axis
from paceline.strategies.extensions import extensions
from paceline.strategies.limits import DeviceCounts, Limits
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan

GOSSIP = Path(__file__).resolve().parents[2] / "examples" / "strategies" / "gossip"
SAMPLES, BATCH = 25, 10  # the third step of an epoch has 5 samples: replicas count unlike numbers


def install(site: Path, name: str, target: str) -> None:
    """What pip writes for a package with an entry point."""
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[paceline.strategies]\n{name} = {target}\n")


@pytest.fixture
def gossip(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    site = tmp_path_factory.mktemp("site")
    install(site, "gossip", "paceline_gossip:STRATEGY")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(GOSSIP)
    extensions.cache_clear()
    yield
    extensions.cache_clear()
    for name in [name for name in sys.modules if name.startswith("paceline_gossip")]:
        del sys.modules[name]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def make_job(**changes: Any) -> paceline.Job:
    fields = {"optimizer": sgd, "batch": BATCH, "steps": 8, "precision": "float64", **changes}
    return classification_job(net, **fields)


def train(
    run: Path, plan: str, *, save_every: int | None = None, resume: bool = False, **changes: Any
) -> dict[str, Any]:
    devices = f"cpu:0-{Plan.parse(plan).world_size - 1}"
    return paceline.train(
        make_job(**changes), plan, devices=devices, run=run, save_every=save_every, resume=resume
    ).to_dict()


def by_hand(replicas: int, steps: int) -> dict[str, torch.Tensor]:
    """The mean of replicas that average with their neighbours after each step, by a plain loop."""
    job = make_job(steps=steps)
    models = [net().double() for _ in range(replicas)]
    first = load_initial()
    for model in models:
        model.load_state_dict(first)
    optimizers = [sgd(list(model.named_parameters())) for model in models]
    for batch in whole_batches(job, steps):
        for model, optimizer, share in zip(
            models, optimizers, split(batch.samples, [1] * replicas), strict=True
        ):
            optimizer.zero_grad()
            job.loss(
                model(batch.input[share.start : share.stop]), batch.target[share.start : share.stop]
            ).backward()
            optimizer.step()
        states = [
            {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for model in models
        ]
        for number, model in enumerate(models):
            near = {(number - 1) % replicas, number, (number + 1) % replicas}
            model.load_state_dict(
                {
                    name: torch.stack([states[other][name] for other in near]).mean(0)
                    for name in first
                }
            )
    return {
        name: torch.stack([model.state_dict()[name] for model in models]).mean(0) for name in first
    }


def load_initial() -> dict[str, torch.Tensor]:
    """The weights that a run of this job starts from."""
    from paceline.training.prepare import build_model

    return {
        name: tensor.clone()
        for name, tensor in build_model(make_job(), torch.device("cpu")).state_dict().items()
    }


EXPERTS = Axis("experts", cuts_samples=True, cuts_weights=True)
CONTEXT = Axis("context", cuts_sequence=True)


@pytest.mark.parametrize(
    ("axis", "dense", "cut", "replica", "is_alike"),
    [
        (EXPERTS, [0, 1, 2, 3], [0, 2], [0, 1, 2, 3], False),
        (CONTEXT, [0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 1], True),
        (Axis("tensor", cuts_weights=True), [0, 2], [0, 2], [0, 0, 1, 1], False),
    ],
)
def test_what_an_axis_cuts_says_over_which_ranks_each_gradient_is_summed(
    axis: Axis, dense: list[int], cut: list[int], replica: list[int], is_alike: bool
):
    """Two replicas, of two ranks along an axis that nothing but its facts is known of. Experts see samples of their own
    and are cut, and what is dense is held alike; of a sequence all hold everything and see parts."""
    meshes = [
        Mesh({"data": 2, axis.name: 2}, rank, (Axis("data", cuts_samples=True), axis))
        for rank in range(4)
    ]

    cut_by = ["" if is_alike else axis.name]
    assert meshes[0].replicas == dense
    assert meshes[0].ranks_over(meshes[0].summed_axes(cut_by)) == cut
    assert [mesh.replica for mesh in meshes] == replica
    assert meshes[0].holds_parts is not is_alike


@pytest.mark.usefixtures("gossip")
def test_its_key_is_read_and_written_like_any_other():
    plan = Plan.parse("microbatches=2 gossip=4")

    assert str(plan) == "gossip=4 microbatches=2" and Plan.parse(str(plan)) == plan == Plan.of(
        gossip=4, microbatches=2
    )
    assert plan.world_size == plan.replicas == plan.num_copies == 4 and not plan.splits_model
    assert "two neighbours" in (plan.relaxed or "") and plan.exact == Plan.parse(
        "data=4 microbatches=2"
    )
    assert Plan.parse("gossip=1") == Plan() and kind_of(plan) == "gossip"


@pytest.mark.usefixtures("gossip")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gossip=4 data=2", "gossip=4 and data=2 don't compose"),
        ("gossip=2 tensor=2", "holds the whole model"),
        ("gossip=2 servers=1 workers=2", "workers hold the whole model"),
        ("gossip=2 compress=int8", "add data=N"),
        ("gossip=2 local=3", "add data=N"),
        ("gossip=x", "not a whole number"),
        ("gossip=0", "at least 1"),
        ("gosip=2", "did you mean 'gossip'"),
        ("single gossip=2", "contradicts gossip=2"),
        ("gossip", "needs a value"),
    ],
)
def test_wrong_values_and_products_are_refused(text: str, words: str):
    with pytest.raises(PlanError, match=words):
        Plan.parse(text)


@pytest.mark.usefixtures("gossip")
def test_a_precision_that_it_does_not_compose_with_is_refused():
    with pytest.raises(PlanError, match="each replica would skip steps of its own"):
        conflicts.check(Plan.parse("gossip=2"), 'precision="fp16"')


def test_without_the_package_its_key_is_unknown():
    with pytest.raises(PlanError, match="unknown plan key 'gossip'"):
        Plan.parse("gossip=2")


@pytest.mark.usefixtures("gossip")
def test_it_is_among_the_relaxed_plans_and_has_a_price():
    """Two neighbours are sent the weights in each step, and three copies of them are held beside."""
    from paceline.model.cost.trace import profile_job
    from paceline.planner.estimate import estimate

    plans = offered(Limits(batch=BATCH), DeviceCounts(4, 4))
    assert Plan.of(gossip=4) in plans

    job, cluster = make_job(precision="float32"), Cluster.local(num_ranks=4)
    profile = profile_job(job)
    estimated, single = (
        estimate(profile, Plan.parse(text), cluster, batch=BATCH, precision="float32")
        for text in ("gossip=4", "data=4")
    )
    assert (
        estimated.step_s > 0
        and estimated.ledger["communication"] >= 3 * profile.parameter_bytes > 0
    )
    assert single.ledger.get("communication", 0) < estimated.ledger["communication"]


@pytest.mark.slow
@pytest.mark.usefixtures("gossip")
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_it_trains_as_a_loop_by_hand(tmp_path: Path, replicas: int):
    """In float64, with steps in which some replicas have fewer samples."""
    train(tmp_path, f"gossip={replicas}")
    trained, expected = load_file(tmp_path / "model.safetensors"), by_hand(replicas, 8)

    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("gossip")
def test_a_resumed_run_goes_on_bit_by_bit_and_other_plans_take_over(tmp_path: Path):
    train(tmp_path / "whole", "gossip=2", save_every=5)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-8")
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    train(tmp_path / "parts", "gossip=2", resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())

    resumed = train(tmp_path / "other", "data=2", resume=True)
    assert resumed["steps"] == 8
    again = train(tmp_path / "other", "gossip=2", resume=True, steps=10)
    assert again["steps"] == 10


@pytest.mark.slow
@pytest.mark.usefixtures("gossip")
def test_verify_says_that_it_is_relaxed_and_what_is_exact():
    certificates = paceline.verify(make_job(), ["gossip=2"])

    assert not certificates[0].passed and "'data=2' can" in str(certificates[0].reason)


def test_a_package_that_cannot_be_loaded_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install(tmp_path, "broken", "no_such_module:STRATEGY")
    monkeypatch.syspath_prepend(tmp_path)
    extensions.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"'broken' \(no_such_module:STRATEGY\) can't be loaded"
        ):
            assert "broken" not in {strategy.name for strategy in extensions()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert str(Plan.parse("data=2")) == "data=2"
    finally:
        extensions.cache_clear()


def test_the_page_shows_the_code_of_the_example():
    """Every Python block of `docs/writing-a-strategy.md` stands in the package."""
    page = (GOSSIP.parents[2] / "docs" / "writing-a-strategy.md").read_text()
    code = "".join(path.read_text() for path in sorted((GOSSIP / "paceline_gossip").glob("*.py")))
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    assert len(blocks) >= 7 and [block for block in blocks if block not in code] == []


def test_a_key_that_is_built_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "taking.py").write_text(
        "from paceline.strategies.axes import Axis\nfrom paceline.strategies.keys import PlanKeys\n"
        "from paceline.strategies.strategy import Strategy\n"
        "STRATEGY = Strategy(name='taking', is_active=lambda plan: False,\n"
        "                    keys=PlanKeys(axes=(Axis('data', cuts_samples=True),)))\n"
    )
    install(tmp_path, "taking", "taking:STRATEGY")
    monkeypatch.syspath_prepend(tmp_path)
    extensions.cache_clear()
    try:
        with pytest.raises(PlanError, match="brings the plan key 'data', which is built in"):
            Plan.parse("dta=2")
        assert str(Plan.parse("data=2")) == "data=2"
    finally:
        extensions.cache_clear()
