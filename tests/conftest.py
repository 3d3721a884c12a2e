"""What the tests share: one thread, an environment without launchers, ranks, and processes to send signals to."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conditions import PATIENCE_S, until
from hypothesis import settings
from later import needed
from preloaded import OF_FORKS, capture_once, train_once, use_huge_pages

from paceline.api import checks, known_trials, prediction
from paceline.base.errors import PacelineError
from paceline.base.imports import load_modules
from paceline.checkpoint import write_json
from paceline.cluster.cluster import Cluster
from paceline.cluster.gpu_use import start_autograd_without_gpus
from paceline.launch.local.ranks import run_local
from paceline.launch.process import background as aside
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.outside_watch import OutsideWatch
from paceline.launch.process.supervisor import Supervisor

load_modules(OF_FORKS)
os.environ.setdefault("KERAS_BACKEND", "torch")  # before anything imports keras
os.environ["COLUMNS"] = "100"  # however wide the terminal is from which the suite is started
gc.set_threshold(
    10_000, 20, 20
)  # most of what is made here is let go with its test, or with its fork
torch.set_num_threads(1)  # ranks are forks, and the tests' sums are small
start_autograd_without_gpus()  # before the first fake tensors
capture_once()
train_once()

# The same examples everywhere and always, however busy the machine is.
settings.register_profile("suite", deadline=None, database=None, derandomize=True, max_examples=50)
settings.load_profile("suite")

_CHECK, _PREDICT, _RUN_BESIDE = checks.first_update, prediction._predict, aside.run_beside
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
)


# How long each file of tests took when that was last written, of the files that took long. These begin first: one that
# began last would run alone at the end.
_SECONDS, _LONG_S = Path(__file__).with_name("seconds.json"), 2
_WHOLE_TIMES = (
    3  # as long as a test may take otherwise: checks and predictions are processes beside its runs
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-seconds", action="store_true", help=f"write to {_SECONDS.name} how long files took"
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="runs inside tests are checked against one device and predicted, as outside of tests",
    )


def _is_whole(config: pytest.Config) -> bool:
    return bool(config.getoption("--whole"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Doctests are in the sources: a search of the tests for them takes time, and would import Keras."""
    return [collector for collector in (yield) if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of many plans have a small form; the longest files come first."""
    _leave_small_forms(items)
    if _is_whole(config):
        _give_more_time(config, items)
    gc.freeze()  # the tests' own modules: a collection, in forks too, would go through them and write to each page
    use_huge_pages()
    seconds = json.loads(_SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """With --write-seconds, of the files that ran; the others keep their figures."""
    if config.getoption("write_seconds"):
        took_s: Counter[str] = Counter(json.loads(_SECONDS.read_text()))
        reports = [
            report
            for reports in terminalreporter.stats.values()
            for report in reports
            if isinstance(report, pytest.TestReport)
        ]
        for file in {report.nodeid.partition("::")[0] for report in reports}:
            took_s[file] = 0
        for report in reports:
            took_s[report.nodeid.partition("::")[0]] += report.duration
        long_files = {file: round(s) for file, s in took_s.items() if s >= _LONG_S}
        _SECONDS.write_text(json.dumps(long_files, indent=1, sort_keys=True) + "\n")


def _leave_small_forms(items: list[pytest.Item]) -> None:
    """Of a test that is marked as `sweep(n)`, n cases belong to the suite, spread over all of them; the others are
    slow."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for same in cases.values():
        (small,) = same[0].get_closest_marker("sweep").args  # type: ignore[union-attr]
        width = max(len(same) // small, 1)
        kept = {len(same) * number // small + number % width for number in range(small)}
        for number, item in enumerate(same):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def _give_more_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timeout")
        timeout_s = float(
            marker.args[0] if marker else config.getoption("timeout") or config.getini("timeout")
        )
        item.add_marker(pytest.mark.timeout(timeout_s * _WHOLE_TIMES), append=False)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test is taken for a rank of the launcher that the suite itself runs under, and ranks have one thread: several
    files run side by side, and threads that wait for a core spin."""
    for name in list(os.environ):
        if name in _LAUNCHERS or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def unknown_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test tries of a job says nothing to another: times may be made up."""
    monkeypatch.setattr(known_trials, "OLD_S", 0.0)


@pytest.fixture(autouse=True, scope="module")
def huge_pages() -> None:
    """Anew for each file: what a process writes to beside a fork leaves its huge page."""
    use_huge_pages()


@pytest.fixture(autouse=True, scope="session")
def plain_runs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Runs inside of tests, and of fixtures that tests share, are not held against one device first, nor are they
    predicted: beside short runs that takes as long as they do, and a fork for each. Under `--whole` they are."""
    if _is_whole(pytestconfig):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "run_beside", _run_afterwards)
        patch.setattr(checks, "first_update", lambda *args, **options: None)
        patch.setattr(
            prediction,
            "_predict",
            lambda priced, run_dir: write_json(
                run_dir / "predicted.json", {"step_s": None, "peak_memory_bytes": None}
            ),
        )
        yield


@contextmanager
def _run_afterwards(
    work: Callable[[HeartbeatTable], None] | None, board: HeartbeatTable, processes: Supervisor
) -> Iterator[None]:
    """In place of `run_beside`: in this process, after the ranks."""
    try:
        yield
    finally:
        board.over = True
    if work is not None:
        work(board)


@pytest.fixture(autouse=True)
def marked_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But in tests that are marked for it."""
    for mark, place, name, work in (
        ("checked_runs", checks, "first_update", _CHECK),
        ("predicted_runs", aside, "run_beside", _RUN_BESIDE),
        ("predicted_runs", prediction, "_predict", _PREDICT),
    ):
        if request.node.get_closest_marker(mark):
            monkeypatch.setattr(place, name, work)


@pytest.fixture(scope="module")
def charts_drawn_once() -> Iterator[None]:
    """Of equal figures, which most pages of a file's tests have: a chart takes longer than all else of its page."""
    drawn: dict[str, Any] = {}

    def once(draw: Callable[..., Any]) -> Callable[..., Any]:
        def chart(*args: Any, **options: Any) -> Any:
            key = repr((draw.__name__, args, options))
            if key not in drawn:
                drawn[key] = draw(*args, **options)
            return drawn[key]

        return chart

    needed("matplotlib")
    from paceline.reports import charts

    with pytest.MonkeyPatch.context() as patch:
        for draw in (charts.lines, charts.stacked, charts.points):
            patch.setattr(charts, draw.__name__, once(draw))
        yield


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(body, 2)` runs `body(context)` as two CPU ranks and returns the results in rank order."""

    def run(body: Callable[[Any], Any], num_ranks: int, **options: Any) -> list[Any]:
        return run_local(body, Cluster.local(f"cpu:0-{num_ranks - 1}").devices, **options)

    return run


@pytest.fixture
def hang_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks are watched from when this file exists: before that, a busy machine may keep healthy ones from going on
    for longer than a test's short patience."""
    look, path = OutsideWatch.look, tmp_path / "hang-begins"

    def look_late(watch: OutsideWatch, pids: dict[int, int]) -> Any:
        if path.exists():
            return look(watch, pids)
        watch._looked_s = watch._awake_s = time.monotonic()
        return None

    monkeypatch.setattr(OutsideWatch, "look", look_late)
    return path


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fails a test that leaves a process or a meeting place behind; gives the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(psutil.Process().children(recursive=True))
    yield folder
    _, left = psutil.wait_procs(
        set(psutil.Process().children(recursive=True)) - before, timeout=PATIENCE_S
    )
    assert not left, "processes are left running"
    assert not list(folder.glob("paceline-*")), "a meeting place is left"


@dataclass
class Child:
    """A fork of the test that stands for a user's process, in a process group of its own like a shell's job."""

    pid: int
    printed: Path

    @property
    def stderr(self) -> str:
        return self.printed.read_text()

    def ranks(self, count: int) -> list[psutil.Process]:
        """Its ranks, once so many are there."""
        parent = psutil.Process(self.pid)
        until(
            lambda: len(parent.children(recursive=True)) > count
        )  # and the process that forks them
        return parent.children(recursive=True)

    def exit_code(self) -> int:
        """Wait for its end. A negative number is the signal that killed it."""
        until(
            lambda: psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE,
            tell=lambda: self.stderr,
        )
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def start_child(tmp_path: Path) -> Iterator[Callable[[Callable[[], Any]], Child]]:
    """`start_child(work)` runs `work()` in a process of its own, as the command line would: errors are printed."""
    started: list[Child] = []

    def start(work: Callable[[], Any]) -> Child:
        printed = tmp_path / f"child-{len(started)}.txt"
        printed.touch()
        pid = os.fork()
        if pid == 0:
            _be_child(work, printed)
        started.append(Child(pid, printed))
        return started[-1]

    yield start
    for child in started:
        if child.pid:
            for process in [
                *psutil.Process(child.pid).children(recursive=True),
                psutil.Process(child.pid),
            ]:
                process.kill()
            os.waitpid(child.pid, 0)


def _be_child(work: Callable[[], Any], printed: Path) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        file = open(printed, "w", buffering=1)  # noqa: SIM115  # until the process ends
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        work()
        code = 0
    except PacelineError as error:
        print(f"error: {error}")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    """`wait_for(condition)` returns when it holds."""
    return until


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """Two nodes of this machine, with a CPU each."""
    needed("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 * 2**20,
        },
    )
    started.second = started.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started.wait_for_nodes(timeout=60)
    yield started
    started.shutdown()
