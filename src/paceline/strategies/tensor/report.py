"""Reports which parameters of a model are split, and which every rank holds whole, for users and
for `split.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.strategies.layout import Report

if TYPE_CHECKING:
    from torch import nn

# Smallest share of the parameters, and largest number of groups, that are shown. The file has all
# groups.
SHOWN_SHARE, SHOWN_GROUPS = 0.005, 4


@dataclass(frozen=True)
class Group:
    """Parameters that stay whole for one reason."""

    names: str  # the name, or a pattern with `*` for numbers if there are several
    reason: str
    parameters: int  # number of elements
    share: float  # of all parameters, 0 to 1


def pattern(name: str) -> str:
    """Return a name with `*` in place of its numbers.

    >>> pattern("layers.11.norm.weight")
    'layers.*.norm.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def groups(sizes: Mapping[str, int], whole: Mapping[str, str]) -> list[Group]:
    """Group whole parameters by pattern and reason, the largest first.

    sizes: elements of every parameter.
    """
    total = sum(sizes.values())
    names_by_pattern: dict[tuple[str, str], list[str]] = {}
    for name, reason in whole.items():
        names_by_pattern.setdefault((pattern(name), reason), []).append(name)
    made = [
        Group(
            alike if len(names) > 1 else names[0],
            reason,
            sum(sizes[name] for name in names),
            sum(sizes[name] for name in names) / total,
        )
        for (alike, reason), names in names_by_pattern.items()
    ]
    return sorted(made, key=lambda group: -group.parameters)


def report(
    tensors: Mapping[str, nn.Parameter],
    whole: Mapping[str, str],
    notes: tuple[str, ...],
    *,
    ranks: int,
    sequence: Collection[str] = (),
) -> Report:
    """Report the split of a model over `ranks` ranks.

    Args:
        tensors: All parameters of the model, whole.
        whole: The reason why each whole parameter is not split, by name.
        sequence: The modules that are cut along the sequence between their products.
    """
    sizes = {name: math.prod(p.shape) for name, p in tensors.items()}
    total, kept = sum(sizes.values()), groups(sizes, whole)
    split = total - sum(group.parameters for group in kept)
    large = [group for group in kept if group.share >= SHOWN_SHARE][:SHOWN_GROUPS]
    rest = sum(group.share for group in kept) - sum(group.share for group in large)
    shares = [f"{group.names} {_percent(group.share)} ({group.reason})" for group in large]
    shares += [f"others {_percent(rest)}"] if rest and large else [_percent(rest)] if rest else []
    line = f"tensor={ranks} splits {_percent(split / total)} of {total:,} parameters"
    line += f"; whole on every rank: {', '.join(shares)}" if shares else ""
    document: dict[str, Any] = {
        "ranks": ranks,
        "parameters": total,
        "split_parameters": split,
        "split_share": split / total,
        "whole": [asdict(group) for group in kept],
        "sequence": sorted(sequence),
        "notes": list(notes),
    }
    return Report((line, *notes), document)


def _percent(share: float) -> str:
    """Format a share as a percentage.

    >>> _percent(0.9996), _percent(0.173)
    ('99.96 %', '17.3 %')
    """
    digits = 2 if 0.995 < share < 1 or 0 < share < 0.005 else 1
    return f"{100 * share:.{digits}f}".rstrip("0").rstrip(".") + " %"
