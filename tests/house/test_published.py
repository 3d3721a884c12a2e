"""Rows of published measurements are read as their sources mean them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "benchmarks.published", reason="benchmarks/ can't be imported: run pytest in a checkout's root"
)

from benchmarks.published.report import Errors, main, rank_correlation
from benchmarks.published.rows import Case, Skipped, case, read

COLUMNS = [
    "source",
    "row_id",
    "model",
    "params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "global_batch",
    "micro_batch",
    "hardware",
    "n_devices",
    "devices_per_node",
    "intra_bw",
    "inter_bw",
    "dp",
    "fsdp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "zero_stage",
    "precision",
    "recompute",
    "metric",
    "value",
    "unit",
    "memory_gib",
    "notes",
]
GPT = {
    "model": "GPT 3.6B",
    "params": "3600000000",
    "layers": "30",
    "hidden": "3072",
    "heads": "32",
    "vocab": "51200",
    "seq": "2048",
    "global_batch": "512",
    "micro_batch": "16",
    "hardware": "A100-80GB SXM",
    "n_devices": "64",
    "devices_per_node": "8",
    "dp": "32",
    "tp": "2",
    "pp": "1",
    "precision": "fp16",
    "recompute": "full",
}


def row(source: str, **given: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), **GPT, "row_id": f"{source}-0001", **given}


def read_row(source: str, **given: str) -> Case:
    return case(row(source, **given), source)


@pytest.mark.parametrize(
    ("source", "given", "seconds"),
    [
        ("vtrain", {"metric": "iteration_time", "value": "250", "unit": "ms"}, 0.25),
        (
            "mpt",
            {
                "metric": "tokens_per_s_per_gpu",
                "value": "2048",
                "unit": "tok/s/GPU",
                "fsdp": "32",
                "tp": "1",
                "dp": "64",
            },
            512 * 2048 / 2048 / 64,
        ),
        (
            "megSC21t1",
            {"metric": "achieved_tflops_per_gpu", "value": "138", "unit": "TFLOP/s/GPU"},
            96
            * 512
            * 2048
            * 30
            * 3072**2
            * (1 + 2048 / 6 / 3072 + 51200 / 16 / 30 / 3072)
            / 138e12
            / 64,
        ),
    ],
)
def test_metrics_become_seconds(source: str, given: dict[str, str], seconds: float):
    """Times, rates of tokens and FLOP/s, the latter counted as the source counts."""
    assert read_row(source, **given).step_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        ({}, "data=32 tensor=2 recompute=full"),
        ({"pp": "2", "dp": "16"}, "pipeline=2 data=16 tensor=2 microbatches=2 recompute=full"),
        ({"zero_stage": "1", "recompute": "none"}, "shard=32 tensor=2 zero=1"),
        (
            {"micro_batch": "4", "recompute": "selective(attn)"},
            "data=32 tensor=2 microbatches=4 recompute=selective",
        ),
    ],
)
def test_rows_become_plans(given: dict[str, str], plan: str):
    """Axes, micro-batches, sharding and recomputation."""
    published_case = read_row("vtrain", metric="iteration_time", value="1", unit="s", **given)

    assert [str(published_plan) for published_plan in published_case.plans] == [plan]


@pytest.mark.parametrize(
    ("given", "precision"),
    [("amp_fp8", "fp8"), ("FP8-CS", "fp8"), ("fp16 mixed", "bf16"), ("float32", "float32")],
)
def test_precisions_are_those_of_rows(given: str, precision: str):
    assert (
        read_row("vtrain", metric="iteration_time", value="1", unit="s", precision=given).precision
        == precision
    )


@pytest.mark.parametrize("given", [{"model": "LLAMA2-7B (LoRA)"}, {"notes": "Finetuning; LoRA"}])
def test_adapters_alone_are_trained_where_a_row_says_so(given: dict[str, str]):
    """Those of queries, keys and values, in every layer."""
    with_adapters, without = (
        read_row("vtrain", metric="iteration_time", value="1", unit="s", **each)
        for each in (given, {})
    )

    trained = [p for p in with_adapters.profile.parameters if p.trainable]
    assert [p.name for p in trained] == ["layers.adapters"] and trained[0].count > 1
    assert all(p.trainable for p in without.profile.parameters)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cp": "2"}, "context parallelism"),
        ({"precision": "NVFP4"}, "fp4"),
        ({"notes": "EP 8"}, "experts"),
        ({"metric": "scaling_efficiency"}, "not a step's time"),
        ({"global_batch": ""}, "no global batch"),
        ({"tp": "3"}, "don't multiply"),
        ({"hidden": ""}, "dimensions"),
        ({"hardware": "abacus"}, "hardware"),
    ],
)
def test_what_a_plan_can_not_express_is_skipped_with_its_reason(given: dict[str, str], reason: str):
    """Nothing is skipped silently."""
    with pytest.raises(Skipped, match=reason):
        read_row("vtrain", **{"metric": "iteration_time", "value": "1", "unit": "s", **given})


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Figures by source, what was skipped, and no line above 100 columns."""
    path = tmp_path / "rows.csv"
    time = {"metric": "iteration_time", "unit": "s"}
    rows = [
        row("vtrain", row_id=f"vtrain-{n}", value=str(3 + n), micro_batch=str(2**n), **time)
        for n in range(5)
    ]
    rows.append(row("other", value="1", **time))
    header = dict(zip(COLUMNS, COLUMNS, strict=True))
    path.write_text(
        "\n".join(",".join(fields[name] for name in COLUMNS) for fields in [header, *rows])
    )

    assert len([entry for entry in read(path) if isinstance(entry, Case)]) == 5
    assert main(path) == 0
    printed = capsys.readouterr().out
    assert "nothing is known of this source's conventions" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_statistics_by_hand():
    """The 90th percentile of ten errors is the ninth, and ties share a rank."""
    errors = Errors(tuple(n / 100 for n in range(1, 11)))

    assert (errors.mean, errors.median, errors.ninetieth) == pytest.approx((0.055, 0.055, 0.09))
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
