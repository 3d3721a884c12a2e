"""Sharded replicas: each rank holds a part of every parameter, its gradient and its optimizer state
(FSDP2).

The three stages of ZeRO (Rajbhandari et al. 2020) differ in when FSDP2 gathers and reduces:

    zero  parameters between forward and backward   gradients between micro-batches
    1     whole                                     whole, reduced once an update
    2     whole                                     sharded, reduced every micro-batch
    3     sharded, gathered unit by unit            sharded, reduced every micro-batch

Parameters that FSDP2 can't shard stay whole on every rank, and their gradients are summed at the
end of a step. These are scalars, empty and complex parameters, those with sparse gradients, and
those with a less usual dtype in their unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.errors import JobError, PlanRefused
from paceline.base.logs import logger
from paceline.base.nested import tensors_in
from paceline.model.forward_effects import NOTHING, ForwardEffects, owner
from paceline.model.units import find_units, is_callable, name_in_model, refuse_scripted
from paceline.strategies.data.run import GradientBuckets
from paceline.strategies.mesh import is_about_parts, let_go_of
from paceline.strategies.shard.exchange import exchange_in_place
from paceline.strategies.shard.hooks import Hooks, hooks_of
from paceline.strategies.shard.inputs import WritableInputs, writable_outputs
from paceline.strategies.shard.order_check import OrderCheck
from paceline.strategies.shard.recurrent import keep_in_place
from paceline.strategies.shard.unused import reduce_unused
from paceline.strategies.synchroniser import Synchroniser
from paceline.torch_private.autograd import version_of
from paceline.torch_private.dtensor import part_of
from paceline.torch_private.fsdp import end_backward
from paceline.torch_private.modules import own_parameters

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
    observed: ForwardEffects = NOTHING,
    device: torch.device | None = None,
) -> Sharding:
    """Shard every unit, and the remaining parameters at the root, along dim 0.

    Parameters that a forward writes to stay whole, because FSDP2 drops writes to the weights that
    it has gathered. Parameters of a block that is not running are not gathered, and are written to
    in parts. A model that is not on the device is moved there unit by unit, and each unit is cut
    before the next one is moved. Parameters that autocast always casts are cast before they are
    gathered; see `gathers.py`.
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
    if not is_callable(model):  # pieces of stages: nothing would gather parameters outside them
        whole |= _outside(units.values(), model).keys()
    for parameter in model.parameters():
        if parameter not in whole:
            parameter.data = parameter.data.contiguous()  # FSDP2 accepts no other memory format
    kind = device.type if device is not None else next(model.parameters()).device.type
    # FSDP2 requires that its mesh and that of split layers have the same parent.
    along = (
        mesh.devices(kind)["shard"]
        if mesh.sizes["tensor"] > 1
        else DeviceMesh.from_group(mesh.group("shard"), kind, mesh_dim_names=("shard",))
    )
    outermost = {"": model} if is_callable(model) else {}
    # Pieces that edit each other's outputs in place have been refused before (strategies/stages).
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
        exchange_in_place(modules, along.get_group())
    if device is not None:
        _bring(device, [*(p for p in model.parameters() if not is_sharded(p)), *model.buffers()])
    running = _Running()
    # Captured pieces need no check: all ranks call them alike, and they return tensors.
    if outermost:
        expects = kind == "cuda"
        group = mesh.new_group(["shard"], backend="gloo") if expects else mesh.group("shard")
        assert group is not None, "this rank is a member"
        roll = OrderCheck(list(sharded), group, mesh.ranks_along("shard"), expects=expects)
        running = _watch_calls(sharded, roll)
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
    """Shard a unit with FSDP2, except for parameters that stay whole, and move it to the device if
    one is given."""
    from torch.distributed.fsdp import fully_shard

    uncut = (
        [p for p in unit.parameters() if p not in whole and not is_sharded(p)]
        if device is not None
        else []
    )
    if device is not None:  # FSDP2 moves the others
        _bring(device, [p for p in uncut if hasattr(p, "device_mesh")])
    module = fully_shard(
        unit, mesh=along, reshard_after_forward=not stays_gathered, ignored_params=whole
    )
    for parameter in uncut:
        if not hasattr(parameter, "device_mesh"):
            let_go_of(parameter)
    # Gradients are sums: the loss is already divided by the whole window's count.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    reduce_unused(module)
    return module


def _gathered_cast(
    model: nn.Module, observed: ForwardEffects, hooked: Collection[str], along: DeviceMesh
) -> frozenset[str]:
    """Return the names of parameters that are gathered in the dtype to which autocast casts them.

    Collective.
    """
    if observed.cast_dtype is None:
        return frozenset()
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    # Those that all ranks have, so that they gather alike.
    flags = torch.tensor(
        [name in observed.cast and name not in hooked for name in numbers],
        dtype=torch.uint8,
        device=along.device_type,
    )
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=along.get_group())
    cast = frozenset(compress(numbers, flags.tolist()))
    if dist.get_rank() == 0:
        logger.info(
            "of all parameters %.1f %% are gathered in %s: what autocast casts before anything uses it",
            100 * sum(numbers[name] for name in cast) / sum(numbers.values()),
            str(observed.cast_dtype).removeprefix("torch."),
        )
    return cast


def _bring(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors to the device, in place."""
    for tensor in tensors:
        if tensor.device == device:
            continue
        # The `data` of a part of a split layer can't be replaced.
        if hasattr(tensor, "device_mesh"):
            with torch.no_grad():
                torch.utils.swap_tensors(
                    tensor, torch.nn.Parameter(tensor.to(device), tensor.requires_grad)
                )
        else:
            tensor.data = tensor.data.to(device)


def _let_go_without_gradients(module: Any, inputs: Any, output: Any) -> None:
    """Free the outermost unit's gathered weights after an evaluation.

    FSDP2 would keep them for a backward.
    """
    if not torch.is_grad_enabled():
        module.reshard()


class Sharding(Synchroniser):
    """The synchroniser of sharding.

    It tells FSDP2 before each micro-batch what to keep whole afterwards, and sums gradients of
    parameters that FSDP2 doesn't shard.
    """

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
        # Settings of the outermost module apply to those inside it.
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
        # Whether the model now gets gradients; None if it was never frozen for a while.
        self.is_collected: bool | None = None
        # Whether the backward is the last one, if `_complete` must end it; None if it need not.
        self.open: bool | None = None
        places = _own_places(sharded)
        for name, module in sharded.items():
            module.register_forward_pre_hook(
                partial(_refuse_other_weights, places[name]), prepend=True
            )
            module.register_forward_pre_hook(self._freeze(places[name]))
            module.register_forward_pre_hook(self._mark(name))
            self.edits.append(edits := _Edits(places[name]))
            module.register_forward_pre_hook(edits.before)
            # This hook runs before FSDP2 frees the weights.
            module.register_forward_hook(edits.after, prepend=True)

    def begin(self, *, last: bool) -> None:
        self.running.end()
        if self.running.runs_again:
            self.open = last
            return
        self._set(is_last=last, reshards=last or self.zero == 3, reduces=last or self.zero > 1)
        for edits in self.edits:
            edits.stays_gathered = self.zero < 3 and not last

    def collect(self, *, on: bool) -> None:
        """Set whether the model runs for its own gradients, or frozen inside another model's loss.

        FSDP2 makes the parameters of a forward only once, so that hooks set their `requires_grad`
        as well.
        """
        self.running.is_own, self.is_collected = on, on
        for module in self.outermost:
            module.set_requires_gradient_sync(on)
            module.set_reshard_after_backward(False)
        if on:
            self.end_evaluation()

    def hold(self) -> None:
        """Prepare for a loss that may run the model again, or run a backward before the step's own.

        A gradient penalty is an example. FSDP2 would mistake the end of such a pass for the end of
        the step's backward.
        """
        self._complete()
        self.running.hold()
        self._set(is_last=False, reshards=False, reduces=False)

    def _complete(self) -> None:
        """End a backward that FSDP2 was not allowed to end: reduce gradients and free gathered
        weights."""
        if self.open is None:
            return
        last, self.open = self.open, None
        self._set(is_last=last, reshards=True, reduces=last or self.zero > 1)
        for module in self.outermost:
            end_backward(module)
        if last or self.zero == 3:
            self.end_evaluation()

    def _set(self, *, is_last: bool, reshards: bool, reduces: bool) -> None:
        for module in self.outermost:
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(reshards)
            module.set_requires_gradient_sync(reduces)

    def end_evaluation(self) -> None:
        """Free gathered weights after an evaluation.

        Below stage 3, FSDP2 keeps them for a backward, which an evaluation doesn't have. They would
        stay beyond the next update, and the next forward would use them.
        """
        for module in self.units:
            module.reshard()

    def unused(self) -> set[str]:
        """Return the names of parameters without a gradient of this rank since `finish`.

        FSDP2 gives them zeros.
        """
        self._complete()
        return self.names - self.used

    def finish(self) -> None:
        """Sum the gradients of whole parameters; FSDP2 ends its own reductions in backward."""
        self._complete()
        self.whole.finish()
        self.used = set()

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent, without FSDP2's own, which it doesn't count; see
        `Synchroniser`."""
        return self.whole.sent_bytes

    def _mark(self, unit: str) -> Callable[..., None]:
        """Return a forward pre-hook that registers hooks on the gradients of a unit's whole
        parameters.

        It runs after FSDP2's hook, when the parameters are whole.
        """

        def before_forward(module: nn.Module, inputs: Any) -> None:
            # `is_collected` is False if the model runs frozen in another model's loss.
            if unit in self.marked or self.is_collected is False:
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
        if parameter.grad is not None:  # a hook of the user may have removed it
            self.used.add(name)

    def _freeze(self, places: Sequence[tuple[nn.Module, str, str]]) -> Callable[..., None]:
        """Return a forward pre-hook that sets whether the parameters get gradients.

        It runs after FSDP2's hook.
        """

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if self.is_collected is not None:
                for holder, key, name in places:
                    own_parameters(holder)[key].requires_grad_(
                        self.is_collected and name in self.names
                    )

        return before_forward


class _Edits:
    """Refuses a forward that writes to a unit's gathered weights, or moves them to other memory.

    It compares version counters and addresses before and after the unit's forward. Below stage 3, a
    unit stays gathered from one micro-batch to the next, so that it also compares between them.

    Args:
        places: The places of the unit's own parameters, each with its name in the model.
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
        """Return the version and the memory address of each parameter."""
        gathered: list[Any] = [own_parameters(holder)[key] for holder, key, _ in self.places]
        return [(version_of(p), part_of(p).data_ptr()) for p in gathered]


def _own_places(sharded: Mapping[str, nn.Module]) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """Return the parameters of every unit that FSDP2 shards with it, and not with a unit inside
    it."""
    places: dict[str, list[tuple[nn.Module, str, str]]] = {}
    known: set[torch.Tensor] = set()
    for unit in sorted(sharded, key=len, reverse=True):  # inner units come first
        places[unit] = [
            (holder, key, name_in_model(f"{unit}.{path}.{key}".strip(".").replace("..", ".")))
            for path, holder in sharded[unit].named_modules()
            for key, p in own_parameters(holder).items()
            if p is not None and is_sharded(p) and p not in known
        ]
        known |= {own_parameters(holder)[key] for holder, key, _ in places[unit]}
    return places


def _refuse_other_weights(
    places: Sequence[tuple[nn.Module, str, str]], module: nn.Module, inputs: Any
) -> None:
    """Refuse to run a unit with other weights than its own. A hook that runs before FSDP2's.

    FSDP2's hook would replace the other weights by the unit's own.

    Raises:
        PlanRefused: the unit holds tensors that are not parameters of the model.
    """
    from torch import nn

    for holder, key, name in places:
        if not isinstance(own_parameters(holder)[key], nn.Parameter):
            raise PlanRefused(
                f"a forward runs a block with another tensor in the place of its parameter '{name}', and "
                "shard=N would compute with the parameter",
                hint="call torch.func.functional_call in the class of the model that runs the blocks, "
                "where it is seen beforehand, or use a data=N plan",
            )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 holds the parameter in parts. A part of a split layer does not count."""
    return hasattr(parameter, "device_mesh") and "shard" in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def _called_alike(
    units: Mapping[str, nn.Module], model: nn.Module, choosing: Collection[str]
) -> dict[str, nn.Module]:
    """Return the units that every rank calls.

    A module that chooses between units replaces them as one unit. If the root chooses, no unit is
    needed for it.

    choosing: the paths of modules that choose.
    """
    alike: dict[str, nn.Module] = {}
    for path, unit in units.items():
        if (chooser := owner(model, path)) not in choosing:
            alike[path] = unit
        elif chooser:
            alike[chooser] = model.get_submodule(chooser)
    return alike


def _outside(units: Iterable[nn.Module], model: nn.Module) -> dict[nn.Parameter, None]:
    """Return the model's parameters that belong to no unit, in the model's order."""
    in_units = {p for unit in units for p in unit.parameters()}
    return dict.fromkeys(p for p in model.parameters() if p not in in_units)


def _kept_whole(model: nn.Module, units: Collection[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 can't shard.

    It requires one dtype of all trainable parameters of a unit.
    """
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
    """Let ranks compare the next unit before FSDP2 gathers it, and refuse outputs in which it finds
    no tensors."""
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
    """Refuses a backward inside a forward or a loss, before the step's own backward.

    FSDP2 would mistake it for the step's backward, and free weights and gradients. A job that
    defines its own step calls `hold` before a forward. Such a backward is then recorded and not
    refused.
    """

    def __init__(self) -> None:
        # is_on: whether the model's forward is running, or the loss after it. is_own: whether a
        # step's own backward follows; False if the model runs frozen inside another model's loss.
        self.is_on, self.is_own, self.is_held, self.runs = False, True, False, 0
        # Whether the model ran more than once since `hold`, or a backward has passed through it.
        self.runs_again = False

    def hold(self) -> None:
        """Begin a loss that may run the model again, or run a backward through it."""
        self.is_held, self.runs, self.runs_again = True, 0, False

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self.is_on = self.is_own
        self.runs += torch.is_grad_enabled()
        self.runs_again = self.runs_again or (self.is_held and self.runs > 1)

    def end(self) -> None:
        """End the forward and the loss: the step's own backward comes next."""
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
    """Refuse an output without tensors that can be found.

    FSDP2 gathers a unit for backward when a gradient arrives at its output, so that it must find
    the tensors in it.
    """
    if torch.is_grad_enabled() and not any(True for _ in tensors_in(output)):
        kind = type(module).__name__.removeprefix("FSDP")
        raise JobError(
            f"{kind} returns a {type(output).__name__}, and shard=N can't find the tensors in it",
            hint="return tensors, tuples, lists, mappings or dataclasses, or use a data=N plan",
        )


def _explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same forward, with a clear error if it uses parameters of a unit that are not
    gathered."""

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
