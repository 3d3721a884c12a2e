"""Sound contents, damaged as hypothesis likes: bytes that are changed, cut and moved, and values of JSON replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

_NASTY = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        10**400,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "..",
        "../../x",
        "/etc/passwd",
        "\ud800",
        "data=2",
        "1" * 5000,
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": {"b": []}},
    ]
)
_VALUES = _NASTY | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
_PLACES = st.floats(0, 1, exclude_max=True)
_EDITS = st.tuples(
    st.sampled_from(["set", "cut", "insert", "remove", "repeat", "swap"]),
    _PLACES,
    _PLACES,
    st.binary(min_size=1, max_size=8),
)


def damaged(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of these after a few edits, a mixture, or any bytes."""
    edited = st.tuples(st.sampled_from(seeds), st.lists(_EDITS, min_size=1, max_size=4)).map(
        lambda drawn: _edit(*drawn)
    )
    return edited | st.binary(max_size=200) | _other_values(seeds)


def _edit(data: bytes, edits: Sequence[tuple[str, float, float, bytes]]) -> bytes:
    for kind, first, second, piece in edits:
        start, end = sorted((int(first * len(data)), int(second * len(data))))
        if kind == "set":
            data = data[:start] + piece + data[start + len(piece) :]
        elif kind == "cut":
            data = data[:start]
        elif kind == "insert":
            data = data[:start] + piece + data[start:]
        elif kind == "remove":
            data = data[:start] + data[end:]
        elif kind == "repeat":
            data = data[:end] + data[start:end][:4096] + data[end:]
        else:
            data = data[end:] + data[start:end] + data[:start]
    return data


def _other_values(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Lines of JSON with other values and keys that are gone; nothing of what is no JSON."""
    documents = [lines for seed in seeds if (lines := _lines(seed)) is not None]
    if not documents:
        return st.nothing()
    return st.tuples(
        st.sampled_from(documents),
        st.lists(st.tuples(_PLACES, _VALUES | st.just(...)), min_size=1, max_size=3),
    ).map(lambda drawn: _replaced(*drawn))


def _lines(seed: bytes) -> list[Any] | None:
    try:
        return [json.loads(seed)]
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in seed.splitlines()]
    except ValueError:
        return None


def _replaced(lines: list[Any], changes: Sequence[tuple[float, Any]]) -> bytes:
    whole = json.loads(json.dumps(lines))
    for place, value in changes:
        nodes = list(_nodes(whole))
        if not nodes:
            break
        holder, key = nodes[int(place * len(nodes))]
        if value is ...:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(value)
    return "\n".join(json.dumps(line) for line in whole).encode("utf8", "surrogatepass")


def _nodes(value: Any) -> Any:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in list(items):
        yield value, key
        yield from _nodes(inner)
