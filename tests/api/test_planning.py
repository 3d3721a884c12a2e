"""`plan`: the answer for a job, on this machine and on others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from later import needed
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api import planning
from paceline.api.planning_table import Answer
from paceline.base.errors import ClusterError, PlanError, UsageError
from paceline.cluster.cluster import Cluster
from paceline.planner.corrections import Calibration
from paceline.planner.estimate import Estimate
from paceline.planner.goodput import outlook
from paceline.planner.problem import PlanningProblem
from paceline.planner.search import Candidate, RankedPlans
from paceline.planner.survival import FailureRates
from paceline.simulate.device import DeviceRates
from paceline.strategies.plan import Plan
from paceline.strategies.server.keys import Servers

WIDTH, BATCH = 64, 4


class Net(nn.Module):
    """Layers in a list, so that it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x)


class Moody(Net):
    """Its course depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.sum()) > 0 else -x)


def _job(model: Any = Net, **changes: Any) -> paceline.Job:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return paceline.Job(
        **{
            "model": model,
            "data": TensorDataset(x, x.argmax(1) % 3),
            "loss": F.cross_entropy,
            "optimizer": lambda named: torch.optim.AdamW(named),
            "batch": BATCH,
            "epochs": 1,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def answer() -> Answer:
    """For two CPUs that are not here."""
    return paceline.plan(_job(), "2xcpu", calibrate_s=0)


def test_the_answer_is_a_document_and_a_table(answer: Answer):
    """Its keys are the contract's; the chosen plan comes first, lines fit 100 columns, and every plan can be read."""
    document = json.loads(json.dumps(answer.to_dict()))
    assert {"cluster", "chosen", "plans"} <= document.keys() and document["cluster"] == "2xcpu"
    assert document["chosen"] == str(answer.chosen) and answer.chosen is not None
    for row in document["plans"]:
        assert {
            "plan",
            "fits",
            "step_s",
            "step_s_low",
            "step_s_high",
            "samples_per_s",
            "memory_bytes",
            "breakdown",
            "relaxed",
            "reason",
        } <= row.keys()
        assert (Plan.parse(row["plan"]).relaxed is not None) == row["relaxed"]
        assert row["samples_per_s"] == pytest.approx(BATCH / row["step_s"]) and row["reason"]
    lines = answer.describe().splitlines()
    assert lines[0] == f"chosen: {answer.chosen}" and max(map(len, lines)) <= 100
    listed = " ".join(row["plan"] for row in document["plans"])
    assert all(
        kind in listed for kind in ("data=2", "shard=2", "pipeline=2", "single")
    )  # devices may be left out


def test_devices_that_are_not_here():
    """A described cluster is used whole."""
    answer = paceline.plan(_job(), "2x2xH100")
    assert answer.chosen is not None and answer.chosen.world_size == 4
    assert all(Plan.parse(row["plan"]).world_size == 4 for row in answer.to_dict()["plans"])
    assert max(map(len, answer.describe().splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "most"),
    [
        ("4xA100", "pipeline tensor"),
        pytest.param("8xA100", "pipeline data tensor", marks=pytest.mark.slow),
        pytest.param("2x8xH100", "pipeline data tensor", marks=pytest.mark.slow),
    ],
)
def test_a_model_of_transformers_is_split_where_it_is_not(cluster: str, most: str):
    """From its configuration, as it is: it also returns a cache, which no plan passes on."""
    transformers = needed("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    tokens = [({"input_ids": torch.arange(16)}, torch.arange(16)) for _ in range(64)]
    answer = paceline.plan(
        _job(lambda: transformers.GPT2LMHeadModel(config), data=tokens, loss=loss, batch=16),
        cluster,
    )
    kinds = {candidate.kind for candidate in answer.ranking.ranked}
    assert {"data", "shard", "pipeline data", "data tensor", most} <= kinds
    assert all(
        candidate.estimate.low_s < candidate.estimate.high_s for candidate in answer.ranking.ranked
    )
    assert any(note.startswith("tensor=N") for note in answer.notes)


def test_servers_are_no_rivals_of_replicas_in_a_node():
    """A small model, whose messages all links hide: what servers send passes through their hosts."""
    answer = paceline.plan(_job(batch=64), "4xH100")
    assert str(answer.chosen) == "data=4"
    assert not [
        candidate.plan
        for candidate in answer.ranking.tied
        if isinstance(candidate.plan.sync, Servers)
    ]


@pytest.mark.slow
def test_a_batch_smaller_than_the_devices():
    """Plans have no more replicas than samples."""
    answer = paceline.plan(_job(batch=2), "2xcpu", calibrate_s=0)
    assert all(Plan.parse(row["plan"]).replicas <= 2 for row in answer.to_dict()["plans"])
    with pytest.raises(PlanError, match="no plan uses all 2 devices"):
        paceline.plan(_job(Moody, batch=1), "2xH100")


@pytest.mark.slow
def test_nothing_fits():
    """The gap is said, and the nearest plan."""
    cluster = Cluster.local(num_ranks=2)
    small = replace(
        cluster, devices=tuple(replace(device, memory_bytes=2**20) for device in cluster.devices)
    )
    answer = paceline.plan(_job(), small)
    assert answer.chosen is None and answer.to_dict()["chosen"] is None
    assert (
        "nothing fits on 2 devices; nearest is '" in answer.describe()
        and "MiB too much" in answer.describe()
    )


@pytest.mark.slow
def test_nothing_fits_on_devices_that_are_not_here(tmp_path: Path):
    """The gap is in the document, to the byte, for the nearest plan of each kind."""
    file = tmp_path / "small.toml"
    file.write_text('[[nodes]]\ndevices = ["2xH100"]\nmemory = "900MB"\n')
    answer = paceline.plan(_job(), str(file))
    rows = answer.to_dict()["plans"]
    assert answer.chosen is None and len(rows) > 3 and not any(row["fits"] for row in rows)
    assert [row["missing_bytes"] for row in rows] == sorted(row["missing_bytes"] for row in rows)
    assert rows[0]["missing_bytes"] > 100e6  # what the device needs to run anything
    text = " ".join(answer.describe().split())
    assert text.startswith("nothing fits on ") and "MiB too much for a H100" in text


def test_what_can_be_neither_traced_nor_run_is_rough():
    """On devices that are not here: the fallback is by parameters alone, and the answer says what is rough."""

    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    answer = paceline.plan(_job(Broken), "2xH100")
    assert answer.chosen is not None
    assert any(
        "priced by its parameters alone: activations are left out" in note for note in answer.notes
    )
    assert "rough: " in answer.describe() and max(map(len, answer.describe().splitlines())) <= 100


def test_a_model_that_fails_on_fake_tensors_is_said_to_in_a_line(caplog: pytest.LogCaptureFixture):
    """torch would log a traceback for each try."""

    class Short(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.zeros(7).expand(len(x), 3)

    answer = paceline.plan(_job(Short), "1xH100")
    assert (
        "could not be run on fake tensors (RuntimeError: " in " ".join(answer.notes)
        and not caplog.records
    )


def test_a_model_that_can_not_be_built():
    """Its own error is the user's."""

    def build() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        paceline.plan(_job(build), "8xH100")


def test_a_model_that_can_not_be_cut_is_said_to():
    """Its other plans are ranked."""
    answer = paceline.plan(_job(Moody), "2xcpu", calibrate_s=0)
    assert answer.chosen is not None and answer.notes
    assert not any("pipeline" in row["plan"] for row in answer.to_dict()["plans"])


@pytest.mark.slow
def test_servers_are_not_ranked_for_batch_norm():
    """They would fail in their first step. All of them have one reason, which is given once."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))

    answer = paceline.plan(_job(build), "2xcpu", calibrate_s=0)
    assert not any("server" in row["plan"] for row in answer.to_dict()["plans"])
    told = " ".join(answer.describe().split())
    assert (
        told.count("running statistics") == 1
        and "not priced: servers, servers compress=bf16, " in told
    )


@pytest.mark.parametrize("cluster", ["1000xH100", "2x250xH100"])
def test_more_devices_than_a_plan_can_use(cluster: str):
    """Where they have a price, plans may leave some out."""
    with pytest.raises(
        PlanError, match=r"no plan uses all \d+ devices: replicas \(at most 4, the batch\)"
    ) as caught:
        paceline.plan(_job(), cluster)
    assert "--price-per-hour" in str(caught.value)


def test_an_unknown_cluster():
    with pytest.raises(ClusterError, match=r"unknown accelerator 'H1000'"):
        paceline.plan(_job(), "8xH1000")


@pytest.mark.slow
def test_by_cost_devices_may_be_left_out(tmp_path: Path):
    """A small net is cheapest on one device, by the price that is given or stated in the cluster's file."""
    answer = paceline.plan(_job(batch=32), "2xH100", price_per_hour=2.0)
    assert str(answer.chosen) == "single" and "samples/s, 0.16 MiB, 0.0" in answer.describe()
    rows = [row for row in answer.to_dict()["plans"] if row["fits"]]
    assert rows[0]["cost_per_million_samples"] == pytest.approx(
        2.0 / 3600 * rows[0]["step_s"] / 32 * 1e6
    )
    costs = [row["cost_per_million_samples"] for row in rows]
    assert costs == sorted(costs) and max(map(len, answer.describe().splitlines())) <= 100
    file = tmp_path / "priced.toml"
    file.write_text('[[nodes]]\ndevices = ["2xH100"]\nprice_per_hour = 2.0\n')
    assert paceline.plan(_job(batch=32), str(file)).to_dict()["plans"][0] == rows[0]
    file.write_text(file.read_text() + '[[nodes]]\ndevices = ["2xA100"]\n')
    with pytest.raises(ClusterError, match="some nodes have a price_per_hour and others have none"):
        paceline.plan(_job(), str(file))


def test_rows_are_held_against_one_choice(answer: Answer, monkeypatch: pytest.MonkeyPatch):
    """The chosen plan is looked for once for all of them: that takes time in proportion to the plans."""
    lookups = []
    chosen = RankedPlans.chosen.fget
    assert chosen is not None
    monkeypatch.setattr(
        RankedPlans, "chosen", property(lambda ranked: lookups.append(True) or chosen(ranked))
    )

    assert len(answer.to_dict()["plans"]) > 3
    assert len(lookups) == 1


def test_another_precision_is_advised():
    """One line, and in the document; float64 has no other."""
    bf16_answer = paceline.plan(_job(precision="bf16"), "2xH100")
    assert "  precision=float32 instead: " in bf16_answer.describe()
    assert bf16_answer.to_dict()["precision"]["precision"] == "float32"
    assert bf16_answer.to_dict()["precision"]["step_s"] > 0
    assert paceline.plan(_job(precision="float64"), "1xH100").advice is None


@pytest.mark.slow
def test_failures_are_reckoned_with(answer: Answer):
    """An interval between checkpoints and what lasts of the time."""
    with_failures = paceline.plan(_job(), "2xH100", mtbf_hours=1000.0)
    failures = with_failures.to_dict()["failures"]
    assert failures["mtbf_s"] == pytest.approx(1000 * 3600 / 2)
    assert 0.99 < failures["goodput"] < 1
    assert "with a failure every 20.8 days: a checkpoint every" in with_failures.describe().replace(
        "\n    ", " "
    )
    ways = failures["survival"]
    assert list(ways) == ["copies", "checkpoint", "resume"]
    assert ways["copies"]["goodput"] > 0.99 and ways["checkpoint"]["goodput"] > failures["goodput"]
    assert ways["resume"]["goodput"] == failures["goodput"]
    on_two = paceline.plan(_job(), "2x1xH100", mtbf_hours=1000.0).to_dict()["failures"]
    assert list(on_two["survival"]) == ["copies", "resume"]
    assert list(on_two["survival_refused"]) == [
        "fewer",
        "spare",
    ]  # if the keeper of the meeting place is lost
    assert answer.to_dict()["failures"] is None
    for wrong in (
        {"mtbf_hours": 0.0},
        {"mtbf_hours": 1.0, "repair_hours": 0.0},
        {"mtbf_hours": 1.0, "checkpoint_bytes_per_s": -1.0},
        {"price_per_hour": 0.0},
    ):
        with pytest.raises(UsageError, match="must be a number above 0"):
            paceline.plan(_job(), "2xH100", **wrong)


def test_what_ranks_leave_is_reckoned_with(answer: Answer):
    """Ranks go back as far as copies are apart: one step of a long one, several of a short one."""
    problem, candidate, cluster = (
        PlanningProblem.of(_job()),
        answer.ranking.chosen,
        Cluster.local("cpu:0-1"),
    )
    assert candidate is not None
    for step_s, back_s in ((30.0, 30.0), (1e-4, pytest.approx(0.2, abs=0.2))):
        slower = replace(candidate, estimate=replace(candidate.estimate, step_s=step_s))
        ways = outlook(problem, slower, cluster, FailureRates(mtbf_hours=1.0)).survivals
        assert ways[0].interval_s == back_s
    assert ways[0].interval_s > 1e-4


def test_advice_is_priced_as_the_choice_is():
    """A plan that took three times its price takes three times its price in another precision, too."""
    cluster, plan = Cluster.local("cpu:0"), Plan()
    problem = PlanningProblem.of(_job())
    rates = DeviceRates(5e10, 1e11, 8e9, 4e9, 5e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.planner.estimate.measured_rates", lambda *args, **more: rates)
        predicted = problem.price(plan, cluster)
        before = planning._advice(problem, Candidate(plan, predicted), cluster)
        trial = Calibration(3 * predicted.step_s, predicted.peak_memory_bytes)
        problem.corrections.add(plan, predicted, trial)
        corrected = problem.price(plan, cluster)
        after = planning._advice(problem, Candidate(plan, corrected), cluster)

    assert corrected.step_s == 3 * predicted.step_s and corrected.is_measured
    assert before is not None and isinstance(before.estimate, Estimate)
    assert after is not None and isinstance(after.estimate, Estimate)
    assert after.estimate.step_s == pytest.approx(3 * before.estimate.step_s, rel=0.05)
    assert not after.estimate.is_measured


@pytest.mark.slow
def test_plans_that_are_here_are_tried():
    """The chosen plan's figures were measured, and the document says which."""
    answer = paceline.plan(_job(), "2xcpu", calibrate_s=2.0)
    rows = {row["plan"]: row for row in answer.to_dict()["plans"]}

    assert rows[str(answer.chosen)]["measured"]
    assert not all(row["measured"] for row in rows.values())


@pytest.mark.slow
def test_micro_batches_that_a_model_refuses_are_no_reason_to_stop():
    """A batch norm of one value a channel can't be trained; plans with larger micro-batches are ranked."""

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))
        )

    answer = paceline.plan(_job(model, batch=16), "2xcpu", calibrate_s=0)

    assert "pipeline=2 microbatches=8" in " ".join(row["plan"] for row in answer.to_dict()["plans"])
    assert "can't be cut for micro-batches of 1 samples" in answer.ranking.refused["pipeline"]
