"""Each file of `examples/` runs, in a form that takes a second: the longer ones are checked by hand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from later import needed

import paceline as pl
from paceline.base.errors import PlanError
from paceline.job.choices import choosing
from paceline.strategies.plan import Plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The plan that an example is about, and settings that make it small.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "01_digits.py": ("data=2", {"width": 4}),
    "02_gpt_bytes.py": ("data=2", {"width": 16, "layers": 1, "sequence": 16, "batch": 4}),
    "03_diabetes.py": ("data=2", {"width": 8}),
    "04_stdlib_lines.py": (
        "servers=2 workers=2 staleness=inf",
        {"buckets": 256, "modules": 2, "per_module": 20},
    ),
    "06_own_step.py": ("data=2", {}),
    "09_too_large.py": ("pipeline=2", {"width": 32, "layers": 2}),
    "10_two_towers.py": ("place=2", {"width": 8, "batch": 64}),
    "11_diloco.py": ("data=2 local=2 outer=diloco compress=int8", {"width": 8, "batch": 16}),
}
# tests/launch/hosts/test_hosts.py and tests/proof/test_servers.py run these two in the suite.
TESTED_ELSEWHERE = {"01_digits.py", "04_stdlib_lines.py"}
ELSEWHERE = {
    "05_search.py",
    "07_keras.py",
    "08_transformers.py",
    "12_architecture_search.py",
    "13_plan_a_cluster.py",
}


def test_every_example_is_run_and_numbered():
    """Without a gap, and each says in its docstring how to run it."""
    files = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert files == sorted({*JOBS, *ELSEWHERE})
    assert [int(name[:2]) for name in files] == list(range(1, len(files) + 1))
    for name in files:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert f"examples/{name}" in text.split('"""')[1]
        assert len(text.splitlines()) <= 110
        assert f"| `{name}` |" in (EXAMPLES.parent / "docs" / "index.md").read_text(
            encoding="utf-8"
        )


def test_commands_that_train_an_example_run_on_any_machine():
    """With GPUs, without, and with fewer than ranks: as written, in docstrings and on pages."""
    texts = [
        path.read_text(encoding="utf-8")
        for path in (
            *EXAMPLES.glob("*.py"),
            *EXAMPLES.parent.glob("*.md"),
            *EXAMPLES.parent.glob("docs/**/*.md"),
        )
    ]
    lines = [
        line
        for text in texts
        for line in re.findall(
            r"^(?: {4})?(?:\$ )?paceline train (examples/\S+.*)$", text, re.MULTILINE
        )
    ]
    assert len(lines) > 8
    for line in lines:
        given = re.search(r"--devices cpu:(?:0|0-(\d))(?: |$)", line)
        plan = re.search(r"--plan (?:\"(.*?)\"|(\S+))", line)
        if plan is None:  # the fastest for the devices that are here
            assert given is None and "--memory" not in line, line
            continue
        text = plan[1] or plan[2]
        ranks = 2 if "gossip" in text else Plan.parse(text).world_size
        if ranks > 1 or "--memory" in line:
            assert given is not None and int(given[1] or 0) + 1 == ranks, line


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in TESTED_ELSEWHERE else name
        for name in JOBS
    ],
)
def test_an_example_trains_under_its_plan(name: str, tmp_path: Path):
    """Two steps, and the plan is the one of its docstring."""
    needed("sklearn", "scikit-learn")
    plan, settings = JOBS[name]
    docstring = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    assert set(re.findall(r"[a-z]+=", plan)) <= set(re.findall(r"[a-z]+=", docstring))
    figures = pl.train(
        pl.load(str(EXAMPLES / name), settings), plan, steps=2, run=tmp_path / "run", table=False
    )
    assert figures["steps"] == 2


@pytest.mark.slow
def test_what_is_too_large_is_refused_on_one_device(tmp_path: Path):
    """The example's own sizes and limit: nothing starts."""
    with pytest.raises(PlanError, match="pipeline=4"):
        pl.train(
            pl.load(str(EXAMPLES / "09_too_large.py")),
            "single",
            memory="192MiB",
            run=tmp_path / "run",
        )


SMALL_GPT = {"width": 128, "layers": 2, "sequence": 16, "batch": 16}


def test_the_model_that_is_planned_computes_a_loss():
    """In a small form, on two samples."""
    job = pl.load(str(EXAMPLES / "13_plan_a_cluster.py"), SMALL_GPT)
    tokens, following = (torch.stack(part) for part in zip(job.data[0], job.data[1], strict=True))
    loss = job.loss(job.model()(tokens), following)
    loss.backward()
    assert loss.item() > 0


@pytest.mark.slow
def test_the_cluster_that_nobody_owns_is_planned_for():
    """The same small form, on described GPUs."""
    assert (
        pl.plan(pl.load(str(EXAMPLES / "13_plan_a_cluster.py"), SMALL_GPT), "2xH100").chosen
        is not None
    )


def test_architectures_differ_by_their_choices():
    """The net consists of what is chosen."""
    needed("sklearn", "scikit-learn")
    net = runpy.run_path(str(EXAMPLES / "12_architecture_search.py"))["net"]
    last_of = {"net.blocks": 3}
    with choosing(lambda name, options: last_of.get(name, options[-1])):
        assert len(net(4)) == 7 and isinstance(net(4)[3].operation, torch.nn.Identity)
    assert len(net(4)) == 6 and isinstance(net(4)[1].operation, torch.nn.Conv2d)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory"
)  # of others
@pytest.mark.parametrize("name", ["07_keras.py", "08_transformers.py"])
def test_a_script_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As `python FILE` does."""
    needed({"07_keras.py": "keras", "08_transformers.py": "peft"}[name])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Keras about numpy
def test_the_script_of_keras_equals_one_process(capsys: pytest.CaptureFixture[str]):
    """A small form: the same history on two ranks as on one."""
    needed("keras")
    main = runpy.run_path(str(EXAMPLES / "07_keras.py"))["main"]
    (_, single), (_, distributed) = (
        main(plan, devices, epochs=1, samples=100)
        for plan, devices in (("data=1", "cpu:0"), ("data=2", "cpu:0-1"))
    )
    assert distributed.history["val_loss"] == pytest.approx(single.history["val_loss"], rel=1e-4)
