"""What peers may say to the coordinator. A message is checked as it comes in, before anything is made of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from paceline.servers.wire import Role, WireError

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Finite = Annotated[
    float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)
]  # a worker says what isn't, and ends
_Pair = Annotated[list[float], Meta(min_length=2, max_length=2)]
_True = Literal[True]


class _ServerLeft(TypedDict):
    peak_memory_bytes: float
    core_wait_s: float


class _WorkerLeft(_ServerLeft):
    waited_for_step_s: float
    waited_for_weights_s: float
    pushed_bytes: float
    pulled_bytes: float


# By who speaks, and by the first key, which names the kind.
_SHAPES: Mapping[Role, Mapping[str, Mapping[str, Any]]] = {
    Role.CONTROL: {
        "idle": {"idle": _True, "deaths": _Count, "measured": list[str]},
        "alive": {"alive": _True},
        "told": {
            "told": _Count,
            "loss": _Finite,
            "count": float,
            "is_mean": bool,
            "digest": _Count,
        },
        "finished": {"finished": _Count, "version": _Count, "unused": list[str], "stop": bool},
        "sums": {
            "sums": _Count,
            "names": list[str],
            "values": list[_Pair],
            "refused": list[str],
            "stop": bool,
        },
        "figures": {"figures": _Count, "values": list[float]},
        "update": {"update": _Count, "optimizer": str, "unused": list[str]},
        "left": {"left": _WorkerLeft},
    },
    Role.SERVER: {
        "held": {"held": _Count, "squares": float},
        "lost": {"lost": _Count, "incarnation": _Count, "why": str},
        "alive": {"alive": _True},
        "copied": {"copied": _Count},
        "exported": {"exported": _Count},
        "stop": {"stop": _True},
        "left": {"left": _ServerLeft},
    },
}


def checked(role: Role, message: dict[str, Any]) -> dict[str, Any]:
    """A message, if a peer in this role may say it.

    Raises:
        WireError: it is of no known kind, lacks something, has something else, or a value of the wrong type.
    """
    kind = next(iter(message), "")
    shape = _SHAPES[role].get(kind)
    if shape is None:
        raise WireError(
            f"it sent a message of the unknown kind '{kind[:40]}'; known are {', '.join(_SHAPES[role])}"
        )
    if message.keys() != shape.keys():
        raise WireError(
            f"it sent a message '{kind}' with {', '.join(sorted(message))[:200]} where "
            f"{', '.join(shape)} are due"
        )
    values = {}
    for key, type_ in shape.items():
        try:
            values[key] = msgspec.convert(message[key], type_)
        except msgspec.ValidationError as error:
            raise WireError(
                f"it sent a message '{kind}' whose '{key}' is {repr(message[key])[:40]}: {error}"
            ) from None
    return values
