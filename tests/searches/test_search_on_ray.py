"""Searches on a real local Ray cluster of two nodes: trials on both, and a node that dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs.studies import JOB, WORKS
from later import needed

import paceline as pl
from paceline.base.errors import PacelineError, UsageError
from paceline.job.file import JobFile
from paceline.launch.hosts.shared_files import SharedFiles, marked
from paceline.ray import nodes as ray_nodes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of this machine, with a CPU each."""
    needed("ray")
    from ray.cluster_utils import Cluster

    # A niceness of 15, the default, leaves workers no core beside other work.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    started = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 * 2**20,
        },
    )
    started.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started.wait_for_nodes(timeout=60)
    yield started
    started.shutdown()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "net.py"
    path.write_text(JOB)
    return str(path)


def command(file: str, trials: int, run: Path, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "paceline",
        "search",
        file,
        "--trials",
        str(trials),
        "--set",
        "fails=no",
        "--run",
        str(run),
        "--json",
        *words,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("trials", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_trials_run_on_both_nodes(cluster: Any, file: str, tmp_path: Path, trials: int):
    """With choices, pruning, the winner's test figures, and the value that training the winner gives."""
    run = tmp_path / "run"
    study = pl.search(
        file, trials, settings={**WORKS, "pause_s": 0.05}, ray=cluster.address, run=run
    )
    assert len(study["trials"]) == trials and {trial["state"] for trial in study["trials"]} <= {
        "complete",
        "pruned",
    }
    assert len({device for trial in study["trials"] for device in trial["devices"]}) == 2
    assert study["test"]["loss"] > 0 and set(study["best"]["params"]) == {"lr", "width", "net.act"}
    again = pl.train(
        JobFile.parse(file, study["best"]["settings"]), "single", run=tmp_path / "again"
    )
    assert again["validation_loss"] == study["best"]["value"]
    assert not list(run.glob("*.mark"))


@pytest.mark.slow
def test_a_node_that_dies_loses_no_trial(
    cluster: Any, file: str, tmp_path: Path, wait_for: Callable[..., None]
):
    """What ran there starts again on the other nodes, under its number."""
    run = tmp_path / "run"
    extra = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    with subprocess.Popen(
        command(file, 9, run, "--ray", cluster.address, "--set", "pause_s=0.1", "--pruner", "none"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        wait_for(lambda: len(list(run.glob("trials/*/metrics.jsonl"))) >= 3)
        cluster.remove_node(extra, allow_graceful=False)
        out, err = child.communicate(timeout=150)
    assert child.returncode == 0, err
    study = json.loads(out)
    assert [trial["number"] for trial in study["trials"]] == list(range(9))
    assert {trial["state"] for trial in study["trials"]} == {"complete"}
    assert "is lost" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan": "data=2"},
            "plan 'data=2' needs 2 devices a trial and the search has 1.*within one node",
        ),
        ({"devices": "cpu:0"}, "devices 'cpu:0' are of this machine"),
    ],
)
def test_requests_that_the_nodes_can_not_serve(
    cluster: Any, file: str, tmp_path: Path, options: dict[str, Any], message: str
):
    """Refused before anything starts."""
    with pytest.raises(UsageError, match=f"(?s){message}"):
        pl.search(file, 2, settings=WORKS, ray=cluster.address, run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_that_nodes_do_not_see_is_refused(
    cluster: Any, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the node, and what all of them must see."""
    from paceline.searches import target

    @contextmanager
    def of_another_folder(source: JobFile, run_dir: Path) -> Iterator[SharedFiles]:
        with marked(source, run_dir) as shared:
            yield replace(shared, mark="another")

    monkeypatch.setattr(target, "marked", of_another_folder)
    with pytest.raises(
        PacelineError, match=r"(?s)the run folder .* is not there.*a filesystem that all nodes see"
    ):
        pl.search(file, 2, settings=WORKS, ray=cluster.address, run=tmp_path / "run")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://here:1", "not the address"),
        ("10001", "not the address"),
        ("silent", "no Ray cluster answers at '127.0.0.1:.*' within"),
    ],
)
def test_an_address_without_a_cluster_does_not_hang(
    file: str, tmp_path: Path, address: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    """Whether nothing listens there or something that says nothing."""
    needed("ray")
    monkeypatch.setattr(ray_nodes, "_CONNECT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = f"127.0.0.1:{silent.getsockname()[1]}" if address == "silent" else address
        with pytest.raises(UsageError, match=message):
            pl.search(file, 2, settings=WORKS, ray=given, run=tmp_path / "run")


def test_without_ray_or_without_a_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package is named, with how to get it; a function is refused."""
    with pytest.raises(UsageError, match="needs the job's file"):
        pl.search(lambda lr=0.1: None, 2, vary={"lr": "0..1"}, ray="auto")  # type: ignore[arg-type,return-value]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"(?s)needs the package 'ray'.*'\.\[ray\]'"):
        pl.search(file, 2, settings=WORKS, ray="auto", run=tmp_path / "run")
