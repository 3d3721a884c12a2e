"""Steps of a job's own: certified as they are, not with a planted bug, and refused where a plan can't run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import Plant, no_bug, verified
from safetensors.torch import load_file

import paceline
from paceline.base.errors import JobError, PlanError, TrainingError
from paceline.job.named_optimizers import NamedOptimizers
from paceline.planner.multi_model import priced
from paceline.planner.problem import check_step
from paceline.servers.meetings import Meetings, Sums
from paceline.servers.server_state import ServerState
from paceline.training.feed import MicroBatch
from paceline.training.own_step.named_parts import _OfPart
from paceline.training.own_step.step import OwnStep
from paceline.training.own_step.step_batch import StepBatch
from paceline.training.own_step.step_draws import MakesOn, WindowDraws
from paceline.training.own_step.verbs import Verbs
from tests.corpus import own_steps
from tests.corpus.own_steps import adam, fields, small

JOBS = (
    "gan_with_penalty",
    "distillation",
    "self_distillation",
    "muon_beside_adamw",
    "actor_critic",
    "masked_tokens",
)


@dataclass
class Record:
    """What a model may return."""

    rows: torch.Tensor


def _without_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_OfPart, "finish", lambda self: None)


def _without_followers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("paceline.training.stepper.follow", lambda *_: None)


def _with_own_draws(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws for its own samples alone."""
    patch.setattr(WindowDraws, "_drawn", lambda self, func, args, kwargs: func(*args, **kwargs))


def _without_one_optimizer(patch: pytest.MonkeyPatch) -> None:
    update = Verbs.update
    patch.setattr(
        Verbs,
        "update",
        lambda self, name: (
            update(self, name)
            if name != "rest"
            else self.taken.reached.difference_update(self.state.optimizer.names[name])
        ),
    )


def _with_means_of_counts(patch: pytest.MonkeyPatch) -> None:
    """A sum is divided by what this rank counts."""
    patch.setattr(
        "paceline.training.stepper.Stepper.scale_gradients", lambda self, factor, parameters: None
    )


def _with_own_rows(patch: pytest.MonkeyPatch) -> None:
    """Nothing comes of other ranks' samples."""
    patch.setattr("paceline.strategies.mesh.Mesh.is_first_of_same_samples", False)


PLANTED: dict[str, Plant] = {
    "gan_with_penalty": _with_own_draws,
    "distillation": _without_reduction,
    "self_distillation": _without_followers,
    "muon_beside_adamw": _without_one_optimizer,
    "actor_critic": _with_means_of_counts,
    "masked_tokens": _with_own_draws,
    "memory_queue": _with_own_rows,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOBS, "memory_queue"])
def test_verify_certifies_a_step_and_catches_a_planted_bug(name: str) -> None:
    """Replicas of unequal windows."""
    right, wrong = verified(
        getattr(own_steps, name)(), [("data=3", no_bug), ("data=3", PLANTED[name])], steps=3
    )
    assert (right.verdict, wrong.verdict) == ("passed", "failed")


@pytest.mark.slow
def test_replicas_and_servers_take_a_step() -> None:
    """A small form of what follows for many jobs, and one bug."""
    *right, wrong = verified(
        own_steps.self_distillation(),
        [
            ("data=2", no_bug),
            ("servers=2 workers=2", no_bug),
            ("data=2", PLANTED["self_distillation"]),
        ],
    )
    assert [each.verdict for each in right] == ["passed", "passed"]
    assert wrong.verdict == "failed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizers": {"critic": adam}}, "no optimizer"),
        (
            {
                "optimizers": {
                    "generator": adam,
                    "critic": adam,
                    "both": paceline.Optimizer(adam, parameters="critic"),
                }
            },
            "'critic' and 'both'",
        ),
        (
            {
                "optimizers": {
                    "generator": adam,
                    "critic": adam,
                    "idle": paceline.Optimizer(adam, parameters=lambda name, p: False),
                }
            },
            "no parameter to update",
        ),
    ],
)
def test_each_parameter_has_one_optimizer(changes: dict[str, Any], words: str) -> None:
    models = {"generator": small(), "critic": small()}
    job = paceline.Job(
        **{**fields(), "models": models, "training_step": lambda ctx, batch: None, **changes}
    )

    with pytest.raises(JobError, match=words):
        job.optimizer(list(job.model().named_parameters()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"training_step": lambda ctx, batch: None}, "need"),
        ({"models": {"a": small()}}, "optimizers="),
        (
            {"models": {"a": small()}, "optimizers": {"b": adam}, "loss": F.mse_loss},
            "named after no model",
        ),
        (
            {"models": {"a": small(), "b": small()}, "optimizers": {"a": adam, "b": adam}},
            "training_step=",
        ),
        (
            {"models": {"a": small()}, "optimizers": {"a": adam}, "loss": F.mse_loss, "clip": 1.0},
            "clip belongs",
        ),
        (
            {
                "models": {"a": small()},
                "optimizers": {"a": adam},
                "loss": F.mse_loss,
                "followers": {"f": paceline.ema("b", 0.9)},
            },
            "follows 'b'",
        ),
        (
            {
                "models": {"a": small()},
                "optimizers": {"a": adam},
                "training_step": lambda ctx, batch: None,
                "validation": fields()["data"],
            },
            "needs validation_step=",
        ),
        (
            {
                "models": {"a": small()},
                "optimizers": {"a": adam},
                "loss": F.mse_loss,
                "model": small(),
            },
            "either model",
        ),
    ],
)
def test_fields_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        paceline.Job(**{**fields(), **given})


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("distillation", "servers=1 workers=2 staleness=1"),
        ("distillation", "servers=1 workers=2 staleness=inf"),
        ("gan_with_penalty", "tensor=2"),
        ("memory_queue", "pipeline=2"),
    ],
)
def test_plans_that_can_not_run_a_step(name: str, plan: str) -> None:
    """They are refused, and the planner doesn't propose them."""
    job = getattr(own_steps, name)()
    with pytest.raises(
        (PlanError, paceline.PacelineError),
        match=r"models= don't compose|a loss runs 'critic'|'queue' has no parameters",
    ):
        paceline.train(job, plan)
    with pytest.raises(PlanError):
        check_step(priced(job), paceline.Plan.parse(plan))


SERVED: dict[str, Plant] = {
    **PLANTED,
    "distillation": lambda patch: patch.setattr(Meetings, "take_result", _with_first_figures),
    "self_distillation": lambda patch: patch.setattr(
        "paceline.servers.server.follow", lambda *_: None
    ),
    "actor_critic": lambda patch: patch.setattr(ServerState, "step_optimizer", _with_a_tenth),
}


def _with_first_figures(
    self: Meetings, take_result: Callable[[Meetings], Any] = Meetings.take_result
) -> Any:
    """Figures of one worker stand for all."""
    first = self.brought.get(0)
    result = take_result(self)
    return Sums(result.number, first["values"]) if isinstance(result, Sums) and first else result


def _with_a_tenth(
    self: ServerState,
    name: str,
    *,
    clip: float,
    step_optimizer: Callable[..., None] = ServerState.step_optimizer,
) -> None:
    """Gradients of one optimizer are taken for smaller ones."""
    step_optimizer(self, name, clip=clip / 10 if name == "actor" else clip)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOBS, "three_models"])
def test_servers_make_each_update_of_a_step(name: str) -> None:
    """Matrices of Muon are whole on one server each; a follower's rows lie beside its source's. A planted bug is
    found."""
    bugs = [("servers=2 workers=2", SERVED[name])] if name in SERVED else []
    right, *wrong = verified(
        getattr(own_steps, name)(), [("servers=2 workers=3", no_bug), *bugs], steps=3
    )
    assert right.verdict == "passed"
    assert [each.verdict for each in wrong] == ["failed"] * len(bugs)


@pytest.mark.parametrize(
    "chain",
    [
        "servers=1 workers=2 | data=2",
        pytest.param("data=2 | servers=2 workers=2 colocate=yes | shard=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_plan(tmp_path: Path, chain: str) -> None:
    """Followers, both optimizers and the order of data are those of one device."""
    job, plans = own_steps.self_distillation(), chain.split(" | ")
    for number, plan in enumerate(plans, 1):
        paceline.train(
            job, plan, run=tmp_path / "many", steps=6 * number // len(plans), resume=number > 1
        )
    paceline.train(job, "single", run=tmp_path / "one", steps=6)

    actual, expected = (load_file(tmp_path / run / "model.safetensors") for run in ("many", "one"))
    assert all(
        torch.allclose(actual[name], expected[name], rtol=0, atol=1e-12) for name in expected
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["shard=2", pytest.param("servers=2 workers=2", marks=pytest.mark.slow)]
)
def test_a_model_may_first_run_in_another_s_loss(tmp_path: Path, plan: str) -> None:
    """A critic that judges a decoder before it is trained itself."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward(
            "decoder", batch, lambda out, batch: F.softplus(-ctx.run("critic", out)).mean()
        )
        ctx.update("decoder")
        fake = ctx.run("decoder", batch)
        ctx.backward("critic", fake, lambda out, batch: F.softplus(out).mean())
        ctx.update("critic")

    job = paceline.Job(
        models={"decoder": small(), "critic": small(3, 1)},
        optimizers={"decoder": adam, "critic": adam},
        training_step=step,
        **fields(),
    )
    for run in ("single", plan):
        paceline.train(job, run, run=tmp_path / run, steps=3)

    actual, expected = (load_file(tmp_path / run / "model.safetensors") for run in (plan, "single"))
    assert all(
        torch.allclose(actual[name], expected[name], rtol=0, atol=1e-12) for name in expected
    )


def _overflowing() -> paceline.Job:
    """In the second step the gradient of `a` overflows, by a sample of the last rank; that of `b` doesn't."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        factor = torch.ones(len(batch), 1)
        if ctx.step == 1:
            factor[-1] = 3e38
        ctx.backward(
            "a", batch, lambda out, batch, factor: (factor * (out - batch.target)).mean(), factor
        )
        ctx.backward("b", batch, lambda out, batch: F.mse_loss(out, batch.target))
        ctx.update("a")
        ctx.update("b")

    return paceline.Job(
        models={"a": small(), "b": small()},
        optimizers={"a": adam, "b": adam},
        training_step=step,
        **fields(precision="fp16"),
    )


def test_loss_scaling_skips_one_update_on_all_ranks(tmp_path: Path) -> None:
    """The scale is halved once, and followers, ranks and the other optimizer go on."""
    job = _overflowing()
    weights = []
    for steps in (1, 2):
        summary = paceline.train(job, "data=2", run=tmp_path / f"{steps}", steps=steps)
        weights.append(load_file(tmp_path / f"{steps}" / "model.safetensors"))
    same = {
        name.partition(".")[0]: torch.equal(weights[0][name], weights[1][name])
        for name in weights[0]
    }
    assert same == {"a": True, "b": False}
    assert summary["loss_scale"] == 2.0**15 and summary["skipped_steps"] == 1


@pytest.mark.slow
def test_what_messages_leave_out_is_kept(tmp_path: Path) -> None:
    """A resumed run goes on bit by bit with the residuals of every model."""
    job = own_steps.gan_with_penalty()
    for run, stops in (("whole", (4,)), ("parts", (2, 4))):
        for steps in stops:
            paceline.train(
                job,
                "data=2 compress=topk",
                run=tmp_path / run,
                steps=steps,
                resume=steps > stops[0],
            )

    whole, parts = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_rank_draws_the_rows_of_its_samples() -> None:
    """Each operator that has samples in front; one that does not is drawn alike."""

    def drawn(rows: int, first: int) -> list[torch.Tensor]:
        with WindowDraws(
            rows=rows, first=first, count=12, key=(0, "own step", 3), device=torch.device("cpu")
        ):
            x = torch.ones(rows, 2)
            return [
                torch.randn(rows, 2),
                torch.rand_like(x),
                torch.randint(9, (rows,)),
                x.clone().uniform_(),
                torch.bernoulli(x / 2),
                torch.multinomial(torch.ones(rows, 4), 1),
                torch.poisson(x * 3),
                torch.nn.functional.dropout(x),
                torch.distributions.Gamma(x, x).sample(),
                torch.randn(1, 5),
            ]

    whole, part = drawn(12, 0), drawn(5, 7)

    assert all(
        torch.equal(mine, all_of_it[7:])
        for mine, all_of_it in zip(part[:-1], whole[:-1], strict=True)
    )
    assert torch.equal(part[-1], whole[-1])


def test_what_is_drawn_for_all_samples_is_drawn_whole() -> None:
    """For what `gather` returns, of which a rank takes its places; a permutation of a rank's samples is refused."""

    def drawn(rows: int, first: int) -> list[torch.Tensor]:
        with WindowDraws(
            rows=rows, first=first, count=12, key=(0, "own step", 3), device=torch.device("cpu")
        ):
            return [torch.randperm(12), torch.randn(12, 2), torch.rand_like(torch.ones(12))]

    whole, part = drawn(12, 0), drawn(5, 7)

    assert all(torch.equal(mine, all_of_it) for mine, all_of_it in zip(part, whole, strict=True))
    with (
        WindowDraws(rows=5, first=7, count=12, key=(0,), device=torch.device("cpu")),
        pytest.raises(
            paceline.PacelineError, match=r"torch.randperm\(5\) where it has 5 of the step's 12"
        ),
    ):
        torch.randperm(5)


def test_what_is_no_sample_is_drawn_alike_whatever_its_shape() -> None:
    """Also where a rank has as many samples as it has rows."""

    def drawn(rows: int, first: int) -> list[torch.Tensor]:
        draws = WindowDraws(
            rows=rows, first=first, count=12, key=(0, "own step", 3), device=torch.device("cpu")
        )
        with draws:
            with draws.alike():
                alike = [
                    torch.rand(5),
                    torch.randperm(5),
                    torch.poisson(torch.ones(5)),
                    torch.rand(1, 3),
                ]
            return [*alike, torch.rand(rows)]

    *whole, of_all = drawn(12, 0)
    for rows, first in ((5, 7), (1, 2)):
        *part, of_part = drawn(rows, first)
        assert all(
            torch.equal(mine, all_of_it) for mine, all_of_it in zip(part, whole, strict=True)
        )
        assert torch.equal(of_part, of_all[first : first + rows])


def test_a_batch_is_cut_as_it_was_made() -> None:
    """Micro-batches without samples hold one that counts nothing."""
    x = torch.arange(6.0)
    batch = StepBatch(
        [MicroBatch(x[:4], x[:4], 4), MicroBatch(x[4:], x[4:], 2), MicroBatch(x[:1], x[:1], 0)]
    )

    assert len(batch) == 6 and torch.equal(batch.input, x)
    assert [part.tolist() for part in batch.cut(x * 2, "what it is")] == [
        [0, 2, 4, 6],
        [8, 10],
        [0],
    ]
    with pytest.raises(paceline.PacelineError, match="what it is has a tensor of shape"):
        batch.cut(torch.ones(5), "what it is")


def test_a_list_with_an_item_for_each_sample_is_cut_and_joined() -> None:
    """Such as boxes, of which images have different numbers, and words."""
    target = [{"boxes": torch.ones(count, 4)} for count in (2, 3, 1)]
    words = ["a", "b", "c"]
    batch = StepBatch(
        [MicroBatch(torch.zeros(2, 1), target[:2], 2), MicroBatch(torch.zeros(1, 1), target[2:], 1)]
    )

    assert [len(each["boxes"]) for each in batch.target] == [2, 3, 1]
    assert [[len(each["boxes"]) for each in part] for part in batch.cut(batch.target, "boxes")] == [
        [2, 3],
        [1],
    ]
    assert batch.cut({"words": words}, "words") == [{"words": ["a", "b"]}, {"words": ["c"]}]
    pair = StepBatch([MicroBatch((torch.zeros(2), torch.ones(2)), None, 2)] * 2)
    assert [part.tolist() for part in pair.input] == [[0] * 4, [1] * 4]
    record = StepBatch(
        [MicroBatch(Record(torch.zeros(2)), None, 2), MicroBatch(Record(torch.ones(1)), None, 1)]
    )
    assert record.input.rows.tolist() == [0, 0, 1]


def test_a_step_draws_in_the_precision_of_the_job_and_by_no_generator_of_its_own() -> None:
    with WindowDraws(
        rows=3, first=0, count=3, key=(0,), device=torch.device("cpu"), dtype=torch.float64
    ) as draws:
        assert torch.randn(3).dtype is torch.zeros(2).dtype is torch.float64
        with draws.makes_on.paused():
            assert torch.zeros(2).dtype is torch.float32
        with pytest.raises(paceline.PacelineError, match="generator of its own"):
            torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert torch.zeros(2).dtype is torch.float32


def test_what_a_generator_draws_is_on_its_device() -> None:
    """As where no device is the default. In a step it is refused, wherever the tensor would be."""
    generator, elsewhere = torch.Generator(), torch.device("meta")
    expected = torch.randint(8, (3,), generator=generator.manual_seed(3))
    with MakesOn(elsewhere):
        assert torch.equal(torch.randint(8, (3,), generator=generator.manual_seed(3)), expected)
        assert torch.zeros(3).device == torch.randn(3).device == elsewhere

    with (
        WindowDraws(rows=3, first=0, count=3, key=(0,), device=elsewhere),
        pytest.raises(TrainingError, match="generator of its own"),
    ):
        torch.randn(3, generator=generator)


def test_what_a_rank_gathers_and_runs_alike() -> None:
    """And the messages of what does not fit."""
    pieces = [MicroBatch(torch.zeros(2, 3), torch.zeros(2), 2)]
    verbs = Verbs.__new__(Verbs)
    verbs.batch, verbs.loss_samples, verbs.first = StepBatch(pieces), None, 2
    verbs.taken = OwnStep.__new__(OwnStep)
    verbs.state = verbs.taken.state = SimpleNamespace(  # type: ignore[assignment]
        device="cpu",
        parts={"net": None},
        step_sync=SimpleNamespace(has_own_steps=False, world_size=1),
    )
    verbs.draws = WindowDraws(rows=2, first=2, count=4, key=(0,), device=torch.device("cpu"))

    assert verbs.places.tolist() == [2, 3]
    with verbs.draws:
        assert verbs.gather({"a": torch.ones(2, 5)})["a"].shape == (2, 5)
        with pytest.raises(paceline.PacelineError, match=r"of shape \(3,\), and the batch has 2"):
            verbs.gather(torch.zeros(3))
        with pytest.raises(paceline.PacelineError, match="other samples on each rank"):
            verbs.run("net", verbs.batch, cut=False)
    verbs.loss_samples = 2
    with pytest.raises(paceline.PacelineError, match="inside a loss"):
        verbs.gather(torch.zeros(2))
    with pytest.raises(AttributeError, match="no 'models': it has alike, backward"):
        verbs.models  # noqa: B018


def test_optimizers_share_their_state_and_groups() -> None:
    named = [(f"a.{key}", p) for key, p in small()().named_parameters()]
    optimizers = NamedOptimizers.of(
        {
            "matrices": paceline.Optimizer(adam, parameters=lambda name, p: p.ndim == 2),
            "rest": paceline.Optimizer(adam, parameters=lambda name, p: p.ndim != 2),
        },
        named,
        ["a"],
    )
    for _, p in named:
        p.grad = torch.ones_like(p)

    optimizers.members["rest"].step()

    assert {p.ndim for p in optimizers.state} == {1}
    assert sum(len(group["params"]) for group in optimizers.param_groups) == len(named)
