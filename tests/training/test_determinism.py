"""Plans with deterministic=yes repeat to the bit, and name the operator that can't."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import NotDeterministic, PacelineError, PlanError
from paceline.job.file import JobFile
from paceline.strategies.conflicts import check
from paceline.strategies.plan import Plan
from paceline.training.determinism import deterministic_algorithms, repeatable

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get(WORKSPACE),
    )


@pytest.fixture(params=[(None, False), (":4096:2", True)], ids=["torch's own", "a user's"])
def before(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, ...]]:
    """Settings as torch has them, or as a user may have changed them."""
    workspace, is_changed = request.param
    monkeypatch.delenv(WORKSPACE, raising=False)
    if workspace is not None:
        monkeypatch.setenv(WORKSPACE, workspace)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", is_changed)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", not is_changed)
    torch.use_deterministic_algorithms(is_changed, warn_only=is_changed)
    yield settings()
    torch.use_deterministic_algorithms(False)


def test_settings_are_made_and_put_back(before: tuple[Any, ...]):
    with deterministic_algorithms():
        assert settings() == (True, False, True, False, True, ":4096:8")
    assert settings() == before
    with pytest.raises(ZeroDivisionError), deterministic_algorithms():
        raise ZeroDivisionError
    assert settings() == before


def test_a_plan_without_the_key_leaves_settings_alone(before: tuple[Any, ...]):
    with repeatable(Plan.parse("data=2")):
        assert settings() == before


def test_a_workspace_that_repeats_is_left_to_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic_algorithms():
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


def put(x: torch.Tensor) -> torch.Tensor:
    """An operator without a deterministic form, on the CPU, too."""
    return x.clone().put_(torch.tensor([0]), torch.zeros(1, dtype=x.dtype))


def test_an_operator_without_a_deterministic_form_is_named():
    with (
        pytest.raises(NotDeterministic, match="the operator 'put_' has no deterministic form"),
        deterministic_algorithms(),
    ):
        put(torch.ones(2))
    with pytest.raises(NotDeterministic, match="'put_'"), deterministic_algorithms():
        try:
            put(torch.ones(2))
        except RuntimeError as error:
            raise ValueError("the loss failed") from error


@pytest.mark.parametrize(
    "text", ["{}", "RuntimeError: {}", "the loss failed\ntorch says: {}\nmore"]
)
def test_names_of_several_words_are_whole(text: str):
    """As torch says them of CUDA's operators."""
    message = "median CUDA with indices output does not have a deterministic implementation, but you set 'torch.use"
    with (
        pytest.raises(NotDeterministic, match="'median CUDA with indices output'"),
        deterministic_algorithms(),
    ):
        raise RuntimeError(text.format(message))
    with deterministic_algorithms(strict=False) as missing:
        warnings.warn(message, stacklevel=1)
    assert missing == {"median CUDA with indices output"}


def test_other_errors_and_warnings_pass():
    with pytest.raises(RuntimeError, match="size of tensor"), deterministic_algorithms():
        torch.ones(2) + torch.ones(3)
    with (
        pytest.warns(UserWarning, match="of the job"),
        deterministic_algorithms(strict=False) as missing,
    ):
        warnings.warn("of the job", stacklevel=1)
    assert not missing


def test_operators_that_run_all_the_same_are_named():
    with deterministic_algorithms(strict=False) as missing:
        for _ in range(2):
            put(torch.ones(2))
    assert missing == {"put_"}


class Net(nn.Module):
    """Dropout, a table of which rows repeat, and what the planners can split."""

    def __init__(self, last: Any = lambda x: x) -> None:
        super().__init__()
        self.table, self.drop, self.last = nn.Embedding(5, 12), nn.Dropout(0.2), last
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x).mean(1)
        for layer in self.layers:
            y = self.drop(torch.tanh(layer(y)))
        return self.last(self.out(y))


def make_job(last: Any = lambda x: x) -> paceline.Job:
    draws = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randint(5, (25, 6), generator=draws), torch.randint(3, (25,), generator=draws)
    )
    return paceline.Job(
        model=lambda: Net(last),
        data=data,
        loss=F.cross_entropy,
        batch=10,
        steps=6,
        clip=0.5,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )


def train(plan: str, run: Path, **options: Any) -> dict[str, torch.Tensor]:
    paceline.train(
        make_job(), plan, devices=f"cpu:0-{Plan.parse(plan).world_size - 1}", run=run, **options
    )
    return load_file(run / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=3",
        "shard=2",
        "pipeline=2",
        "servers=1 workers=2",
        "single",
        "tensor=2",
        "data=2 compress=int8",
        "place=2",
        "data=2 local=2 outer=diloco",
    ],
)
def test_two_runs_are_alike_to_the_bit(plan: str, tmp_path: Path):
    """One of them in one go, the other stopped and resumed after three steps."""
    whole = train(f"{plan} deterministic=yes", tmp_path / "whole")
    train(f"{plan} deterministic=yes", tmp_path / "resumed", steps=4)
    resumed = train(f"{plan} deterministic=yes", tmp_path / "resumed", resume=True)
    assert whole.keys() == resumed.keys()
    assert [name for name, weight in whole.items() if not torch.equal(weight, resumed[name])] == []


def test_a_run_names_the_operator_and_the_line(tmp_path: Path):
    with pytest.raises(PacelineError, match="failed in step 1") as raised:
        paceline.train(
            make_job(put), "data=2 deterministic=yes", devices="cpu:0-1", run=tmp_path / "run"
        )
    assert raised.value.exit_code == 2
    assert f"{Path(__file__).name}:" in str(
        raised.value
    ) and "'put_' has no deterministic form" in str(raised.value)
    assert "leave deterministic=yes out" in str(raised.value.hint)


FILE = """
import torch, paceline as pl
class Put(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).clone().put_(torch.tensor([0]), torch.zeros(1))
data = [(torch.full((6,), i / 9), torch.zeros(3)) for i in range(8)]
def job():
    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 6), Put(6, 3)), data=data, validation=data,
                  batch=4, steps=1, loss=torch.nn.functional.mse_loss,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""


def test_an_evaluation_and_a_prediction_name_the_operator(tmp_path: Path):
    (tmp_path / "job.py").write_text(FILE)
    run, inputs = tmp_path / "run", tmp_path / "x.npy"
    numpy.save(inputs, numpy.ones((3, 6), dtype=numpy.float32))
    paceline.train(JobFile(tmp_path / "job.py"), "single", devices="cpu:0", run=run)
    assert paceline.evaluate(run, "single", devices="cpu:0")["step"] == 1
    with pytest.raises(PacelineError, match="'put_' has no deterministic form"):
        paceline.evaluate(run, "single deterministic=yes", devices="cpu:0")
    with pytest.raises(PacelineError, match="'put_' has no deterministic form"):
        paceline.predict(run, inputs, "single deterministic=yes", devices="cpu:0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("servers=1 workers=2 staleness=1 deterministic=yes", "which worker's update comes first"),
        ("data=2 shares=speed deterministic=yes", "another run may cut the batch"),
    ],
)
def test_what_no_setting_makes_repeatable_is_refused(text: str, message: str):
    with pytest.raises(PlanError, match=message):
        check(Plan.parse(text))


def test_the_key_has_one_text_form():
    assert str(Plan.parse("deterministic=yes data=2")) == "data=2 deterministic=yes"
    assert Plan.parse("data=2 deterministic=no") == Plan.parse("data=2")
    assert str(Plan.parse("single deterministic=yes").exact) == "single deterministic=yes"
    with pytest.raises(PlanError, match="deterministic=true: known: yes, no"):
        Plan.parse("deterministic=true")
