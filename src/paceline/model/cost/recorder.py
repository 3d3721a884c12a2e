"""Watches one forward and backward: the work of every operator, and when every tensor's memory comes and goes."""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from paceline.model.cost.fusion import Fusion, SparedByFusion
from paceline.model.cost.products import products_of
from paceline.model.cost.profile import Affine, Core, Fused, Product, Segment, Work
from paceline.torch_private.dispatch import OperatorMode, is_writing, schema_of
from paceline.torch_private.pytree import tensor_leaves, tree_leaves
from paceline.torch_private.storage import key_of, storage_key

aten = torch.ops.aten
# On CPUs and on GPUs, and the index of their argument `training`.
_BATCH_NORMS, _TRAINING = (aten.native_batch_norm, aten.cudnn_batch_norm), 5
Direction = Literal["forward", "backward", "update"]
# Operators that wait for memory on every device.
PLAIN = frozenset(
    (
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "addcmul",
        "addcdiv",
        "lerp",
        "sqrt",
        "relu",
        "threshold_backward",
        "copy",
        "clone",
        "cat",
        "stack",
        "fill",
        "zero",
        "zeros_like",
        "ones_like",
        "new_zeros",
        "full_like",
        "_to_copy",
        "sum",
        "_foreach_add",
        "_foreach_mul",
        "_foreach_div",
        "_foreach_lerp",
        "_foreach_addcmul",
        "_foreach_addcdiv",
        "_foreach_sqrt",
        "_foreach_norm",
        "linalg_vector_norm",
        "_fused_adamw",
        "_fused_adam",
        "_fused_sgd",
    )
)


def is_plain(name: str) -> bool:
    """Whether an operator, by its name in aten, waits for memory on every device.

    >>> is_plain("add_"), is_plain("gelu")
    (True, False)
    """
    return name.rstrip("_") in PLAIN


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Where in a step something happens: the number of the segment, and which way."""

    segment: int
    direction: Direction


@dataclass(slots=True)
class Tallied:
    """Work counted so far. What fusing operators spares of it is known in the end.

    normed_channels: of each batch norm that takes its batch's own statistics.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    function_bytes: float = 0.0
    operators: int = 0
    spared: SparedByFusion = field(default_factory=SparedByFusion)
    products: list[Product] = field(default_factory=list)
    normed_channels: list[int] = field(default_factory=list)

    def work(self) -> Work:
        return Work(
            Affine(self.flops),
            Affine(self.moved_bytes),
            Affine(self.function_bytes),
            self.operators,
            tuple(self.products),
            Fused(Affine(self.spared.num_bytes), self.spared.operators, self.spared.kernels),
            tuple(self.normed_channels),
        )


@dataclass
class SparedScores:
    """What selective recomputation lets go of in one place. num_bytes: not kept. work: done again."""

    num_bytes: int = 0
    work: Tallied = field(default_factory=Tallied)


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes alive in one place: when it is entered, at most, and when it is left."""

    start: int
    peak: int
    end: int


@dataclass
class WorkRecorder(OperatorMode):
    """Counts what runs inside `with recorder:`, on fake or on real tensors alike.

    Tensors that exist before (parameters, buffers, the batch) are not counted when they are given to `ignore`.
    The storages of gradients are left out of all levels, from their first moment on: who holds gradients, and how
    long, is the strategies' business.
    """

    place: StepPosition = StepPosition(0, "forward")
    work: dict[StepPosition, Tallied] = field(default_factory=lambda: defaultdict(Tallied))
    outputs: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._known: set[int] = set()
        self._gradient_serials: set[int] = set()
        # place, serial of the storage, bytes (negative when it goes)
        self._log: list[tuple[StepPosition, int, int]] = []
        self._serial = 0
        self._until_kept: dict[StepPosition, tuple[Tallied, int]] = {}
        self._kept_tensors: Counter[StepPosition] = Counter()
        self._fusion = Fusion()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        spared = self._fusion.spared()
        for place, tallied in self.work.items():
            tallied.spared = spared[place]

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Leave out the memory of tensors that outlive the pass."""
        self._known.update(storage_key(t) for t in tensors if _has_storage(t))

    def move_to(self, place: StepPosition) -> None:
        self.place = place
        self._log.append((place, -1, 0))  # a place where no memory comes or goes has levels too

    def complete_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        """A parameter's gradient is made: it belongs to the segment whose backward is running."""
        self.gradients[self.place.segment].append(name)
        if gradient is not None and _has_storage(gradient):
            serial, _ = self._alive.get(storage_key(gradient), (-1, None))
            self._gradient_serials.add(serial)

    def note_kept(self) -> None:
        """Autograd keeps a tensor now: what was counted here so far is done again where a forward runs twice."""
        tallied = self.work[self.place]
        self._kept_tensors[self.place] += 1
        self._until_kept[self.place] = replace(tallied), len(tallied.products)

    def _again(self, place: StepPosition) -> Work | None:
        if place not in self._until_kept:
            return None
        tallied, products = self._until_kept[place]
        return replace(tallied, products=tallied.products[:products]).work()

    @cached_property
    def levels(self) -> Mapping[StepPosition, Levels]:
        """Levels of every place, counted from an empty device; 0 of one that was not entered. To be asked for when all
        has run."""
        levels: dict[StepPosition, Levels] = defaultdict(lambda: Levels(0, 0, 0))
        level = 0
        for place, serial, num_bytes in self._log:
            before = levels.get(place, Levels(level, level, level))
            if serial not in self._gradient_serials:
                level += num_bytes
            levels[place] = Levels(before.start, max(before.peak, level), level)
        return levels

    def segment(self, number: int, *, spared: SparedScores | None) -> Segment:
        """What a segment does and keeps, with the samples that it ran with."""
        places = StepPosition(number, "forward"), StepPosition(number, "backward")
        ahead, back = (self.levels[place] for place in places)
        forward, backward = (self.work[place].work() for place in places)
        return Segment(
            forward=forward,
            backward=backward,
            kept_bytes=Affine(ahead.end - ahead.start),
            output_bytes=Affine(self.outputs.get(number, 0)),
            forward_peak_bytes=Affine(ahead.peak - ahead.start),
            backward_peak_bytes=Affine(max(0, back.peak - ahead.end)),
            core=None if spared is None else Core(spared.work.work(), Affine(spared.num_bytes)),
            again=self._again(places[0]),
            kept_tensors=self._kept_tensors[places[0]],
        )

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func.namespace != "aten":
            return result
        outputs = [t for t in tree_leaves(result) if _has_storage(t)]
        if (kept := _WORKSPACE_BYTES.get(func.overloadpacket)) is not None and not result[
            -1
        ].numel():
            self._track(result[-1], kept(*args))
        fresh = [t for t in outputs if self._track(t)]
        if fresh or is_writing(func):
            self.count(func, args, kwargs, result, outputs)
        return result

    def count(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: Sequence[torch.Tensor]
    ) -> None:
        tallied = self.work[self.place]
        tallied.operators += 1
        formula = _FORMULAS.get(func.overloadpacket)
        inputs = [t for t in tree_leaves((args, kwargs)) if _has_storage(t)]
        self._fusion.add(
            self.place, self._named(inputs), self._named(outputs), is_product=formula is not None
        )
        num_bytes = sum(_num_bytes(t) for t in (*inputs, *outputs))
        flops = 0.0 if formula is None else formula(*args, **kwargs, out_val=result)
        if func.overloadpacket in _BATCH_NORMS and args[_TRAINING]:
            tallied.normed_channels.append(int(args[0].shape[1]))
        if formula is not None:
            tallied.flops += flops
            tallied.products += products_of(func.overloadpacket, args, kwargs, result)
            return
        name = schema_of(func).name.removeprefix("aten::")
        if is_plain(name):
            tallied.moved_bytes += num_bytes
        else:
            tallied.function_bytes += num_bytes * _SLOWER.get(name, 1)

    def _named(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Each tensor's storage, by a number that no other storage gets, and its bytes."""
        keys = [storage_key(t) for t in tensors]
        return [
            (self._alive[key][0] if key in self._alive else ~key, _num_bytes(t))
            for key, t in zip(keys, tensors, strict=True)
        ]

    def _track(self, tensor: torch.Tensor, num_bytes: int | None = None) -> bool:
        """Follow the tensor's storage until it is freed; False if it was known. num_bytes: that it really has."""
        storage = tensor.untyped_storage()
        key = key_of(storage)
        if key in self._alive or key in self._known:
            return False
        num_bytes, serial = storage.nbytes() if num_bytes is None else num_bytes, self._serial
        self._serial += 1

        def freed(_: Any) -> None:
            self._log.append((self.place, serial, -num_bytes))
            self._alive.pop(key, None)

        self._log.append((self.place, serial, num_bytes))
        self._alive[key] = (serial, weakref.ref(storage, freed))
        return True


def follow(recorder: WorkRecorder, pieces: dict[str, nn.Module], model: nn.Module) -> list[str]:
    """Tell the recorder which piece runs, forward and backward, and when gradients are made.

    Backward only ever moves towards the first segment: a hook that fires late (a skip connection's) is not
    followed back.

    Returns:
        The piece of each segment, "" between pieces; filled as the forward pass goes on.
    """
    segments = [""]

    def back_to(segment: int) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            place = recorder.place
            if place.direction == "forward" or segment < place.segment:
                recorder.move_to(StepPosition(segment, "backward"))

        return hook

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            before = len(segments) - 1
            for tensor in tensor_leaves((args, kwargs)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(back_to(before))
            segments.append(name)
            recorder.move_to(StepPosition(len(segments) - 1, "forward"))

        return hook

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        segment = len(segments) - 1
        tensors = tensor_leaves(output)
        recorder.outputs[segment] = sum(_num_bytes(t) for t in tensors)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(back_to(segment))
        segments.append("")
        recorder.move_to(StepPosition(len(segments) - 1, "forward"))

    for name, piece in pieces.items():
        piece.register_forward_pre_hook(enter(name), with_kwargs=True)
        piece.register_forward_hook(leave)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: recorder.complete_gradient(name, p.grad)
            )
    return segments


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, *_with_heads_of(query, key, value))


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, *_with_heads_of(query, key, value))


def _with_heads_of(query: Any, *others: Any) -> list[tuple[int, ...]]:
    """Shapes of keys or values as a kernel reads them, where several heads of queries share one of theirs. torch's own
    formulas refuse that up to 2.11."""
    return [(*other.shape[:1], *query.shape[1:2], *other.shape[2:]) for other in others]


def _recurrent(x: Any, weight: Any, recurrent: Any, *args: Any, **kwargs: Any) -> int:
    """Of one layer and direction: each step of the sequence multiplies its input, and the state before it."""
    return int(2 * math.prod(x.shape[:-1]) * (weight.numel() + recurrent.numel()))


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent(*args)


def _recurrent_workspace(x: Any, weight: Any, recurrent: Any, *args: Any) -> int:
    """Bytes that a layer keeps for its backward, for each step of the sequence and sample."""
    inner, state = weight.shape[1], recurrent.shape[1]
    values = WORKSPACE_STATES * state + WORKSPACE_INPUTS * max(inner, state)
    return round(math.prod(x.shape[:-1]) * values * x.element_size())


# What oneDNN keeps of a recurrent layer for its backward: gates, states and their gradients. A fake one has no bytes.
# Fitted on states of 128 and 256 values with inputs of 128 to 512, torch 2.13: within 2 %, and 12 % for layers of 48
# and 60 values, whose rows are rounded up.
WORKSPACE_STATES, WORKSPACE_INPUTS = 9.45, 6.23
_WORKSPACE_BYTES: dict[Any, Callable[..., int]] = {aten.mkldnn_rnn_layer: _recurrent_workspace}
# How much slower than a GELU, byte for byte: max_pool2d 1.2 GB/s, GELU 8.4 GB/s, one core, torch 2.13.
_SLOWER = {"max_pool2d_with_indices": 7}
# torch's counter takes the CPU's kernels of attention and of recurrent layers for free: they are not in its registry.
# The causal half that a kernel may skip is counted, as it is there.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_cudnn_attention,
            aten._scaled_dot_product_flash_attention_for_cpu,
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention_backward,
            aten._scaled_dot_product_efficient_attention_backward,
            aten._scaled_dot_product_cudnn_attention_backward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        ),
        _attention_backward,
    ),
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
