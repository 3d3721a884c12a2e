"""Where nothing fits, the smallest changes that do; and Transformers models planned from their configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from called import call

import paceline as pl
from paceline.api.auto import _choose
from paceline.api.fine_tuning import FineTuning
from paceline.base.errors import PlanError, UsageError
from paceline.cluster.cluster import Cluster
from paceline.planner.fit import check_fits
from paceline.planner.problem import PlanningProblem, with_memory
from paceline.planner.remedies import remedies

LAYERS = 4
SIZE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "vocab_size": 8000,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
PARAMETERS = 2 * 8000 * 512 + LAYERS * (4 * 512**2 + 3 * 512 * 1024)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SIZE))
    return tmp_path


def gpus(count: int, gib: float) -> Cluster:
    """So many GPUs with so much memory beside the driver's."""
    (kind,) = Cluster.parse(f"{count}xT4").nodes
    return Cluster.of((with_memory(kind, (gib + 0.94) * 2**30 / kind.devices[0].memory_bytes),))


def wide_job(**fields: Any) -> pl.Job:
    data = torch.utils.data.TensorDataset(torch.zeros(64, 2048), torch.zeros(64, 2048))
    return pl.Job(
        **{
            "model": lambda: torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))),
            "data": data,
            "batch": 64,
            "steps": 10,
            "loss": torch.nn.functional.mse_loss,
            "optimizer": lambda named: torch.optim.AdamW(named),
            **fields,
        }
    )


@pytest.mark.slow  # test_every_nothing_fits_names_changes stays
def test_each_change_is_the_smallest_of_its_kind_that_fits(folder: Path) -> None:
    """Every one is priced and fits; a smaller one of the same kind would not do."""
    fine_tuning = FineTuning(str(folder), batch=8, sequence=512)
    cluster = gpus(1, 0.16)
    problem = PlanningProblem.of(fine_tuning.job(), device=cluster.first_here)
    assert problem.search(cluster).chosen is None
    fitting_remedies = remedies(problem, cluster, fine_tuning.smaller(cluster))
    changes = [remedy.change for remedy in fitting_remedies]
    assert all(remedy.candidate.estimate.fits for remedy in fitting_remedies)
    assert changes[0] == "--lora 16 --dtype bfloat16"
    assert changes[-1] == "devices of 8 GiB in place of 1"
    counts = [int(change.split()[0]) for change in changes if "devices in place" in change]
    for fewer in (number for number in (2, 3, 4) if counts and number < counts[0]):
        assert problem.search(cluster.resized(fewer)).chosen is None
    lines = [str(remedy) for remedy in fitting_remedies]
    assert all("samples/s" in line and "MiB" in line for line in lines)


@pytest.mark.slow
def test_adapters_and_dtypes_of_a_configuration_are_priced(folder: Path) -> None:
    """Of frozen weights no gradient and no optimizer state is kept, and bf16 halves them."""
    whole = FineTuning(str(folder), batch=2, sequence=64)
    job, adapted = whole.job(), replace(whole, lora=8, dtype="bfloat16").job()
    full = PlanningProblem.of(job).profile
    assert sum(p.num_bytes * p.count for p in full.parameters) == pytest.approx(
        4 * PARAMETERS, rel=0.01
    )
    small = PlanningProblem.of(adapted).profile
    assert sum(p.num_bytes * p.count for p in small.parameters) == pytest.approx(
        2 * PARAMETERS, rel=0.05
    )
    cluster = Cluster.parse("1x24GB")
    ledgers = [
        PlanningProblem.of(made).price(pl.Plan(), cluster).needs[0].ledger
        for made in (job, adapted)
    ]
    assert 8 * PARAMETERS <= ledgers[0]["optimizer"] <= 10 * PARAMETERS
    assert ledgers[1]["optimizer"] < 0.02 * ledgers[0]["optimizer"]
    (folder / "config.json").write_text(json.dumps(SIZE | {"dtype": "bfloat16"}))
    assert whole.weights_dtype == "bfloat16"


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hf": "lama"}, "did you mean 'llama'"),
        ({"hf": "meta-llama/Llama-3-8B"}, "nothing is downloaded"),
        ({"hf": "vit"}, "is of no language model"),
        ({"hf": "llama", "lora": 0}, "--lora must be at least 1"),
        ({"hf": "llama", "dtype": "bf17"}, "--dtype bf17"),
        (
            {"hf": "gpt2", "sequence": 1025},
            "--hf gpt2 has 1,024 positions, and --sequence is 1,025",
        ),
        ({"hf": "opt", "sequence": 8192}, "has 2,048 positions"),
        ({"hf": "bert"}, "hint: --sequence 512"),
        ({"hf": "xlm-roberta", "sequence": 512}, "has 510 positions"),
    ],
)
def test_what_is_no_model_to_fine_tune(fields: dict[str, Any], message: str) -> None:
    """An error says what is known, and that nothing is downloaded."""
    with pytest.raises(UsageError, match=message):
        FineTuning(**fields).job()


def test_a_model_that_computes_positions_takes_any_sequence(folder: Path) -> None:
    FineTuning(str(folder), sequence=SIZE["max_position_embeddings"] * 4).job()
    FineTuning("opt", sequence=2048).job()


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["1x24GB", pytest.param("2x24GB", marks=pytest.mark.slow)])
def test_the_command_takes_a_configuration(folder: Path, gpus: str) -> None:
    """It prints a plan as for a job file; options of one kind are refused with the other."""
    shape = ["--lora", 8, "--sequence", 64, "--batch", 4]
    run = call("plan", "--hf", folder, *shape, "--cluster", gpus, "--json")
    assert run.exit_code == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["chosen"] and "remedies" not in answer
    for arguments, message in (
        (["plan"], "either FILE or --hf"),
        (["plan", __file__, "--lora", "8"], "is about --hf"),
        (["plan", "--hf", "llama", "--scale", "1..2"], "for job files"),
    ):
        run = call(*arguments)
        assert run.exit_code == 2 and message in run.stderr


@pytest.mark.slow
def test_every_nothing_fits_names_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan`, a plan that was asked for and one that is chosen for a run say the same remedies."""
    job, cluster = wide_job(), gpus(1, 0.22)
    answer = pl.plan(job, cluster)
    assert answer.chosen is None
    assert any("GiB in place of" in remedy.change for remedy in answer.remedies)
    assert "what would fit, the least change first:" in answer.describe()
    assert [entry["change"] for entry in answer.to_dict()["remedies"]] == [
        r.change for r in answer.remedies
    ]
    problem = PlanningProblem.of(job)
    here = Cluster.local("cpu:0")
    tiny = replace(
        here, devices=tuple(replace(device, memory_bytes=240 * 2**20) for device in here.devices)
    )
    monkeypatch.setattr(
        "paceline.planner.fit._from_small_to_large", lambda *arguments, **options: iter(())
    )
    with pytest.raises(PlanError) as caught:
        check_fits(problem, pl.Plan(), tiny, snapshot=False)
    shown = str(caught.value)
    assert "none of the plans that were tried fits" in shown or "the least change first" in shown
    with pytest.raises(PlanError, match="nothing fits on these devices"):
        _choose(job, tiny, may_be_fewer=True)
