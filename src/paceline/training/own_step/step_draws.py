"""Makes random numbers the same per sample under every plan, if a job's own step draws them outside
of models and losses, or a collate function draws them.

Each draw is keyed by the step and its number in the step. A tensor that has this rank's samples
along dim 0 is drawn for the whole window, and the rank keeps its rows. Any other tensor is drawn
alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.base.errors import TrainingError
from paceline.base.streams import drawing, key_to_seed, seed_streams
from paceline.torch_private.default_device import DeviceContext, device_constructors
from paceline.torch_private.dispatch import OperatorMode, without_last_mode
from paceline.torch_private.pytree import tensor_leaves, tree_map

# Operators that draw more numbers for some elements than for others. Each row gets its own random
# stream.
_BY_VALUE = ("_sample_dirichlet", "_standard_gamma", "binomial", "poisson")


class _DefaultDevice(DeviceContext):
    """torch's own default device, except for draws from a generator, which belongs to one device.

    The tensor that such a draw makes is on the generator's device, as it is without a default
    device. Tensors that the draw is given are on the default device if the same code made them.
    Then they, and the returned tensor, get the numbers that the draw makes on the generator's
    device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is None:
            return super().__torch_function__(func, types, args, kwargs)
        if (
            func in device_constructors()
            and kwargs.get("device") is None
            and kwargs.get("out") is None
        ):
            return func(*args, **{**kwargs, "device": generator.device})
        tensors = tensor_leaves((args, kwargs))
        if all(tensor.device == generator.device for tensor in tensors):
            return func(*args, **kwargs)
        moved = {id(tensor): tensor.to(generator.device) for tensor in tensors}
        args, kwargs = tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs))
        drawn = func(*args, **kwargs)
        written = next((tensor for tensor in tensors if moved[id(tensor)] is drawn), None)
        return drawn.to(tensors[0].device) if written is None else written.copy_(drawn)


class MakesOn:
    """While this is entered, torch.zeros(3) and the like are on the device, and of the job's `input_dtype`.

    Tensors drawn from a generator are on the generator's device.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._context = None if device.type == "cpu" else _DefaultDevice(device)
        self._dtype, self._outside = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()
        if self._dtype is not None:
            self._outside = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: Any) -> None:
        if self._dtype is not None:
            torch.set_default_dtype(self._outside)
        if self._context is not None:
            self._context.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let code inside the block make tensors where they would be without this."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class WindowDraws(OperatorMode):
    """While this is entered, random operators draw for the window, and new tensors are made on the
    device.

    Python's and NumPy's generators are seeded only for a step, because nothing shows whether their
    numbers belong to a sample.

    Args:
        rows: Number of rows of this rank's tensors.
        first: Place of the first row in the window.
        count: Number of samples of the window.
        key: The key of the step.
        dtype: The job's `input_dtype`.
        is_step: Whether a step draws, and not a collate function.

    Raises:
        TrainingError: an operator is given a generator, or permutes the samples of this rank.
    """

    def __init__(
        self,
        *,
        rows: int,
        first: int,
        count: int,
        key: Sequence[int | str],
        device: torch.device,
        dtype: torch.dtype | None = None,
        is_step: bool = True,
    ) -> None:
        super().__init__()
        self.is_step = is_step
        self.rows, self.first, self.count, self.key, self.number = rows, first, count, tuple(key), 0
        self.is_alike = False
        self.makes_on = MakesOn(device, dtype)
        if is_step:
            seed_streams(*self.key)  # also seeds Python's and NumPy's streams

    def __enter__(self) -> WindowDraws:
        self.makes_on.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.makes_on.__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operators inside the block draw, and make tensors, as they would without this."""
        with self.makes_on.paused(), without_last_mode() as mode:
            assert mode is self, "a mode that the step entered is left before a verb"
            yield

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Treat no tensor inside the block as one of samples: all ranks draw the same numbers,
        whatever its shape.
        """
        before, self.is_alike = self.is_alike, True
        try:
            yield
        finally:
            self.is_alike = before

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        is_cut = self.rows != self.count and not self.is_alike
        if kwargs.get("generator") is not None:
            if not is_cut and not self.is_step:
                return func(*args, **kwargs)
            raise TrainingError(
                f"{self._source} draws from a generator of its own ({func.overloadpacket.__name__}): "
                "each rank would draw other numbers, and a resumed run others again",
                hint="leave generator= out: what is drawn is fixed by the seed and the step, and a "
                "sample gets the same numbers under every plan",
            )
        if func.overloadpacket.__name__ == "randperm" and is_cut and args[0] == self.rows:
            raise TrainingError(
                f"{self._source} draws torch.randperm({self.rows}) where it has {self.rows} of the step's {self.count} "
                "samples: other samples would meet than on one device",
                hint="everyone = ctx.gather(x), then everyone[torch.randperm(len(everyone))[ctx.places]]; what are no "
                "samples is permuted in `with ctx.alike():`"
                if self.is_step
                else "a data set can mix an item with another one that it draws; a step of one's own mixes whole "
                "batches, see `paceline docs own-step`",
            )
        self._seed()
        self.number += 1
        with drawing():
            if (
                func.overloadpacket.__name__ in _BY_VALUE
                and not self.is_alike
                and self._has_rows(args[0])
            ):
                return torch.cat(
                    [self._drawn_row(func, row, args, kwargs) for row in range(self.rows)]
                )
            return self._drawn(func, args, kwargs) if is_cut else func(*args, **kwargs)

    @property
    def _source(self) -> str:
        return "the step" if self.is_step else "collate"

    def _seed(self, *more: int) -> None:
        seed = key_to_seed(*self.key, self.number, *more)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == self.rows

    def _drawn_row(self, func: Any, row: int, args: Any, kwargs: Any) -> Any:
        self._seed(self.first + row)
        return func(
            *tree_map(lambda v: v[row : row + 1] if self._has_rows(v) else v, list(args)), **kwargs
        )

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        written: list[tuple[torch.Tensor, torch.Tensor]] = []

        def whole(value: Any) -> Any:
            if self._has_rows(value):
                full = (
                    value[:1].expand(self.count, *value.shape[1:]).clone()
                )  # of a kind that can be drawn with
                full[self.first : self.first + self.rows] = value
                written.append((value, full))
                return full
            return value

        def rows(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for given, full in written:
                if value is full:  # the operator writes in place
                    return given.copy_(full[self.first : self.first + self.rows])
            return (
                value[self.first : self.first + self.rows].clone()
                if value.ndim and len(value) == self.count
                else value
            )

        sized = [
            [self.count, *argument[1:]]
            if _is_size(argument) and argument[0] == self.rows
            else argument
            for argument in args
        ]
        drawn = func(*tree_map(whole, sized), **tree_map(whole, kwargs))
        return tree_map(rows, drawn) if written or sized != list(args) else drawn


def _is_size(argument: Any) -> bool:
    return (
        isinstance(argument, list | tuple)
        and len(argument) > 0
        and all(type(length) is int for length in argument)
    )
