"""The space of a search: parameters from the signature of the job's function, fixed by --set,
widened by --vary.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paceline.base.errors import JobError, UsageError, nearest
from paceline.job.file import JobFunction

SPECIFICATION = "LOW..HIGH, LOW..HIGH:STEP, LOW..HIGH:log or OPTION,OPTION,..."


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from low to high, both included: `width: Annotated[int, Range(32, 256, step=32)]`."""

    low: float
    high: float
    # distance of the values from low; by default 1 for whole numbers, and any distance for others
    step: float | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """Numbers from low to high, both included, as many in each decade: `lr: Annotated[float,
    Log(1e-5, 1e-1)]`.
    """

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Options:
    """One of several values; `Literal` becomes this."""

    options: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return any(option == value and type(option) is type(value) for option in self.options)

    def __str__(self) -> str:
        return " or ".join(map(str, self.options))


@dataclass(frozen=True, slots=True)
class Numbers:
    """A range of numbers."""

    low: float
    high: float
    step: float | None
    is_log: bool
    whole: bool  # whether only integers are in the range

    def __contains__(self, value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        )

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}" + (
            ":log" if self.is_log else f":{self.step:g}" if self.step else ""
        )


Domain = Numbers | Options


@dataclass(frozen=True)
class Space:
    """The parameters of a job's function: which are varied and which are fixed."""

    domains: Mapping[str, Domain]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]  # of varied parameters, if the job has defaults
    # defaults of parameters that are neither varied nor set
    kept: Mapping[str, Any] = field(default_factory=dict)

    def example(self) -> dict[str, Any]:
        """Return settings to build the job with before the first trial."""
        first = {
            name: domain.options[0] if isinstance(domain, Options) else domain.low
            for name, domain in self.domains.items()
        }
        return {**first, **self.defaults, **self.fixed}


def read(
    function: JobFunction, *, settings: Mapping[str, Any] = {}, vary: Mapping[str, str] = {}
) -> Space:
    """Read the space of a job's function.

    Args:
        settings: Values that are fixed.
        vary: Text of a domain by parameter, instead of the signature's.

    Raises:
        JobError: the signature contradicts itself; the message lists all problems.
        UsageError: settings or vary contradict themselves; the message lists all problems.
    """
    parameters = function.parameters()
    varied, problems = _varied(parameters, settings, vary)
    domains, defaults, kept, faults = dict(varied), {}, {}, []
    for name, (kind, default) in parameters.items():
        if name in settings:
            continue
        try:
            domain = varied.get(name) or _domain(kind)
            default = default.value if isinstance(default, Enum) else default
            if domain is None:
                kept[name] = default
                continue
            domains[name] = domain
            if default is not inspect.Parameter.empty and (name not in varied or default in domain):
                if default not in domain:
                    raise ValueError(f"its default {default!r} is not in {domain}")
                defaults[name] = default
        except ValueError as error:
            faults.append(f"parameter '{name}': {error}")
    if problems:
        raise UsageError("; ".join(problems), hint=f"--vary NAME={SPECIFICATION}; --set NAME=VALUE")
    if faults:
        raise JobError(f"{function.name}() in {function.path.name}: {'; '.join(faults)}")
    return Space(domains, dict(settings), defaults, kept)


def _varied(
    parameters: Mapping[str, tuple[Any, Any]], settings: Mapping[str, Any], vary: Mapping[str, str]
) -> tuple[dict[str, Domain], list[str]]:
    """Return the domains of `vary`, and what is wrong with the request."""
    domains: dict[str, Domain] = {}
    problems = [
        f"unknown hyperparameter '{name}', {nearest(name, parameters)}"
        for name in settings
        if name not in parameters and "." not in name
    ]
    for name, text in vary.items():
        if name in settings:
            problems.append(f"'{name}' is both set and varied")
        elif "." in name:
            problems.append(
                f"'{name}' is a choice inside the model, which is always varied; --set fixes it"
            )
        elif name not in parameters:
            problems.append(f"unknown hyperparameter '{name}', {nearest(name, parameters)}")
        else:
            try:
                domains[name] = parse(text, parameters[name][0])
            except ValueError as error:
                problems.append(f"--vary {name}={text}: {error}")
    return domains, problems


def parse(text: str, kind: Any) -> Domain:
    """Read a domain for a parameter of this type from text.

    >>> parse("1e-5..1e-1:log", float)
    Numbers(low=1e-05, high=0.1, step=None, is_log=True, whole=False)
    >>> parse("relu,gelu", str)
    Options(options=('relu', 'gelu'))

    Raises:
        ValueError: it can't be read, or contradicts itself or the type.
    """
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    bounds, _, manner = text.partition(":")
    if ".." not in bounds:
        return _options(text, plain)
    low, _, high = bounds.partition("..")
    try:
        ends = float(low), float(high)
        step = float(manner) if manner not in ("", "log") else None
    except ValueError:
        raise ValueError(f"it must be {SPECIFICATION}") from None
    return _numbers(Log(*ends) if manner == "log" else Range(*ends, step=step), plain)


def _options(text: str, plain: Any) -> Options:
    from paceline.base.schema import convert

    options = []
    for word in (word.strip() for word in text.split(",")):
        try:
            options.append(convert(word, plain))
        except ValueError:
            raise ValueError(
                f"'{word}' is not a value of the parameter; it must be {SPECIFICATION}"
            ) from None
    if len(set(map(str, options))) < len(options):
        raise ValueError("an option is given twice")
    return Options(tuple(options))


def _domain(kind: Any) -> Domain | None:
    """Return the domain that an annotation gives; None if it gives none."""
    plain, *metadata = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    marks = [mark for mark in metadata if isinstance(mark, Range | Log)]
    if len(marks) > 1:
        raise ValueError(f"it has two ranges, {marks[0]} and {marks[1]}")
    if marks:
        return _numbers(marks[0], plain)
    if nested := next(_marks_inside(plain), None):
        raise ValueError(f"{nested} must stand around the whole type: Annotated[..., {nested}]")
    options = _listed(plain)
    return Options(tuple(options)) if options and options != [None] else None


def _listed(kind: Any) -> list[Any]:
    """Return all values of a type that lists its values, as settings have them; empty for any other
    type.
    """
    if get_origin(kind) is Annotated:
        return _listed(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        parts = [_listed(part) for part in get_args(kind)]
        return [value for part in parts for value in part] if all(parts) else []
    if kind is types.NoneType:
        return [None]
    values: list[Any] = []
    if get_origin(kind) is Literal:
        values = list(get_args(kind))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
    is_plain = all(value is None or type(value) in (bool, int, str) for value in values)
    return values if is_plain else []


def _marks_inside(kind: Any) -> Iterator[Range | Log]:
    for part in get_args(kind) if get_origin(kind) in (Union, types.UnionType, Annotated) else ():
        if isinstance(part, Range | Log):
            yield part
        yield from _marks_inside(part)


def _numbers(mark: Range | Log, plain: Any) -> Numbers:
    """Return a range for parameters of this type.

    Raises:
        ValueError: the type has no ranges, or the range makes no sense.
    """
    if plain not in (int, float):
        raise ValueError(
            f"{mark} is for whole numbers (int) and numbers (float), not for {getattr(plain, '__name__', plain)}"
        )
    step = mark.step if isinstance(mark, Range) else None
    ends = [mark.low, mark.high] if step is None else [mark.low, mark.high, step]
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in ends):
        raise ValueError(f"{mark} must have finite numbers as its ends")
    if mark.low > mark.high:
        raise ValueError(f"{mark} is empty: low is above high")
    if isinstance(mark, Log) and mark.low <= 0:
        raise ValueError(f"{mark} must begin above 0")
    if step is not None and step <= 0:
        raise ValueError(f"{mark} must have a step above 0")
    if plain is int:
        if any(end != int(end) for end in ends):
            raise ValueError(
                f"{mark} must have whole numbers as its ends, as the parameter is an int"
            )
        low, high, step = int(mark.low), int(mark.high), None if step is None else int(step)
        return Numbers(low, high, step, isinstance(mark, Log), whole=True)
    return Numbers(float(mark.low), float(mark.high), step, isinstance(mark, Log), whole=False)
