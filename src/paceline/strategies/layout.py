"""What a rank runs of a model: all of it, or stages of it. The step around it is the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.cluster.devices import Device
    from paceline.job import Precision


class Batch(Protocol):
    """A micro-batch, as far as a model and its loss are concerned. samples: that count; 0 for a stand-in."""

    @property
    def target(self) -> Any: ...
    @property
    def samples(self) -> int: ...

    def call(self, model: nn.Module) -> Any:
        """The model's output for it."""

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""

    def to(self, device: torch.device) -> Batch:
        """On the device."""


class Statistics:
    """Whose samples a batch norm sees: here, those of its rank.

    may_meet: whether forwards wait there for other replicas. num_meetings: how often they did.
    """

    may_meet, num_meetings = False, 0

    def over(self, samples: int) -> AbstractContextManager[None]:
        """A forward of so many samples comes next, and its backward; 0 of a stand-in."""
        return nullcontext()


@dataclass(frozen=True)
class ModelUse:
    """How a job runs its model, for plans that must see the forward.

    example: makes a batch of so many samples; where a model is cut does not depend on their values.
    context: the numeric context of a forward.
    functions: the job's loss and metrics, from (output, target), by what they are called in a message.
    evaluated: makes a batch as the model is evaluated on; None if it isn't.
    running: entered where the whole model's weights are used.
    statistics: of its batch norms.
    """

    example: Callable[[int], Batch]
    context: Callable[[], Any]
    functions: Mapping[str, Callable[[Any, Any], Any]]
    evaluated: Callable[[], Batch] | None = None
    running: Callable[[], AbstractContextManager[None]] = nullcontext
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class CutBasis:
    """What says which cut of a model is even.

    microbatch_samples: most samples of a micro-batch.
    state_factor: gives bytes of optimizer state a byte of trainable parameters.
    devices: of each rank. precision: of the job.
    """

    microbatch_samples: int
    state_factor: Callable[[], float]
    devices: Sequence[Device]
    precision: Precision


class MicrobatchWork(Protocol):
    """What belongs to a micro-batch besides the model."""

    def before_forward(self, microbatch: int, stage: int) -> None:
        """Random streams and the numeric context."""

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        """What backward starts from."""

    def before_backward(self, microbatch: int) -> None:
        """Tells the synchronisers."""

    def record(self, kind: str, label: str, start_s: float, end_s: float) -> None:
        """Notes when something was done, by `time.perf_counter`; for traces."""


@dataclass(frozen=True)
class Report:
    """What a user should know of how a model was laid out.

    lines: to show when a run begins. document: the same in full, for `split.json`; empty if there is nothing to say.
    """

    lines: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a rank's part of a tensor lies in the whole. shape: of the whole. offsets: along each dim."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Ownership(Protocol):
    """What a rank answers for: it alone counts it in norms and writes it into checkpoints.

    owned, owned_buffers: names.
    extents: of parameters that are held in part, as plain tensors; a DTensor knows its own.
    """

    @property
    def owned(self) -> frozenset[str]: ...
    @property
    def owned_buffers(self) -> frozenset[str]: ...
    @property
    def extents(self) -> Mapping[str, Extent]: ...


class Layout(Ownership, Protocol):
    """How a rank runs its part of a model.

    module: holds the parameters of this rank, under the model's names. The rooms of the plan change it in place.
    has_output: whether the model's output, and so the loss, is here.
    meets_in_forward: whether ranks of other replicas wait in its forwards. Else stand-ins are left out.
    report: how the model was laid out.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def has_output(self) -> bool: ...
    @property
    def meets_in_forward(self) -> bool: ...
    @property
    def report(self) -> Report: ...

    def let_go(self) -> None:
        """Take the memory of parameters that `module` doesn't hold, once the rooms have changed it."""

    def run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        """Forward and backward of every micro-batch of a step."""

    def forward(self, batch: Batch) -> Any:
        """The model's output for one batch without gradients; None where `has_output` is false. Collective."""

    def finish(self) -> None:
        """Every gradient of this rank is complete over its replicas; make it so over its stages too."""


class Whole:
    """The model as it is."""

    has_output = True
    report = Report()

    def __init__(self, model: nn.Module, use: ModelUse, *, gathers_weights: bool) -> None:
        self.module, self.context, self.statistics = model, use.context, use.statistics
        self.gathers_weights = gathers_weights
        self.owned = frozenset(name for name, _ in model.named_parameters())
        self.owned_buffers = frozenset(name for name, _ in model.named_buffers())
        self.extents: dict[str, Extent] = {}

    def let_go(self) -> None:
        """All of them are held."""

    @property
    def meets_in_forward(self) -> bool:
        return self.gathers_weights or self.statistics.may_meet

    @cached_property
    def never_cut(self) -> list[nn.Parameter]:
        """Parameters that the plan's rooms left whole; asked when no other one is gathered."""
        return [p for p in self.module.parameters() if not hasattr(p, "device_mesh")]

    def run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        for number, batch in enumerate(batches):
            if batch.samples or self.meets_in_forward:
                with self._left_by_stand_in(batch), self.statistics.over(batch.samples):
                    self._run(number, batch, work)
            else:
                work.before_backward(number)

    def _run(self, number: int, batch: Batch, work: MicrobatchWork) -> None:
        work.before_forward(number, 0)
        began_s = time.perf_counter()
        with self.context():
            output = batch.call(self.module)
        loss = work.loss(number, output)
        turned_s = time.perf_counter()
        work.before_backward(number)
        if loss.requires_grad:  # else nothing counts in this micro-batch
            loss.backward()
        work.record("forward", str(number), began_s, turned_s)
        work.record("backward", str(number), turned_s, time.perf_counter())

    def forward(self, batch: Batch) -> Any:
        with self._left_by_stand_in(batch), self.statistics.over(batch.samples):
            return batch.call(self.module)

    def _left_by_stand_in(self, batch: Batch) -> AbstractContextManager[None]:
        """What a forward without samples changes of a model is put back."""
        from paceline.model.attributes import state_of_forward_kept

        never_cut = self.never_cut
        return nullcontext() if batch.samples else state_of_forward_kept(self.module, never_cut)

    def finish(self) -> None:
        """Nothing is elsewhere."""
