"""The effects of a model's forward on its parameters and blocks, found by running it before it is
distributed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from paceline.model.copy_on_write import TensorSnapshot
from paceline.torch_private.autograd import version_of
from paceline.torch_private.modules import FORWARD_HOOKS, has_hooks
from paceline.torch_private.storage import address

# Calls of operators that write to a tensor, such as `q.lerp_(p, 0.1)`, and `q.data`. Initial values
# are no edits.
_WRITES = re.compile(
    r"(?<!init)\.(?!requires_grad_|register_)[a-z]\w*[a-z0-9]_\(|\.data\b|no_grad|\.detach\("
)
# The things by which a forward may choose blocks: values or positions of elements, and random
# numbers.
_CHOOSES = re.compile(
    r"\b(?:item|tolist|nonzero|argwhere|unique|any|all|max|min|argmax|argmin|topk|where|random|rand|"
    r"randint|bernoulli)\(|\brandom\b|\bbool\("
)
# Calls that run a module with other weights than its own, for a while.
_SWAPS = re.compile(r"\b(?:functional_call|_reparametrize_module)\b")
# Their forwards write to no parameter but by `max_norm`, and choose between experts inside of a
# listed layer.
_LIBRARIES = ("torch", "transformers", "keras", "torchvision")


@dataclass(frozen=True, slots=True)
class ForwardEffects:
    """The effects of a model's forward that were observed."""

    # Names of parameters that it writes to, without `followers` if the plan keeps their values.
    edited: frozenset[str] = frozenset()
    # Paths of modules that call some of their blocks for one batch and others for another batch.
    choosing: frozenset[str] = frozenset()
    sparse: frozenset[str] = frozenset()  # names of parameters that get sparse gradients
    # Names of parameters that autocast casts before anything computes with them; see `casts.py`.
    cast: frozenset[str] = frozenset()
    cast_dtype: torch.dtype | None = None  # the dtype of these casts; None without autocast
    # Path of a module whose state the model doesn't show; see `module_with_unseen_state`.
    unseen_state: str | None = None


NOTHING = ForwardEffects()


def limited_by_norm(model: nn.Module) -> frozenset[str]:
    """Return the names of embedding weights whose rows a forward scales down if they are too
    long.
    """
    modules = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }
    return frozenset(name for name, p in model.named_parameters() if id(p) in modules)


def sparsely_trained(model: nn.Module) -> frozenset[str]:
    """Return the names of trainable parameters that get sparse gradients, as those of
    `nn.Embedding(sparse=True)`.
    """
    sparse = {
        id(p)
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        for p in module.parameters(recurse=False)
    }
    return frozenset(
        name for name, p in model.named_parameters() if id(p) in sparse and p.requires_grad
    )


def has_own_code(model: nn.Module) -> bool:
    """Whether a class of the model belongs to none of the libraries that are known here."""
    return not all(map(_is_of_library, set(map(type, model.modules()))))


def may_write(model: nn.Module) -> bool:
    """Whether the model's own code, in the files of its classes or in hooks, might write to a
    parameter.
    """
    return any(
        _has_in_source(kind, _WRITES, in_file=True) for kind in set(map(type, model.modules()))
    ) or any(has_hooks(module, FORWARD_HOOKS) for module in model.modules())


def may_choose(model: nn.Module, blocks: Iterable[str]) -> bool:
    """Whether the code of a class that calls some of these blocks might call others for other
    samples.

    A class of a known library calls the same blocks for all samples.
    """
    kinds = {type(model.get_submodule(owner(model, path))) for path in blocks}
    return any(_has_in_source(kind, _CHOOSES) for kind in kinds)


@cache
def runs_with_other_weights(kind: type[nn.Module]) -> bool:
    """Whether the code of a class runs modules with weights that they don't hold
    (`torch.func.functional_call`).
    """
    return _has_in_source(kind, _SWAPS, if_unreadable=False)


def _has_in_source(
    kind: type[nn.Module],
    words: re.Pattern[str],
    *,
    in_file: bool = False,
    if_unreadable: bool = True,
) -> bool:
    """Whether the code of a class that belongs to no library has these words.

    Args:
        in_file: Whether all of the file that defines the class counts.
    """
    if _is_of_library(kind):
        return False
    try:
        text = inspect.getsource(sys.modules[kind.__module__] if in_file else kind)
    except (OSError, TypeError, KeyError):
        return if_unreadable
    return words.search(text) is not None


def _is_of_library(kind: type[nn.Module]) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def choosing(
    model: nn.Module, blocks: Mapping[str, nn.Module], forwards: Iterable[Callable[[], Any]]
) -> frozenset[str]:
    """Return the paths of modules that do not call the same blocks in all of these forwards.

    Each is the innermost module with a forward of its own around the blocks.

    Args:
        blocks: The blocks by path.
        forwards: Forwards of the model, each for other samples.
    """
    calls: list[str] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, path=path: calls.append(path))
        for path, block in blocks.items()
    ]
    owner_of = {path: owner(model, path) for path in blocks}
    seen: dict[str, set[tuple[str, ...]]] = {name: set() for name in owner_of.values()}
    try:
        for forward in forwards:
            calls.clear()
            forward()
            for name, sequences in seen.items():
                sequences.add(tuple(path for path in calls if owner_of[path] == name))
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(name for name, sequences in seen.items() if len(sequences) > 1)


def owner(model: nn.Module, path: str) -> str:
    """Return the path of the innermost module around a block that is called itself.

    A ModuleList only holds others.
    """
    while path:
        path = path.rpartition(".")[0]
        if type(model.get_submodule(path)).forward is not nn.Module.forward:
            break
    return path


def written_by(
    forward: Callable[[], Any],
    model: nn.Module,
    is_elsewhere: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> frozenset[str]:
    """Return the names of the parameters that a forward of the model writes to, even if their
    values stay the same.

    The model can't be used any more after that.

    Args:
        is_elsewhere: Whether a tensor lies in a file; writes to such a tensor are found by its
            version counter alone.
    """
    named = dict(model.named_parameters())
    before = {name: (version_of(p), address(p)) for name, p in named.items()}
    seen = {name: TensorSnapshot(p) for name, p in named.items() if not is_elsewhere(p)}
    forward()
    return frozenset(
        name
        for name, p in named.items()
        if (
            before[name][0] != version_of(p) or seen[name].is_changed()
            if name in seen
            else before[name] != (version_of(p), address(p))
        )
    )


def followers(
    names: Iterable[str],
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    forwards: tuple[Callable[[], Any], Callable[[], Any]],
) -> frozenset[str]:
    """Return the names of parameters of blocks that a forward writes to in place while their block
    does not run.

    The write has to be the same for all samples, as that to the target of a momentum encoder. The
    model can't be used any more after that.

    Args:
        names: Names of the parameters that forwards write to.
        blocks: The blocks by path.
        forwards: Two forwards of the model, each for other samples.
    """
    named = dict(model.named_parameters())
    in_block = {path: [name for name in names if name.startswith(f"{path}.")] for path in blocks}
    # What begins as a copy of what it follows would not change: it begins elsewhere here.
    values = {name: named[name].detach() + 1 for group in in_block.values() for name in group}
    starts: dict[str, list[TensorSnapshot]] = {}
    inside: set[str] = set()

    @torch.no_grad()
    def reset() -> None:
        for name, value in values.items():
            named[name].copy_(value)

    def begin(path: str) -> None:
        starts[path] = [TensorSnapshot(named[name]) for name in in_block[path]]

    def end(path: str) -> None:
        inside.update(
            name
            for name, seen in zip(in_block[path], starts.pop(path), strict=True)
            if seen.is_changed()
        )

    handles = [
        handle
        for path, block in blocks.items()
        if in_block[path]
        for handle in (
            block.register_forward_pre_hook(lambda *_, path=path: begin(path), prepend=True),
            block.register_forward_hook(lambda *_, path=path: end(path)),
        )
    ]
    reset()
    try:
        forwards[0]()
    finally:
        for handle in handles:
            handle.remove()
    after = {name: named[name].detach().clone() for name in values}
    reset()
    addresses = {name: address(named[name]) for name in values}
    forwards[1]()
    # What neither forward writes to was written to once, before them, and that may have been in its
    # block.
    return frozenset(
        name
        for name in values
        if name not in inside
        and torch.equal(named[name], after[name])
        and not torch.equal(after[name], values[name])
        and address(named[name]) == addresses[name]
    )
