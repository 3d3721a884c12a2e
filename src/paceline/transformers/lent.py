"""The model, its optimizer and its schedule in the script's process while ranks train them.

Weights and optimizer state are fetched from the ranks when code looks at them. Changes that code
makes to the optimizer's options, the schedule, `requires_grad` and plain attributes of modules are
sent to the ranks before their next step. Any other change is refused at that moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch

from paceline.base.errors import UsageError
from paceline.job.modes import has_modes
from paceline.model.forward_state import ForwardState
from paceline.torch_private.autograd import GETTERS, gradient_hooks, version_of
from paceline.torch_private.dispatch import without_subclass_functions
from paceline.torch_private.modules import HOOKS
from paceline.torch_private.optimizers import STEP_HOOKS, mark_stepped
from paceline.training import state
from paceline.training.restore import take_over

_T = torch.Tensor
_READ_NO_VALUES: frozenset[Any] = frozenset(
    {
        *(
            getattr(_T, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "layout",
                "ndim",
                "requires_grad",
                "is_leaf",
                "grad_fn",
                "is_meta",
                "is_cuda",
                "is_sparse",
                "is_quantized",
            )
        ),
        *GETTERS,
        _T.requires_grad.__set__,  # type: ignore[attr-defined]
        _T.requires_grad_,
        _T.size,
        _T.dim,
        _T.numel,
        _T.nelement,
        _T.element_size,
        _T.is_floating_point,
        _T.is_complex,
        _T.register_hook,
        _T.register_post_accumulate_grad_hook,
    }
)
_OF_GRADIENTS = (_T.grad.__get__, _T.grad.__set__)  # type: ignore[union-attr]


class _Weight(torch.nn.Parameter):
    """A weight that ranks train. Its values are fetched from them when something reads it."""

    lent: ClassVar[Lent | None] = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if cls.lent is not None and os.getpid() == cls.lent.process:
            cls.lent.attend(function)
        with without_subclass_functions():
            if function == _T.data.__get__:  # type: ignore[attr-defined]
                return args[0].detach()  # writes to it are counted as those to the weight
            return function(*args, **(kwargs or {}))


class Lent:
    """The model, optimizer and schedule that the ranks train meanwhile.

    Args:
        bring: Loads the current weights into the model.
        read_state: Reads the current optimizer state, by parameter.
        schedule: A schedule that ranks step, too; None if they are told its rates.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        schedule: Any,
        *,
        bring: Callable[[], None],
        read_state: Callable[[], dict[Any, dict[str, Any]]],
    ) -> None:
        self.model, self.schedule, self._bring = model, schedule, bring
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        # Only ranks have the first two.
        self.scaling, self.has_modes, self.process = (
            None,
            False,
            os.getpid(),
        )
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self._is_busy = self._is_updating = self._is_changed = False
        self._state = _StateOnRanks(read_state)
        self._groups = [list(map(id, group["params"])) for group in self.optimizer.param_groups]
        self._attributes, self._hooks = ForwardState(model).now().attributes, self._all_hooks()
        self._note()

    @contextmanager
    def lent(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Follow the ranks' training inside the context.

        Args:
            options: Of their optimizer and schedule.
        """
        kept = self.optimizer.state
        self.take(options)
        try:
            self.optimizer.state = self._state
            if has_modes(self.optimizer):
                # Ranks change the mode instead.
                vars(self.optimizer).update(dict.fromkeys(("train", "eval"), lambda: None))
            for p in self._trained.values():
                if type(p) is torch.nn.Parameter:
                    p.__class__ = _Weight
            _Weight.lent = self
            yield
        finally:
            _Weight.lent = None
            for p in self._trained.values():
                if type(p) is _Weight:
                    cast(Any, p).__class__ = torch.nn.Parameter
            self.optimizer.state = kept
            for name in ("train", "eval"):
                vars(self.optimizer).pop(name, None)

    def take(self, options: Mapping[str, Any]) -> None:
        """Set optimizer and schedule to the options of those on ranks."""
        take_over(self, options)
        self._told = self._options()

    def attend(self, function: Any) -> None:
        """React to code that calls a function of torch with a weight: fetch the weights if it reads
        values.

        Raises:
            UsageError: it looks at a gradient, or at weights before an update that ranks have made
                already.
        """
        if self._is_busy or function in _READ_NO_VALUES:
            return
        if function in _OF_GRADIENTS:
            raise UsageError(
                "code of the script looks at a gradient while ranks train, and gradients stay on ranks",
                hint="a hook of the parameter (register_hook) before train() sees it; the log has their "
                "norm as grad_norm",
            )
        if self._is_updating:
            raise UsageError(
                "on_pre_optimizer_step looks at a weight, and ranks have updated it already",
                hint="on_step_begin sees the weights before a step, on_step_end those after it",
            )
        self._bring()

    @contextmanager
    def being_filled(self) -> Iterator[None]:
        """Allow the weights to be overwritten inside the context with those on ranks."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self._note()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Tell code inside the context that the update comes next, although ranks have made it
        already.

        Raises:
            UsageError: the code changes options that the update should have followed.
        """
        before, self._is_updating = self._options(), True
        try:
            yield
        finally:
            self._is_updating = False
        if self._options() != before:
            raise UsageError(
                "on_pre_optimizer_step changes what the update follows, and ranks have made it already",
                hint="on_step_begin comes before it",
            )

    def step(self, options: Mapping[str, Any], *, is_skipped: bool) -> None:
        """Follow the ranks, which have made an update and stepped their schedule.

        Args:
            options: Of both after the step.
        """
        self._is_changed |= self._options() != self._told
        if not self._is_changed:
            self.take(options)
            return
        if self.schedule is not None and not is_skipped:
            mark_stepped(self.optimizer)  # schedules look whether a step was taken
            self.schedule.step()

    def changes(self) -> dict[str, Any] | None:
        """Return the changes that ranks must be told of before they go on; None if there are none.

        Raises:
            UsageError: code has made a change that they can't be told of.
        """
        self._refuse()
        self._state.forget()
        options, attributes = self._options(), self._attributes.changed()
        if not (self._is_changed or attributes or options != self._told):
            return None
        self._is_changed, self._told, self._attributes = (
            False,
            options,
            ForwardState(self.model).now().attributes,
        )
        now = self._attributes.values()
        return {**options, "attributes": {name: now[name] for name in attributes}}

    def _options(self) -> dict[str, Any]:
        frozen = [name for name, p in self._trained.items() if not p.requires_grad]
        return {**state.changing_document(cast(Any, self), step=0, samples=0), "frozen": frozen}

    def _refuse(self) -> None:
        written = [
            name
            for name, tensor in self._tensors()
            if version_of(tensor) != self._versions.get(name)
        ]
        if written:
            raise UsageError(
                f"code of the script has written to '{written[0]}' while ranks train, which have it in "
                "other memory",
                hint="let the model's forward do it (torch.nn.utils.parametrize), or the optimizer that "
                "create_optimizer makes",
            )
        if self.optimizer.state is not self._state or self._state.is_written():
            raise UsageError(
                "code of the script has written to the optimizer's state while ranks train, which have it "
                "in other memory",
                hint="end the training, and begin another with a new optimizer",
            )
        if [
            list(map(id, group["params"])) for group in self.optimizer.param_groups
        ] != self._groups:
            raise UsageError(
                "the optimizer was given other parameters while ranks train",
                hint="give it all of them before train() and freeze some: requires_grad_(False) in a "
                "callback is followed",
            )
        thawed = [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and name in self._frozen
        ]
        if thawed:
            raise UsageError(
                f"'{thawed[0]}' was frozen when train() began and is to be trained now, but the optimizer "
                "does not have it",
                hint="let it be trained when train() begins, and freeze it in on_train_begin",
            )
        if self._all_hooks() != self._hooks:
            raise UsageError(
                "hooks were registered or removed while ranks train, whose modules don't have them",
                hint="register them before train()",
            )

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._trained.items()
        yield from self.model.named_buffers()

    def _note(self) -> None:
        self._versions = {name: version_of(tensor) for name, tensor in self._tensors()}

    def _all_hooks(self) -> list[int]:
        of_modules = (getattr(module, name) for module in self.model.modules() for name in HOOKS)
        of_weights = (gradient_hooks(p) for p in self._trained.values())
        of_optimizer = (getattr(self.optimizer, name) for name in STEP_HOOKS)
        return [
            id(hook)
            for hooks in (*of_modules, *of_weights, *of_optimizer)
            for hook in hooks.values()
        ]


class _StateOnRanks(Mapping[Any, dict[str, Any]]):
    """An optimizer's state by parameter, which is read from ranks when it is looked at."""

    def __init__(self, read: Callable[[], dict[Any, dict[str, Any]]]) -> None:
        self._read = read
        self.forget()

    def forget(self) -> None:
        """Forget the state that was read, because the ranks go on."""
        self._seen: dict[Any, dict[str, Any]] = {}
        self._versions: list[int] = []

    def _now(self) -> dict[Any, dict[str, Any]]:
        if not self._seen:
            self._seen = self._read()
            self._versions = self._written()
        return self._seen

    def _written(self) -> list[int]:
        return [
            version_of(value)
            for of_parameter in self._seen.values()
            for value in of_parameter.values()
            if isinstance(value, torch.Tensor)
        ]

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return self._now()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def is_written(self) -> bool:
        return self._written() != self._versions
