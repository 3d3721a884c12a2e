"""Asks a fork for what this process must not touch: CUDA, which forks can't share once it is in use."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work()` returns, as JSON brings it: run in a fork that ends with it.

    Raises:
        RuntimeError: the work failed; its last line says how.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not answer:
        raise RuntimeError(f"the process that was asked ended with {os.waitstatus_to_exitcode(status)}")
    found = json.loads(answer)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["value"]


@contextmanager
def cuda_left_alone() -> Iterator[None]:
    """Work on the CPU that must not begin to use CUDA: fake tensors and torch's optimizers ask whether there is a GPU,
    and asking is use. A process that uses CUDA already is left as it is."""
    import torch

    if torch.cuda.is_initialized():
        yield
        return
    is_available, current = torch.cuda.is_available, torch.accelerator.current_accelerator
    torch.cuda.is_available, torch.accelerator.current_accelerator = lambda: False, lambda check_available=False: None
    try:
        yield
    finally:
        torch.cuda.is_available, torch.accelerator.current_accelerator = is_available, current


def _answer(work: Callable[[], Any], writing: int) -> None:
    code = 1
    try:
        try:
            answer = {"value": work()}
            code = 0
        except Exception as error:
            answer = {"error": "".join(traceback.format_exception_only(error)).strip()}
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(code)
