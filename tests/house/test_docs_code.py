"""The Python code on the pages: it compiles, uses names and arguments that exist, and the jobs in it train."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def blocks(page: Path) -> list[str]:
    """The page's Python code but doctests. What it leaves out with '...' among arguments is left out."""
    code = re.findall(r"```python\n(?!>>>)(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [re.sub(r", \.\.\.\)", ")", block.replace("(..., ", "(")) for block in code]


def statements(page: Path) -> Iterator[ast.AST]:
    """Every node of the code. A piece of a method's body is put into a function."""
    for block in blocks(page):
        if block.startswith(" "):
            block = "if True:\n" + block
        yield from ast.walk(ast.parse(block))


def public(node: ast.AST) -> str:
    """NAME of `pl.NAME` or `paceline.NAME`; empty for other nodes."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("pl", "paceline")
    ):
        return node.attr
    return ""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_code_on_the_pages_uses_what_there_is(page: Path):
    """Each `pl.NAME` exists, and takes the arguments that it is given by name."""
    for node in statements(page):
        if name := public(node):
            assert hasattr(pl, name), name
        if isinstance(node, ast.Call) and (name := public(node.func)) and name != "keras":
            known = (
                {field.name for field in fields(pl.Job)}
                if name in ("Job", "from_lightning")  # which passes them on
                else set(inspect.signature(getattr(pl, name)).parameters)
            )
            assert {keyword.arg for keyword in node.keywords if keyword.arg} <= known, name


def shown(page: Path) -> list[str]:
    """The lines of a page's code and terminal output: fenced, or indented by four spaces."""
    fence = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    fenced = [line for code in fence.findall(text) for line in code.splitlines()]
    return [*fenced, *re.findall(r"^ {4}(.*)$", fence.sub("", text), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_fits_the_column_of_the_site(page: Path):
    """At most 80 characters, which a reader sees without scrolling; so does what a terminal prints."""
    assert [line for line in shown(page) if len(line) > 80] == []


@pytest.fixture
def names() -> dict[str, Any]:
    """What the pages suppose: a net of ten classes, its data, and the usual imports."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 6), torch.randint(10, (24,)))

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).float().mean()

    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "np": np,
        "pl": pl,
        "Tensor": Tensor,
        "Path": Path,
        "accuracy": accuracy,
        "Net": lambda width=8: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 10)),
        "train_set": data,
        "test_set": data,
        "__name__": "page",
    }


@pytest.mark.parametrize(
    ("page", "number"),
    [("README.md", 0), ("docs/index.md", 0), ("docs/job.md", 0), ("docs/callbacks.md", 0)],
)
def test_a_job_on_a_page_trains(page: str, number: int, names: dict[str, Any], tmp_path: Path):
    """Two steps on one device."""
    exec(blocks(ROOT / page)[number], names)
    assert (
        pl.train(names["job"](), "single", steps=2, run=tmp_path / "run", table=False)["steps"] == 2
    )


def test_the_step_of_its_own_trains(names: dict[str, Any], tmp_path: Path):
    """The GAN of docs/own-step.md, with models that suit its sizes, and the smallest step."""
    names |= {
        "Generator": lambda: nn.Linear(64, 6),
        "Critic": lambda: nn.Linear(6, 1),
        "images": names["train_set"],
    }
    smallest, gan = blocks(ROOT / "docs" / "own-step.md")[:2]
    exec(gan, names)
    exec(smallest, names)
    for name in ("job", "average_job"):
        result = pl.train(names[name](), "data=2", steps=2, run=tmp_path / name, table=False)
        assert result["steps"] == 2


def test_the_computation_of_its_own_trains(names: dict[str, Any], tmp_path: Path):
    """The autoencoder of docs/job.md: figures of each step and of the evaluation."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            return self.decoder(mean), mean, log_variance

    names |= {"VAE": Autoencoder}
    exec(blocks(ROOT / "docs" / "job.md")[2], names)
    result = pl.train(names["autoencoder"](), "data=2", steps=2, run=tmp_path / "run", table=False)
    assert set(result.metrics) == {"validation_loss", "divergence"}
    assert all(row["metrics"]["divergence"] > 0 for row in result.history if "loss" in row)


@pytest.mark.parametrize("plan", ["single", "shard=2"])
def test_the_recipes_train(plan: str, names: dict[str, Any], tmp_path: Path):
    """A warm-up, groups of parameters, and a callback that asks for evaluations, of docs/recipes.md."""
    code = "\n".join(blocks(ROOT / "docs" / "recipes.md"))
    for begin in ("import math\n", "def adamw(", "class Every("):
        block = code[code.index(begin) :].partition("\n\npl.Job(")[0]
        exec(re.split(r"\n(?=from |pl\.|job = )", block)[0], names)
    job = replace(
        names["job"](),
        batch=8,
        optimizer=names["adamw"],
        validation=names["test_set"],
        callbacks=[names["Every"](2)],
    )
    assert names["total"] == names["job"]().total_steps
    result = pl.train(job, plan, steps=5, run=tmp_path / "run", table=False)
    rates = [line["lr"] for line in result.history if "lr" in line]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_a_script_and_its_job_have_equal_losses(
    names: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The script and the job that docs/coming-from.md compares, whose batches of two epochs are the same."""
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    compared = page.partition("\n## Compare a script with its job\n")[2]
    for block in re.findall(r"```python\n(.*?)```", compared, re.DOTALL):
        exec(block, names)
    losses = names["script"]()
    for plan, most in (("single", 0.0), ("data=2", 1e-14)):
        names["compare"](plan, losses, steps=20, run=tmp_path / plan, table=False)
        shown = re.findall(r" step \d+: (\S+) \S+ (\S+)$", capsys.readouterr().out, re.MULTILINE)
        assert [old for old, _ in shown] == [f"{loss:.15f}" for loss in losses[:20]]
        assert max(abs(float(difference)) for _, difference in shown) <= most


@pytest.mark.slow
def test_the_verbs_run_as_the_pages_say(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The commands from Python in docs/job.md, and the results of docs/running.md."""
    monkeypatch.chdir(tmp_path)
    job, _, _, verbs = blocks(ROOT / "docs" / "job.md")
    Path("job.py").write_text(
        "from torch.utils.data import TensorDataset\nfrom torch import nn\n"
        + job
        + """
def Net(width): return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 10))
train_set = test_set = TensorDataset(torch.randn(24, 6), torch.randint(10, (24,)))
"""
    )
    exec(job, names)
    exec(verbs, names)
    assert names["certificates"][0].passed and names["answer"].chosen is not None
