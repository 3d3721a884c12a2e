"""Files that start a command on a cluster: what is in them, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from called import call

from paceline.api.launch_files import LaunchRequest, text
from paceline.base.errors import UsageError
from paceline.launch.hosts.host_process import host

DOCKER = Path(__file__).parents[2] / "docker"
TRAIN = ["train", "jobs/My Digits.py:other", "--plan", "data=16", "--run", "/runs/a b"]


def document(kind: str, **changes: Any) -> dict[str, Any]:
    return dict(yaml.safe_load(text(kind, LaunchRequest(TRAIN, **changes))))


def test_slurm(tmp_path: Path):
    """Words with blanks stay words, and a stopped run is queued again; bash reads the file."""
    written = text("slurm", LaunchRequest(TRAIN, num_hosts=2, gpus="8", time_limit="1-00:00:00"))
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --requeue",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --job-name=my-digits",
        "srun --kill-on-bad-exit=0 --wait=600 paceline train 'jobs/My Digits.py:other' --plan data=16 "
        "--run '/runs/a b' --resume",
    ):
        assert line in written.splitlines()
    (tmp_path / "job.sh").write_text(written)
    assert subprocess.run(["bash", "-n", str(tmp_path / "job.sh")]).returncode == 0


def test_slurm_is_told_the_name_of_gpus():
    """A cluster with several kinds of them gives the one that is asked for."""
    assert "#SBATCH --gpus-per-node=h100:8" in text(
        "slurm", LaunchRequest(TRAIN, num_hosts=2, gpus="h100:8")
    )
    assert "#SBATCH --time=0-01:00" in text("slurm", LaunchRequest(TRAIN, time_limit="0-01:00"))


def test_kubernetes():
    """A TrainJob whose pods mount the volumes."""
    job = document(
        "k8s", num_hosts=2, gpus="8", image="registry/paceline:1", volumes={"runs": "/runs"}
    )
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (
        2,
        8,
        "registry/paceline:1",
    )
    assert trainer["command"] == ["paceline", *TRAIN, "--resume"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    assert (
        pod["terminationGracePeriodSeconds"] == 120
    )  # to save; Kubernetes kills after 30 s otherwise


def test_skypilot():
    """Buckets are mounted, not copied: what a run writes is there when its machine is gone."""
    task = document(
        "sky",
        num_hosts=2,
        gpus="H100:8",
        volumes={"s3://runs": "/runs", "more": "/m", "./data": "/data"},
    )
    assert (task["num_nodes"], task["resources"]) == (
        2,
        {"accelerators": "H100:8", "job_recovery": {"recover_on_exit_codes": [4, 5]}},
    )
    checkout = task["file_mounts"].pop("~/paceline")
    assert (
        task["setup"] == "pip install ~/paceline" and (Path(checkout) / "pyproject.toml").is_file()
    )
    assert task["file_mounts"] == {
        "/runs": {"source": "s3://runs", "mode": "MOUNT"},
        "/m": {"name": "more", "mode": "MOUNT"},
        "/data": "./data",
    }
    assert task["run"].endswith("--run '/runs/a b' --resume")


def test_ray():
    """The head runs the command and no rank; each host is a pod with its GPUs."""
    job = document("ray", num_hosts=2, gpus="8", image="p:1", volumes={"runs": "/runs"})
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"]["entrypoint"].endswith("--run '/runs/a b' --resume --on ray")
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    [hosts] = cluster["workerGroupSpecs"]
    [container] = hosts["template"]["spec"]["containers"]
    assert (hosts["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (2, 8)
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
    request = LaunchRequest(["train", "job.py", "--run", "/runs/a", "--on=ray:head:10001"])
    assert yaml.safe_load(text("ray", request))["spec"]["entrypoint"].endswith(
        "--on=ray:head:10001 --resume"
    )
    with pytest.raises(UsageError, match="evaluate has no --on ray"):
        text("ray", LaunchRequest(["evaluate", "/runs/a"]))


def test_docker():
    """Each host knows its place and has its own GPUs; folders are no volumes."""
    file = document(
        "docker", num_hosts=2, gpus="8", image="p:1", volumes={"runs": "/runs", "./jobs": "/job"}
    )
    first, second = file["services"]["host-0"], file["services"]["host-1"]
    assert (first["image"], first["command"]) == ("p:1", ["paceline", *TRAIN, "--resume"])
    assert second["environment"] == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "host-0",
        "PET_MASTER_PORT": "29500",
        "PACELINE_HOSTS_HERE": "2",
    }
    assert host(second["environment"]).index == 1  # type: ignore[union-attr]
    assert first["volumes"] == ["runs:/runs", "./jobs:/job"] and file["volumes"] == {"runs": {}}
    [devices] = second["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == [str(number) for number in range(8, 16)]


def test_a_volume_of_docker_may_have_a_dot():
    """Docker refuses a file that uses a volume and does not name it in the end."""
    assert document("docker", volumes={"my.runs": "/runs"})["volumes"] == {"my.runs": {}}


@pytest.mark.parametrize(
    ("name", "hosts", "plan"),
    [("compose", 2, "data=2"), ("compose-servers", 4, "servers=2 workers=2")],
)
def test_the_compose_files_of_the_project_are_what_is_written(name: str, hosts: int, plan: str):
    run = "/runs/digits" if hosts == 2 else "/runs/digits-servers"
    request = LaunchRequest(
        ["train", "01_digits.py", "--plan", plan, "--run", run],
        hosts,
        volumes={"../examples": "/job", "data": "/data", "runs": "/runs"},
    )
    assert (DOCKER / f"{name}.yaml").read_text() == text("docker", request)


def test_words_reach_a_container_as_they_are():
    """Docker and Kubernetes put the values of variables into words, unless the dollar is doubled."""
    request = LaunchRequest(["train", "job.py", "--run", "/runs/a", "--set", "x=$(id)$HOME"])
    assert (
        "x=$$(id)$$HOME" in yaml.safe_load(text("docker", request))["services"]["host-0"]["command"]
    )
    assert "x=$$(id)$$HOME" in yaml.safe_load(text("k8s", request))["spec"]["trainer"]["command"]


@pytest.mark.parametrize("stem", ["a" * 39 + "-b", "-", "Jöb ", "9", "файл"])
def test_a_name_is_one_that_clusters_take(stem: str):
    """A label of RFC 1123: it begins and ends with a letter or a digit."""
    assert re.fullmatch(
        r"[a-z]([a-z0-9-]*[a-z0-9])?", LaunchRequest(["train", f"{stem}.py", "--run", "/r"]).name
    )


def test_options_may_be_joined_with_their_values():
    request = LaunchRequest(["train", "job.py", "--run=/runs/a", "--plan=data=16"], num_hosts=2)
    assert request.num_ranks == 8


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("slurm", {"volumes": {"runs": "/runs"}}, "slurm has no place for --volume"),
        ("docker", {"time_limit": "1:00:00"}, "docker has no place for --time"),
        ("sky", {"image": "other"}, "sky has no place for --image"),
        ("k8s", {"volumes": {"s3://runs": "/runs"}}, "no claim's name"),
        ("ray", {"volumes": {"Runs_X": "/runs"}}, "no claim's name"),
        ("docker", {"volumes": {"runs": "runs"}}, "not mounted at an absolute path"),
        ("docker", {"volumes": {"my runs": "/runs"}}, "neither a volume's name nor a folder"),
        ("docker", {"volumes": {"./a:b": "/runs"}}, "neither a volume's name nor a folder"),
        ("docker", {"volumes": {"runs": "/"}}, "would hide all files"),
        (
            "sky",
            {"volumes": {"s3://a": "/runs", "s3://b": "/runs/"}},
            "s3://b=/runs/ is mounted where s3://a is",
        ),
        ("k8s", {"gpus": "H100:16"}, "k8s has no place for the name in --gpus H100:16"),
        ("docker", {"gpus": "H100:16"}, "docker has no place for the name"),
    ],
)
def test_what_a_kind_has_no_place_for_is_refused(kind: str, given: dict[str, Any], message: str):
    """Instead of being left out."""
    with pytest.raises(UsageError, match=message):
        text(kind, LaunchRequest(TRAIN, **given))


def test_without_pyyaml_the_file_is_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert json.loads(text("k8s", LaunchRequest(TRAIN)))["kind"] == "TrainJob"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": ["plan", "job.py"]}, "not train, evaluate or predict"),
        ({"command": []}, "not train, evaluate or predict"),
        ({"command": ["train", "job.py"]}, "no --run"),
        ({"command": TRAIN, "num_hosts": 0}, "--hosts must be at least 1, got 0"),
        ({"command": TRAIN, "num_hosts": 3}, "16 ranks can't be shared by 3 hosts"),
        (
            {"command": TRAIN, "num_hosts": 2, "gpus": "H100:2"},
            "are 8 a host, and --gpus H100:2 gives each 2",
        ),
        (
            {"command": [*TRAIN[:2], "--procs=4", "--run", "/r"], "gpus": "H100:2"},
            "hint: --hosts 2, or a plan for 2 ranks",
        ),
        ({"command": TRAIN, "volumes": {"./runs": "/runs/"}}, "the run would be lost with it"),
        ({"command": TRAIN, "gpus": "many"}, "not N or NAME:N"),
        ({"command": TRAIN, "time_limit": "soon"}, "HH:MM:SS"),
        ({"command": TRAIN, "time_limit": "4:00"}, "HH:MM:SS"),
        ({"command": TRAIN, "time_limit": "0:02:00"}, "queued again without end"),
        ({"command": TRAIN, "gpus": "16"}, "name of the 16 GPUs"),
    ],
)
def test_what_cannot_start_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        text("sky", LaunchRequest(**given))


def test_the_command_line_writes_it(tmp_path: Path):
    file = tmp_path / "job.sh"
    result = call("launch", "slurm", "--hosts", 2, "--write", file, "--", *TRAIN)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{file}\n" and "#SBATCH --nodes=2" in file.read_text()
    result = call("launch", "slurm", "--write", tmp_path / "no" / "job.sh", "--", *TRAIN)
    assert result.exit_code == 2 and "can't write" in result.stderr
    result = call("launch", "slurm", "--write", __file__, "--", *TRAIN)
    assert result.exit_code == 2 and "is Python code" in result.stderr


def test_a_file_has_all_letters_in_any_locale(tmp_path: Path):
    """Also where Python would write ASCII. Quotes and blanks of a path reach the shell as they are."""
    file, job = tmp_path / """it's "x".sh""", """it's "Jöb".py"""
    paceline = [sys.executable, "-m", "paceline"]
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [*paceline, "launch", "slurm", "--write", str(file), "--", "train", job, "--run", "/r"],
        env=ascii_only,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    [srun] = [
        line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("srun")
    ]
    assert job in shlex.split(srun)
