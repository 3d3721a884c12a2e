"""Each option of the command line is a parameter of a function, with its name, type, default and meaning."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
from called import call

import paceline
from paceline import cli
from paceline.base.command_line import REST, CommandLine, option
from paceline.base.signatures import Declaration

# The function of each command, and its parameters that are no options.
VERBS = {
    "train": (paceline.train, {"table"}),
    "evaluate": (paceline.evaluate, set()),
    "predict": (paceline.predict, set()),
    "plan": (paceline.plan, {"repair_hours", "checkpoint_bytes_per_s"}),
    "verify": (paceline.verify, set()),
    "search": (paceline.search, {"settings", "space"}),  # settings are --set
    "report": (paceline.report, set()),
    "compare": (paceline.compare, set()),
    "rehearse": (paceline.rehearse, {"faults", "request"}),  # --kill and its like, options of train
    "audit": (paceline.audit, set()),
    "replay": (paceline.replay, {"job"}),
}
COMMANDS = pytest.mark.parametrize("name", list(cli.COMMANDS))


@pytest.mark.parametrize("name", list(VERBS))
def test_options_are_the_parameters_of_the_verb(name: str):
    """As Python has them when the function's module is imported, which the command line does not do."""
    verb, left_out = VERBS[name]
    line = cli.COMMANDS[name].line
    read = {each.name: each for each in line.parameters}
    module = vars(importlib.import_module(verb.__module__))
    declared = inspect.signature(verb).parameters
    assert len(read) == len(line.parameters)
    assert declared.keys() - left_out <= read.keys() and not left_out & read.keys() - {"faults"}
    for parameter in declared.values():
        if parameter.name in left_out:
            continue
        found = read[parameter.name]
        assert found.annotation == parameter.annotation or (
            eval(found.annotation, module) == eval(str(parameter.annotation), module)
        )
        if parameter.default is inspect.Parameter.empty:
            assert found.default is None
        else:
            assert eval(str(found.default), module) == parameter.default
        assert found.text, f"{name}: nothing is said about {parameter.name}"


def sample(line: CommandLine, parameter: Declaration) -> tuple[list[str], Any]:
    """An option with a value, and what the function gets."""
    name, shown = option(parameter), line.value(parameter)
    if parameter.annotation == "bool":
        return ([name], True) if parameter.default == "False" else ([name, "no"], False)
    if parameter.annotation.startswith("int"):
        return [name, "3"], 3
    if parameter.annotation.startswith("float"):
        return [name, "2.5"], 2.5
    if parameter.annotation.startswith("Mapping"):
        return [name, "a=1=2", name, "b="], {"a": "1=2", "b": ""}
    if "|" in shown:
        return [name, shown.split("|")[0]], shown.split("|")[0]
    if re.search(r"(^|\| )Sequence", parameter.annotation):
        return [name, "x", name, "y"], ["x", "y"]
    return [name, "x"], "x"


@COMMANDS
def test_every_option_is_read(name: str):
    """Its value has the parameter's type, also behind an equals sign."""
    line = cli.COMMANDS[name].line
    arguments = [each for each in line.parameters if line.is_argument(each) and each.name != REST]
    needed = [line.value(each).split("|")[0] for each in arguments]
    required = [
        each for each in line.parameters if not line.is_argument(each) and each.default is None
    ]
    for each in line.parameters:
        if line.is_argument(each):
            continue
        more = [word for other in required if other != each for word in sample(line, other)[0]]
        words, value = sample(line, each)
        assert line.read([*needed, *more, *words])[0][each.name] == value
        if len(words) == 2:
            assert line.read(["=".join(words), *needed, *more])[0][each.name] == value


@COMMANDS
def test_help_fits_and_says_something(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each listed option stands once, under a heading. No line is longer than the terminal."""
    command = cli.COMMANDS[name]
    assert 0 < len(command.summary) <= 55
    line = command.line
    in_groups = " ".join(line.groups.values()).split()
    for columns in (80, 100):
        monkeypatch.setattr("paceline.base.command_line.width", lambda columns=columns: columns)
        shown = call(name, "--help").stdout
        assert max(map(len, shown.splitlines())) <= columns
    for each in line.parameters:
        if not line.is_argument(each):
            assert in_groups.count(each.name) == 1
            listed = re.findall(rf"^  {re.escape(option(each))}(?= |$)", shown, re.MULTILINE)
            assert len(listed) == 1
        assert len(each.summary) > 12, f"{name} {each.name}: {each.summary}"


@pytest.mark.parametrize(
    ("words", "note", "given"),
    [
        ("train x.py --patience 5", "--patience is now --timeout", ("timeout_s", 5.0)),
        ("plan x.py --gpus=8xH100", "--gpus is now --cluster", ("cluster", "8xH100")),
        ("plan x.py --price 2", "--price is now --price-per-hour", ("price_per_hour", 2.0)),
        ("plan --hf opt --weights float16", "--weights is now --dtype", ("dtype", "float16")),
        ("verify x.py --resume full", "--resume is now --restore", ("restore", "full")),
    ],
)
def test_former_options_work_with_a_note(
    words: str, note: str, given: tuple[str, Any], capsys: pytest.CaptureFixture[str]
):
    assert cli.parse(words.split())[1][given[0]] == given[1]
    printed = capsys.readouterr()
    assert printed.err.startswith(f"note: {note}") and printed.err.count("\n") == 1
    assert not printed.out


def test_former_keywords_work_with_a_warning(tmp_path: Any):
    with (
        pytest.warns(DeprecationWarning, match="to= is now output="),
        pytest.raises(paceline.PacelineError),
    ):
        paceline.report(tmp_path, to=tmp_path / "page.html")  # type: ignore[call-arg]


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "x.py", "--porcs", "2"]])
def test_options_are_read_without_torch(words: list[str]):
    code = (
        f"import sys; from paceline.cli import main; sys.argv = ['paceline', *{words}]\n"
        "try: main()\n"
        "finally: assert not {'torch', 'numpy', 'rich', 'psutil'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert "Traceback" not in ran.stderr
    assert ran.returncode == (0 if "--help" in words else 2)
