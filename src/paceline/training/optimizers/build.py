"""Builds a rank's optimizer. The job's function makes it for this rank's parameters; it is refused
if it can't be exact.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.job import Job
from paceline.job.modes import for_training, has_modes
from paceline.job.named_optimizers import requires_closure
from paceline.model.cost.updates import let_fuse
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.mesh import Mesh, axes_cut, local_part
from paceline.strategies.plan import Plan
from paceline.strategies.strategy import Refusal
from paceline.training.optimizers.gather import GatheredTensors, connect
from paceline.training.optimizers.local_shards import OwnParts
from paceline.training.optimizers.parts import groups_of
from paceline.training.optimizers.probe import (
    Behaviour,
    Reach,
    is_exact_in_parts,
    no_optimizer,
    observe,
)
from paceline.training.optimizers.state import OptimizerState


@dataclass(frozen=True)
class Built:
    """The optimizer for the parameters that this rank updates."""

    optimizer: torch.optim.Optimizer
    groups: list[list[str]]  # names of all parameters by group, on whichever rank they are
    state: OptimizerState  # the state to save
    behaviour: Behaviour  # what trial steps of it showed
    # Tensors that one rank of several updates whole; None if there are none here.
    gathered: GatheredTensors | None
    own_parts: OwnParts  # tensors of which each rank updates its part, as a plain tensor


def build_optimizer(
    job: Job,
    trainable: Mapping[str, torch.nn.Parameter],
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    mesh: Mesh | None = None,
    sparse: frozenset[str] = frozenset(),
) -> Built:
    """Build the optimizer for the parameters that this rank holds.

    The job's function sees every parameter, so that its groups are the same on every rank.

    Args:
        trainable: All trainable parameters.
        parameters: Those on this rank, in the form in which the rank holds them.
        mesh: The mesh of the ranks that train together. The call is collective over all of them.
        sparse: Names of parameters that get sparse gradients.

    Raises:
        JobError: the function returns no optimizer that can be used.
    """
    behaviour, device = (
        _behaviour(job, trainable, sparse),
        next(iter(trainable.values())).device.type,
    )
    gathered, own_parts = None, OwnParts({})
    if mesh is not None and mesh.holds_parts:
        reach = _agreed(behaviour.reach, mesh, device)
        gathered = _gathered(job, behaviour, reach, trainable, parameters, mesh, sparse)
        if Reach.PARAMETERS not in reach.values() and not behaviour.needs_closure:
            own_parts = OwnParts(
                {
                    name: p
                    for name, p in parameters.items()
                    if hasattr(p, "device_mesh") and reach[name] is Reach.ELEMENT
                }
            )
    whole = {} if gathered is None else gathered.whole
    elsewhere = () if gathered is None else gathered.parameters.keys() - whole.keys()
    updated = {
        name: p
        for name, p in {**parameters, **own_parts.plain, **whole}.items()
        if name not in elsewhere
    }
    optimizer, groups = _built(job, trainable, updated)
    if gathered is None and not behaviour.needs_closure:
        let_fuse(optimizer)
    state = OptimizerState(
        optimizer,
        updated,
        behaviour.changing,
        unnamed=behaviour.unnamed,
        through_state_dict=behaviour.through_state_dict,
        unkept=behaviour.unkept,
        distributed=own_parts.distributed,
        alone=whole.keys() if gathered is not None and gathered.is_together else (),
    )
    return Built(optimizer, groups, state, behaviour, gathered, own_parts)


def refuse_coupled(
    optimizer: torch.optim.Optimizer, reach: Mapping[str, Reach], *, plan_key: str
) -> None:
    """Refuse an optimizer that must see all parameters at once.

    plan_key: the key of the plan that lets each rank update a part of the parameters.

    Raises:
        PlanRefused: names a parameter whose update depends on others.
    """
    coupled = [name for name, extent in reach.items() if extent is Reach.PARAMETERS]
    if coupled:
        raise PlanRefused(
            f"{type(optimizer).__name__} updates '{coupled[0]}' by other parameters' gradients or weights, and "
            f"{plan_key} lets each rank see some of them alone",
            hint="use a data=N, shard=N or tensor=N plan, or an optimizer that treats each parameter by itself (AdamW, "
            "SGD, Muon)",
        )


def refuse_kinds(built: Built, plan: Plan) -> None:
    """Refuse two kinds of optimizers under plans whose ranks can't run them together.

    These are optimizers that evaluate the loss several times a step, and optimizers that have other
    weights for evaluations.

    Raises:
        PlanRefused: parameters lie on servers, or each replica takes its own steps.
    """
    active = ActivePlan(plan)
    kinds: tuple[tuple[bool, str, Refusal], ...] = (
        (
            built.behaviour.needs_closure,
            "needs a closure that evaluates the loss several times a step",
            "closures",
        ),
        (
            has_modes(built.optimizer),
            "has train() and eval(), that is, other weights for evaluations",
            "modes",
        ),
    )
    for is_of_kind, needs, refusal in kinds:
        if is_of_kind and (why := active.refusal(refusal)):
            raise PlanRefused(
                f"{type(built.optimizer).__name__} {needs}, and {why}",
                hint="use a data=N, shard=N or tensor=N plan",
            )


def _behaviour(
    job: Job, trainable: Mapping[str, torch.nn.Parameter], sparse: frozenset[str]
) -> Behaviour:
    try:
        return observe(job.optimizer, trainable, sparse)
    # An error of the user's code. It comes again with the real parameters, unless it depends on
    # sizes.
    except Exception as error:
        needs_closure = requires_closure(_built(job, trainable, {})[0])
        first = (str(error).splitlines() or [""])[0]
        logger.warning(
            "the optimizer could not be tried on stand-ins of the parameters, so it is taken to see %s "
            "whole and to keep its state where torch says (%s: %s)",
            "all tensors" if needs_closure else "each tensor",
            type(error).__name__,
            first,
        )
        return Behaviour(
            dict.fromkeys(trainable, Reach.PARAMETERS if needs_closure else Reach.TENSOR),
            needs_closure=needs_closure,
        )


def _agreed(reach: Mapping[str, Reach], mesh: Mesh, device: str) -> dict[str, Reach]:
    """Return the furthest reach that any rank found, because ranks that differ by a rounding must
    decide alike. Collective.
    """
    furthest = torch.tensor([int(extent) for extent in reach.values()], device=device)
    if mesh.world_size > 1:
        dist.all_reduce(furthest, dist.ReduceOp.MAX)
    return {name: Reach(number) for name, number in zip(reach, furthest.tolist(), strict=True)}


def _is_exact_in_parts(job: Job, parameters: Mapping[str, torch.nn.Parameter], mesh: Mesh) -> bool:
    from torch.distributed.tensor import distribute_tensor

    def distribute(name: str, whole: torch.Tensor) -> torch.Tensor:
        parameter: Any = parameters[name]
        moved = whole.to(local_part(parameter).device)
        if not axes_cut(parameter):
            return moved
        return distribute_tensor(
            moved, parameter.device_mesh, parameter.placements, src_data_rank=None
        )

    exact = torch.tensor(
        int(is_exact_in_parts(job.optimizer, parameters, distribute)),
        device=local_part(next(iter(parameters.values()))).device,
    )
    dist.all_reduce(exact, dist.ReduceOp.MIN)
    return bool(exact)


def _gathered(
    job: Job,
    behaviour: Behaviour,
    reach: Mapping[str, Reach],
    trainable: Mapping[str, torch.nn.Parameter],
    parameters: Mapping[str, torch.nn.Parameter],
    mesh: Mesh,
    sparse: frozenset[str],
) -> GatheredTensors | None:
    """Return the tensors that must be updated whole and are held in parts; None if there are none.
    Collective over all ranks.

    An optimizer that evaluates the loss several times a step decides on one rank how often it does
    so, because the decision may depend on anything.

    Raises:
        PlanRefused: the optimizer must see all parameters, and one of them gets sparse gradients.
    """
    is_coupled = Reach.PARAMETERS in reach.values() or behaviour.needs_closure
    if not is_coupled and max(reach.values()) is Reach.ELEMENT:
        return None
    has_stages = mesh.sizes[mesh.stage_axis] > 1
    if all(mesh.sizes[axis] == 1 for axis in mesh.part_axes) and not (is_coupled and has_stages):
        return None
    group, ranks = connect(mesh, stages=is_coupled)
    place = ranks.index(mesh.rank)
    if not is_coupled:
        gathered = {
            name: p for name, p in parameters.items() if axes_cut(p) and reach[name] is Reach.TENSOR
        }
        return GatheredTensors(gathered, group, place=place, size=len(ranks)) if gathered else None
    if not has_stages and not behaviour.needs_closure and _is_exact_in_parts(job, parameters, mesh):
        return None  # torch computes the norms of this optimizer over all parts
    if tables := sorted(sparse & trainable.keys()):
        raise PlanRefused(
            f"the optimizer updates parameters by others' gradients or weights, and '{tables[0]}' gets "
            "sparse gradients, which ranks that hold parts of a model don't send to one of them",
            hint="use a data=N plan, or build the embedding with sparse=False",
        )
    logger.warning(
        "the optimizer couples parameters: one rank of each %d that hold the model's parts updates all "
        "of them, and holds all of the optimizer's state",
        len(ranks),
    )
    return GatheredTensors(parameters, group, place=place, size=len(ranks), every=trainable)


def _built(
    job: Job,
    trainable: Mapping[str, torch.nn.Parameter],
    parameters: Mapping[str, torch.nn.Parameter],
) -> tuple[torch.optim.Optimizer, list[list[str]]]:
    """Return the optimizer for this rank's parameters, and the names of all parameters in its
    groups.
    """
    every = {
        name: parameters[name] if name in parameters else _stand_in(p)
        for name, p in trainable.items()
    }
    optimizer = for_training(job.optimizer, list(every.items()))
    _check(optimizer)
    name_of = {id(p): name for name, p in every.items()}
    used = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := sum(id(p) not in name_of for p in used):
        raise JobError(
            f"the optimizer holds {strangers} parameters that are not the model's",
            hint="build it from the (name, parameter) pairs it is given. A loss with weights of its own is "
            "a second model, and a step of one's own trains both: see `paceline docs own-step`",
        )
    if left_out := set(name_of.values()) - {name_of[id(p)] for p in used}:
        warnings.warn(
            f"the optimizer leaves out {len(left_out)} trainable parameters, such as {min(left_out)}; "
            "they will not change",
            stacklevel=2,
        )
    loss = job.compute if job.loss is None else job.loss
    if loss is not None and (
        untrained := [
            name for name, p in _weights_of_loss(loss, trainable).items() if id(p) not in name_of
        ]
    ):
        warnings.warn(
            f"the loss has trainable weights of its own, such as '{untrained[0]}', and they will not change: "
            "the optimizer is given the model's. A step of one's own trains the loss as a second model, see "
            "`paceline docs own-step`; requires_grad_(False) says that they are to stay",
            stacklevel=2,
        )
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    for group in groups_of(optimizer):
        is_local = [name_of.get(id(p)) in parameters for p in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [
                    item for item, is_kept in zip(group[key], is_local, strict=True) if is_kept
                ]
    return optimizer, names


def _weights_of_loss(loss: Any, of_model: Collection[str]) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters, by name, of modules that a loss uses.

    Such a module is the loss itself, the object of which it is a method, or found in the variables
    around it.

    of_model: the names of the model's own parameters. A module with exactly these is the model, of
    which a rank may hold a part.
    """
    reached = [loss, getattr(loss, "__self__", None)]
    if isinstance(loss, partial):
        reached += [loss.func, *loss.args, *loss.keywords.values()]
    if hasattr(loss, "__code__"):
        around = inspect.getclosurevars(loss)
        reached += [*around.nonlocals.values(), *around.globals.values()]
    trainable = [
        {name: p for name, p in module.named_parameters() if p.requires_grad}
        for module in reached
        if isinstance(module, torch.nn.Module)
    ]
    return {
        name: p
        for of_module in trainable
        if of_module.keys() != set(of_model)
        for name, p in of_module.items()
    }


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise no_optimizer(optimizer)


def _stand_in(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter of the same shape that has the memory of one element."""
    return torch.nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
