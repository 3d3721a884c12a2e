"""What README and docs promise: links lead somewhere, and the worked example gives the figures that the page shows."""

from __future__ import annotations

import ast
import csv
import doctest
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

import paceline
from benchmarks.models import program, program_names
from paceline import cli
from paceline.base import errors
from paceline.cluster.links import Network
from paceline.cluster.software import Software
from paceline.job import Job
from paceline.planner.corrections import SPREAD
from paceline.planner.estimate import GPU_SPREAD, RATES_SPREAD
from paceline.planner.program import MICROBATCH_S, rank_program
from paceline.simulate.allocator import CPU_HOLES, CPU_HOLES_ADDED, CPU_HOLES_LEAN
from paceline.simulate.device import THREAD_EFFICIENCY
from paceline.simulate.play import Player
from paceline.simulate.program import Collective, Compute
from paceline.strategies.key_registry import KEYS
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import whole_rank

from . import cli_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A command writes these pages, and a tree that has not run it has none.
GENERATED = {ROOT / "docs" / "accuracy.md"}


def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of a page."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link) or target in GENERATED:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path):
    """A link names a file that is there, and a heading that the file has."""
    assert broken_links(page) == []


def test_the_site_links_to_its_own_pages_alone():
    """`mkdocs build --strict` fails for a link that leads out of docs/."""
    docs = ROOT / "docs"
    outside = {
        f"{page.relative_to(ROOT)}: {link}"
        for page in docs.glob("**/*.md")
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:|#", link)
        and not (page.parent / link.partition("#")[0]).resolve().is_relative_to(docs)
    }
    assert outside == set()


def links_of(page: Path) -> set[Path]:
    """The pages that a page links to."""
    paths = (link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")))
    return {(page.parent / path).resolve() for path in paths if path.endswith(".md")} & set(PAGES)


def test_a_reader_of_the_readme_comes_to_every_page():
    """By links: the README's, those of the pages that it names, and so on. The site's menu has each page once."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {target for page in new for target in links_of(page)} - reached
    assert set(PAGES) - reached == set()
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", settings, re.MULTILINE)
    assert sorted(menu) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT
    )


def test_every_strategy_has_a_page():
    """Of the same name as its folder, or a part of its family's, with a picture and when it is not the one to take.

    `stages/` has two.
    """
    families = {
        "shard": "data",
        "place": "pipeline",
        "compress": "local",
        "compile": "recompute",
    }
    folders = {
        path.parent.name for path in (ROOT / "src/paceline/strategies").glob("*/strategy.py")
    }
    for name in sorted(folders - {"stages"} | {"pipeline", "place"}):
        home = families.get(name, name)
        page = (ROOT / "docs" / "strategies" / f"{home}.md").read_text(encoding="utf-8")
        if home in families.values():
            page = page.partition(f"\n## `{name}=")[2].partition("\n## `")[0]
        assert f"](../figures/{name}.svg)" in page
        assert {"When", "When not", "Limits"} <= set(
            re.findall(r"^###? (.+)$", page, re.MULTILINE)
        ), name


def test_every_figure_is_shown():
    """A page shows each picture that `python -m benchmarks.figures` drew; the build of the site finds missing ones."""
    shown = {
        link.rpartition("/")[2]
        for page in PAGES
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")} <= shown


def test_tables_of_plots_have_the_figures_of_the_results():
    """Each figure that a plot shows stands in docs/results.md or docs/memory.md."""
    pages = [
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "memory.md")
    ]
    printed = set(re.findall(r"\d+(?:\.\d+)?", " ".join(pages).replace(",", "")))
    for table in (ROOT / "benchmarks" / "figures" / "tables").glob("*.csv"):
        with table.open(encoding="utf-8", newline="") as file:
            figures = [value for row in csv.DictReader(file) for value in row.values()]
        shown = {figure for figure in figures if re.fullmatch(r"[\d.]+", figure)}
        assert {
            figure
            for figure in shown
            if figure not in printed and f"{float(figure):g}" not in printed
        } == set()


def test_pages_that_the_code_names_are_there():
    """A message or a comment that sends a reader to a page names one that exists."""
    files = [
        path for folder in ("src", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        f"{in_files or by_command}.md"
        for path in files
        for in_files, by_command in re.findall(
            r"docs/([\w/-]+)\.md|`paceline docs ([\w/-]+)`", path.read_text(encoding="utf-8")
        )
    }
    assert {name for name in named if not (ROOT / "docs" / name).exists()} <= {
        page.name for page in GENERATED
    }


def test_messages_name_pages_that_an_installation_has():
    """Whoever installed a wheel has no folder docs/; the command `docs` says where a page is."""
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        assert not [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and id(node) not in docstrings
            if re.search(r"\bdocs/[\w/-]+\.md", str(node.value))
        ], path


def test_the_page_of_the_command_line_is_that_of_the_commands():
    """`python tests/house/cli_page.py --write` writes it."""
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page()


def test_the_dockerfile_says_how_to_build_it():
    """Without Docker, too; the commands give arguments that it takes."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    given = set(re.findall(r"--build-arg (\w+)=", dockerfile + page))
    assert "buildah build" in dockerfile
    assert {"BASE", "PIP_NO_INDEX"} <= given
    assert given <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_tests_that_the_pages_name_are_there():
    """A page that says which test shows something names one that exists."""
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(
            r"`(tests/[\w/]+(?:\.py)?)/?(?:::\w+)?`", page.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 10
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()


def test_the_worked_example_gives_its_figures():
    """The code in docs/formulas.md prints what the page says, and its table has the simulator's times."""
    page = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
    example = doctest.DocTestParser().get_doctest(page, {}, "formulas.md", "formulas.md", 0)
    assert len(example.examples) > 10
    runner = doctest.DocTestRunner()
    runner.run(example, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0

    table = re.findall(
        r"\| (?:compute|network) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, flags=re.MULTILINE
    )
    player = Player(example.globs["rates"], Network(example.globs["gpus"].link))
    ends_ms = []
    rank = whole_rank(example.globs["profile"], (4,))
    for event in rank_program(rank, Plan.parse("data=2"), "cuda"):
        before = dict(player.clock)
        player.play(event)
        takes = isinstance(event, Compute) and (event.flops or event.moved_bytes or event.fixed_s)
        if takes or isinstance(event, Collective):
            ends_ms += [
                end_s * 1000 for stream, end_s in player.clock.items() if end_s != before[stream]
            ]
    assert [float(end) for _, _, end in table] == pytest.approx(ends_ms, abs=0.05)
    assert all(
        float(start) + float(takes) == pytest.approx(float(end)) for start, takes, end in table
    )


def test_versions_agree():
    """The package, the changelog's newest version, and the citation."""
    newest = re.findall(
        r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )[0]
    (cited,) = re.findall(
        r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert newest == cited == paceline.__version__


def test_every_error_is_explained():
    """The table of docs/errors.md has each exception with its exit code."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Z]\w+)` \| (\d) \|", page, re.MULTILINE))
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PacelineError)
    ]
    assert rows == {kind.__name__: str(kind.exit_code) for kind in kinds}


def test_every_plan_key_is_explained():
    """The table of docs/plans.md has each key that a plan may have."""
    table = (
        (ROOT / "docs" / "plans.md")
        .read_text(encoding="utf-8")
        .split("## Keys")[1]
        .split("\n## ")[0]
    )
    keys = re.findall(r"(\w+)=", " ".join(re.findall(r"^\| (.*?) \| ", table, flags=re.MULTILINE)))
    assert set(keys) == set(KEYS)


def test_job_fields_on_the_page_exist():
    """The table of docs/job.md names fields that a Job has."""
    table = (
        (ROOT / "docs" / "job.md")
        .read_text(encoding="utf-8")
        .split("## Fields")[1]
        .split("\n## ")[0]
    )
    names = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \| ", table, flags=re.MULTILINE)))
    )
    assert {"model", "epochs", "steps"} <= names <= {field.name for field in fields(Job)}


def commands(page: Path) -> list[str]:
    """The `paceline` commands in a page's indented code, without comments."""
    text = re.sub(r" +\\\n +", " ", page.read_text(encoding="utf-8"))  # a command in several lines
    lines = re.findall(
        r"^ {4}(?:\$ |srun .*?|torchrun .*?-- )?paceline (.*)$", text, flags=re.MULTILINE
    )
    return [line.partition("   #")[0] for line in lines if "[" not in line]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: page.name
)
def test_commands_on_the_pages_are_understood(page: Path):
    """Every option that a page shows exists, and every plan can be read."""
    for line in commands(page):
        _, given = cli.parse(shlex.split(line))
        for text in [given["plan"]] if "plan" in given else given.get("plans", ()):
            if text != "auto" and not text.endswith(".json") and "gossip" not in text:
                Plan.parse(text)


def test_each_figure_of_our_own_program_has_its_origin():
    """All fields but those of the models that it trains, once."""
    page = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
    table = page.split("### Paceline's own program")[1].split("\n## ")[0]
    names = re.findall(
        r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \| ", table, flags=re.MULTILINE))
    )
    assert sorted(names) == sorted(
        {field.name for field in fields(Software)} - {"name", "attention", "activation_bytes"}
    )


def test_the_reference_has_the_figures_of_the_code():
    """The tables of docs/formulas.md give the programs of the catalogue and the measured constants as they are."""
    page = (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")
    table = page.split("### Programs")[1].split("\n### ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert {row[0].strip("| `") for row in rows} == set(program_names())
    for name, *figures, _ in rows:
        figures_of = program(name.strip("| `"))
        assert [float(figure) for figure in figures] == pytest.approx(
            [
                figures_of.product_rate,
                figures_of.attention_rate,
                figures_of.memory_rate,
                1e6 * figures_of.operator_s,
                1e6 * figures_of.kernel_s,
                1e3 * figures_of.microbatch_s,
                1e3 * figures_of.step_s,
                figures_of.link_rate,
                figures_of.network_rate,
                figures_of.spread,
            ]
        ), name
    constants = {
        "`MICROBATCH_S` | {:g} ms": 1e3 * MICROBATCH_S,
        "`THREAD_EFFICIENCY` | {:g} ": THREAD_EFFICIENCY,
        "`CPU_HOLES` | {:g} of": CPU_HOLES,
        "`CPU_HOLES_LEAN` | {:g} of": CPU_HOLES_LEAN,
        "`CPU_HOLES_ADDED` | {:g} of": CPU_HOLES_ADDED,
        "CPUs alone | {:g} |": RATES_SPREAD,
        "GPUs of this machine | {:g} |": GPU_SPREAD,
        "itself was calibrated | {:g} |": SPREAD["itself"],
        "kind was calibrated | {:g} |": SPREAD["kind"],
        "other kinds only | {:g} |": SPREAD["nothing"],
    }
    for words, value in constants.items():
        assert words.format(value) in page


def test_the_example_of_planning_prints_what_it_says(capsys: pytest.CaptureFixture[str]):
    """The price of a 405B model in docs/planning.md."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.strip() == code.splitlines()[-1].removeprefix("# ")
