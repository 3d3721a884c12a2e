"""The part of a model that a rank runs: the whole model, or stages of it. The step is the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.cluster.devices import Device
    from paceline.job import Precision


class Batch(Protocol):
    """A micro-batch, as a model and its loss see it."""

    @property
    def target(self) -> Any: ...
    @property
    def samples(self) -> int: ...  # number of samples; 0 for a padding batch

    def call(self, model: nn.Module) -> Any:
        """Return the model's output for this batch."""

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the model is called."""

    def to(self, device: torch.device) -> Batch:
        """Return this batch on the device."""


class Statistics:
    """The source of a batch norm's statistics: in this class, the samples of its own rank."""

    may_meet = False  # whether forwards wait in batch norms for other replicas

    def over(self, samples: int) -> AbstractContextManager[None]:
        """Enter this around a forward of `samples` samples and its backward; 0 for a padding
        batch."""
        return nullcontext()


@dataclass(frozen=True)
class ModelUse:
    """A job's use of its model, for plans that must see the forward."""

    # Makes a batch of a given number of samples. Their values don't influence where a model is cut.
    example: Callable[[int], Batch]
    context: Callable[[], Any]  # the numeric context of a forward
    # The job's loss and metrics, functions of (output, target), by their names in messages.
    functions: Mapping[str, Callable[[Any, Any], Any]]
    # Makes a batch like those of an evaluation; None if the model isn't evaluated.
    evaluated: Callable[[], Batch] | None = None
    # The context that is entered where the whole model's weights are used.
    running: Callable[[], AbstractContextManager[None]] = nullcontext
    statistics: Statistics = field(default_factory=Statistics)  # of the model's batch norms


@dataclass(frozen=True)
class CutBasis:
    """The facts that decide which cut of a model is even."""

    microbatch_samples: int  # samples of the largest micro-batch
    state_factor: Callable[[], float]  # bytes of optimizer state per byte of trainable parameters
    devices: Sequence[Device]  # the device of each rank
    precision: Precision  # of the job


class MicrobatchWork(Protocol):
    """The work of a micro-batch besides running the model."""

    def before_forward(self, microbatch: int, stage: int) -> None:
        """Set the random streams and the numeric context."""

    def loss(self, microbatch: int, output: Any) -> torch.Tensor:
        """Return the tensor from which backward starts."""

    def before_backward(self, microbatch: int) -> None:
        """Tell the synchronisers that a backward comes next."""

    def record(self, kind: str, label: str, start_s: float, end_s: float) -> None:
        """Record the interval of an action for traces, in seconds of `time.perf_counter`."""


@dataclass(frozen=True)
class Report:
    """A description for the user of how a model was laid out."""

    lines: tuple[str, ...] = ()  # shown when a run begins
    # The same in full, for `split.json`; empty if there is nothing to say.
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Extent:
    """The position of a rank's part of a tensor in the whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the part, along each dim


class Ownership(Protocol):
    """The tensors that a rank owns.

    It alone counts them in norms and writes them into checkpoints.
    """

    @property
    def owned(self) -> frozenset[str]: ...  # names of parameters
    @property
    def owned_buffers(self) -> frozenset[str]: ...  # names
    # Extents of parameters that are held in part as plain tensors. A DTensor knows its own.
    @property
    def extents(self) -> Mapping[str, Extent]: ...


class Layout(Ownership, Protocol):
    """A rank's part of a model, and the way it runs."""

    # Holds the parameters of this rank under the model's names. Strategies change it in place.
    @property
    def module(self) -> nn.Module: ...
    @property
    def has_output(self) -> bool: ...  # whether this rank has the model's output, and so the loss
    @property
    def output_place(self) -> int: ...  # of the rank that has it, along the axis of stages
    # Whether ranks of other replicas wait in this rank's forwards. If not, padding batches are
    # skipped.
    @property
    def meets_in_forward(self) -> bool: ...
    @property
    def report(self) -> Report: ...  # describes how the model was laid out

    def let_go(self) -> None:
        """Free the memory of parameters that `module` doesn't hold, after the strategies have
        changed it."""

    def run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        """Run forward and backward of every micro-batch of a step."""

    def forward(self, batch: Batch) -> Any:
        """Return the model's output for one batch without gradients; None if `has_output` is false.

        Collective.
        """

    def finish(self) -> None:
        """Complete the gradients over this rank's stages.

        They are complete over its replicas already.
        """


class Whole:
    """The layout of a rank that runs the whole model."""

    has_output, output_place = True, 0
    report = Report()

    def __init__(self, model: nn.Module, use: ModelUse, *, gathers_weights: bool) -> None:
        self.module, self.context, self.statistics = model, use.context, use.statistics
        self.gathers_weights = gathers_weights
        self.owned = frozenset(name for name, _ in model.named_parameters())
        self.owned_buffers = frozenset(name for name, _ in model.named_buffers())
        self.extents: dict[str, Extent] = {}

    def let_go(self) -> None:
        """Free nothing: `module` holds all parameters."""

    @property
    def meets_in_forward(self) -> bool:
        return self.gathers_weights or self.statistics.may_meet

    @cached_property
    def never_cut(self) -> frozenset[nn.Parameter]:
        """The parameters that the plan's strategies left whole.

        Read only while no other one is gathered.
        """
        return frozenset(p for p in self.module.parameters() if not hasattr(p, "device_mesh"))

    def run(self, batches: Sequence[Batch], work: MicrobatchWork) -> None:
        for number, batch in enumerate(batches):
            if batch.samples or self.meets_in_forward:
                with self.surrounding(batch.samples):
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
        if loss.requires_grad:  # otherwise nothing in this micro-batch counts
            loss.backward()
        work.record("forward", str(number), began_s, turned_s)
        work.record("backward", str(number), turned_s, time.perf_counter())

    def forward(self, batch: Batch) -> Any:
        with self.surrounding(batch.samples):
            return batch.call(self.module)

    def surrounding(self, samples: int) -> AbstractContextManager[Any]:
        """Enter this around a forward of `samples` samples and its backward.

        After those of a padding batch, the model's state is what it was before.
        """
        statistics, never_cut = self.statistics.over(samples), self.never_cut
        if samples:
            return statistics
        from paceline.model.forward_state import ForwardState

        stack = ExitStack()
        stack.callback(ForwardState(self.module, edited=never_cut).now().restore)
        stack.enter_context(statistics)
        return stack

    def finish(self) -> None:
        """Do nothing: there are no other stages."""
