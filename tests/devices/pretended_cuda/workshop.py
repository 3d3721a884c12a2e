"""Trains jobs on request, one line of JSON each, in a process with pretended CUDA devices. Such processes are forks of
one that has imported everything, and that has used no CUDA: all tests share it."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import shared_gpu
import torch
from preloaded import OF_FORKS, use_huge_pages
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.api import prediction
from paceline.base import fork
from paceline.base.errors import PacelineError
from paceline.base.fork import die_with, in_a_fork
from paceline.base.imports import load_modules
from paceline.checkpoint import write_json
from paceline.checkpoint.write import Writer
from paceline.cluster import accelerators, cluster
from paceline.launch.process import rank_process
from paceline.model import graph_check
from paceline.simulate import device as simulate_device
from paceline.training.parts.memory_checkpoint import Copier
from paceline.training.step import TrainingStep
from paceline.training.stepper import Stepper
from pretended_cuda import checks
from pretended_cuda.jobs import JOBS

_measured: dict[str, Any] = {}
_notes_collectives = False  # whether ranks note those of CPU tensors in each step
_killed: dict[
    str, int
] = {}  # a rank's number and the step after which it is killed, the first time it is started


class _OfCpuTensors(TorchDispatchMode):
    """Names of the collectives of CPU tensors that are asked for while it is entered: gloo's, which block the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                leaf
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
            ]
            if any(tensor.device.type == "cpu" for tensor in tensors):
                self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def _measure(device: Any) -> None:
    """Let ranks note what they ask of their device in each step, and what they hold once they are built."""
    build, step = Stepper.__init__, Stepper.step

    def built(stepper: Stepper, *args: Any, **options: Any) -> None:
        build(stepper, *args, **options)
        if stepper.device.type == "cuda":
            stats = torch.cuda.memory_stats(stepper.device)
            _measured.update(
                built_peak_bytes=stats["requested_bytes.all.peak"],
                steps=[],
                backwards=[],
                copies=[],
                built_bytes=stats["requested_bytes.all.current"],
                devices=sorted(
                    {
                        str(p.device)
                        for p in stepper.local_parameters.values()
                        if p.device.type != "meta"
                    }
                ),
            )

    def stepped(stepper: Stepper, *args: Any, **options: Any) -> Any:
        before = device.counts()
        with _OfCpuTensors() if _notes_collectives else nullcontext() as collectives:
            result = step(stepper, *args, **options)
        if "steps" in _measured:
            _measured["steps"].append(
                {name: count - before[name] for name, count in device.counts().items()}
            )
            _measured["steps"][-1]["cpu_collectives"] = collectives.names if collectives else []
        return result

    def noting(backward: Callable[..., Any]) -> Callable[..., Any]:
        def went_back(*args: Any, **options: Any) -> Any:
            before = device.counts()
            result = backward(*args, **options)
            if "backwards" in _measured:
                _measured["backwards"].append(
                    {name: count - before[name] for name, count in device.counts().items()}
                )
            return result

        return went_back

    copy = Copier.copy

    def copied(copier: Copier, step: int, *args: Any, **options: Any) -> None:
        before = device.counts()
        copy(copier, step, *args, **options)
        if "copies" in _measured:
            _measured["copies"].append(
                {name: count - before[name] for name, count in device.counts().items()}
            )
        if (
            _killed == {"rank": copier.context.rank, "step": step}
            and copier.context.num_starts == 1
        ):
            copier.wait()  # else no copy may be there yet
            os.kill(os.getpid(), signal.SIGKILL)

    Copier.copy = copied  # type: ignore[method-assign]
    Stepper.__init__, Stepper.step = built, stepped  # type: ignore[method-assign]
    for kind in (TrainingStep, Stepper):  # workers of servers take no step of their own
        kind.backward = noting(kind.backward)  # type: ignore[method-assign]


@contextmanager
def _written(folder: Path, device: Any) -> Iterator[None]:
    """Ranks write what they noted when they end, those on the CPU, who used CUDA there; and whoever measures a GPU,
    whether ranks use it."""
    run_body, measure = rank_process.run_body, simulate_device._measure
    begun = folder / "begun"

    def measured(kind: Any) -> Any:
        if kind == "cuda":
            (folder / f"gpu-{'beside' if begun.exists() else 'before'}-{os.getpid()}").touch()
        return measure(kind)

    def noted(body: Any, context: Any, **options: Any) -> Any:
        begun.touch()
        _measured.clear()
        _measured["rank"] = context.rank
        result = run_body(body, context, **options)
        if "steps" in _measured:
            (folder / f"measured-{context.rank}.json").write_text(json.dumps(_measured))
        if context.device.type == "cpu":
            (folder / f"on-cpu-{context.rank}.json").write_text(json.dumps(device.first_use()))
        return result

    rank_process.run_body, simulate_device._measure = noted, measured
    try:
        yield
    finally:
        rank_process.run_body, simulate_device._measure = run_body, measure


@contextmanager
def _unpriced() -> Iterator[None]:
    """Runs are not priced before they start, nor predicted: beside short runs that takes longer than they do."""
    with (
        patch.object(
            sys.modules["paceline.api.train"],
            "price",
            lambda job, resolved, chosen, snapshot: prediction.Priced(job, resolved, snapshot),
        ),
        patch.object(
            prediction,
            "_predict",
            lambda priced, run_dir: write_json(
                run_dir / "predicted.json", {"step_s": None, "peak_memory_bytes": None}
            ),
        ),
    ):
        yield


def _train(request: dict[str, Any], device: Any) -> dict[str, Any]:
    global _notes_collectives
    run = Path(request["run"])
    _notes_collectives = request["options"].pop("notes_collectives", False)
    is_priced, is_large, lacks_memory = (
        request["options"].pop(name, False) for name in ("priced", "large", "lacks_memory")
    )
    _killed.clear()
    _killed.update(request["options"].pop("killed", {}))
    try:
        with (
            _written(run.parent, device),
            nullcontext() if is_priced else _unpriced(),
            patch.object(graph_check, "MAX_BYTES", 0) if is_large else nullcontext(),
            (
                patch.object(Writer, "has_memory_for", lambda *args: False)
                if lacks_memory
                else nullcontext()
            ),
        ):
            summary = paceline.train(
                JOBS[request["job"]](),
                request["plan"],
                devices=request["devices"],
                run=run,
                timeout_s=120,
                **{"check": False, **request["options"]},
            )
        return {
            "summary": summary.figures,
            "measured": len([*run.parent.glob("gpu-*")]),
            "measured_beside": len([*run.parent.glob("gpu-beside-*")]),
        }
    except PacelineError as error:
        return {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
    except Exception:
        return {"error": traceback.format_exc(), "kind": "Exception", "exit_code": 1}


def _verify(request: dict[str, Any]) -> dict[str, Any]:
    """Certificates of plans for the job, and the document that they are in."""
    run = Path(request["run"])
    try:
        certificates = paceline.verify(
            JOBS[request["job"]](),
            request["plans"],
            devices=request["devices"],
            run=run,
            timeout_s=120,
            **request["options"],
        )
        return {
            "certificates": [each.to_dict() for each in certificates],
            "described": [each.describe() for each in certificates],
            "document": json.loads((run / "certificate.json").read_text()),
            "table": (run / "certificate.txt").read_text(),
        }
    except PacelineError as error:
        return {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
    except Exception:
        return {"error": traceback.format_exc(), "kind": "Exception", "exit_code": 1}


def _check(name: str) -> dict[str, Any]:
    try:
        return {"found": in_a_fork(getattr(checks, name))}
    except Exception as error:
        return {"error": str(error)}


def _script(path: str, words: Sequence[str]) -> dict[str, Any]:
    """What a script prints. It may use CUDA, and Python that it starts has the devices, too."""

    def run() -> str:
        fork._is_apart = False
        sys.path.insert(0, os.environ["PRETENDED_CUDA_SITE"])
        sys.argv = [path, *words]
        try:
            with redirect_stdout(io.StringIO()) as printed:
                runpy.run_path(path, run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise
        return printed.getvalue()

    try:
        return {"found": in_a_fork(run)}
    except Exception as error:
        return {"error": str(error)}


def _work(connection: socket.socket, device: Any) -> None:
    """The life of a workshop: it answers requests until nobody asks any more."""
    with connection.makefile("r") as requests, connection.makefile("w") as answers:
        for line in requests:
            request = json.loads(line)
            answer = (
                _check(request["check"])
                if "check" in request
                else _script(request["script"], request["words"])
                if "script" in request
                else _verify(request)
                if "plans" in request
                else _train(request, device)
            )
            answer["first_use"] = device.first_use()
            print(json.dumps(answer, default=str), file=answers, flush=True)


def _begin(
    environment: dict[str, str], connection: socket.socket, printed: int, device: Any
) -> None:
    """In a fork: be a workshop, in a process group of its own. The device reads its sizes when it is first used."""
    code = 1
    try:
        die_with(os.getppid())
        os.setsid()
        os.environ.update(environment)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        _work(connection, device)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end(pid: int) -> int:
    """End a workshop and all that it has started. Returns its exit code, negative for a signal."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Open and end workshops as the socket that is stdin says, until nobody speaks to it."""
    import pretended_cuda_device as device

    shared_gpu.install()
    load_modules(OF_FORKS)
    use_huge_pages()
    torch.set_num_threads(1)
    # A pretended device gives tensors all that it has.
    accelerators.CONTEXT_BYTES = cluster.CONTEXT_BYTES = cluster.KERNEL_BYTES = (
        accelerators.WORKSPACES
    ) = 0
    simulate_device.MATRIX_SIDES["cuda"], simulate_device.STREAM_BYTES["cuda"] = (
        simulate_device.MATRIX_SIDES["cpu"],
        simulate_device.STREAM_BYTES["cpu"],
    )
    _measure(device)
    control = socket.socket(fileno=0)
    while order := (given := socket.recv_fds(control, 1 << 16, 2))[0]:
        request, descriptors = json.loads(order), given[1]
        if "end" in request:
            answer = _end(request["end"])
        else:
            with socket.socket(fileno=descriptors[0]) as connection:
                if not (answer := os.fork()):
                    control.close()
                    _begin(request["environment"], connection, descriptors[1], device)
            os.close(descriptors[1])
        control.sendall(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
