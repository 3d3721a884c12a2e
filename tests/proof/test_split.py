"""Models that are split over ranks compute what one device computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.classification import classification_job, failure_text, passes
from jobs.perceptrons import ListedPerceptron
from planted import verified
from split_jobs import OWN, TRANSFORMERS, split_job
from torch import nn

import paceline
from paceline.base.errors import PacelineError, PlanError
from paceline.cluster.devices import Device
from paceline.model.graph import Capture, capture
from paceline.strategies.mesh import Mesh, local_part
from paceline.strategies.stages.assignment import assigned, piece_needs
from paceline.strategies.stages.engine import Engine
from paceline.strategies.stages.layout import Stages
from paceline.training import rank_state
from paceline.training.stepper import Stepper

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in OWN if name != "chain"), "llama"])
def test_a_pipeline_of_two(name: str) -> None:
    """Skips, towers, ties, keyword inputs, ignored targets and a short last batch, under the default schedule."""
    passes(split_job(name), "pipeline=2")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        *(
            f"pipeline=2 schedule={schedule} microbatches=3"
            for schedule in ("interleaved", "gpipe", "1f1b", "zero-bubble")
        ),
        "pipeline=4",
        "pipeline=4 schedule=zero-bubble microbatches=2",
        "pipeline=4 microbatches=1",
    ],
)
def test_schedules(plan: str) -> None:
    """Tied weights, a skip over all stages, uneven micro-batches, a norm over all stages: what torch's own pipelines
    get wrong without an error, or refuse."""
    passes(split_job("chain"), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 data=2",
        "pipeline=2 shard=2",
        "pipeline=2 shard=2 zero=1 recompute=full",
        "pipeline=2 data=2 schedule=zero-bubble",
        "pipeline=2 data=2 shares=2:1",
        "data=2 tensor=2",
        "pipeline=2 tensor=2 schedule=zero-bubble",
        "pipeline=2 data=2 tensor=2",
    ],
)
def test_products(plan: str) -> None:
    """Pipelines of replicas, of shards, of unequal parts. torch's DistributedDataParallel is wrong or fails in these;
    with a zero-bubble schedule the reduction still waits for the weights' own half of the backward."""
    passes(split_job("chain"), plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-tower", "unet", "routed"])
def test_placed_parts(name: str) -> None:
    """Modules where a memory ledger puts them, alone and in two replicas."""
    passes(split_job(name), "place=2 data=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("chain", "tensor=2"),
        ("tied", "tensor=2"),
        ("tied", "shard=2 tensor=2"),
        ("keras", "tensor=2"),
    ],
)
def test_split_layers(name: str, plan: str) -> None:
    """Heads, gates, embeddings and what can't be split beside them; fused weights and tied ones."""
    passes(split_job(name), plan)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "plan", "most"),
    [
        ("two-tower", "tensor=2", 0.54),
        ("llama", "tensor=2", 0.51),
        ("qwen3", "tensor=2", 0.51),
        ("gpt2", "tensor=2", 0.52),
        ("bert", "tensor=2", 0.53),
        ("llama", "pipeline=2", 0.6),
        ("two-tower", "place=2", 0.6),
        ("llama", "pipeline=2 tensor=2", 0.31),
    ],
)
def test_a_rank_holds_a_part(
    name: str, plan: str, most: float, run_ranks: Callable[..., Any]
) -> None:
    """What verify can't see: that the model is split at all."""
    split_plan = paceline.Plan.parse(plan).with_(microbatches=2)

    def body(context: Any) -> float:
        mesh = Mesh(split_plan.axes.sizes(), context.rank)
        mesh.connect()
        stepper = Stepper(split_job(name), split_plan, mesh, context.device)
        whole = sum(p.numel() for p in stepper.model.parameters())
        return sum(local_part(p).numel() for p in stepper.local_parameters.values()) / whole

    assert max(run_ranks(body, split_plan.world_size)) <= most


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*OWN, *TRANSFORMERS])
def test_every_model_under_every_plan(name: str) -> None:
    """Layers, parts, products with replicas, shards and stages, and every schedule on two and on four ranks; where the
    model has fewer pieces than the plan has stages, it is refused in words."""
    plans = [
        "tensor=2",
        "place=2",
        "data=2 tensor=2",
        "pipeline=2 data=2",
        "pipeline=2 shard=2",
        "pipeline=2 data=2 tensor=2",
        *(f"pipeline={ranks} schedule={schedule}" for ranks in (2, 4) for schedule in SCHEDULES),
    ]
    for certificate in paceline.verify(split_job(name), plans, steps=3):
        refused = "pieces that can be cut apart" in (certificate.refused or "")
        assert certificate.passed or refused, certificate.describe()


class Dense(nn.Module):
    """Each layer reads what all before it returned: values with several consumers, on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x]
        for layer in self.layers:
            made.append(torch.tanh(layer(torch.stack(made).sum(0))))
        return self.out(torch.stack(made).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 schedule=interleaved",
        "pipeline=3",
        "pipeline=4 schedule=zero-bubble",
        "place=3",
    ],
)
def test_a_value_that_several_stages_need(plan: str) -> None:
    """Its gradient is the sum of what comes back from each of them."""
    passes(classification_job(Dense), plan)


# --- Planted bugs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_tie_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that don't add up the gradients of a weight that both use."""
    monkeypatch.setattr(Stages, "finish", lambda self: None)

    assert "gradient of 'embed.weight'" in failure_text(split_job("tied"), "pipeline=2")


def dropped_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The backward of one micro-batch never happens on the first stage."""
    right = Engine._roots

    def roots(self: Engine, action: Any, staged: Any, flight: Any) -> Any:
        right_roots = right(self, action, staged, flight)
        return ([], []) if action.stage == 0 and action.microbatch == 1 else right_roots

    patch.setattr(Engine, "_roots", roots)


def scaled_stage(patch: pytest.MonkeyPatch) -> None:
    """A stage's gradients come out larger by a thousandth."""
    right = Stages.finish

    def finish(self: Stages) -> None:
        right(self)
        if self.place == 1:
            for parameter in self.module.parameters():
                parameter.grad.mul_(1.001)

    patch.setattr(Stages, "finish", finish)


def norm_of_one_stage(patch: pytest.MonkeyPatch) -> None:
    """Each stage clips by the norm of its own gradients."""

    def clip(
        greatest: float, parameters: Mapping[str, torch.nn.Parameter], norm: torch.Tensor
    ) -> None:
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), greatest)

    patch.setattr(rank_state, "clip", clip)


def layer_not_summed(patch: pytest.MonkeyPatch) -> None:
    """A bias of a layer that ranks compute together gets one rank's gradient, doubled."""
    right = Stages.finish

    def finish(self: Stages) -> None:
        right(self)
        for name, parameter in self.module.named_parameters():
            if name == "layers.0.bias":
                parameter.grad.mul_(2.0)

    patch.setattr(Stages, "finish", finish)


def weights_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A rank that would initialise its stage by itself has other weights before the first step."""
    right = Stages.__init__

    def init(self: Stages, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        if self.place == 1:
            with torch.no_grad():
                for parameter in self.module.parameters():
                    parameter.normal_()

    patch.setattr(Stages, "__init__", init)


PLANTED = (
    (dropped_microbatch, "pipeline=2", ["gradient of 'layers.0."]),
    (norm_of_one_stage, "pipeline=2", ["weight of '"]),
    (layer_not_summed, "tensor=2", ["gradient of 'layers.0.bias'"]),
    (weights_of_its_own, "pipeline=2", ["initial weight of 'layers.1.weight'", "on rank 1"]),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [
        PLANTED,
        pytest.param(
            ((scaled_stage, "pipeline=2", ["gradient of 'out."]),), marks=pytest.mark.slow
        ),
    ],
)
def test_planted_bugs_are_named(planted: Any) -> None:
    """Each by what it spoils first."""
    certificates = verified(
        classification_job(clip=0.1, precision="float64"),
        [(plan, plant) for plant, plan, _ in planted],
    )
    for (plant, _, words), certificate in zip(planted, certificates, strict=True):
        assert not certificate.passed, plant.__doc__
        assert all(word in certificate.describe() for word in words), certificate.describe()


# --- What can't be split ------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Its own course depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if x.sum() > 1e9:
                x = layer(x)
            x = torch.relu(layer(x))
        return self.out(x)


class InPlace(nn.Module):
    """Adds to what a block returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        first += 1.0
        return self.out(torch.tanh(self.layers[1](first)))


BRANCH = next(
    number
    for number, line in enumerate(
        inspect.getsource(Branching).splitlines(), inspect.getsourcelines(Branching)[1]
    )
    if "x.sum()" in line
)


def captured() -> tuple[nn.Module, Capture]:
    model = ListedPerceptron()
    return model, capture(model, (torch.zeros(2, 6),), {})


def refuse(model: nn.Module, graph: Capture, plan: str, words: str) -> None:
    """What a rank says of a model that was captured before it holds any part of it."""
    split_plan = paceline.Plan.parse(plan).with_(microbatches=2)
    needs = piece_needs(model, graph, state_factor=0.0)
    with pytest.raises(PlanError) as refused:
        assigned(model, graph, split_plan, needs=needs, samples=4, devices=(), precision="float64")
    assert words in str(refused.value)


@pytest.mark.slow
def test_models_with_fewer_pieces_than_a_plan_asks_for() -> None:
    """By verify, too."""
    model, graph = captured()
    refuse(
        model,
        graph,
        "pipeline=5",
        "the model has 3 pieces that can be cut apart and the plan needs 5 stages",
    )
    refuse(
        model,
        graph,
        "place=4",
        "the model has 3 pieces with parameters and 4 parts were asked for",
    )
    assert "the model has 3 pieces that can be cut apart and the plan needs 4" in failure_text(
        classification_job(), "pipeline=2 schedule=interleaved"
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (Branching, "pipeline=2", f"test_split.py:{BRANCH}: "),
        (InPlace, "pipeline=2 shard=2", "edits in place what another module returned"),
    ],
)
def test_models_that_a_plan_does_not_suit(
    model: Callable[[], nn.Module], plan: str, words: str, tmp_path: Path
) -> None:
    """Each is refused in words, before the first step."""
    with pytest.raises(PacelineError) as refused:
        paceline.train(classification_job(model), plan, steps=2, run=tmp_path / "run")
    assert words in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2", "tensor=4"])
def test_an_edit_in_place_stays_with_what_it_edits(plan: str) -> None:
    """No cut comes between them; shapes that don't divide leave a layer whole."""
    passes(classification_job(InPlace), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=3 schedule=zero-bubble microbatches=1",
        "pipeline=2 microbatches=11",
        "pipeline=3 microbatches=2",
    ],
)
def test_more_microbatches_than_samples_and_fewer_than_stages(plan: str) -> None:
    """Stand-ins fill the pipeline; one that can't be filled is slow and right."""
    passes(classification_job(), plan)


@pytest.mark.slow  # as of replicas in test_certificates.py
def test_a_mean_over_targets_that_count_is_named() -> None:
    """Micro-batches have unequal numbers of targets: torch's own pipelines average such losses without an error."""
    job = classification_job(
        ListedPerceptron,
        loss=lambda output, target: F.cross_entropy(output, target, ignore_index=2),
    )

    assert "not the mean over its samples" in failure_text(job, "pipeline=2")


# --- Placements by hand -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_placement_by_hand(tmp_path: Path) -> None:
    """The longest pattern wins."""
    path = tmp_path / "parts.toml"
    path.write_text('[parts]\n0 = ["layers", "out"]\n1 = ["layers.1"]\n')

    passes(classification_job(), f"place={path} parts=2")


WRONG_PLACEMENTS = {
    '[parts]\n0 = ["layers.0"]\n1 = ["out"]': "leaves out 'layers.1'",
    '[parts]\n0 = ["layers"]\n1 = ["outt"]': "no module 'outt', did you mean 'out'",
    '[parts]\n0 = ["layers", "out"]\n1 = ["out"]': "puts 'out' on parts",
    '[parts]\n0 = ["*"]': "has 1 parts and the plan 2",
    '[parts]\n1 = ["*"]': "the keys 0, 1, ...",
    "parts = 3": "the keys 0, 1, ...",
    "[parts": "can't read the placement",
}


def test_placements_that_are_wrong(tmp_path: Path) -> None:
    """Each is refused with what to write."""
    model, graph = captured()
    path = tmp_path / "parts.toml"
    for text, words in WRONG_PLACEMENTS.items():
        path.write_text(text)
        refuse(model, graph, f"place={path} parts=2", words)


def test_a_placement_by_hand_that_overfills_a_device(
    tmp_path: Path, run_ranks: Callable[..., Any]
) -> None:
    """It is refused before a step, with what each device would hold and has."""
    path = tmp_path / "parts.toml"
    path.write_text('[parts]\n0 = ["layers", "out"]\n1 = ["layers.1"]\n')
    placed_plan = paceline.Plan.parse(f"place={path} parts=2")

    def body(context: Any) -> str:
        mesh = Mesh(placed_plan.axes.sizes(), context.rank)
        mesh.connect()
        with pytest.raises(PlanError) as refused:
            Stepper(
                classification_job(),
                placed_plan,
                mesh,
                context.device,
                devices=(Device("cpu", 0, 2**30), Device("cpu", 1, 100)),
            )
        return str(refused.value)

    for words in run_ranks(body, 2):
        assert "doesn't fit" in words and "part 0" in words and words.count("too much") == 1


def test_the_ledger_of_a_placement() -> None:
    """A line a device, with its sum and what it has."""
    from paceline.strategies.stages.ledger import MIB, PieceMemory, refuse_overfull

    needs = {"a": PieceMemory(MIB, MIB, 2 * MIB, 3 * MIB), "b": PieceMemory(MIB, MIB, 2 * MIB, 0)}
    with pytest.raises(PlanError, match=r"doesn't fit:(?s:.)*part 0 .* 7\.0 .* 6 too much"):
        refuse_overfull(needs, {"a": 0, "b": 1}, [6 * MIB, 6 * MIB])
