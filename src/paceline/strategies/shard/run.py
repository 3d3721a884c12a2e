"""Sharded replicas: each rank holds a part of every parameter, its gradient and its optimizer state (FSDP2).

The three stages of ZeRO (Rajbhandari et al. 2020) are three settings of when FSDP2 gathers and reduces:

    zero  parameters between forward and backward   gradients between micro-batches
    1     whole                                     whole, reduced once an update
    2     whole                                     sharded, reduced every micro-batch
    3     sharded, gathered unit by unit            sharded, reduced every micro-batch

What FSDP2 can't shard (scalars, empty and complex parameters, those with sparse gradients, the odd dtypes of a unit)
stays whole on every rank, and its gradient is summed at the end of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.model.forward_effects import NOTHING, Observed, owner
from paceline.model.tensors import tensors_in
from paceline.model.units import find_units, is_callable, name_in_model, refuse_scripted
from paceline.strategies.data.run import GradientBuckets
from paceline.strategies.mesh import is_about_parts
from paceline.strategies.shard.exchange import exchange_in_place
from paceline.strategies.shard.hooks import Hooks, hooks_of
from paceline.strategies.shard.inputs import WritableInputs, writable_outputs
from paceline.strategies.shard.order_check import OrderCheck
from paceline.strategies.shard.recurrent import keep_in_place
from paceline.strategies.shard.unused import reduce_unused
from paceline.strategies.state_tensors import SavedState, StateTensor

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from paceline.strategies.mesh import Mesh
    from paceline.strategies.plan import Plan


def prepare(
    model: nn.Module,
    *,
    plan: Plan,
    mesh: Mesh,
    observed: Observed = NOTHING,
    device: torch.device | None = None,
) -> Sharding:
    """Shard every unit and what is left at the root along dim 0.

    Parameters that a forward writes to stay whole: FSDP2 drops what is written to the weights it has gathered. Those
    of a block that is not running are not gathered, and are written to in parts.
    A model that is not on the device is brought there unit by unit, each cut before the next one comes.
    Parameters that autocast casts in any case are gathered cast; see `gathers.py`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.strategies.shard.gathers import gather_in

    refuse_scripted(model, "shard=N")
    units = _called_alike(find_units(model), model, observed.choosing)
    hooks = hooks_of(model)
    keep_in_place(model)
    whole = _kept_whole(model, units.values()) | {
        p
        for name, p in model.named_parameters()
        if name in observed.edited | observed.sparse
        or (name in hooks and hooks[name].after and plan.num_microbatches > 1 and plan.zero > 1)
    }
    if not is_callable(model):  # pieces of stages: nothing would gather what lies outside them
        whole |= _outside(units.values(), model).keys()
    for parameter in model.parameters():
        if parameter not in whole:
            parameter.data = parameter.data.contiguous()  # FSDP2 takes no other memory format
    kind = device.type if device is not None else next(model.parameters()).device.type
    # FSDP2 wants its mesh and that of split layers from one parent.
    along = (
        mesh.devices(kind)["shard"]
        if mesh.sizes["tensor"] > 1
        else DeviceMesh.from_group(mesh.group("shard"), kind, mesh_dim_names=("shard",))
    )
    outermost = {"": model} if is_callable(model) else {}
    # Pieces that edit each other's outputs in place are refused before (strategies/stages).
    warnings.filterwarnings(
        "ignore", message=r"FSDP2-wrapped module \(FSDPPieceModule\) returned a view"
    )
    sharded = {
        name: module
        for name, module in {**units, **outermost}.items()
        if module is model or any(p not in whole for p in module.parameters())
    }
    cast = _gathered_cast(model, observed, hooks.keys(), along)
    if outermost:
        model.register_forward_hook(writable_outputs)  # before FSDP2's
    modules: list[FSDPModule] = []
    for path, unit in sharded.items():
        module = _shard_unit(unit, along, whole, stays_gathered=plan.zero < 3, device=device)
        modules.append(module)
        if unit is not model:
            WritableInputs(unit, path)
        if plan.zero == 3:
            unit.register_forward_hook(_let_go_without_gradients)
        if cast and observed.cast_dtype is not None:
            gather_in(
                observed.cast_dtype,
                module,
                {
                    p
                    for name, p in unit.named_parameters(prefix=path)
                    if name in cast and is_sharded(p)
                },
            )
    if kind == "cpu":
        exchange_in_place(modules, along.size())
    if device is not None:
        _bring(device, [*(p for p in model.parameters() if not is_sharded(p)), *model.buffers()])
    running = _Running()
    if outermost:  # a captured piece is called by every rank alike, and returns tensors
        running = _watch_calls(sharded, _roll(list(sharded), mesh, expects=kind == "cuda"))
        model.forward = _explained(model.forward)
    trainable = {name: p for name, p in model.named_parameters() if p in whole and p.requires_grad}
    return Sharding(
        model,
        sharded,
        GradientBuckets(trainable, mesh.group("shard"), sparse=observed.sparse),
        zero=plan.zero,
        hooks=hooks,
        running=running,
    )


def _shard_unit(
    unit: nn.Module,
    along: DeviceMesh,
    whole: set[nn.Parameter],
    *,
    stays_gathered: bool,
    device: torch.device | None,
) -> FSDPModule:
    """Hand a unit to FSDP2, but for what stays whole, and bring it to the device, where one is given."""
    from torch.distributed.fsdp import fully_shard

    uncut = (
        [p for p in unit.parameters() if p not in whole and not is_sharded(p)]
        if device is not None
        else []
    )
    if device is not None:  # FSDP2 brings the others
        _bring(device, [p for p in uncut if hasattr(p, "device_mesh")])
    module = fully_shard(
        unit, mesh=along, reshard_after_forward=not stays_gathered, ignored_params=whole
    )
    while uncut:
        _let_go_of(uncut.pop())
    # Gradients are sums: the loss is already divided by the whole window's count.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    reduce_unused(module)
    return module


def _gathered_cast(
    model: nn.Module, observed: Observed, hooked: Collection[str], along: DeviceMesh
) -> frozenset[str]:
    """Parameters that are gathered in the dtype that autocast casts them to. Collective."""
    if observed.cast_dtype is None:
        return frozenset()
    cast = _agreed(observed.cast.difference(hooked), model, along)
    if dist.get_rank() == 0:
        numbers = {name: p.numel() for name, p in model.named_parameters()}
        logger.info(
            "of all parameters %.1f %% are gathered in %s: what autocast casts before anything uses it",
            100 * sum(numbers[name] for name in cast) / sum(numbers.values()),
            str(observed.cast_dtype).removeprefix("torch."),
        )
    return cast


def _agreed(names: Collection[str], model: nn.Module, mesh: DeviceMesh) -> frozenset[str]:
    """Of these parameters those that all ranks of the mesh name: they must gather alike. Collective."""
    every = [name for name, _ in model.named_parameters()]
    flags = torch.tensor(
        [name in names for name in every], dtype=torch.uint8, device=mesh.device_type
    )
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=mesh.get_group())
    return frozenset(name for name, is_named in zip(every, flags.tolist(), strict=True) if is_named)


def _roll(units: Sequence[str], mesh: Mesh, *, expects: bool) -> OrderCheck:
    """Collective if ranks expect: each row of the axis then has a group for it alone."""
    if not expects:
        return OrderCheck(units, mesh.group("shard"), mesh.ranks_along("shard"), expects=False)
    groups = [
        (row, dist.new_group(row, backend="gloo")) for row in mesh.rows("shard")
    ]  # all of them on each rank
    return next(
        OrderCheck(units, group, row, expects=True) for row, group in groups if mesh.rank in row
    )


def _bring(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """To the device, in place."""
    for tensor in tensors:
        if tensor.device == device:
            continue
        if hasattr(
            tensor, "device_mesh"
        ):  # a part of a split layer: its data can't be put in the place of others
            with torch.no_grad():
                torch.utils.swap_tensors(
                    tensor, torch.nn.Parameter(tensor.to(device), tensor.requires_grad)
                )
        else:
            tensor.data = tensor.data.to(device)


def _let_go_of(parameter: nn.Parameter) -> None:
    """Of a whole parameter after its shard was made: others may still refer to it, and find one
    element in its shape."""
    if not hasattr(parameter, "device_mesh"):
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
            parameter.shape
        )


def _let_go_without_gradients(module: Any, inputs: Any, output: Any) -> None:
    """FSDP2 keeps the outermost unit's gathered weights for a backward, and an evaluation has none."""
    if not torch.is_grad_enabled():
        module.reshard()


class Sharding:
    """Tells FSDP2 before each micro-batch what to keep whole after it, and sums what it doesn't shard."""

    def __init__(
        self,
        root: nn.Module,
        sharded: Mapping[str, nn.Module],
        whole: GradientBuckets,
        *,
        zero: int,
        hooks: Mapping[str, Hooks],
        running: _Running,
    ) -> None:
        # The outermost tells those inside it.
        self.outermost: list[FSDPModule] = (
            [sharded[""]] if "" in sharded else list(sharded.values())  # type: ignore[list-item, arg-type]
        )
        self.units: list[FSDPModule] = list(sharded.values())  # type: ignore[arg-type]
        self.whole, self.zero, self.hooks, self.running = whole, zero, hooks, running
        self.names = {
            name for name, p in root.named_parameters() if is_sharded(p) and p.requires_grad
        }
        self.used: set[str] = set()
        self.marked: set[str] = set()
        self.edits: list[_Edits] = []
        self.is_collected: bool | None = None  # where the model was ever frozen for a while
        self.open: bool | None = (
            None  # whether the backward is the last one, where it must be ended here
        )
        places = _own_places(sharded)
        for name, module in sharded.items():
            module.register_forward_pre_hook(
                partial(_refuse_other_weights, places[name]), prepend=True
            )
            module.register_forward_pre_hook(self._freeze(places[name]))
            module.register_forward_pre_hook(self._mark(name))
            self.edits.append(edits := _Edits(places[name]))
            module.register_forward_pre_hook(edits.before)
            module.register_forward_hook(
                edits.after, prepend=True
            )  # before FSDP2 lets go of the weights

    def begin(self, *, last: bool) -> None:
        self.running.end()
        if self.running.runs_again:
            self.open = last
            return
        self._set(is_last=last, reshards=last or self.zero == 3, reduces=last or self.zero > 1)
        for edits in self.edits:
            edits.stays_gathered = self.zero < 3 and not last

    def collect(self, *, on: bool) -> None:
        """Whether the model is run for its own gradients, and not frozen inside of another's loss. FSDP2 makes the
        parameters that a forward uses once, so they are told as well."""
        self.running.is_own, self.is_collected = on, on
        for module in self.outermost:
            module.set_requires_gradient_sync(on)
            module.set_reshard_after_backward(False)
        if on:
            self.end_evaluation()

    def hold(self) -> None:
        """A forward is next, of a loss that may run the model again, or go back through it before the step's own
        backward, as a gradient penalty does. FSDP2 takes the end of any such pass for that of the backward."""
        self._complete()
        self.running.hold()
        self._set(is_last=False, reshards=False, reduces=False)

    def _complete(self) -> None:
        """End a backward whose passes FSDP2 was not let end: reduce gradients and let go of weights."""
        if self.open is None:
            return
        last, self.open = self.open, None
        self._set(is_last=last, reshards=True, reduces=last or self.zero > 1)
        for module in self.outermost:
            module._get_fsdp_state()._root_post_backward_final_callback()
        if last or self.zero == 3:
            self.end_evaluation()

    def _set(self, *, is_last: bool, reshards: bool, reduces: bool) -> None:
        for module in self.outermost:
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(reshards)
            module.set_requires_gradient_sync(reduces)

    def end_evaluation(self) -> None:
        """Below stage 3 FSDP2 keeps gathered weights for a backward. An evaluation has none: they would outlive the
        next update, and the forward after it would still use them."""
        for module in self.units:
            module.reshard()

    def unused(self) -> set[str]:
        """Parameters without a gradient of this rank since the last `finish`; FSDP2 gives them zeros."""
        self._complete()
        return self.names - self.used

    def finish(self) -> None:
        """Sum the gradients of whole parameters; FSDP2 ends its own reductions in backward."""
        self._complete()
        self.whole.finish()
        self.used = set()

    @property
    def sent_bytes(self) -> float:
        """FSDP2 counts nothing; see `Synchroniser`."""
        return self.whole.sent_bytes

    def kept(self) -> Iterable[StateTensor]:
        return ()

    def restore(self, saved: SavedState) -> list[str]:
        return []

    def _mark(self, unit: str) -> Callable[..., None]:
        """A hook that comes after FSDP2's, when the unit's parameters are whole, and waits for their gradients."""

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if (
                unit in self.marked or self.is_collected is False
            ):  # run frozen, in another model's loss
                return
            self.marked.add(unit)
            for path, parameter in module.named_parameters(prefix=unit):
                name = name_in_model(path)
                if name in self.names and not is_sharded(parameter):
                    if name in self.hooks:
                        self.hooks[name].register(parameter)
                    parameter.register_post_accumulate_grad_hook(partial(self._use, name))

        return before_forward

    def _use(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # a hook of the user's may have taken it away
            self.used.add(name)

    def _freeze(self, places: Sequence[tuple[nn.Module, str, str]]) -> Callable[..., None]:
        """A hook that comes after FSDP2's: whether the parameters that the forward uses get gradients."""

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if self.is_collected is not None:
                for holder, key, name in places:
                    holder._parameters[key].requires_grad_(self.is_collected and name in self.names)  # type: ignore

        return before_forward


class _Edits:
    """Refuses a forward that writes to the weights which FSDP2 has gathered for a unit, or moves them to other memory.
    Version counters and addresses tell.

    That is in the unit's forward, and below stage 3 from one micro-batch to the next, in which it stays gathered.

    places: of the unit's own parameters, each with its name in the model.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str, str]]) -> None:
        self.places, self.states = places, list[tuple[int, int]]()
        self.stays_gathered = False

    def before(self, module: nn.Module, inputs: Any) -> None:
        if self.stays_gathered:
            self._compare()
        self.states = self._states()

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._compare()

    def _compare(self) -> None:
        for before, now, (_, _, name) in zip(self.states, self._states(), self.places, strict=True):
            if before == now:
                continue
            did, then = (
                (f"changes the parameter '{name}' in place", "lose the change")
                if before[1] == now[1]
                else (
                    f"moves the parameter '{name}' to other memory",
                    "compute with its present values in all later steps",
                )
            )
            raise PlanRefused(
                f"a forward {did}, and shard=N would {then}",
                hint="use a data=N plan if all replicas change it alike, or one that doesn't cut the "
                "batch: single or tensor=N",
            )

    def _states(self) -> list[tuple[int, int]]:
        """Of each parameter: its version, and the address of its memory."""
        gathered: list[Any] = [holder._parameters[key] for holder, key, _ in self.places]
        return [(p._version, getattr(p, "_local_tensor", p).data_ptr()) for p in gathered]


def _own_places(sharded: Mapping[str, nn.Module]) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """For every unit the parameters that FSDP2 shards with it and not with a unit inside it."""
    places: dict[str, list[tuple[nn.Module, str, str]]] = {}
    known: set[torch.Tensor] = set()
    for unit in sorted(sharded, key=len, reverse=True):  # what is inside comes first
        places[unit] = [
            (holder, key, name_in_model(f"{unit}.{path}.{key}".strip(".").replace("..", ".")))
            for path, holder in sharded[unit].named_modules()
            for key, p in holder._parameters.items()
            if p is not None and is_sharded(p) and p not in known
        ]
        known |= {holder._parameters[key] for holder, key, _ in places[unit]}  # type: ignore[misc]
    return places


def _refuse_other_weights(
    places: Sequence[tuple[nn.Module, str, str]], module: nn.Module, inputs: Any
) -> None:
    """A hook before FSDP2's, which would put a unit's own weights in the place of those that it is run with.

    Raises:
        PlanRefused: the unit holds tensors that are no parameters of the model.
    """
    from torch import nn

    for holder, key, name in places:
        if not isinstance(holder._parameters[key], nn.Parameter):
            raise PlanRefused(
                f"a forward runs a block with another tensor in the place of its parameter '{name}', and "
                "shard=N would compute with the parameter",
                hint="call torch.func.functional_call in the class of the model that runs the blocks, "
                "where it is seen beforehand, or use a data=N plan",
            )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 holds it in parts; a part of a split layer is not what this asks for."""
    return hasattr(parameter, "device_mesh") and "shard" in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def _called_alike(
    units: Mapping[str, nn.Module], model: nn.Module, choosing: Collection[str]
) -> dict[str, nn.Module]:
    """Units that every rank calls: a module that chooses between some of them is one itself. The root needs to be none.

    choosing: paths of such modules.
    """
    alike: dict[str, nn.Module] = {}
    for path, unit in units.items():
        if (chooser := owner(model, path)) not in choosing:
            alike[path] = unit
        elif chooser:
            alike[chooser] = model.get_submodule(chooser)
    return alike


def _outside(units: Iterable[nn.Module], model: nn.Module) -> dict[nn.Parameter, None]:
    """The model's parameters that no unit has, in its order."""
    in_units = {p for unit in units for p in unit.parameters()}
    return dict.fromkeys(p for p in model.parameters() if p not in in_units)


def _kept_whole(model: nn.Module, units: Collection[nn.Module]) -> set[nn.Parameter]:
    """Parameters that FSDP2 can't shard, unit by unit: it wants one dtype of the trainable ones in each."""
    groups = [list(unit.parameters()) for unit in units]
    groups.append(list(_outside(units, model)))
    whole: set[nn.Parameter] = set()
    for group in groups:
        whole |= {p for p in group if p.ndim == 0 or p.numel() == 0 or p.is_complex()}
        rest = [p for p in group if p.requires_grad and p not in whole]
        dtypes = {p.dtype for p in rest}
        if len(dtypes) > 1:
            usual = max(dtypes, key=lambda dtype: sum(p.nbytes for p in rest if p.dtype == dtype))
            whole |= {p for p in rest if p.dtype != usual}
    return whole


def _watch_calls(sharded: Mapping[str, nn.Module], roll: OrderCheck) -> _Running:
    """Compare over the ranks which unit is called next, before FSDP2 gathers it; refuse outputs it can't see into."""
    for number, module in enumerate(sharded.values()):
        if number + 1 < len(sharded):
            module.register_forward_pre_hook(
                lambda *_, number=number: roll.call(number), prepend=True
            )
        else:
            module.register_forward_hook(lambda *_: roll.end())
        module.register_forward_hook(_refuse_opaque)
    running = _Running()
    sharded[""].register_forward_pre_hook(running.begin)
    for name, module in sharded.items():
        module.register_forward_hook(
            partial(running.watch, name or type(module).__name__.removeprefix("FSDP"))
        )
    return running


class _Running:
    """Refuses a backward before the step's own, inside of a forward or a loss: FSDP2 takes it for the step's, and lets
    go of weights and gradients. A step of one's own says `hold` before a forward, and then it is noted alone.

    is_on: whether the model's forward is going on, or the loss after it. is_own: whether a step's own backward follows;
    not where the model runs frozen inside another's loss. runs_again: whether the model ran more than once since
    `hold`, or a backward has gone through it.
    """

    def __init__(self) -> None:
        self.is_on, self.is_own, self.is_held, self.runs = False, True, False, 0
        self.runs_again = False

    def hold(self) -> None:
        """A loss begins that may do both."""
        self.is_held, self.runs, self.runs_again = True, 0, False

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self.is_on = self.is_own
        self.runs += torch.is_grad_enabled()
        self.runs_again = self.runs_again or (self.is_held and self.runs > 1)

    def end(self) -> None:
        """The step's own backward is next."""
        self.is_on = False

    def watch(self, unit: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._refuse, unit))

    def _refuse(self, unit: str, gradients: Any) -> None:
        if self.is_on and self.is_held:
            self.runs_again = True
        elif self.is_on:
            raise PlanRefused(
                "the model's forward or the loss goes back through what "
                f"'{unit}' returns (torch.autograd.grad), and shard=N gathers its weights for the step's "
                "own backward alone",
                hint="use a data=N plan, which keeps parameters whole",
            )


def _refuse_opaque(module: nn.Module, inputs: Any, output: Any) -> None:
    """FSDP2 gathers a unit for backward when a gradient arrives at its output, and must find the tensors in it."""
    if torch.is_grad_enabled() and not any(True for _ in tensors_in(output)):
        kind = type(module).__name__.removeprefix("FSDP")
        raise JobError(
            f"{kind} returns a {type(output).__name__}, and shard=N can't find the tensors in it",
            hint="return tensors, tuples, lists, mappings or dataclasses, or use a data=N plan",
        )


def _explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward with a clear error where it reaches into a unit whose parameters are not gathered."""

    @wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not is_about_parts(error):
                raise
            raise JobError(
                "the model uses a parameter of one of its blocks without calling the block, and shard=N "
                f"gathers a block's parameters when it is called ({str(error).splitlines()[0]})",
                hint="call the blocks of a ModuleList or Sequential as block(x), not as block.method(x) or "
                "block.weight, or use a data=N plan",
            ) from error

    return explained
