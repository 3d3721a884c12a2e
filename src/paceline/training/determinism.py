"""Makes runs repeat to the bit: torch, cuDNN and cuBLAS compute the same results from the same
numbers each time.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from paceline.base.errors import NotDeterministic
from paceline.strategies.plan import Plan

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Workspaces with which cuBLAS repeats its results, the faster one first (its documentation,
# "Results Reproducibility").
_REPEATABLE = (":4096:8", ":16:8")
_MISSING = re.compile(r"^(?:.*: )?(.+?) does not have a deterministic implementation", re.MULTILINE)


def repeatable(plan: Plan) -> AbstractContextManager[Any]:
    """Return the context for a rank's work under a plan: `deterministic_algorithms` if the plan
    says deterministic=yes.
    """
    return deterministic_algorithms() if plan.modifiers.deterministic == "yes" else nullcontext()


@contextmanager
def deterministic_algorithms(*, strict: bool = True) -> Iterator[set[str]]:
    """Let every operator inside the block use an algorithm that repeats to the bit on the same
    device. Settings are restored.

    cuBLAS reads its setting when a process first multiplies matrices on a GPU, so enter this block
    before that.

    Args:
        strict: Whether an operator without such an algorithm is an error. If not, it runs
            unchanged. So does attention, for which torch has deterministic kernels only in strict
            mode.

    Yields:
        The names of operators that ran without such an algorithm so far; none if strict.

    Raises:
        NotDeterministic: the work called an operator that has no such algorithm on its device.
    """
    missing: set[str] = set()
    with _settings(strict=strict), _noting(missing):
        try:
            yield missing
        except Exception as error:
            if (operator := _named(error)) is None:
                raise
            raise NotDeterministic(
                f"the operator '{operator}' has no deterministic form on this device, and deterministic algorithms "
                "were asked for",
                hint="use another operator in its place, or leave deterministic=yes out of the plan; runs then repeat "
                "up to rounding alone",
            ) from error


@contextmanager
def _settings(*, strict: bool) -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic
    before = (
        cudnn.deterministic,
        cudnn.benchmark,
        deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get(_WORKSPACE),
    )
    if before[-1] not in _REPEATABLE:
        os.environ[_WORKSPACE] = _REPEATABLE[0]
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        deterministic.fill_uninitialized_memory = (
            True  # memory that is read before it is written would differ
        )
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, deterministic.fill_uninitialized_memory = before[:3]
        torch.use_deterministic_algorithms(before[3], warn_only=before[4])
        os.environ.pop(_WORKSPACE, None)
        if before[5] is not None:
            os.environ[_WORKSPACE] = before[5]


@contextmanager
def _noting(missing: set[str]) -> Iterator[None]:
    """Collect the names from torch's warnings of such operators. Other warnings are shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _MISSING.pattern)
        show = warnings.showwarning

        def note(message: Warning | str, *where: Any, **options: Any) -> None:
            operator = _MISSING.match(str(message))
            if operator:
                missing.add(operator[1])
            else:
                show(message, *where, **options)

        warnings.showwarning = note
        yield


def _named(error: BaseException) -> str | None:
    """Return the operator that, according to an error or its causes, has no deterministic form."""
    cause: BaseException | None = error
    while cause is not None:
        if operator := _MISSING.search(str(cause)):
            return operator[1]
        cause = cause.__cause__
    return None
