"""Random layers switched off: the mean, which is the same under every plan, takes the place of what
they draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

from paceline.base.streams import is_drawing
from paceline.torch_private.autograd import is_in_backward
from paceline.torch_private.dispatch import (
    OperatorMode,
    entered_modes,
    is_writing,
    schema_of,
    without_all_modes,
)
from paceline.torch_private.fake_tensors import detect_fake_mode


def _randint(*args: Any, **options: Any) -> torch.Tensor:
    *bounds, size = args
    return torch.full(size, sum(bounds) // 2, **{"dtype": torch.int64, **options})


def _native_dropout(x: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _native_dropout_backward(gradient: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return the gradient of a dropout that has passed its input through."""
    return gradient.clone()


def _rrelu_with_noise(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> torch.Tensor:
    slope = (lower + upper) / 2
    if training:  # backward multiplies by the noise
        noise.copy_(torch.where(x > 0, torch.ones_like(x), torch.full_like(x, slope)))
    return torch.nn.functional.leaky_relu(x, slope)


def _normal(mean: Any, std: Any, size: Any = None, **options: Any) -> torch.Tensor:
    if size is not None:
        return torch.full(size, mean, **options)
    return (
        mean.expand(torch.broadcast_shapes(mean.shape, getattr(std, "shape", ()))).clone()
        if isinstance(mean, torch.Tensor)
        else torch.full_like(std, mean)
    )


# A mean for each operator with which layers of models draw, without its `generator`. On the CPU,
# dropout of every kind draws its mask with bernoulli_(keep) and divides by `keep`, so with the mean
# it passes its input through. GPUs have one operator for all of that.
_MEANS: dict[str, Callable[..., Any]] = {
    "_sample_dirichlet": lambda x: x / x.sum(-1, keepdim=True),
    "_standard_gamma": lambda x: x.clone(),
    "bernoulli": lambda x, p=None: x.clone() if p is None else torch.full_like(x, p),
    "bernoulli_": lambda x, p=0.5: x.copy_(p) if isinstance(p, torch.Tensor) else x.fill_(p),
    "binomial": lambda count, p: count * p,
    "exponential_": lambda x, rate=1.0: x.fill_(1 / rate),
    "geometric_": lambda x, p: x.fill_(1 / p),
    "log_normal_": lambda x, mean=1.0, std=2.0: x.fill_(math.exp(mean + std**2 / 2)),
    "native_dropout": _native_dropout,
    "normal": _normal,
    "normal_": lambda x, mean=0.0, std=1.0: x.fill_(mean),
    "poisson": lambda x: x.clone(),
    "rand": lambda size, **options: torch.full(size, 0.5, **options),
    "rand_like": lambda x, **options: torch.full_like(x, 0.5, **options),
    "randint": _randint,
    "randint_like": lambda x, *bounds, **options: torch.full_like(x, sum(bounds) // 2, **options),
    "randn": lambda size, **options: torch.zeros(size, **options),
    "randn_like": lambda x, **options: torch.zeros_like(x, **options),
    "randperm": lambda size, **options: torch.arange(size, **options),
    "rrelu_with_noise": _rrelu_with_noise,
    "rrelu_with_noise_": lambda x, *given: x.copy_(_rrelu_with_noise(x.clone(), *given)),
    "uniform_": lambda x, low=0.0, high=1.0: x.fill_((low + high) / 2),
}

# Arguments by which fused operators (attention, recurrent layers of several steps) are told how
# much to drop, forward and backward; they pass everything through at 0.
_DROPS = ("dropout_p", "dropout")
_HARMLESS = ("_cudnn_init_dropout_state",)  # a generator for what is dropped, and nothing is


def is_switched_off() -> bool:
    """Whether random operators return their mean at this moment."""
    return not is_drawing() and any(isinstance(mode, WithoutRandomness) for mode in entered_modes())


def forget_draws() -> None:
    """Forget the noted draws, because a new step begins."""
    for mode in entered_modes():
        if isinstance(mode, WithoutRandomness):
            mode.forget()


@contextmanager
def without_modes() -> Iterator[bool]:
    """Disable all dispatch modes in the block, as torch.compile needs it, and yield whether random
    operators draw.

    If they don't, code that is compiled in the block must use `means`.
    """
    if is_off := any(isinstance(mode, WithoutRandomness) for mode in entered_modes()):
        is_off = not is_drawing()
        with without_all_modes():
            yield not is_off
    else:
        yield True


def means() -> dict[Any, Callable[..., Any]]:
    """Return the replacements of random operators in a graph, for operators without effects on
    their arguments.

    They include the backwards of operators that have a backward of their own.
    """
    return {
        **{func: partial(_mean_of, func) for func in _random_operators()},
        torch.ops.aten.native_dropout_backward.default: _native_dropout_backward,
    }


@cache
def _random_operators() -> tuple[Any, ...]:
    packets = (
        getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")
    )
    funcs = [
        getattr(packet, name)
        for packet in packets
        if hasattr(packet, "overloads")
        for name in packet.overloads()
    ]
    return tuple(
        func
        for func in funcs
        if not is_writing(func)
        and (_drop_argument(func) is not None or torch.Tag.nondeterministic_seeded in func.tags)
    )


def _mean_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    kwargs = {key: value for key, value in kwargs.items() if key != "generator"}
    if (without_drops := _without_drops(func, args, kwargs)) is not None:
        args, kwargs, drops = without_drops
        return func(*args, **kwargs) if drops else NotImplemented
    if name in _MEANS:
        return _MEANS[name](*args, **kwargs)
    if (
        f"{name}_" in _MEANS
    ):  # where a graph is made, what is written in place becomes a tensor of its own
        return _MEANS[f"{name}_"](args[0].clone(), *args[1:], **kwargs)
    return NotImplemented


class WithoutRandomness(OperatorMode):
    """A mode in which random operators return the mean of what they would draw.

    It has no effect while a model is built, nor in `drawing`. The operators are caught below
    autograd, so those inside torch's own functions (attention, recurrent layers) and in the second
    forward of a recomputed block are caught too. A forward on fake tensors is left as it is: its
    recording draws when it runs.

    Attributes:
        left_on: Names of random operators that were called and have no mean here.
        drawn: A number for each call that returned a mean, in order. torch's generator would have
            drawn it there, so it tells streams apart.
        drawn_forward: Those of the numbers that were drawn outside of a backward, where nothing is
            recomputed.
        seeds: The seeds that the generator had when it drew these numbers.
        off: Names of operators that returned their mean, by the path of the module that called
            them; "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_on: set[str] = set()
        self.off: dict[str, set[str]] = {}
        self.drawn: list[int] = []
        self.drawn_forward: list[int] = []
        self.seeds: set[int] = set()
        self._building = False
        self._inside: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether any operator that was called so far draws."""
        return bool(self.off or self.left_on)

    def building(self, build: Callable[[], Any]) -> Callable[[], Any]:
        """Return the same function with real draws, for initial weights."""

        @wraps(build)
        def built() -> Any:
            before, self._building = self._building, True
            try:
                return build()
            finally:
                self._building = before

        return built

    def forget(self) -> None:
        """Forget the draws, because another step begins."""
        self.drawn.clear()
        self.drawn_forward.clear()
        self.seeds.clear()

    def most_repeats(self) -> int:
        """Return how often the most frequent number was drawn outside of a backward since the step
        began.
        """
        return max(Counter(self.drawn_forward).values(), default=0)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note in `off`, while the block runs, which of the model's modules draw."""
        handles = []
        for path, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(
                    lambda module, inputs, path=path: self._inside.append(path)
                ),
                module.register_forward_hook(
                    lambda module, inputs, output: (self._inside.pop(), None)[1]
                ),
            ]
        try:
            yield
        finally:
            self._inside.clear()
            for handle in handles:
                handle.remove()

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        is_random, is_backward = (
            torch.Tag.nondeterministic_seeded in func.tags,
            name.endswith("_backward"),
        )
        if (
            not (is_random or is_backward)
            or self._building
            or is_drawing()
            or detect_fake_mode(args) is not None
        ):
            return func(*args, **kwargs)
        if name == "native_dropout_backward":
            return _native_dropout_backward(*args)
        without_drops = _without_drops(func, args, kwargs)
        if name in _HARMLESS:
            pass
        elif without_drops is not None:
            args, kwargs, drops = without_drops
            if drops and not is_backward:
                self._note(name)
        elif is_random and name in _MEANS:
            self._note(name)
            return _MEANS[name](
                *args, **{key: value for key, value in kwargs.items() if key != "generator"}
            )
        elif is_random:
            self.left_on.add(name)
        return func(*args, **kwargs)

    def _note(self, name: str) -> None:
        self.off.setdefault(self._inside[-1] if self._inside else "", set()).add(name)
        self.seeds.add(torch.default_generator.initial_seed())
        self.drawn.append(int(torch.empty((), dtype=torch.int64).random_()))
        if not is_in_backward():
            self.drawn_forward.append(self.drawn[-1])


@cache
def _drop_argument(func: Any) -> tuple[int, str] | None:
    """Return the position and the name of an operator's argument that says how much to drop; None
    if it has none.
    """
    return next(
        (
            (place, argument.name)
            for place, argument in enumerate(schema_of(func).arguments)
            if argument.name in _DROPS
        ),
        None,
    )


def _without_drops(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any], bool] | None:
    """Return a fused operator's arguments with nothing to drop, and whether it would have dropped
    something.

    The result is None for an operator without such an argument.
    """
    where = _drop_argument(func)
    if where is None:
        return None
    place, name = where
    if place < len(args):
        return (*args[:place], 0.0, *args[place + 1 :]), kwargs, bool(args[place])
    return args, {**kwargs, name: 0.0} if name in kwargs else kwargs, bool(kwargs.get(name))
