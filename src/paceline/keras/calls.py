"""`fit`, `evaluate` and `predict` of a Keras model on several ranks: Keras's own, with other steps of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from paceline.base.errors import PlanError, UsageError
from paceline.cluster.devices import Device
from paceline.launch.hosts.environment import current
from paceline.planner.resolve import resolve
from paceline.strategies.plan import Plan


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    plan: str | Plan | None = None,
    devices: str | None = None,
    **arguments: Any,
) -> Any:
    """Train a compiled Keras model on the ranks of a plan, as `model.fit` does on one device.

    Args:
        x, y: As in `model.fit`: arrays, tensors, dictionaries of them, a PyDataset, a DataLoader, a generator.
        plan: "single" or "data=N"; by default a rank for each device that is named, or else "single". Other plans train
            the model as `job` has it, and take the arguments that docs/keras.md lists.
        devices: Names such as "cpu:0,cpu:1", one a rank.
        arguments: All others of `model.fit`. `batch_size` is over all ranks. Callbacks run in this process.

    Returns:
        Keras's History.

    Raises:
        UsageError: the backend of Keras is not torch, or a batch can't be cut into samples.
        PlanError: the plan doesn't suit the devices. PlanRefused: the first step is not what one process computes.
        RankFailed: a rank failed.
    """
    _check_model(model)
    if (split := _split_plan(plan)) is not None:
        from paceline.keras import split_plans

        return split_plans.fit(model, x, y, split, devices, arguments)
    with _on_ranks(model, plan, devices):
        return model.fit(x, y, **arguments)


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    plan: str | Plan | None = None,
    devices: str | None = None,
    **arguments: Any,
) -> Any:
    """What `model.evaluate` returns, computed on the ranks of a plan. For arguments and errors see `fit`."""
    with _on_ranks(model, plan, devices):
        return model.evaluate(x, y, **arguments)


def predict(
    model: Any,
    x: Any,
    *,
    plan: str | Plan | None = None,
    devices: str | None = None,
    **arguments: Any,
) -> Any:
    """What `model.predict` returns, computed on the ranks of a plan. For arguments and errors see `fit`."""
    with _on_ranks(model, plan, devices):
        return model.predict(x, **arguments)


@contextmanager
def _on_ranks(model: Any, plan: str | Plan | None, devices: str | None) -> Iterator[None]:
    _check_model(model)
    ranks = _devices(plan, devices)
    if len(ranks) == 1:
        from paceline.keras.devices import name_of, on_device

        with on_device(model, name_of(ranks[0])) if devices is not None else nullcontext():
            yield
        return
    if getattr(model, "jit_compile", False):
        warnings.warn(
            "jit_compile=True has no effect on several ranks: their steps are not compiled",
            stacklevel=4,
        )
    from paceline.keras.ranks import Ranks

    with Ranks(model, ranks).running():
        yield


def _check_model(model: Any) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise UsageError(
            f"model must be a keras.Model, got {type(model).__name__}",
            hint="pl.train takes a pl.Job with any torch.nn.Module",
        )
    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras runs on the backend {keras.backend.backend()!r}, and Paceline trains on torch",
            hint="set KERAS_BACKEND=torch before keras is imported: "
            "os.environ['KERAS_BACKEND'] = 'torch'",
        )


def _split_plan(plan: str | Plan | None) -> Plan | None:
    """Return a plan that is not one of replicas alone; None if this one is, or none was given."""
    requested = Plan() if plan is None else Plan.read(plan)
    return None if requested == Plan.of(data=requested.world_size) else requested


def _devices(plan: str | Plan | None, devices: str | None) -> Sequence[Device]:
    """Return the device of each rank.

    Raises:
        UsageError: a launcher started several processes.
        PlanError: the plan is not one of replicas, or doesn't suit the devices.
    """
    launcher = current()
    if launcher is not None and launcher.world_size > 1:
        raise UsageError(
            f"{launcher.launcher} started {launcher.world_size} processes, and fit starts its own ranks: "
            "each process would train a model of its own",
            hint="start one process, and name the plan",
        )
    resolved = resolve(
        None, "single" if plan is None and devices is None else plan, devices=devices
    )
    size = resolved.plan.world_size
    if resolved.plan != Plan.of(data=size):
        raise PlanError(
            f"plan '{resolved.plan}' is not one that fit knows",
            hint=f"plan='data={size}', or pl.train(pl.keras.job(model, x, y, ...), '{resolved.plan}')",
        )
    return resolved.cluster.devices
