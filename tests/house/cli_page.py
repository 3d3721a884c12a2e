"""The page about the command line, from the commands themselves.

python tests/house/cli_page.py           # prints it
python tests/house/cli_page.py --write   # writes docs/cli.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.cli import COMMANDS, Command

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_TOP = """\
# The command line

<!-- Written by `python tests/house/cli_page.py --write`. Do not edit. -->

`paceline COMMAND --help` prints the same. A result goes to stdout, everything else to stderr. The functions of the
same names are in the [Python interface](api.md), with the same parameters; [errors](errors.md) has the exit codes.
"""


def page() -> str:
    """Each command with its arguments and options, in the order of `paceline --help`."""
    return "\n".join([_TOP, *map(_section, COMMANDS.values())])


def _section(command: Command) -> str:
    parser = command.line.parser()
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = [f"## {command.name}\n\n    {usage}\n\n{command.summary}\n"]
    for group in parser._action_groups:
        rows = [
            f"| `{_words(each)}` | {each.help} |"
            for each in group._group_actions
            if each.help != "==SUPPRESS=="
        ]
        if rows:
            lines += [
                "| argument | meaning |"
                if group.title == "positional arguments"
                else f"| {group.title} | |",
                "|---|---|",
            ]
            lines += [row.replace("%%", "%") for row in rows]
            lines.append("")
    return "\n".join(lines)


def _words(action: Any) -> str:
    """An option with what stands for its value."""
    words = " ".join([*action.option_strings, action.metavar or ""]).strip()
    return words.replace("|", "/")  # which a table takes for a column


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
