"""The units of a model: the repeated blocks that are sharded, recomputed and profiled one at a
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.base.errors import PlanRefused

if TYPE_CHECKING:
    from torch import nn


_MARK = "model|"  # a parameter's name in the user's model, where it is held by a module of ours


def name_of_attribute(name: str) -> str:
    """Return the attribute in which a module of Paceline holds a parameter of the user's model.

    torch allows no dots in such a name.
    """
    return _MARK + name.replace(".", "|")


def name_in_model(path: str) -> str:
    """Return a parameter's name in the user's model, whichever module holds it.

    >>> name_in_model("pieces.3." + name_of_attribute("blocks.0.weight"))
    'blocks.0.weight'
    """
    return path.partition(_MARK)[2].replace("|", ".") if _MARK in path else path


def is_callable(module: nn.Module) -> bool:
    """Whether a module is called itself. A ModuleList, for example, only holds others."""
    from torch import nn

    return (
        getattr(type(module), "forward", None) is not nn.Module.forward
    )  # a scripted one's class has none


def refuse_scripted(model: nn.Module, plan_key: str) -> None:
    """Refuse a plan if a module of the model is compiled by torch.jit.

    Args:
        plan_key: The plan's key that needs hooks or forwards of its own, for the message.

    Raises:
        PlanRefused: a module is compiled by torch.jit, and takes neither hooks nor other forwards.
    """
    from torch.jit import ScriptModule

    for path, module in model.named_modules():
        if isinstance(module, ScriptModule):
            raise PlanRefused(
                f"'{path}' is a scripted module (torch.jit), and {plan_key} can't change how it runs",
                hint="use a data=N plan without recompute, or the module that it was made of",
            )


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the units of a model by name.

    Units are the outermost listed modules (children of a ModuleList or Sequential) that own
    parameters. A container that is never called (ModuleList, ModuleDict, ParameterList) is no unit;
    the modules in it may be units. Three kinds of modules are left out. One shares a parameter with
    the rest of the model, so that the parameter belongs to both. One is held twice by the model.
    One is run by a class with other weights than its own (functional_call), while a unit gathers
    its own weights when it is called, or runs again with them. Parameters that no unit holds belong
    to the root. The order is the model's own.

    >>> from torch import nn
    >>> list(find_units(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])})))
    ['layers.0', 'layers.2']
    """
    from paceline.job.batch_loss import computing
    from paceline.model.forward_effects import runs_with_other_weights

    def is_closed(module: nn.Module) -> bool:
        return runs_with_other_weights(type(module))  # type: ignore[arg-type]  # mypy sees no hash in a class

    paths = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        path: module
        for path, module in listed_modules(computing(model), is_closed=is_closed)
        if any(True for _ in module.parameters()) and not _is_tied(module, paths)
    }


def listed_modules(
    module: nn.Module,
    prefix: str = "",
    *,
    is_closed: Callable[[nn.Module], bool] = lambda module: False,
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost children of ModuleLists and Sequentials that are called themselves, with
    their paths.

    Args:
        is_closed: Whether the modules inside a module are left out.
    """
    from torch import nn

    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in () if is_closed(module) else module.named_children():
        path = f"{prefix}{name}"
        if listed and is_callable(child):
            yield path, child
        else:
            yield from listed_modules(child, f"{path}.", is_closed=is_closed)


def _is_tied(unit: nn.Module, paths: Mapping[int, int]) -> bool:
    """Whether a parameter of the unit is also reached by a path outside it.

    Args:
        paths: The number of paths to each parameter of the model, by the id of the parameter.
    """
    inside = Counter(id(p) for _, p in unit.named_parameters(remove_duplicate=False))
    return any(paths[parameter] != count for parameter, count in inside.items())


def recurrent_units(model: nn.Module) -> dict[str, str]:
    """Return the class names of recurrent layers by the unit that holds them; the unit "" is a
    model without units.

    >>> from torch import nn
    >>> recurrent_units(nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 2)))
    {'0': 'LSTM'}
    """
    from torch import nn

    layers = {
        name: next(
            (layer for layer in unit.modules() if isinstance(layer, nn.RNN | nn.GRU | nn.LSTM)),
            None,
        )
        for name, unit in (find_units(model) or {"": model}).items()
    }
    return {name: type(layer).__name__ for name, layer in layers.items() if layer is not None}
