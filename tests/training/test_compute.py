"""`compute=`: a function of the model and of the loader's own batch, under plans, beside a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

import paceline as pl
from paceline.base.errors import JobError, PacelineError
from paceline.base.streams import seed_model
from paceline.training.feed import fetch

SAMPLES, BATCH, LABELS = 22, 8, 3  # the last of three batches is short
PLANS = ("data=3", "shard=2", "tensor=2", "pipeline=2", "microbatches=2")


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.2, momentum=0.9)


class Classifier(nn.Module):
    """Listed layers, and a root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, LABELS))
        self.temperature = nn.Parameter(torch.ones(LABELS))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.temperature


class Autoencoder(nn.Module):
    """Three outputs; the noise of its latent values is part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 6))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


class Rows(Dataset[Any]):
    """Samples as mappings, as many loaders give them."""

    def __init__(self, *, is_mapping: bool = True) -> None:
        draws = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 6, generator=draws, dtype=torch.float64)
        self.noise = torch.randn(SAMPLES, 2, generator=draws, dtype=torch.float64)
        self.y = torch.randint(LABELS, (SAMPLES,), generator=draws)
        self.is_mapping = is_mapping

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.is_mapping:
            return {"x": self.x[index], "of": {"y": self.y[index]}}
        return self.x[index], self.noise[index]


def classify(model: nn.Module, batch: Any) -> Any:
    """A mean over samples, and figures of both forms."""
    output, y = model(batch["x"]), batch["of"]["y"]
    figures = {
        "accuracy": (output.argmax(1) == y).double().mean(),
        "accuracy_of_some": ((output.argmax(1) == y)[y != 1].sum(), (y != 1).sum()),
    }
    return F.cross_entropy(output, y), figures


def classify_some(model: nn.Module, batch: Any) -> Any:
    """A sum, and the count of the labels that are not left out."""
    y = torch.where(batch["of"]["y"] == 1, -100, batch["of"]["y"])
    return F.cross_entropy(model(batch["x"]), y, reduction="sum"), (y != -100).sum()


def reconstruct(model: nn.Module, batch: Any) -> Any:
    x, noise = batch
    output, mean, log_variance = model(x, noise)
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    error = F.mse_loss(output, x, reduction="none").sum(1).mean()
    return error + divergence, {"divergence": divergence.detach()}


def job_of(
    compute: Callable[[nn.Module, Any], Any], model: type[nn.Module] = Classifier, **changes: Any
) -> pl.Job:
    data = Rows(is_mapping=issubclass(model, Classifier))
    loader = DataLoader(data, BATCH, sampler=SequentialSampler(data))
    fields = {"optimizer": sgd, "epochs": 2, "precision": "float64", **changes}
    return pl.Job(model=model, data=loader, compute=compute, **fields)


def by_hand(
    job: pl.Job, model: nn.Module, compute: Any
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train the model in a plain loop over the loader that the job was given."""
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    loader = DataLoader(job.data, BATCH)
    for batch in [*loader, *loader]:
        optimizer.zero_grad()
        value = compute(model, batch)
        has_figures = isinstance(value[1:], tuple) and isinstance(value[1], dict)
        loss, figures = value if has_figures else (value, {})
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        yield (
            float(loss.detach()),
            {
                name: float(each[0]) / float(each[1]) if isinstance(each, tuple) else float(each)
                for name, each in figures.items()
            },
        )


def close(value: Any, expected: Any) -> bool:
    return bool(value == pytest.approx(expected, rel=0, abs=1e-12, nan_ok=True))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("compute", "model"),
    [(classify, Classifier), (classify_some, Classifier), (reconstruct, Autoencoder)],
)
@pytest.mark.sweep(1)
def test_plans_equal_a_loop_by_hand(
    plan: str, compute: Any, model: type[nn.Module], tmp_path: Path
):
    """Losses, figures and weights are those of the loop, also where parts are uneven."""
    job = job_of(compute, model)
    seed_model(job.seed)
    plain = model().double()
    expected = list(by_hand(job, plain, compute))

    result = pl.train(job, plan, run=tmp_path / "run", table=False)

    rows = [row for row in result.history if "loss" in row]
    assert close([row["loss"] for row in rows], [loss for loss, _ in expected])
    for row, (_, figures) in zip(rows, expected, strict=True):
        assert close(row.get("metrics", {}), figures)
    trained = result.model()
    assert type(trained) is model
    for name, p in plain.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), p, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_validate_takes_the_place_of_compute_in_evaluations(tmp_path: Path):
    """Without it, `compute` gives the validation loss and metrics, over all samples once."""
    data = Rows()
    whole = next(iter(DataLoader(data, SAMPLES)))

    def validate(model: nn.Module, batch: Any) -> Any:
        assert not model.training and not torch.is_grad_enabled()
        return {"loss": classify(model, batch)[0], "size": model(batch["x"]).square().mean()}

    job = job_of(classify, validation=data, epochs=1)
    for name, each in {"compute": job, "validate": replace(job, validation_step=validate)}.items():
        result = pl.train(each, "data=3", run=tmp_path / name, table=False)
        model = result.model()
        with torch.no_grad():
            loss, figures = classify(model, whole)
            size = float(model(whole["x"]).square().mean())
        right, count = figures["accuracy_of_some"]
        expected = {
            "accuracy": float(figures["accuracy"]),
            "accuracy_of_some": float(right) / float(count),
        }
        others = expected if name == "compute" else {"size": size}
        assert close(result.metrics, {"validation_loss": float(loss), **others})


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=3", "pipeline=2"])
def test_figures_come_when_they_come(plan: str, tmp_path: Path):
    """One sample of the second batch brings new names, which no other rank has."""
    bringing = Rows().x[13]

    def compute(model: nn.Module, batch: Any) -> Any:
        is_it = (batch["x"] == bringing).all(1)
        late = {"late": (3 * is_it.sum(), is_it.sum()), "odd": (is_it.sum() / 0, 1)}
        return classify(model, batch)[0], late if plan != "data=3" or is_it.any() else {}

    result = pl.train(job_of(compute), plan, run=tmp_path / "run", table=False)

    rows = [row.get("metrics") for row in result.history if "loss" in row]
    come, others = {"late": 3.0, "odd": None}, None if plan == "data=3" else {"odd": None}
    assert rows == [others, come, others] * 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", ["single", "data=2", "servers=1 workers=2"])
def test_evaluations_have_figures_of_some_batches(plan: str, tmp_path: Path):
    """Ranks have figures of other names, and in another order; each name is summed by itself."""
    first, last = Rows().x[13], Rows().x[5]

    def validate(model: nn.Module, batch: Any) -> Any:
        figures = {"loss": classify(model, batch)[0]}
        is_last, is_first = (batch["x"] == last).all(1).any(), (batch["x"] == first).all(1).any()
        if is_first:
            figures |= {"first": (torch.tensor(3.0), 1)}
        figures |= {"ones": (torch.tensor(1.0), 1), "none": (torch.tensor(0.0), 0)}
        if is_last:
            figures |= {"last": (torch.tensor(5.0), 1), "first": (torch.tensor(9.0), 2)}
        return figures

    job = job_of(lambda model, batch: classify(model, batch)[0], epochs=1)
    job = replace(job, validation=Rows(), validation_step=validate)
    result = pl.train(job, plan, run=tmp_path / "run", table=False)

    with torch.no_grad():
        whole = classify(result.model(), next(iter(DataLoader(Rows(), SAMPLES))))[0]
    loss = float(whole)
    expected = {"validation_loss": loss, "first": 4.0, "ones": 1.0, "last": 5.0}
    assert close(result.metrics, expected)


@pytest.mark.slow
def test_figures_are_those_of_the_first_evaluation(tmp_path: Path):
    """An optimizer with a closure computes the loss of a step several times."""

    def compute(model: nn.Module, batch: Any) -> Any:
        loss = classify(model, batch)[0]
        return loss, {"again": loss.detach()}

    job = job_of(compute, optimizer=lambda named: torch.optim.LBFGS([p for _, p in named], 0.1))
    result = pl.train(job, "data=2", run=tmp_path / "run", table=False)

    rows = [row for row in result.history if "loss" in row]
    assert close([row["metrics"]["again"] for row in rows], [row["loss"] for row in rows])


class Counting(Classifier):
    """It counts its forwards in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x)


def test_what_looks_ahead_leaves_the_model_as_it_is(tmp_path: Path):
    """The names of an evaluation's figures are found by a forward before the first step."""
    job = job_of(classify, Counting, steps=1, epochs=None, validation=Rows())

    trained = pl.train(job, "single", run=tmp_path / "run", table=False).model()

    assert (
        trained.get_buffer("forwards") == 1 + 3
    )  # of the step, and of three batches that are evaluated


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DataLoader(TensorDataset(torch.randn(9, 3), torch.randn(9, 1)), 4), list),
        (DataLoader(TensorDataset(torch.randn(9, 3)), 4), list),
        (DataLoader([{"x": torch.randn(3)}] * 9, 4), dict),
        (DataLoader(torch.randn(9, 3), 4), Tensor),
        (DataLoader([(torch.randn(3), 1.0)] * 9, 4, collate_fn=tuple), tuple),
    ],
)
def test_the_batch_is_the_loaders_own(data: DataLoader[Any], kind: type):
    """Its classes and its values are those of the loader."""
    job = pl.Job(
        model=lambda: nn.Linear(3, 1), data=data, compute=lambda *_: 0, optimizer=sgd, steps=1
    )
    indices = [4, 7, 1]
    expected = (data.collate_fn or list)([data.dataset[index] for index in indices])

    (batch,), target = fetch(job.data, indices, indices, seed=0, collate=job.collate)

    assert type(batch) is kind and target is None
    torch.testing.assert_close(batch, expected)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """Each sample is to be nearer to itself than to the others of its batch."""
    output = model(batch["x"])
    likeness = output @ (output + batch["x"][:, :LABELS]).T
    return F.cross_entropy(likeness, torch.arange(len(output), device=output.device))


@pytest.mark.slow
@pytest.mark.checked_runs
def test_a_loss_that_compares_samples_is_found(tmp_path: Path):
    """The check of the first update names the cause under a plan that cuts the batch, and passes another one."""
    job = job_of(contrast, epochs=1)

    check = pl.train(job, "data=2", run=tmp_path / "cut", table=False)["check"]

    assert "the loss of compute is" in check["reason"] and "compares samples" in check["reason"]
    assert (
        pl.train(job, "tensor=2", run=tmp_path / "whole", table=False)["check"]["verdict"]
        == "passed"
    )


@pytest.mark.checked_runs
def test_a_state_of_its_own_is_found(tmp_path: Path):
    """Ranks would have a state each."""
    calls = [0]

    def compute(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return classify(model, batch)[0] * calls[0]

    with pytest.raises(PacelineError, match="the loss keeps a state of its own"):
        pl.train(job_of(compute, epochs=1), "data=2", run=tmp_path, table=False)


@pytest.mark.slow
@pytest.mark.checked_runs
def test_the_first_update_is_checked(tmp_path: Path):
    """The proof's one device computes the batch as ranks do."""
    result = pl.train(job_of(classify, steps=2, epochs=None), "data=3", run=tmp_path, table=False)

    assert result["check"]["verdict"] == "passed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": F.cross_entropy}, "either loss or compute"),
        ({"metrics": {"a": F.mse_loss}, "validation": Rows()}, "a batch of compute= has no target"),
        ({"model": None, "models": {"net": Classifier}}, "compute is for one model"),
        ({"compute": "classify"}, "compute must be a function"),
        ({"validation_step": classify}, "give validation="),
    ],
)
def test_fields_that_contradict_it_are_refused(changes: dict[str, Any], message: str):
    """The message says what to give."""
    with pytest.raises(JobError, match=message):
        replace(job_of(classify), **changes)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "figures", "message"),
    [
        ("data=2 local=2", {"accuracy": 1.0}, "data=N and shard=N"),
        ("servers=1 workers=2", {"accuracy": 1.0}, "data=N and shard=N"),
        ("single", {"lr": 1.0}, "give the figure another name"),
    ],
)
def test_figures_that_a_plan_or_a_run_can_not_have(
    plan: str, figures: dict[str, Any], message: str, tmp_path: Path
):
    """They are refused in the first step, with the plan that has them or what to do."""
    job = job_of(lambda model, batch: (classify(model, batch)[0], figures))

    with pytest.raises(PacelineError, match=message):
        pl.train(job, plan, run=tmp_path / "run", table=False)


@pytest.mark.slow
def test_a_course_that_depends_on_values_is_refused_where_it_is_recorded(tmp_path: Path):
    """A plan that keeps the model whole runs it."""

    def compute(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)[0]
        return loss * 2 if loss.item() > 1e9 else loss

    job = job_of(compute, steps=1, epochs=None)
    with pytest.raises(PacelineError, match="data=N and shard=N plans run it as it is"):
        pl.train(job, "tensor=2", run=tmp_path / "cut", table=False)
    assert pl.train(job, "single", run=tmp_path / "whole", table=False)["steps"] == 1
