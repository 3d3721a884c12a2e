"""Synchronised batch normalisation: the mean and the variance are those of a window's samples on
all replicas.

Gradients pass through these statistics. torch's `SyncBatchNorm` replaces modules, and runs only on
GPUs. This module changes torch's operator instead. It therefore works for every caller: a module or
a class that inherits from it, `F.batch_norm`, a captured graph, compiled code.

A replica whose part of the window is one micro-batch then computes the same as one device. Several
micro-batches would have to wait for each other within their forwards. Each of them therefore keeps
its own statistics, as on one device that cuts the batch in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import RanksDisagree, TrainingError
from paceline.strategies.layout import Statistics
from paceline.torch_private.dispatch import forget_kernels
from paceline.torch_private.fake_tensors import is_fake
from paceline.torch_private.modules import BatchNorm, replace_size_check

if TYPE_CHECKING:
    from paceline.strategies.mesh import Mesh

aten = torch.ops.aten


class JoinedStatistics(Statistics):
    """Sums the statistics of a model's batch norms over its replicas.

    All ranks must run the same batch norms in the same order; on CPUs they compare this. Batch
    norms that are modules are found at once. The first forward shows whether there are others.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        _install()
        self._model, self._replicas = model, mesh.replicas
        self.may_meet, self._is_seen = (
            True,
            any(isinstance(module, BatchNorm) for module in model.modules()),
        )
        self._counts, self._compares = True, False
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def over(self, samples: int) -> Iterator[None]:
        """Enter this around a forward and its backward. Collective if the model has batch norms.

        Args:
            samples: The number of this rank's samples; 0 for a padding batch.

        Raises:
            TrainingError: ranks have run different batch norms.
        """
        global _joined
        if _joined is not None:  # a loss runs a model once more
            yield
            return
        _joined, self._counts = self, samples > 0
        try:
            yield
            if self._compares:
                self.sum(torch.zeros(1))
        finally:
            _joined = None
        self.may_meet = self._is_seen

    def note(self) -> None:
        """Record that the model has a batch norm, whatever its mode is now."""
        self._is_seen = True

    def number_of(self, tensor: Tensor | None) -> int:
        """Return a layer's number by one of its tensors; 0 if the tensor doesn't belong to the
        model."""
        return next((number for number, each in enumerate(self._tensors, 1) if each is tensor), 0)

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return [*self._model.buffers(), *self._model.parameters()]

    def sum(self, figures: Tensor, *, of_gradients: bool = False) -> Tensor:
        """Sum figures over all replicas. The last figure is the layer's number. Collective.

        A padding batch adds nothing, and its inputs get no gradient.
        """
        if self._group is None:
            # A group of its own: gradients use the other groups at the same time, on each rank in
            # its own order.
            self._group = dist.new_group(self._replicas, use_local_synchronization=True)
            self._compares = figures.device.type == "cpu"
        sums = figures.clone()
        if not self._counts:
            sums[:-1] = 0
        try:
            dist.all_reduce(sums, group=self._group)
        except RanksDisagree as error:
            raise _other_course() from error
        if self._compares and float(sums[-1]) != float(figures[-1]) * len(self._replicas):
            raise _other_course()
        if of_gradients and not self._counts:
            sums[:-1] = 0
        return sums


def _other_course() -> TrainingError:
    return TrainingError(
        "replicas have come to different batch norms in one forward, and each waits there for the "
        "samples of all: which of them run, or how often, depends on the samples",
        hint="microbatches=2 leaves each micro-batch its own statistics, as on one device that cuts the "
        "batch alike; GroupNorm and LayerNorm need none",
    )


_joined: JoinedStatistics | None = None  # statistics of the model whose forward or backward runs
_is_apart = False


def is_joined() -> bool:
    """Whether batch norms now join all replicas.

    The cache of compiled code must keep the two cases apart.
    """
    return _joined is not None


@contextmanager
def apart() -> Iterator[None]:
    """Let batch norms use only this rank's samples while the context is entered.

    This is needed where all ranks run a model on the same samples.
    """
    global _is_apart
    before, _is_apart = _is_apart, True
    try:
        yield
    finally:
        _is_apart = before


# --- torch's operator -----------------------------------------------------------------------------


@cache
def _install() -> list[torch.library.Library]:
    """Replace torch's operator in this process.

    It works like torch's if no model joins its statistics.
    """
    own = torch.library.Library("paceline", "FRAGMENT")
    own.define("sum_over_replicas(Tensor figures, bool of_gradients) -> Tensor")
    own.impl("sum_over_replicas", _sum_over_replicas, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "paceline::sum_over_replicas", lambda figures, _: torch.empty_like(figures), lib=own
    )
    of_torch = torch.library.Library("aten", "IMPL")
    # The keys without Autograd are for inference mode.
    for key in (
        "CPU",
        "AutogradCPU",
        "CUDA",
        "AutogradCUDA",
    ):
        of_torch.impl("batch_norm", _batch_norm, key)
        of_torch.impl("instance_norm", _instance_norm, key)
    for operator in (aten.batch_norm.default, aten.instance_norm.default):
        # An earlier export may have cached torch's own kernels for these keys.
        forget_kernels(operator)
    replace_size_check(  # torch's would refuse a rank with one sample
        lambda plain, size: None if _joined is not None and not _is_apart else plain(size)
    )
    return [own, of_torch]


def _sum_over_replicas(figures: Tensor, of_gradients: bool) -> Tensor:
    return figures.clone() if _joined is None else _joined.sum(figures, of_gradients=of_gradients)


def _instance_norm(*arguments: Any) -> Tensor:
    """Run instance norm without joining replicas: it calls batch norm with channels of single
    samples."""
    with apart():
        return aten.instance_norm.default.decompose(*arguments)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *numbers: Any,
) -> Tensor:
    if _joined is not None:
        _joined.note()
    # torch's decomposition divides by the number of values minus one.
    if training and is_fake(x) and x.numel() <= x.shape[1]:
        running_mean = running_var = None
    if _joined is None or _is_apart or not training:
        return aten._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, training, *numbers
        )[0]
    momentum, eps, _ = numbers
    number = _joined.number_of(weight if running_mean is None else running_mean)
    output, mean, variance, count = _Normalised.apply(x, weight, bias, eps, number)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return output


class _Normalised(torch.autograd.Function):
    """Normalises a batch with statistics of all replicas.

    Returns the output, the mean and the variance of each channel, and the number of values behind
    them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, number: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        dtype = torch.promote_types(x.dtype, torch.float32) if weight is None else weight.dtype
        mean, variance = (
            (
                moment.double()
                for moment in aten.batch_norm_update_stats(
                    x.float() if x.itemsize < 4 else x, None, None, 0.0
                )
            )
            if x.numel()
            else x.new_zeros(2, channels, dtype=torch.float64)
        )
        size = x.numel() // channels
        # `new_full` fills on the device; a copy from the host would wait for it.
        mean, square, (count, _) = torch.ops.paceline.sum_over_replicas(
            torch.cat(
                [
                    mean * size,
                    (variance + mean.square()) * size,
                    mean.new_full((1,), size),
                    mean.new_full((1,), number),
                ]
            ),
            False,
        ).split([channels, channels, 2])
        if size < 2 and not is_fake(x) and float(count) < 2:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.shape}"
            )
        mean = mean / count
        variance = (square / count - mean.square()).clamp(min=0)
        mean_here, variance_here = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, bias, mean_here, variance_here, count)
        ctx.eps, ctx.number = eps, number
        ctx.mark_non_differentiable(mean, variance, count)
        return _scaled(x, weight, bias, mean_here, variance_here, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of this gradient
            inputs = (x, weight, bias)
            output = _composed(x, weight, bias, ctx.eps, ctx.number)
            needed = [
                each
                for each, is_needed in zip(inputs, ctx.needs_input_grad, strict=False)
                if is_needed
            ]
            gradients = iter(torch.autograd.grad(output, needed, gradient, create_graph=True))
            return (
                *(next(gradients) if each else None for each in ctx.needs_input_grad[:3]),
                None,
                None,
            )
        dx, dweight, dbias = aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            sums = torch.ops.paceline.sum_over_replicas(
                torch.cat([dweight.double(), dbias.double(), count.new_full((1,), ctx.number)]),
                True,
            )
            factors = sums[:-1].view(2, -1) / count * (variance.double() + ctx.eps).rsqrt()
            slope, offset = (factors if weight is None else factors * weight).to(mean.dtype)
            dx = dx - _scaled(x, slope, offset, mean, variance, ctx.eps)
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None


def _scaled(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    return aten.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


class _Sum(torch.autograd.Function):
    """A sum over replicas that has gradients of every order."""

    @staticmethod
    def forward(ctx: Any, figures: Tensor, of_gradients: bool = False) -> Tensor:
        return torch.ops.paceline.sum_over_replicas(figures, of_gradients)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, True), None


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, number: int
) -> Tensor:
    """Compute the same output as `_Normalised`, with operators that torch can differentiate."""
    dims, shape = (
        [dim for dim in range(x.ndim) if dim != 1],
        [-1 if dim == 1 else 1 for dim in range(x.ndim)],
    )
    ends = torch.cat([x.new_full((1,), x.numel() // x.shape[1]), x.new_full((1,), number)])

    def mean_of(values: Tensor) -> Tensor:
        *sums, count, _ = _Sum.apply(torch.cat([values.sum(dims), ends]))
        return (torch.stack(sums) / count.detach()).view(shape)

    centred = x - mean_of(x)
    output = centred * (mean_of(centred.square()) + eps).rsqrt()
    for operation, parameter in ((torch.mul, weight), (torch.add, bias)):
        output = output if parameter is None else operation(output, parameter.view(shape))
    return output
