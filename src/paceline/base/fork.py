"""Forks of this process: preparing for them, and running work in them that this process must not do
itself.

Most of this is because of CUDA: once a process uses it, its forks can't. torch starts to use CUDA
in unexpected places. Any backward starts a thread for each GPU, even a backward of fake tensors or
on the CPU, and fake tensors look for GPUs when their mode is entered.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.base import (
    codec,
    errors,
    inherited,  # noqa: F401  # each fork opens files again at their places
)
from paceline.base.errors import PacelineError

# Whether `in_a_fork` made this process. It may use CUDA then, so its forks perhaps can't.
_is_apart = False


def in_a_fork(work: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
    """Run `work()` in a fork and return its result, a value that `codec.encode` takes. The fork ends
    after the work.

    A process that is itself such a fork runs the work without another fork.

    Args:
        timeout_s: Seconds after which the fork is killed; by default it may take as long as it
            likes.

    Raises:
        PacelineError: the work raised it, or one of its kinds.
        RuntimeError: the work failed otherwise, and its last line says how; or it gave no answer in
            time.
    """
    if _is_apart:
        return codec.decode(codec.encode(work()))
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    parent_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(reading)
        _answer(work, writing, parent_pid)
    os.close(writing)
    answer = None
    try:
        answer = _read_until(reading, None if timeout_s is None else time.monotonic() + timeout_s)
    finally:
        if answer is None:  # it takes too long, or this process is interrupted
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer is None:
        raise RuntimeError(f"the process that was asked gave no answer within {timeout_s:g} s")
    encoded = value_of(answer, os.waitstatus_to_exitcode(status))
    return codec.decode(base64.b64decode(encoded))


def value_of(answer: bytes, exit_code: int) -> Any:
    """Return the result of another process, which has sent the document of `answer_of` as bytes of
    JSON.

    Raises:
        PacelineError: the other process raised it.
        RuntimeError: the other process failed otherwise, or ended without an answer.
    """
    if not answer:
        raise RuntimeError(f"the process that was asked ended with {exit_code}")
    document = json.loads(answer)
    if "kind" in document:
        raise getattr(errors, document["kind"])(document["error"], hint=document["hint"])
    if "error" in document:
        raise RuntimeError(document["error"])
    return document["value"]


def answer_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Run the work and return its result or its exception, for `value_of` in another process."""
    try:
        return {"value": work()}
    except PacelineError as error:
        return described(error)
    except Exception as error:
        return {"error": "".join(traceback.format_exception_only(error)).strip()}


def described(error: PacelineError) -> dict[str, Any]:
    """Return an error as a document, for `value_of` in another process."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {"kind": kind.__name__, "error": error.args[0], "hint": error.hint}


def _read_until(descriptor: int, deadline_s: float | None) -> bytes | None:
    """Read a pipe until its other end is closed; None if that takes too long."""
    with open(descriptor, "rb") as pipe:
        if deadline_s is None:
            return pipe.read()
        answer = b""
        while wait([descriptor], max(0.0, deadline_s - time.monotonic())):
            if not (part := os.read(descriptor, 65536)):
                return answer
            answer += part
        return None


@contextmanager
def cuda_left_alone() -> Iterator[None]:
    """Let torch find no GPU while the block runs, so that work on the CPU does not begin to use
    CUDA.

    Fake tensors and torch's optimizers ask whether there is a GPU, and asking already uses CUDA. If
    the process uses CUDA already, nothing changes.
    """
    import torch

    if torch.cuda.is_initialized():
        yield
        return
    is_available, current = torch.cuda.is_available, torch.accelerator.current_accelerator
    torch.cuda.is_available, torch.accelerator.current_accelerator = (
        lambda: False,
        lambda check_available=False: None,
    )
    try:
        yield
    finally:
        torch.cuda.is_available, torch.accelerator.current_accelerator = is_available, current


@functools.cache
def ask_forks_about_cuda() -> None:
    """Have forks answer torch's questions about GPUs from now on, so that this process does not use
    CUDA itself.

    Nothing changes if there is no driver of GPUs, or if CUDA is in use already.

    Some modules ask such questions when they are imported: torchao 0.18, which Transformers imports
    with a model, asks for the capability of the first GPU, and torch's inductor asks whether there
    is a GPU. Answers are kept, because each one takes a fork that makes a context of CUDA.
    """
    from paceline.base.drivers import has_driver

    if not has_driver() or not forks_can_use_cuda():
        return
    import torch

    for name in (
        "is_available",
        "device_count",
        "current_device",
        "get_device_capability",
        "get_device_name",
        "is_bf16_supported",
    ):
        setattr(torch.cuda, name, _answered_by_forks(getattr(torch.cuda, name)))
    properties, is_before_use = (
        torch.cuda.get_device_properties,
        functools.partial(_is_before_use, os.getpid()),
    )
    described = _answered_by_forks(
        lambda *where: {
            name: value
            for name in dir(properties(*where))
            if not name.startswith("_")
            and isinstance(value := getattr(properties(*where), name), int | float | str)
        }
    )
    torch.cuda.get_device_properties = lambda *where: (  # type: ignore[assignment]
        SimpleNamespace(**described(*where)) if is_before_use() else properties(*where)
    )
    accelerator = torch.accelerator.current_accelerator
    kind = _answered_by_forks(lambda **options: str(accelerator(**options) or ""))
    torch.accelerator.current_accelerator = lambda check_available=False: (
        accelerator(check_available)
        if not is_before_use()
        else torch.device(name)
        if (name := kind(check_available=check_available))
        else None
    )


def _is_before_use(pid: int) -> bool:
    """Whether this is the process `pid`, not a fork of it, and it does not use CUDA yet."""
    return os.getpid() == pid and not sys.modules["torch"].cuda.is_initialized()


def _answered_by_forks(ask: Callable[..., Any]) -> Callable[..., Any]:
    answers: dict[str, Any] = {}
    is_before_use = functools.partial(_is_before_use, os.getpid())

    @functools.wraps(ask)
    def answer_of_fork(*arguments: Any, **options: Any) -> Any:
        if not is_before_use():
            return ask(*arguments, **options)
        question = repr((arguments, options))
        if question not in answers:
            answers[question] = in_a_fork(lambda: ask(*arguments, **options))
        return answers[question]

    return answer_of_fork


def _answer(work: Callable[[], Any], writing: int, parent_pid: int) -> None:
    global _is_apart
    code = 1
    try:
        _is_apart = True
        die_with(parent_pid)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # ranks that the parent has started are not this process's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if "torch" in sys.modules:
            _renew_thread_pool(sys.modules["torch"])
        answer = _in_a_thread(
            lambda: answer_of(lambda: base64.b64encode(codec.encode(work())).decode())
        )
        code = int("value" not in answer)
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(code)


def _in_a_thread(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run the work in a new thread, because the forked thread could wait for ever in its next
    parallel loop.

    libgomp keeps the threads of a parallel loop for the thread that began the loop. A fork does not
    have them, but its thread waits for them. A new thread gets threads of its own.
    """
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def _renew_thread_pool(torch: Any) -> None:
    """Make torch's thread pool of this fork before the fork has other threads.

    A fork replaces its parent's thread pool when it first asks for the pool. If several threads ask
    at once, as autograd's threads for each GPU do, one of them finds no pool, and torch 2.13 ends
    the process ("Invalid thread pool!", caffe2/utils/threadpool/pthreadpool-cpp.cc).
    """
    torch.set_num_threads(torch.get_num_threads())


def forks_can_use_cuda() -> bool:
    """Whether forks of this process can use CUDA.

    They can't once this process has used it, even if only to count GPUs as
    `torch.cuda.is_available()` does. torch reports this only in a fork, so a fork is asked.
    """
    from paceline.base.drivers import has_driver

    torch = sys.modules.get("torch")
    if torch is None:
        return True
    from paceline.torch_private.cuda import is_in_bad_fork

    return not torch.cuda.is_initialized() and not (has_driver() and in_a_fork(is_in_bad_fork))


def refuse_used_cuda() -> None:
    """Refuse to continue if this process uses CUDA, because its forks could not use it.

    Raises:
        PacelineError: CUDA is already in use in this process.
    """
    if not forks_can_use_cuda():
        keras = "set KERAS_TORCH_DEVICE=cpu before keras is imported, which takes the GPU; or "
        raise PacelineError(
            "CUDA is already in use in this process, and ranks are forks of it",
            hint=f"{keras * ('keras' in sys.modules)}call train before anything touches the GPU, or "
            "counts GPUs as torch.cuda.is_available() does; or use the paceline command",
        )


def prepare_to_fork() -> None:
    """End threads and drop objects that depend on threads, because a fork inherits the objects
    without the threads.
    """
    end_openmp_threads()
    _drop_process_groups()


def _drop_process_groups() -> None:
    """Free gloo's process groups that nothing refers to, such as that of a deleted
    DistributedDataParallel model.

    Otherwise the garbage collector of a fork would free them, and their destructor would wait there
    for ever for threads that only this process has.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if "gloo" in name.read_text():
                gc.collect()
                return


def end_openmp_threads() -> None:
    """End the threads that GNU OpenMP keeps for this one; it starts them again when it needs them.

    A fork inherits the list of these threads but not the threads, and its first parallel operator
    would wait for them for ever. That happens already if a job prepares its data with two threads.
    A process that is itself a fork may have inherited such a list. Ending those threads would wait
    for ever too, so nothing is done in a fork.
    """
    if multiprocessing.parent_process() is not None:
        return
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().splitlines() if maps.exists() else []
    for library in {line.split()[-1] for line in mapped if "libgomp" in line}:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).omp_pause_resource_all(2)  # omp_pause_hard, OpenMP 5.0


def die_with(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent_pid:  # it ended before it could be asked
            os._exit(1)
