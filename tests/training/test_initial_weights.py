"""A job that begins with pretrained weights: from every kind of source, under every plan, in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.perceptrons import ResidualBlock
from planted import no_bug, verified
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import paceline as pl
from paceline.base.errors import JobError
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.memory_use import reset_peak, resident_peak_bytes
from paceline.training.initial import load_initial, matched, source_of
from paceline.training.loop import train_rank
from paceline.training.settings import Settings

WIDTH, NAMES = 8, 32


class Tied(nn.Module):
    """Blocks between an embedding and an output of the same weight, and a buffer that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NAMES, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock(WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, NAMES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def make_job(init: Any, **fields: Any) -> pl.Job:
    draws = torch.Generator().manual_seed(1)
    tokens = torch.randint(NAMES, (10, 5), generator=draws)
    return pl.Job(
        **{
            "model": Tied,
            "data": [(row, row.roll(1)) for row in tokens],
            "batch": 4,
            "steps": 4,
            "loss": lambda output, target: nn.functional.cross_entropy(
                output.transpose(1, 2), target
            ),
            "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01),
            "precision": "float64",
            "init": init,
            **fields,
        }
    )


def pretrained() -> dict[str, Tensor]:
    """Other weights than the seed's; the tied one by its second name alone."""
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in Tied().state_dict().items()}
    del state["embedding.weight"]
    return state


def train(job: pl.Job, plan: str, run: Path) -> dict[str, Tensor]:
    pl.train(job, plan, run=run)
    return load_file(run / "model.safetensors")


def by_hand(job: pl.Job, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first epoch of a loop without Paceline, but for the order of its data."""
    from paceline.proof.order import whole_batches

    model = Tied().double()
    model.load_state_dict(state, strict=False)
    optimizer = job.optimizer(list(model.named_parameters()))
    for batch in whole_batches(job, 4):
        optimizer.zero_grad()
        job.loss(model(batch.input), batch.target).backward()
        optimizer.step()
    return model.state_dict()


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "shard=2",
        "single",
        "data=3",
        "tensor=2",
        "pipeline=2",
        "place=2",
        "servers=2 workers=2",
        "data=2 local=1",
    ],
)
def test_every_plan_begins_with_the_weights_of_the_file(plan: str, tmp_path: Path) -> None:
    """Each rank puts its part of a float32 file into a float64 model and ends where a plain loop ends."""
    save_file(pretrained(), tmp_path / "weights.safetensors")
    job = make_job(tmp_path / "weights.safetensors")
    expected = by_hand(job, pretrained())
    assert_equal(train(job, plan, tmp_path / "run"), expected)


def _folder_of_shards(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    names = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(state)
    }
    for shard in set(names.values()):
        save_file({name: state[name] for name in names if names[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_every_source_gives_the_same(tmp_path: Path, run_ranks: Callable[..., Any]) -> None:
    """A state dict, a function, a folder of shards, a run that ended, a run that was left, and other names."""
    state = pretrained()
    _folder_of_shards(tmp_path / "shards", state)
    inner = {f"old.{name}": value for name, value in state.items()} | {"old.extra": torch.ones(2)}
    strip = lambda name: None if name.endswith("extra") else name.removeprefix("old.")  # noqa: E731
    once = train(make_job(state, steps=2), "single", tmp_path / "once")
    (tmp_path / "once" / "model.safetensors").rename(tmp_path / "moved.safetensors")
    sources = {
        "state": state,
        "function": lambda: dict(state),
        "folder": tmp_path / "shards",
        "text": str(tmp_path / "shards"),
        "renamed": pl.pretrained(inner, rename=strip),
        "by table": pl.pretrained(
            {name.removeprefix("blocks."): value for name, value in state.items()},
            rename={name.removeprefix("blocks."): name for name in state},
        ),
        "run": tmp_path / "once",
        "model": once,
        "step": tmp_path / "once" / "checkpoints" / "step-2",
    }

    def body(context: Any) -> None:
        for name, init in sources.items():
            train_rank(context, make_job(init), pl.Plan(), Settings(tmp_path / name, (1,)))

    for name in sources:
        (tmp_path / name).mkdir()
    run_ranks(body, 1)
    trained = {name: load_file(tmp_path / name / "model.safetensors") for name in sources}
    for name in sources:
        assert_equal(trained[name], trained["run" if name in ("run", "model", "step") else "state"])
    assert not torch.equal(trained["run"]["head.weight"], trained["state"]["head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("blocks.0.linear.bias"),
            "nothing for 1 of the model's weights: blocks.0.linear.bias",
        ),
        (lambda state: state.update(other=torch.ones(1)), "1 that the model doesn't: other"),
        (
            lambda state: state.update({"blocks.0.linear.bias": torch.ones(3)}),
            r"'blocks.0.linear.bias' has shape \(3,\)",
        ),
        (
            lambda state: [state.update({f"m.{name}": state.pop(name)}) for name in list(state)],
            r"removeprefix\('m\.'\)",
        ),
        (lambda state: state.update(model={}), "a dict for 'model'"),
    ],
)
def test_what_does_not_match_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """The message shows the names that differ, and the form that takes them."""
    state = pretrained()
    change(state)
    with pytest.raises(JobError, match=message):
        matched(pl.pretrained(state), source_of(pl.pretrained(state)).shapes, Tied())


def test_a_part_is_loaded_where_that_is_asked_for(tmp_path: Path) -> None:
    """The rest keeps the seed's values; of the model as of the source."""
    encoder = {"0.linear.weight": torch.full((WIDTH, WIDTH), 0.5), "9.weight": torch.ones(1)}
    job = make_job(
        pl.pretrained(encoder, prefix="blocks.", strict=False),
        steps=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
    )
    plain = train(make_job(None, steps=1, optimizer=job.optimizer), "single", tmp_path / "plain")
    part = train(job, "shard=2", tmp_path / "part")
    assert_equal(
        part, {**plain, "blocks.0.linear.weight": torch.full((WIDTH, WIDTH), 0.5).double()}
    )


def test_no_file_and_no_kind_of_weights(tmp_path: Path) -> None:
    """What is no source says what one is."""
    with pytest.raises(JobError, match="is a module; give its state_dict"):
        make_job(Tied())
    with pytest.raises(JobError, match="init must be a state dict"):
        make_job(3)
    (tmp_path / "pickled.bin").write_bytes(b"\x80\x02" * 40)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model.safetensors.index.json").write_text('{"weight_map": ')
    for path, message in (
        (tmp_path / "half", "index.json' can't be read"),
        (tmp_path / "none", "no file or folder"),
        (tmp_path, "has no weights"),
        (tmp_path / "pickled.bin", "torch.load"),
    ):
        with pytest.raises(JobError) as caught:
            source_of(pl.pretrained(path))
        assert message in str(caught.value)


@pytest.mark.slow
def test_verify_holds_the_weights_against_one_device(tmp_path: Path) -> None:
    """A certificate covers them, and a rank that skips a weight fails it."""
    save_file(pretrained(), tmp_path / "weights.safetensors")
    job = make_job(tmp_path / "weights.safetensors")

    def skips(init: Any, shapes: Any, model: nn.Module) -> dict[str, str]:
        matches = matched(init, shapes, model)
        matches.pop("parameters/blocks.1.linear.bias")
        return matches

    certificates = verified(
        job,
        [
            ("data=2", no_bug),
            ("data=2", lambda patch: patch.setattr("paceline.training.initial.matched", skips)),
        ],
    )
    assert [certificate.passed for certificate in certificates] == [True, False]


@pytest.mark.slow
def test_a_rank_reads_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., Any]
) -> None:
    """128 MiB of weights on two ranks: loading them takes no more than what is read at once, beside a rank's half."""
    width, layers = 1024, 32
    save_file(
        {f"{number}.weight": torch.full((width, width), float(number)) for number in range(layers)},
        tmp_path / "weights.safetensors",
    )
    job = make_job(
        tmp_path / "weights.safetensors",
        precision="float32",
        loss=nn.functional.mse_loss,
        model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        data=torch.utils.data.TensorDataset(torch.randn(8, width), torch.randn(8, width)),
    )
    taken: list[float] = []

    def measured(*arguments: Any) -> None:
        reset_peak()
        before = resident_peak_bytes()
        load_initial(*arguments)
        taken.append((resident_peak_bytes() - before) / 2**20)

    def build(context: Any) -> tuple[float, float]:
        from paceline.strategies.mesh import Mesh, local_part
        from paceline.training.stepper import Stepper

        mesh = Mesh.of(pl.Plan.parse("shard=2"), context.rank)
        mesh.connect()
        stepper = Stepper(job, pl.Plan.parse("shard=2"), mesh, context.device)
        return taken[0], max(
            float((local_part(p.detach()) - float(name.split(".")[0])).abs().max())
            for name, p in stepper.parameters.items()
        )

    monkeypatch.setattr("paceline.training.own_step.named_parts.load_initial", measured)
    for taken_mib, wrong in run_ranks(build, 2, timeout_s=100.0):
        assert wrong == 0.0
        assert taken_mib < 32


def test_a_missing_file_ends_a_run_with_the_reason(tmp_path: Path) -> None:
    """The error is the user's, and no rank hangs."""
    with pytest.raises((JobError, RankFailed), match="no file or folder"):
        train(make_job(tmp_path / "gone"), "data=2", tmp_path / "run")
