"""Weights that arrive during a forward: each is put in place when something first looks at it.

A forward meets parameters as arguments of torch's functions and as contents of modules, and both are watched
(`torch.overrides`, a hook before every module's forward). Arguments are recognised by their memory, so a view of a
parameter or its data counts as the parameter. Code that torch does not see (TorchScript, compiled modules) gets all
weights first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from paceline.strategies.compile.run import is_compiled
from paceline.torch_private.dispatch import without_functions
from paceline.torch_private.modules import is_compiled_in_place, own_parameters

if TYPE_CHECKING:
    from torch import nn

    from paceline.servers.connection import ServerConnection


_SET_GRADIENT: Any = torch.Tensor.grad.__set__  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Place:
    """Elements of a parameter and where they come in: a chunk of a link, from which of its elements on."""

    link: int
    chunk: int
    offset: int
    first: int
    count: int


class WeightArrivals:
    """The weights of one worker's model. What is asked for is received beside them, and put in place a step later.

    version: updates that the weights of this step have at least, once it is settled.
    waited_s: seconds that anything has waited for weights.
    pull_s: seconds from asking for the weights of this step until the last of them came.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        links: Sequence[ServerConnection],
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_settled: Called when all of a step's weights are in place, from whatever put the last one there.
        """
        self.parameters, self.links, self.on_settled = parameters, links, on_settled
        self.places: dict[str, list[_Place]] = {name: [] for name in parameters}
        for k, link in enumerate(links):
            for number, chunk in enumerate(link.shard.chunks):
                offset = 0
                for span in chunk.spans:
                    part, count = link.shard.slices[span.slice], span.stop - span.start
                    self.places[part.name].append(
                        _Place(k, number, offset, part.first_element + span.start, count)
                    )
                    offset += count
        self.requested_version, self.version, self.waited_s, self.pull_s = -1, -1, 0.0, 0.0
        self.requested_s = 0.0
        self.begun = -1  # the version that this step's weights were asked for as
        self.settled = -1  # the last complete one
        self.optimizer: str | None = None  # whose weights were asked for last; None for all
        self.pending: dict[str, None] = {}
        self.sharing: dict[int, list[str]] = {}  # names by the memory that they lie in

    def ask(self, version: int, optimizer: str | None = None) -> None:
        """Have weights with at least so many updates sent: all, or those that an optimizer updates; this step's must
        be settled."""
        self.requested_version, self.optimizer = version, optimizer
        self.requested_s = time.perf_counter()
        for link in self.links:
            link.ask(version, optimizer)

    def begin(self) -> None:
        """A step begins: what was asked for are its weights."""
        if self.begun == self.requested_version:
            return
        self.begun = self.requested_version
        self.pending = dict.fromkeys(
            link.shard.slices[span.slice].name
            for link in self.links
            for number in link.shard.updated_by(self.optimizer)
            for span in link.shard.chunks[number].spans
        )
        self.sharing = {}
        for name, p in self.parameters.items():
            self.sharing.setdefault(p.untyped_storage().data_ptr(), []).append(name)

    def are_here(self) -> bool:
        """Whether nothing of this step's weights is on its way any more."""
        return not self.pending or all(link.is_complete() for link in self.links)

    def settle(self) -> None:
        """Wait for all that is missing of this step's weights."""
        if self.settled == self.begun:
            return
        with without_functions():  # what puts one in place looks at none that shares its memory
            self._need(list(self.pending))
        if self.settled != self.begun:  # a model without parameters
            self._note_settled()

    def _note_settled(self) -> None:
        self.settled = self.begun
        self.version = min(min(link.versions, default=self.begun) for link in self.links)
        self.pull_s = max(link.filled_s for link in self.links) - self.requested_s
        self.on_settled()

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile the model may run: it waits where it needs what is not there yet."""
        if self.pending and _is_out_of_sight(model):
            self.settle()
        if not self.pending:
            yield
            return
        hook = register_module_forward_pre_hook(
            lambda module, args: self._need_of(own_parameters(module).values())
        )
        try:
            with _Watch(self._need_of, lambda: bool(self.pending)):
                yield
        finally:
            hook.remove()

    def _need_of(self, arguments: Iterable[Any]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                try:
                    names = self.sharing.get(argument.untyped_storage().data_ptr())
                except (RuntimeError, NotImplementedError):  # a tensor without memory
                    continue
                if names is not None:
                    self._need(names)
            elif isinstance(argument, list | tuple):
                self._need_of(argument)

    def _need(self, names: Iterable[str]) -> None:
        began_s = time.perf_counter()
        for name in names:
            if name in self.pending:
                del self.pending[name]
                self._put(name)
        self.waited_s += time.perf_counter() - began_s
        if not self.pending and self.settled != self.begun:
            self._note_settled()

    def _put(self, name: str) -> None:
        whole = self.parameters[name].data
        for place in self.places[name]:
            link = self.links[place.link]
            link.wait(place.chunk)
            values = link.received[place.chunk][place.offset : place.offset + place.count]
            if whole.is_cuda:  # the host does not wait until the forward before it is through
                values = values.pin_memory().to(whole.device, non_blocking=True)
            if whole.is_contiguous():
                whole.view(-1)[place.first : place.first + place.count].copy_(values)
            else:  # an index for each dim: it writes in place whatever the strides
                flat = torch.arange(place.first, place.first + place.count, device=whole.device)
                whole[torch.unravel_index(flat, whole.shape)] = values.to(whole)


class _Watch(TorchFunctionMode):
    """Tells of the arguments of every function of torch before it runs."""

    def __init__(
        self, tell: Callable[[Iterable[Any]], None], is_wanted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.tell, self.is_wanted = tell, is_wanted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attributes hold no elements, but for views, and those are looked at when they are used.
        if (
            self.is_wanted()
            and getattr(func, "__name__", None) != "__get__"
            and func != _SET_GRADIENT
        ):
            self.tell(args)
            if kwargs:
                self.tell(kwargs.values())
        return func(*args, **(kwargs or {}))


def _is_out_of_sight(model: nn.Module) -> bool:
    """Whether some of it runs where torch can't be watched."""
    from paceline.torch_private.dynamo import OptimizedModule

    return any(
        isinstance(module, torch.jit.ScriptModule | OptimizedModule)
        or is_compiled_in_place(module)
        or is_compiled(module)
        for module in model.modules()
    )
