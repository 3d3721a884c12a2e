"""A command line whose options are the parameters of functions.

A parameter `save_every: int` is the option `--save-every N`. Parameters that have no default and
are no numbers are arguments: words without an option.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.base.errors import UsageError
from paceline.base.signatures import Declaration
from paceline.base.tables import width

_IS_OPTION = re.compile(r"--?[A-Za-z]")
# How alike (0 to 1) an unknown word and an option are that is taken for it. Scripts have --test and
# --step.
_NEAR, _NEAR_OF_OTHERS = 0.75, 0.9
REST = "arguments"  # the parameter that takes words of another program's command line
_INDENT = 28  # columns of an option and its value in the help


@dataclass(frozen=True)
class CommandLine:
    """The arguments and options of a command."""

    name: str  # such as "paceline train"
    summary: str
    parameters: Sequence[Declaration]
    # arguments that may be missing
    optional: Collection[str] = ()
    # the headings of the help, each with its parameters
    groups: Mapping[str, str] = field(default_factory=dict)
    # what stands for values in the help, where the type doesn't say it
    values: Mapping[str, str] = field(default_factory=dict)
    # present options by former ones; of an option that is gone, a hint
    old: Mapping[str, str] = field(default_factory=dict)
    others: Collection[str] = ()  # options of other commands, which a script hardly has

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return the values by parameter, the words that no argument takes, and notes on options
        that change their names.

        Raises:
            UsageError: an option is unknown or lacks its value, or an argument is missing.
        """
        options = {option(each): each for each in self.parameters if not self.is_argument(each)}
        takes_rest = REST in (each.name for each in self.parameters)
        num_arguments = sum(map(self.is_argument, self.parameters)) - takes_rest
        given, arguments, rest, notes = list[str](), list[str](), list[str](), list[str]()
        end = words.index("--") if "--" in words else len(words)
        left = iter(words[:end])
        for word in left:
            name, equals, value = word.partition("=")
            parameter = options.get(present := self.old.get(name, name))
            is_full = len(arguments) == num_arguments
            if not _IS_OPTION.match(word):
                (rest if is_full else arguments).append(word)
            elif parameter is not None:
                if present != name:
                    notes.append(f"{name} is now {present}")
                given.append(f"{present}{equals}{value}")
                if not equals and not _is_flag(parameter):
                    given += itertools.islice(left, 1)
            elif (near := self._near(name, options)) or not (takes_rest and is_full):
                raise UsageError(
                    f"{self.name} has no option {name}{near}",
                    hint=f"arguments of the script's own may come after two dashes: {self.name} SCRIPT -- {word}"
                    if takes_rest
                    else self.old.get(name, f"{self.name} --help"),
                )
            else:
                rest.append(word)
        num_missing = num_arguments - len(arguments)
        arguments += words[end + 1 :][:num_missing]
        rest += words[end + 1 :][num_missing:]
        values = vars(
            self.parser().parse_args([*given, *(["--"] if arguments else []), *arguments])
        )
        for each in self.parameters:
            if each.name in values:
                values[each.name] = _converted(each, values[each.name])
        return (values | {REST: rest}, [], notes) if takes_rest else (values, rest, notes)

    def parser(self) -> argparse.ArgumentParser:
        """Return what reads and explains the words."""
        arguments = [
            f"[{self.value(each)}]" if each.name in self.optional else self.value(each)
            for each in self.parameters
            if self.is_argument(each)
        ]
        parser = _Parser(
            self.name,
            " ".join([self.name, "[OPTIONS]", *arguments]),
            self.summary,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(
                argparse.HelpFormatter, max_help_position=_INDENT, width=min(width(), 100)
            ),
        )
        groups = dict[str, Any]()
        for heading, names in self.groups.items():
            groups |= dict.fromkeys(names.split(), parser.add_argument_group(heading))
        for each in self.parameters:
            choices = _choices(each)
            how: dict[str, Any] = {
                "metavar": self.value(each),
                "help": _meaning(each),
                "type": _text,
            }
            if _is_flag(each):
                how = {"help": how["help"], "action": "store_true"}
            elif is_repeatable(each):
                how["action"] = "append"
            elif choices:
                how["choices"] = choices
            elif is_number(each):
                how["type"] = partial(_number, int if each.annotation.startswith("int") else float)
            if not self.is_argument(each):
                is_required = each.default is None
                groups.get(each.name, parser).add_argument(
                    option(each), dest=each.name, required=is_required, **how
                )
            elif each.name == REST:
                parser.add_argument(REST, nargs="*", metavar=how["metavar"], help=how["help"])
            else:
                nargs = "?" if each.name in self.optional else None
                parser.add_argument(each.name, nargs=nargs, **how)
        return parser

    def value(self, parameter: Declaration) -> str:
        """Return what stands for a parameter's value in the help."""
        annotation, name = parameter.annotation, parameter.name
        if choices := _choices(parameter):
            return "|".join(choices)
        if is_number(parameter):
            unit = "SECONDS" if name.endswith("_s") else "X"
            return "N" if annotation.startswith("int") else unit
        return self.values.get(name, option(parameter)[2:].upper())

    def is_argument(self, parameter: Declaration) -> bool:
        """Return whether a parameter is an argument, and no option."""
        is_named = parameter.name in {*self.optional, REST}
        return is_named or (parameter.default is None and not is_number(parameter))

    def _near(self, name: str, options: Mapping[str, Declaration]) -> str:
        def like(known: Iterable[str], cutoff: float) -> list[str]:
            words = [each.strip("-") for each in known]
            return difflib.get_close_matches(name.strip("-"), words, 1, cutoff)

        if near := like(options, _NEAR):
            return f"; did you mean --{near[0]}?"
        other = like(self.others, _NEAR_OF_OTHERS)
        return f": --{other[0]} is one of paceline train" if other else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message, hint=f"{self.prog} --help")


def option(parameter: Declaration) -> str:
    """Return the option of a parameter. It names one value, and no unit of seconds.

    >>> option(Declaration("timeout_s", "float", "300.0", ""))
    '--timeout'
    >>> option(Declaration("limits", "Sequence[str]", "()", ""))
    '--limit'
    """
    is_list = parameter.annotation.startswith(("Sequence", "Mapping"))
    name = re.sub("s$" if is_list else "(?<!_per)_s$", "", parameter.name.strip("_"))
    return "--" + name.replace("_", "-")


def is_repeatable(parameter: Declaration) -> bool:
    """Return whether an option may stand several times in a command line."""
    kinds = parameter.annotation.split(" | ")
    return any(kind.startswith(("Sequence[", "Mapping[")) for kind in kinds)


def is_number(parameter: Declaration) -> bool:
    """Return whether the value is a number."""
    return parameter.annotation.startswith(("int", "float"))


def _is_flag(parameter: Declaration) -> bool:
    return parameter.annotation == "bool" and parameter.default == "False"


def _choices(parameter: Declaration) -> Sequence[str]:
    if parameter.annotation == "bool" and not _is_flag(parameter):
        return ("yes", "no")
    found = re.search(r"Literal(\[.*?\])", parameter.annotation)
    return ast.literal_eval(found[1]) if found else ()


def _meaning(parameter: Declaration) -> str:
    """Return the first sentence about a parameter, its default, and whether it can be repeated."""
    default, notes = str(parameter.default).strip("'").removesuffix(".0"), list[str]()
    if re.fullmatch(r"[a-z]+|\d+|True", default):
        notes.append(f"{'yes' if default == 'True' else default} by default")
    if is_repeatable(parameter) and parameter.name != REST:
        notes.append("repeatable")
    text = parameter.summary.replace("%", "%%")
    return text + (f" ({', '.join(notes)})" if notes else "")


def _converted(parameter: Declaration, value: Any) -> Any:
    """Return a value as the function takes it.

    Raises:
        UsageError: an entry of a mapping is no NAME=VALUE, or is given twice.
    """
    if parameter.annotation == "bool":
        return value in (True, "yes")
    if not parameter.annotation.startswith("Mapping"):
        return value
    entries: dict[str, str] = {}
    for text in value:
        name, equals, entry = text.partition("=")
        if not name or not equals:
            raise UsageError(
                f"{option(parameter)} {text} is not NAME=VALUE", hint=parameter.summary
            )
        if name in entries:
            raise UsageError(
                f"{option(parameter)} {name} is given twice: {entries[name]} and {entry}"
            )
        entries[name] = entry
    return entries


def _text(text: str) -> str:
    if text:
        return text
    raise argparse.ArgumentTypeError("the value is empty")  # as that of an unset shell variable


def _number(kind: type[float], text: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if value >= 0:
        return value
    what = "a whole number" if kind is int else "a number"
    raise argparse.ArgumentTypeError(f"{text} is not {what} of at least 0")
