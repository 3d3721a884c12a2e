"""The page about the command line, from the commands themselves.

python tests/house/cli_page.py           # prints it
python tests/house/cli_page.py --write   # writes docs/cli.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from paceline.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_TOP = """\
# The command line

<!-- Written by `python tests/house/cli_page.py --write`. Do not edit. -->

`paceline COMMAND --help` prints the same. A result goes to stdout, everything else to stderr. The functions of the
same names are in the [Python interface](api.md); [errors](errors.md) has the exit codes.
"""


def page() -> str:
    """Each command with its arguments and options, in the order of `paceline --help`."""
    group = get_command(app)
    above = group.make_context("paceline", ["doctor"], resilient_parsing=True)
    sections = [_section(name, each, above) for name, each in group.commands.items()]
    return "\n".join([_TOP, *sections])


def _section(name: str, command: Any, above: Any) -> str:
    context = type(above)(command, parent=above, info_name=name)
    records = [each.get_help_record(context) for each in command.get_params(context)]
    rows = [
        f"| `{names.strip().replace('|', '/')}` | {' '.join(text.split()).replace('|', '/')} |"
        for names, text in filter(None, records)
        if names != "-h, --help"
    ]
    usage = command.get_usage(context).removeprefix("Usage: ")
    first = " ".join((command.help or "").split("\n\n")[0].split())
    table = "\n".join(["| option | meaning |", "|---|---|", *rows])
    return f"## {name}\n\n    {' '.join(usage.split())}\n\n{first}\n\n{table}\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
