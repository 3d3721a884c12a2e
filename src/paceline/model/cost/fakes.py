"""Models on fake tensors: moved and converted as constructors do, and given values where they ask for some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from paceline.model.cost.repeated_layers import Chain, find_chains, shortened
from paceline.model.forward_state import MappingSnapshot, MappingSnapshots
from paceline.torch_private.autograd import accumulated_hooks
from paceline.torch_private.dispatch import OperatorMode
from paceline.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from paceline.torch_private.modules import (
    convert_module,
    own_tensors,
    replaced_apply,
)


class FakeModel:
    """A model on fake tensors, built when it is first asked for, and left as it was by everybody who borrows it.

    mode: of its tensors. assumes: whether values that it asks for are made up. chains: of its blocks, once somebody has
        looked; None before.
    """

    def __init__(self, build: Callable[[], nn.Module], *, assumes: bool = False) -> None:
        self._build, self._assumes = build, assumes
        self.chains: tuple[Chain, ...] | None = None

    @cached_property
    def mode(self) -> FakeTensorMode:
        return FakeTensorMode(allow_non_fake_inputs=True)

    @cached_property
    def model(self) -> nn.Module:
        with self._entered():
            return self._build()

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of blocks that are left out, too."""
        return dict(self.model.named_parameters())

    def look_for_chains(
        self,
        units_of: Callable[[nn.Module], Mapping[str, nn.Module]],
        run: Callable[[nn.Module], None],
    ) -> None:
        """Once. See `find_chains`."""
        if self.chains is not None:
            return
        self.chains, _ = (), self.parameters
        try:
            with self.lent() as model:
                self.chains = find_chains(model, units_of, lambda: run(model))
        except Exception:  # a model may do anything, and then all of it is traced
            self.chains = ()

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """While this is entered, blocks that others in a chain stand for are left out."""
        with shortened(self.model, self.chains or ()):
            yield

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """Shortened and in its mode. Gradients, hooks, attributes and all that modules hold are put back at the end."""
        with self.shortened():
            model = self.model
            kept = MappingSnapshots(
                [
                    MappingSnapshot.of(mapping)
                    for module in model.modules()
                    for mapping in (vars(module), *vars(module).values())
                    if isinstance(mapping, dict)
                ]
            )
            parameters = list(model.parameters())
            hooks = [dict(accumulated_hooks(p)) for p in parameters]
            try:
                with self._entered():
                    yield model
            finally:
                kept.restore()
                for p, before in zip(parameters, hooks, strict=True):
                    p.grad = None
                    after = accumulated_hooks(p)
                    for key in [key for key in after if key not in before]:
                        del after[key]

    @contextmanager
    def symbolic(self) -> Iterator[None]:
        """In its mode, in which shapes that depend on values become symbols."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.mode.shape_env, self.mode.static_shapes = ShapeEnv(), False
        try:
            with self.mode:
                yield
        finally:
            self.mode.shape_env, self.mode.static_shapes = None, True

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with self.mode, convertible(), AssumedValues() if self._assumes else nullcontext():
            yield


@contextmanager
def convertible() -> Iterator[None]:
    """While this is entered, `Module.to` and its like put new fake tensors into the place of others.

    torch swaps what is behind a parameter, which a fake one, that others refer to, does not allow. Modules that share
    a parameter share the new one.
    """
    made: dict[tuple[int, int], tuple[Any, Any, torch.Tensor]] = {}

    def converted(
        tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        key = id(convert), id(tensor)
        if key not in made:
            with torch.no_grad():
                new = convert(tensor)
            if new is not tensor and isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            made[key] = (
                convert,
                tensor,
                new,
            )  # both are kept, so that no other object gets their numbers
        return made[key][2]

    def apply(
        plain: Callable[..., nn.Module], module: nn.Module, convert: Any, recurse: bool = True
    ) -> nn.Module:
        tensors = own_tensors(module)
        if not any(isinstance(tensor, FakeTensor) for _, _, tensor in tensors):
            return plain(module, convert, recurse)
        for child in module.children() if recurse else ():
            convert_module(child, convert)
        for holder, name, tensor in tensors:
            holder[name] = converted(tensor, convert)
        return module

    with replaced_apply(apply):
        yield


class AssumedValues(OperatorMode):
    """Gives a forward on fake tensors the values that it asks for: numbers are 1, conditions are false, and whatever
    is chosen by a mask is all there is. To be entered after the mode that makes tensors fake.
    """

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            assumed = _ASSUMED.get(func.overloadpacket)
            if assumed is None:
                raise
            return assumed(*args)


def _number(tensor: torch.Tensor) -> bool | int | float:
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty(mask.numel(), mask.dim(), dtype=torch.long, device=mask.device)


def _all_chosen(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    places: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        places += _all_places(index).unbind(1) if is_mask else [index]  # type: ignore[arg-type]
    return torch.ops.aten.index.Tensor(tensor, places)


_ASSUMED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense: _number,
    torch.ops.aten.equal: lambda tensor, other: False,
    torch.ops.aten.nonzero: _all_places,
    torch.ops.aten.index: _all_chosen,
    torch.ops.aten.masked_select: lambda tensor, mask: tensor.new_empty(tensor.numel()),
}
