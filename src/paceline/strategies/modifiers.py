"""The plan keys `microbatches`, `shares` and `deterministic`.

Any plan can have them, and they belong to no strategy.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.base.errors import nearest
from paceline.strategies.keys import (
    Key,
    PlanKeys,
    as_text,
    choice,
    count,
    is_count,
    whole_number,
)
from paceline.strategies.plan_fields import Modifiers, PlanFields

SHARES_BY = ("equal", "speed", "memory")
ALLOWED_SHARES = f"{'|'.join(SHARES_BY)}|A:B:..."


def _read_shares(name: str, text: str) -> str | tuple[int, ...]:
    if re.fullmatch(r"[a-zA-Z_-]+", text):
        return text
    return tuple(whole_number(name, part, allowed=ALLOWED_SHARES) for part in text.split(":"))


def _problem_of_shares(value: Any) -> str:
    if isinstance(value, tuple):
        return (
            ""
            if all(map(is_count, value))
            else f"shares={as_text(value)} must be whole numbers of at least 1"
        )
    return "" if value in SHARES_BY else f"shares={value}: {nearest(str(value), SHARES_BY)}"


def _problems(plan: PlanFields) -> list[str]:
    shares = plan.modifiers.shares
    if not isinstance(shares, tuple) or len(shares) == plan.replicas or not is_count(plan.replicas):
        return []
    return [
        f"shares={as_text(shares)} has {len(shares)} parts and the plan has {plan.replicas} replicas"
    ]


MICROBATCHES = count(
    "microbatches", "modifiers", "M|auto", default=Modifiers().microbatches, word="auto"
)
SHARES = Key(
    "shares", "modifiers", Modifiers().shares, ALLOWED_SHARES, _read_shares, _problem_of_shares
)
DETERMINISTIC = choice(
    "deterministic", "modifiers", ("yes", "no"), default=Modifiers().deterministic
)

KEYS = PlanKeys(keys=(MICROBATCHES, SHARES, DETERMINISTIC), problems=_problems)
