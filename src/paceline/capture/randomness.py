"""Random layers switched off: what they draw is replaced by its mean, which is the same under every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode


def _randint(*args: Any, **options: Any) -> torch.Tensor:
    *bounds, size = args
    return torch.full(size, sum(bounds) // 2, **{"dtype": torch.int64, **options})


# A mean for each operator that the layers of models draw with on the CPU, without its `generator`. Dropout of every
# kind draws its mask with bernoulli_(keep) and divides by `keep`, so the mean makes it pass its input through.
_MEANS: dict[str, Callable[..., torch.Tensor]] = {
    "bernoulli": lambda x, p=None: x.clone() if p is None else torch.full_like(x, p),
    "bernoulli_": lambda x, p=0.5: x.copy_(p) if isinstance(p, torch.Tensor) else x.fill_(p),
    "exponential_": lambda x, rate=1.0: x.fill_(1 / rate),
    "normal_": lambda x, mean=0.0, std=1.0: x.fill_(mean),
    "rand": lambda size, **options: torch.full(size, 0.5, **options),
    "rand_like": lambda x, **options: torch.full_like(x, 0.5, **options),
    "randint": _randint,
    "randint_like": lambda x, *bounds, **options: torch.full_like(x, sum(bounds) // 2, **options),
    "randn": lambda size, **options: torch.zeros(size, **options),
    "randn_like": lambda x, **options: torch.zeros_like(x, **options),
    "randperm": lambda size, **options: torch.arange(size, **options),
    "uniform_": lambda x, low=0.0, high=1.0: x.fill_((low + high) / 2),
}


_open_drawing = 0  # blocks of `drawing`


@contextmanager
def drawing() -> Iterator[None]:
    """Meanwhile random operators draw, whatever is switched off outside; for what is no part of a forward."""
    global _open_drawing
    _open_drawing += 1
    try:
        yield
    finally:
        _open_drawing -= 1


class WithoutRandomness(TorchDispatchMode):
    """While this is entered, random operators give the mean of what they draw; not while a model is built, nor in
    `drawing`.

    The operators are caught below autograd, where those inside torch's own functions (attention, recurrent layers)
    are seen too, and in the second forward of a recomputed block. A forward on fake tensors is left as it is: what is
    recorded there draws where the recording runs.

    left: names of random operators that were called and have no mean here.
    drawn: for each call that gave a mean, in order, what torch's generator would have drawn there: one number that
        tells streams apart.
    drawn_forward: those of them that were drawn outside of a backward, where nothing is recomputed.
    seeds: that the generator had been given when it drew these.
    off: names of those that gave their mean, by the path of the module that called them; "" for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: set[str] = set()
        self.off: dict[str, set[str]] = {}
        self.drawn: list[int] = []
        self.drawn_forward: list[int] = []
        self.seeds: set[int] = set()
        self._building = False
        self._inside: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether anything that was called so far draws."""
        return bool(self.off or self.left)

    def building(self, build: Callable[[], Any]) -> Callable[[], Any]:
        """The same function with its draws left alone, for initial weights."""
        def built() -> Any:
            before, self._building = self._building, True
            try:
                return build()
            finally:
                self._building = before

        return built

    def forget(self) -> None:
        """Another step begins."""
        self.drawn.clear()
        self.drawn_forward.clear()
        self.seeds.clear()

    def most_repeats(self) -> int:
        """How often the most frequent number was drawn outside of a backward since the step began."""
        return max(Counter(self.drawn_forward).values(), default=0)

    def _draw(self) -> None:
        self.seeds.add(torch.default_generator.initial_seed())
        self.drawn.append(int(torch.empty((), dtype=torch.int64).random_()))
        if torch._C._current_graph_task_id() == -1:
            self.drawn_forward.append(self.drawn[-1])

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile `off` learns which of the model's modules draw."""
        handles = []
        for path, module in model.named_modules():
            handles += [module.register_forward_pre_hook(lambda module, given, path=path: self._inside.append(path)),
                        module.register_forward_hook(lambda module, given, output: (self._inside.pop(), None)[1])]
        try:
            yield
        finally:
            self._inside.clear()
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (self._building or _open_drawing or torch.Tag.nondeterministic_seeded not in func.tags
                or detect_fake_mode(args) is not None):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _MEANS:
            self.off.setdefault(self._inside[-1] if self._inside else "", set()).add(name)
            self._draw()
            return _MEANS[name](*args, **{key: value for key, value in kwargs.items() if key != "generator"})
        if "scaled_dot_product" not in name:  # on the CPU it draws nothing itself
            self.left.add(name)
        return func(*args, **kwargs)
