"""What peers may say to the coordinator. A message is checked as it comes in, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.strategies.server.exchange.wire import Role, WireError

_Check = Callable[[Any], bool]


def _is_true(value: Any) -> bool:
    return value is True


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_figure(value: Any) -> bool:
    """A number of any kind; sums over a model's outputs need not be finite."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_loss(value: Any) -> bool:
    """A worker whose loss is not finite says so and ends."""
    return _is_figure(value) and math.isfinite(value)


def _is_squares(value: Any) -> bool:
    return _is_figure(value) and not value < 0


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_names(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _are_sums(value: Any) -> bool:
    return type(value) is list and all(type(pair) is list and len(pair) == 2 and all(map(_is_figure, pair))
                                       for pair in value)


def _has(*names: str) -> _Check:
    return lambda value: type(value) is dict and value.keys() == set(names) and all(map(_is_figure, value.values()))


# By who speaks, and by the first key, which names the kind.
_SHAPES: Mapping[Role, Mapping[str, Mapping[str, _Check]]] = {
    Role.CONTROL: {
        "idle": {"idle": _is_true, "deaths": _is_count},
        "alive": {"alive": _is_true},
        "told": {"told": _is_count, "loss": _is_loss, "count": _is_figure, "is_mean": _is_bool},
        "finished": {"finished": _is_count, "version": _is_count, "unused": _are_names, "stop": _is_bool},
        "sums": {"sums": _is_count, "values": _are_sums, "stop": _is_bool},
        "left": {"left": _has("peak_memory_bytes", "waited_for_step_s", "waited_for_weights_s", "pushed_bytes",
                              "pulled_bytes")},
    },
    Role.SERVER: {
        "held": {"held": _is_count, "squares": _is_squares},
        "lost": {"lost": _is_count, "incarnation": _is_count, "why": _is_text},
        "alive": {"alive": _is_true},
        "left": {"left": _has("peak_memory_bytes")},
    },
}


def checked(role: Role, message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is, if a peer in this role may say it.

    Raises:
        WireError: it is of no known kind, lacks something, has something else, or a value of the wrong type.
    """
    kind = next(iter(message), "")
    shape = _SHAPES[role].get(kind)
    if shape is None:
        raise WireError(f"it sent a message of the unknown kind '{kind[:40]}'; known are {', '.join(_SHAPES[role])}")
    if message.keys() != shape.keys():
        raise WireError(f"it sent a message '{kind}' with {', '.join(sorted(message))[:200]} where "
                        f"{', '.join(shape)} are due")
    for key, is_right in shape.items():
        if not is_right(message[key]):
            raise WireError(f"it sent a message '{kind}' whose '{key}' is {repr(message[key])[:40]}")
    return message
