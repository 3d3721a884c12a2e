"""Steps of a job's own: certified as they are, not with a planted bug, and refused where a plan can't run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline
from paceline.errors import JobError, PlanError
from paceline.job.named_optimizers import NamedOptimizers
from paceline.runtime.feed import MicroBatch
from paceline.runtime.named_parts import _OfPart
from paceline.runtime.step_batch import StepBatch
from paceline.runtime.step_draws import WindowDraws
from paceline.runtime.verbs import Verbs
from tests.corpus import own_steps
from tests.corpus.own_steps import adam, fields, small

JOBS = ("gan_with_penalty", "distillation", "self_distillation", "muon_beside_adamw", "actor_critic", "masked_tokens")


def certificate(name: str, plan: str) -> Any:
    found, = paceline.verify(getattr(own_steps, name)(), [plan], steps=3, resume="no")
    return found


def _without_reduction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_OfPart, "finish", lambda self: None)


def _with_all_gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients of earlier losses are lost."""
    patch.setattr(Verbs, "_set_aside", lambda self, names: {})


def _without_followers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("paceline.runtime.stepper.follow", lambda *_: None)


def _with_own_draws(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws for its own samples alone."""
    patch.setattr(WindowDraws, "_drawn", lambda self, func, args, kwargs: func(*args, **kwargs))


def _without_one_optimizer(patch: pytest.MonkeyPatch) -> None:
    update = Verbs.update
    patch.setattr(Verbs, "update", lambda self, name: update(self, name) if name != "rest" else
                  self.waiting.difference_update(self.stepper.optimizer.names[name]))


def _with_means_of_counts(patch: pytest.MonkeyPatch) -> None:
    """A sum is divided by what this rank counts."""
    patch.setattr("paceline.runtime.stepper.Stepper.scale_gradients", lambda self, factor, parameters: None)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "gan_with_penalty": _with_own_draws, "distillation": _without_reduction, "self_distillation": _without_followers,
    "muon_beside_adamw": _without_one_optimizer, "actor_critic": _with_means_of_counts,
    "masked_tokens": _with_own_draws}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "self_distillation" else pytest.mark.slow)
                                  for name in JOBS])
def test_verify_certifies_a_step_and_catches_a_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas; the second window is short."""
    assert certificate(name, "data=3").verdict == "passed"
    PLANTED[name](monkeypatch)
    assert certificate(name, "data=3").verdict == "failed"


@pytest.mark.parametrize(("changes", "words"), [
    ({"optimizers": {"critic": adam}}, "no optimizer"),
    ({"optimizers": {"generator": adam, "critic": adam, "both": paceline.Optimizer(adam, parameters="critic")}},
     "'critic' and 'both'"),
    ({"optimizers": {"generator": adam, "critic": adam,
                     "idle": paceline.Optimizer(adam, parameters=lambda name, p: False)}}, "no parameter to update")])
def test_each_parameter_has_one_optimizer(changes: dict[str, Any], words: str) -> None:
    models = {"generator": small(), "critic": small()}
    job = paceline.Job(**{**fields(), "models": models, "step": lambda ctx, batch: None, **changes})

    with pytest.raises(JobError, match=words):
        job.optimizer(list(job.model().named_parameters()))


@pytest.mark.parametrize(("given", "words"), [
    ({"step": lambda ctx, batch: None}, "need"), ({"models": {"a": small()}}, "optimizers="),
    ({"models": {"a": small()}, "optimizers": {"b": adam}, "loss": F.mse_loss}, "named after no model"),
    ({"models": {"a": small(), "b": small()}, "optimizers": {"a": adam, "b": adam}}, "step="),
    ({"models": {"a": small()}, "optimizers": {"a": adam}, "loss": F.mse_loss, "clip": 1.0}, "clip belongs"),
    ({"models": {"a": small()}, "optimizers": {"a": adam}, "loss": F.mse_loss,
      "followers": {"f": paceline.ema("b", 0.9)}}, "follows 'b'"),
    ({"models": {"a": small()}, "optimizers": {"a": adam}, "step": lambda ctx, batch: None,
      "validation": fields()["data"]}, "needs validate="),
    ({"models": {"a": small()}, "optimizers": {"a": adam}, "loss": F.mse_loss, "model": small()}, "either model")])
def test_fields_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        paceline.Job(**{**fields(), **given})


@pytest.mark.parametrize("plan", ["server=1 workers=2", "data=2 compress=int8", "data=2 local=4"])
def test_plans_that_can_not_run_a_step(plan: str) -> None:
    with pytest.raises(PlanError, match="models= don't compose"):
        paceline.train(own_steps.distillation(), plan)


def test_a_rank_draws_the_rows_of_its_samples() -> None:
    """Each operator that has samples in front; one that does not is drawn alike."""
    def drawn(rows: int, first: int) -> list[torch.Tensor]:
        with WindowDraws(rows=rows, first=first, count=12, key=(0, "own step", 3),
                         device=torch.device("cpu")):
            x = torch.ones(rows, 2)
            return [torch.randn(rows, 2), torch.rand_like(x), torch.randint(9, (rows,)), x.clone().uniform_(),
                    torch.bernoulli(x / 2), torch.multinomial(torch.ones(rows, 4), 1), torch.poisson(x * 3),
                    torch.nn.functional.dropout(x), torch.distributions.Gamma(x, x).sample(), torch.randn(1, 5)]

    whole, part = drawn(12, 0), drawn(5, 7)

    assert all(torch.equal(mine, all_of_it[7:]) for mine, all_of_it in zip(part[:-1], whole[:-1], strict=True))
    assert torch.equal(part[-1], whole[-1])


def test_a_batch_is_cut_as_it_was_made() -> None:
    """Micro-batches without samples hold one that counts nothing."""
    x = torch.arange(6.0)
    batch = StepBatch([MicroBatch(x[:4], x[:4], 4), MicroBatch(x[4:], x[4:], 2), MicroBatch(x[:1], x[:1], 0)])

    assert len(batch) == 6 and torch.equal(batch.input, x)
    assert [part.tolist() for part in batch.cut(x * 2, "what it is")] == [[0, 2, 4, 6], [8, 10], [0]]
    with pytest.raises(paceline.PacelineError, match="what it is has a tensor of shape"):
        batch.cut(torch.ones(5), "what it is")


def test_optimizers_share_their_state_and_groups() -> None:
    named = [(f"a.{key}", p) for key, p in small()().named_parameters()]
    optimizers = NamedOptimizers.of({
        "matrices": paceline.Optimizer(adam, parameters=lambda name, p: p.ndim == 2),
        "rest": paceline.Optimizer(adam, parameters=lambda name, p: p.ndim != 2)}, named, ["a"])
    for _, p in named:
        p.grad = torch.ones_like(p)

    optimizers.members["rest"].step()

    assert {p.ndim for p in optimizers.state} == {1}
    assert sum(len(group["params"]) for group in optimizers.param_groups) == len(named)
