"""Parameters that the loss does not use in some steps or in all: trained as a plain loop trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler, default_collate

import paceline
from paceline.launch.process.failure import RankFailed

SAMPLES, BATCH, STEPS, STOP = 24, 6, 6, 3
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (SAMPLES,), generator=torch.Generator().manual_seed(2))
LANGUAGES = ("de", "fr")


class Samples(Dataset[Any]):
    """Each window is of one language."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "language": LANGUAGES[index // BATCH % 2]}, Y[index]


class Body(nn.Module):
    """Blocks, and layers that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare = nn.Linear(4, 4), nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Adapters(Body):
    """A layer and a scale of the language that the batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({language: nn.Linear(4, 4) for language in LANGUAGES})
        self.scales = nn.ParameterDict({language: torch.ones(4) for language in LANGUAGES})

    def forward(self, x: Tensor, language: list[str]) -> Tensor:
        return self.head(
            self.hidden(x + torch.tanh(self.layers[language[0]](x)) * self.scales[language[0]])
        )


class Routed(Body):
    """A layer for samples of some values, which only some steps have, and in those only some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.scale = (
            nn.ModuleDict({"layer": nn.Linear(4, 4)}),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x: Tensor, language: list[str]) -> Tensor:
        hidden = self.hidden(x)
        for row in (x[:, 0] > 1.0).nonzero()[:, 0]:
            hidden = hidden.index_add(
                0, row[None], (self.rare["layer"](hidden[row]) * self.scale)[None]
            )
        return self.head(hidden)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.02, weight_decay=0.5)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.1)


def a_job(
    model: type[nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **changes: Any,
) -> paceline.Job:
    data = Samples()
    fields: dict[str, Any] = {
        "model": seeded(model),
        "data": data,
        "loss": F.cross_entropy,
        "optimizer": optimizer,
        "batch": BATCH,
        "steps": STEPS,
        "precision": "float64",
        "sampler": SequentialSampler(data),
        "clip": 0.5,
    }
    return paceline.Job(**{**fields, **changes})


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return model


def windows() -> Any:
    for step in range(STEPS):
        start = step * BATCH % SAMPLES
        inputs, target = default_collate(
            [Samples()[index] for index in range(start, start + BATCH)]
        )
        yield {**inputs, "x": inputs["x"].double()}, target


def trained_plainly(job: paceline.Job) -> dict[str, Tensor]:
    model = job.model().double()
    optimizer = job.optimizer(list(model.named_parameters()))
    for inputs, target in windows():
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
    return model.state_dict()


def trained(job: paceline.Job, plan: str, then: str, run: Path) -> dict[str, Tensor]:
    """Stopped after some steps, and resumed under a plan that may be another one."""
    paceline.train(replace(job, steps=STOP), plan, run=run, save_every=STOP)
    paceline.train(job, then, run=run, resume=True)
    return load_file(run / "model.safetensors")


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].double(), tensor, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("model", "optimizer", "plan", "then"),
    [
        (Routed, momentum, "data=2", "data=3 microbatches=2"),
        (Routed, adamw, "shard=2", "shard=2 zero=1"),
        (Routed, momentum, "shard=2 zero=2", "single"),
        (Routed, momentum, "servers=2 workers=2", "servers=2 workers=2"),
        (Routed, adamw, "data=2 recompute=full", "servers=1 workers=2"),
        (Routed, adamw, "single", "data=2 shard=2"),
        (Adapters, adamw, "single", "shard=2"),
        (Adapters, adamw, "pipeline=2", "tensor=2"),
        (Adapters, momentum, "tensor=2", "place=2"),
        (Adapters, momentum, "data=2 tensor=2", "shard=2 zero=1"),
        (Adapters, adamw, "pipeline=2 schedule=zero-bubble", "shard=2 pipeline=2"),
        (Adapters, momentum, "shard=2", "pipeline=2"),
    ],
)
def test_parameters_without_a_gradient_stay(
    tmp_path: Path, model: type[nn.Module], optimizer: Any, plan: str, then: str
):
    """Weight decay, momentum and moments move no parameter in a step in which no sample uses it."""
    job = a_job(model, optimizer)

    assert_same(trained(job, plan, then, tmp_path / "run"), trained_plainly(job))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "servers=1 workers=2"])
def test_it_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str], plan: str):
    """With the step and the names; there is no word of those that stand in a list beside used ones."""
    paceline.train(a_job(Adapters, steps=3), plan, run=tmp_path / "run")

    told = capfd.readouterr().err
    assert told.count("does not depend on") == 1, told
    assert (
        "the loss of step 1 does not depend on 5 of 18 parameters: spare.weight, spare.bias, layers.fr.w"
        in told
    )


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden) * self.scale


def heads_in_turn(ctx: Any, batch: Any) -> None:
    """Every optimizer steps, with or without a gradient."""
    inputs, _ = batch
    head = "one" if ctx.step % 3 else "other"
    ctx.backward(
        ("body", "one", "other"),
        inputs["x"],
        lambda hidden, piece: F.cross_entropy(ctx.run(head, hidden), piece.target),
    )
    for name in ("body", "one", "other"):
        ctx.update(name)


@pytest.mark.sweep(1)
@pytest.mark.checked_runs
@pytest.mark.parametrize("plan", ["single", "data=2", "shard=2"])
def test_a_step_of_ones_own(tmp_path: Path, plan: str):
    """An optimizer of a model that the loss did not use updates nothing, as in a plain loop. A check ends before the
    other head's turn, and finds all the same what it is run with."""
    builds = {"body": Hidden, "one": Head, "other": Head}
    job = paceline.Job(
        models={name: seeded(build) for name, build in builds.items()},
        optimizers=dict.fromkeys(builds, adamw),
        training_step=heads_in_turn,
        data=Samples(),
        batch=BATCH,
        steps=STEPS,
        precision="float64",
        sampler=SequentialSampler(Samples()),
    )
    models = {name: seeded(build)().double() for name, build in builds.items()}
    optimizers = [adamw(list(model.named_parameters())) for model in models.values()]
    for step, (inputs, target) in enumerate(windows()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(
            models["one" if step % 3 else "other"](models["body"](inputs["x"])), target
        ).backward()
        for optimizer in optimizers:
            optimizer.step()

    actual = trained(job, plan, plan, tmp_path / "run")

    assert_same(
        actual,
        {
            f"{name}.{key}": tensor
            for name, model in models.items()
            for key, tensor in model.state_dict().items()
        },
    )


@pytest.mark.sweep(1)
@pytest.mark.checked_runs
@pytest.mark.parametrize(("plan", "precision"), [("data=2", "fp16"), ("shard=2", "bf16")])
def test_unused_parameters_stay_in_short_precisions(tmp_path: Path, plan: str, precision: str):
    """To the last bit, and the check of the first update passes."""
    job = a_job(Adapters, momentum, precision=precision, steps=3)
    initial = job.model().state_dict()

    summary = paceline.train(job, plan, run=tmp_path / "run")

    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert summary["steps"] == 3
    assert all(torch.equal(weights[name], initial[name]) for name in ("spare.weight", "spare.bias"))
    assert not torch.equal(weights["layers.fr.weight"], initial["layers.fr.weight"])
    assert summary["check"]["verdict"] == "passed"


# --- Gradients that hooks use up --------------------------------------------------------------------------------------


class UpdatedInBackward(Adapters):
    """Each parameter is updated as soon as its gradient is there, and no gradient is left."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @staticmethod
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None


class TakenAway(Adapters):
    """A hook freezes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(
            lambda parameter: setattr(parameter, "grad", None)
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "tensor=2", "place=2"])
def test_an_optimizer_step_in_backward(tmp_path: Path, plan: str):
    """Where a backward sees the whole batch, it trains as in a plain loop."""
    job = a_job(UpdatedInBackward)

    paceline.train(job, plan, run=tmp_path / "run")

    assert_same(load_file(tmp_path / "run" / "model.safetensors"), trained_plainly(job))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["data=2", "shard=2", "servers=1 workers=2", "single microbatches=2"]
)
def test_an_optimizer_step_in_backward_of_a_part_of_the_batch(tmp_path: Path, plan: str):
    """Its hook is named before anything is updated."""
    with pytest.raises(
        RankFailed,
        match=r"step 1 (?s:.*)hook on 'head\.bias' \(register_post_accumulate_grad_hook\)",
    ):
        paceline.train(a_job(UpdatedInBackward), plan, run=tmp_path / "run")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_a_gradient_that_a_hook_takes_away(tmp_path: Path, plan: str):
    """Its parameter stays as it is."""
    job = a_job(TakenAway)

    paceline.train(job, plan, run=tmp_path / "run")

    assert_same(load_file(tmp_path / "run" / "model.safetensors"), trained_plainly(job))
