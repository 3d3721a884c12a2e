"""Write files that start a Paceline command on a cluster: for Slurm, Kubeflow Trainer, SkyPilot,
KubeRay and Docker.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.errors import PeerLost, Preempted, UsageError
from paceline.cluster.cluster import HOSTS_HERE
from paceline.strategies.plan import Plan

# seconds for a run to finish its step and save, before a time limit or after a request to stop
NOTICE_S = 120
# Seconds from the first end of a rank until Slurm kills the last one: `on_end` of rank 0 may upload
# a model.
LAST_RANK_S = 600
IMAGE = "paceline"  # the name under which this project's Dockerfile is built
PORT = 29500  # the port where containers meet; torchrun's default
# Options that only some kinds of files can express: the field, the option, the kinds.
_OPTIONAL = (
    ("time_limit", "--time", ("slurm",)),
    ("image", "--image", ("k8s", "ray", "docker")),
    ("volumes", "--volume", ("k8s", "sky", "ray", "docker")),
)
_NAMED_GPUS = ("slurm", "sky")
_SKY_CHECKOUT = "~/paceline"  # where SkyPilot's machines find the checkout of this machine
_VOLUME = re.compile(r"[a-zA-Z0-9][\w.-]*", re.ASCII)  # as Docker names volumes
# RFC 1123 label, as Kubernetes names volumes.
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class LaunchRequest:
    """A command on several hosts."""

    # what follows `paceline`, such as ["train", "job.py", "--run", "/runs/a"]
    command: Sequence[str]
    num_hosts: int = 1
    gpus: str = "0"  # per host, as N or NAME:N; "0" for ranks on CPUs
    time_limit: str | None = None  # as Slurm writes it: HH:MM:SS or D-HH:MM:SS
    image: str = IMAGE
    volumes: Mapping[str, str] = field(default_factory=dict)  # where each named volume is mounted

    def __post_init__(self) -> None:
        if not self.command or self.command[0] not in ("train", "evaluate", "predict"):
            raise UsageError(
                f"'{shlex.join(self.command)}' is not train, evaluate or predict with its options",
                hint="paceline launch slurm --hosts 2 -- train job.py --run /shared/runs/a",
            )
        if "--run" not in self._options and self.command[0] == "train":
            raise UsageError(
                "the command has no --run, and hosts must share the run's folder",
                hint="--run /shared/runs/a after train",
            )
        if self.num_hosts < 1:
            raise UsageError(f"--hosts must be at least 1, got {self.num_hosts}")
        if self.time_limit is not None:
            _check_time_limit(self.time_limit)
        _check_mounts(self.volumes)
        if not re.fullmatch(r"([\w.-]+:)?\d+", self.gpus):
            raise UsageError(
                f"--gpus {self.gpus} is not N or NAME:N", hint="--gpus 8, or --gpus H100:8"
            )
        if (self._world_size or 0) % self.num_hosts:
            raise UsageError(
                f"the command's {self._world_size} ranks can't be shared by {self.num_hosts} hosts alike",
                hint=f"--hosts with a number that divides {self._world_size}",
            )
        if self.num_gpus and self.num_ranks > self.num_gpus and "--devices" not in self._options:
            raise UsageError(
                f"the command's {self._world_size} ranks are {self.num_ranks} a host, and --gpus "
                f"{self.gpus} gives each {self.num_gpus}",
                hint=f"--hosts {-(-(self._world_size or 0) // self.num_gpus)}, or a plan for "
                f"{self.num_hosts * self.num_gpus} ranks",
            )

    @property
    def num_gpus(self) -> int:
        """The number of GPUs per host."""
        return int(self.gpus.rpartition(":")[2])

    @property
    def num_ranks(self) -> int:
        """The number of ranks per host.

        It is the host's part of the plan's ranks or of --procs; else one per GPU; else one.
        """
        return self._world_size // self.num_hosts if self._world_size else self.num_gpus or 1

    @property
    def _world_size(self) -> int | None:
        """The number of ranks that the command asks for; None if it does not say."""
        plan, procs = self._options.get("--plan"), self._options.get("--procs")
        if plan is not None and plan != "auto":
            return Plan.read(plan).world_size
        return int(procs) if procs is not None and procs.isdigit() else None

    @property
    def _options(self) -> dict[str, str]:
        """The word that follows each word of the command, or the text after `=` in it."""
        pairs = dict(zip(self.command, [*self.command[1:], ""], strict=True))
        return {
            **pairs,
            **{
                name: value
                for word in self.command
                if word.startswith("--")
                for name, is_joined, value in [word.partition("=")]
                if is_joined
            },
        }

    @property
    def resumed(self) -> list[str]:
        """The whole command. It resumes from the newest checkpoint, or begins if there is none."""
        words = ["paceline", *self.command]
        return words if self.command[0] != "train" or "--resume" in words else [*words, "--resume"]

    @property
    def name(self) -> str:
        """A name from the job's file, in letters that every cluster accepts."""
        file = next((word for word in self.command if word.partition(":")[0].endswith(".py")), "")
        stem = re.sub(r"[^a-z0-9]+", "-", Path(file.partition(":")[0]).stem.lower())
        return re.sub(r"^[^a-z]+", "", stem)[:40].rstrip("-") or "paceline"


def _check_time_limit(limit: str) -> None:
    """Refuse a time limit that is ambiguous or too short.

    Raises:
        UsageError: Slurm and a reader would understand the limit differently (Slurm takes 4:00 for
            four minutes), or it ends a run before the run was asked to save.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", limit)
    if match is None or (match[1] is None and match[4] is None):
        raise UsageError(f"--time {limit} is not HH:MM:SS or D-HH:MM:SS", hint="--time 4:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if ((24 * days + hours) * 60 + minutes) * 60 + seconds <= NOTICE_S:
        raise UsageError(
            f"--time {limit} is over within the {NOTICE_S} s before it in which a run saves, so the run "
            "would be queued again without end",
            hint="--time 4:00:00",
        )


def _check_mounts(volumes: Mapping[str, str]) -> None:
    """Refuse volumes that share a folder or have none.

    Raises:
        UsageError: a volume is not mounted at a folder of its own.
    """
    first: dict[str, str] = {}
    for name, path in volumes.items():
        if not re.fullmatch(r"/[^:]*", path):
            raise UsageError(
                f"--volume {name}={path} is not mounted at an absolute path", hint=f"{name}=/{name}"
            )
        place = posixpath.normpath(path)
        if place.strip("/") == "":
            raise UsageError(
                f"--volume {name}={path} would hide all files of the container",
                hint=f"{name}=/{name}",
            )
        if place in first:
            raise UsageError(
                f"--volume {name}={path} is mounted where {first[place]} is", hint=f"{name}=/{name}"
            )
        first[place] = name


def text(kind: str, request: LaunchRequest) -> str:
    """Return the text of the file for a kind of cluster.

    Raises:
        UsageError: the request lacks something or has something that this kind can't express.
    """
    defaults = LaunchRequest(request.command)
    for name, option, kinds in _OPTIONAL:
        if kind not in kinds and getattr(request, name) != getattr(defaults, name):
            raise UsageError(
                f"a file for {kind} has no place for {option}",
                hint=f"leave {option} out; {', '.join(kinds)} take it",
            )
    if kind not in _NAMED_GPUS and ":" in request.gpus:
        raise UsageError(
            f"a file for {kind} has no place for the name in --gpus {request.gpus}",
            hint=f"--gpus {request.num_gpus}; {' and '.join(_NAMED_GPUS)} take a name",
        )
    writers: dict[str, Callable[[LaunchRequest], str]] = {
        "slurm": slurm,
        "k8s": kubernetes,
        "sky": skypilot,
        "ray": ray_job,
        "docker": compose,
    }
    return writers[kind](request)


def slurm(request: LaunchRequest) -> str:
    """Return a batch file for Slurm.

    Slurm sends USR1 before the time limit; a run that was stopped in this way is queued again.
    """
    options = {
        "job-name": request.name,
        "nodes": request.num_hosts,
        "ntasks-per-node": request.num_ranks,
        **({"gpus-per-node": request.gpus} if request.num_gpus else {}),
        **({"time": request.time_limit} if request.time_limit else {}),
        "signal": f"USR1@{NOTICE_S}",
        "open-mode": "append",
        "output": f"{request.name}-%j.out",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --requeue",
        "",
        f"srun --kill-on-bad-exit=0 --wait={LAST_RANK_S} {shlex.join(request.resumed)}",
        "code=$?",
        f"if [ $code -eq {Preempted.exit_code} ]; then  # stopped before the time limit, with a checkpoint",
        "    scontrol requeue $SLURM_JOB_ID",
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def kubernetes(request: LaunchRequest) -> str:
    """Return a TrainJob of Kubeflow Trainer, v1alpha1, under its runtime `torch-distributed`.

    Raises:
        UsageError: a volume's name is not valid in Kubernetes.
    """
    resources = {"limits": {"nvidia.com/gpu": request.num_gpus}} if request.num_gpus else None
    words = [
        word.replace("$", "$$") for word in request.resumed
    ]  # Kubernetes reads $(NAME), and $$ as one dollar
    trainer = {
        "image": request.image,
        "numNodes": request.num_hosts,
        "numProcPerNode": request.num_ranks,
        "command": words,
        **({"resourcesPerNode": resources} if resources else {}),
    }
    volumes, mounts = _claims(request)
    patched = {
        "manager": "paceline.launch/pods",
        "trainingRuntimeSpec": {
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "spec": {
                                    "template": {
                                        "spec": {
                                            "terminationGracePeriodSeconds": NOTICE_S,
                                            **(
                                                {
                                                    "volumes": volumes,
                                                    "containers": [
                                                        {"name": "node", "volumeMounts": mounts}
                                                    ],
                                                }
                                                if volumes
                                                else {}
                                            ),
                                        }
                                    }
                                }
                            },
                        }
                    ]
                }
            }
        },
    }
    return _yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": request.name},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": trainer,
                "runtimePatches": [patched],
            },
        }
    )


def _claims(request: LaunchRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a pod's volumes, each a claim of its name, and where its container mounts them."""
    for name in request.volumes:
        if not _CLAIM.fullmatch(name):
            raise UsageError(
                f"--volume {name}=... is no claim's name: Kubernetes takes small letters, digits and '-', "
                "at most 63",
                hint="--volume runs=/runs",
            )
    return (
        [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in request.volumes],
        [{"name": name, "mountPath": path} for name, path in request.volumes.items()],
    )


def skypilot(request: LaunchRequest) -> str:
    """Return a SkyPilot task.

    `sky jobs launch` starts it again on other machines if its own are taken away, and where the run
    ends because it was asked to or because a host is lost.

    Raises:
        UsageError: GPUs without a name, a run in a folder that would be lost, or no checkout to
            install from.
    """
    if request.num_gpus and ":" not in request.gpus:
        raise UsageError(
            f"SkyPilot needs the name of the {request.num_gpus} GPUs of a host",
            hint="--gpus H100:8",
        )
    resources = {
        **({"accelerators": request.gpus} if request.num_gpus else {}),
        "job_recovery": {"recover_on_exit_codes": [PeerLost.exit_code, Preempted.exit_code]},
    }
    checkout = Path(__file__).parents[3]
    if not (checkout / "pyproject.toml").is_file():
        raise UsageError(
            "SkyPilot's machines install Paceline from a checkout, and this installation is from none",
            hint="pip install -e . in a checkout of Paceline, and the command again",
        )
    mounts = {path: _bucket(name, path, request) for name, path in request.volumes.items()}
    return _yaml(
        {
            "name": request.name,
            "num_nodes": request.num_hosts,
            "resources": resources,
            "workdir": ".",
            "file_mounts": {**mounts, _SKY_CHECKOUT: str(checkout)},
            "setup": f"pip install {_SKY_CHECKOUT}",
            "run": shlex.join(request.resumed),
        }
    )


def _bucket(name: str, path: str, request: LaunchRequest) -> Any:
    """Return what is mounted at a path.

    Machines get a copy of a folder of this machine, as they get one of a bucket without a mode.
    """
    if name[0] not in "./~":
        return {"source" if "://" in name else "name": name, "mode": "MOUNT"}
    if f"{posixpath.normpath(request._options.get('--run', ''))}/".startswith(
        f"{posixpath.normpath(path)}/"
    ):
        raise UsageError(
            f"--volume {name}={path}: each machine gets a copy of {name}, and the run would be lost with "
            "it",
            hint=f"a bucket: s3://runs={path}",
        )
    return name


def ray_job(request: LaunchRequest) -> str:
    """Return a RayJob of KubeRay, v1: a head that runs the command and no ranks, and one pod per
    host.

    The operator replaces a host that is lost, and the run goes on when the host is back.

    Raises:
        UsageError: the command is not train, or a volume's name is not valid in Kubernetes.
    """
    if request.command[0] != "train":
        raise UsageError(f"{request.command[0]} has no --on ray", hint="a RayJob is for train")
    words = request.resumed if "--on" in request._options else [*request.resumed, "--on", "ray"]
    volumes, mounts = _claims(request)

    def pod(name: str, limits: Mapping[str, Any]) -> dict[str, Any]:
        container = {
            "name": name,
            "image": request.image,
            "resources": {"limits": limits, "requests": limits},
            **({"volumeMounts": mounts} if mounts else {}),
        }
        return {
            "spec": {
                "terminationGracePeriodSeconds": NOTICE_S,
                "containers": [container],
                **({"volumes": volumes} if volumes else {}),
            }
        }

    cpus = {"cpu": str(max(1, request.num_ranks))}
    hosts = {
        "groupName": "hosts",
        "replicas": request.num_hosts,
        "minReplicas": request.num_hosts,
        "maxReplicas": request.num_hosts,
        "rayStartParams": {},
        "template": pod(
            "host", {**cpus, **({"nvidia.com/gpu": request.num_gpus} if request.num_gpus else {})}
        ),
    }
    head = {"rayStartParams": {"num-cpus": "0"}, "template": pod("head", {"cpu": "1"})}
    return _yaml(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": request.name},
            "spec": {
                "entrypoint": shlex.join(words),
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": [hosts]},
            },
        }
    )


def compose(request: LaunchRequest) -> str:
    """Return a file of `docker compose`: one service per host, which meet at the first one.

    A service that fails is started again. The hosts are containers of one machine, so a GPU that
    one of them has is not available to the others.

    Raises:
        UsageError: a volume is neither Docker's nor a folder.
    """
    for name in request.volumes:
        if not _VOLUME.fullmatch(name) and (name[0] not in "./~$" or ":" in name):
            raise UsageError(
                f"--volume {name}=... is neither a volume's name nor a folder that Docker can mount",
                hint="--volume runs=/runs, or --volume ./runs=/runs; Docker splits words at ':'",
            )
    hosts = [f"host-{index}" for index in range(request.num_hosts)]
    mounts = [f"{name}:{path}" for name, path in request.volumes.items()]
    services = {
        name: {
            "image": request.image,
            "command": [word.replace("$", "$$") for word in request.resumed],
            "hostname": name,
            "environment": {
                "PET_NNODES": str(request.num_hosts),
                "PET_NODE_RANK": str(index),
                "PET_NPROC_PER_NODE": str(request.num_ranks),
                "PET_MASTER_ADDR": hosts[0],
                "PET_MASTER_PORT": str(PORT),
                **({HOSTS_HERE: str(request.num_hosts)} if request.num_hosts > 1 else {}),
            },
            **({"volumes": list(mounts)} if mounts else {}),
            **(_gpus_of_host(index, request.num_gpus) if request.num_gpus else {}),
            "shm_size": "1gb",
            "init": True,
            "restart": "on-failure",
            "stop_grace_period": f"{NOTICE_S}s",
        }
        for index, name in enumerate(hosts)
    }
    named = [name for name in request.volumes if _VOLUME.fullmatch(name)]  # else a folder
    return _yaml(
        {
            "name": request.name,
            "services": services,
            **({"volumes": {name: {} for name in named}} if named else {}),
        }
    )


def _gpus_of_host(index: int, count: int) -> dict[str, Any]:
    devices = [str(index * count + number) for number in range(count)]
    return {
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [
                        {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
                    ]
                }
            }
        }
    }


def _yaml(document: Mapping[str, Any]) -> str:
    """Write JSON, which is also YAML; lay it out as YAML if PyYAML is installed."""
    try:
        import yaml
    except ImportError:
        return json.dumps(document, indent=2) + "\n"
    written: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return written
