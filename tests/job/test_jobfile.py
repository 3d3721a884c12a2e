"""Jobs are read from files of any name, with typed settings and errors that say where."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import ClusterError, JobError, UsageError
from paceline.job import Job
from paceline.job.file import JobFile, is_script, load, open_job

BODY = (
    "return pl.Job(model=lambda: given, data=[(0, 0)], loss=max, optimizer=list, batch=1, steps=1)"
)

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def _imports_are_left_as_they_were() -> Iterator[None]:
    finders, modules = list(sys.meta_path), dict(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(modules):
        if getattr(sys.modules[name], "__file__", None) and name.startswith(
            ("paceline_job_", "own_")
        ):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(
        name: str = "digits.py", text: str = "", *, signature: str = "", header: str = ""
    ) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        job = f"{header}\nimport paceline as pl\ndef job({signature}):\n    given = dict(locals())\n    {BODY}\n"
        path.write_text(textwrap.dedent(text) if text else job)
        return str(path)

    return write


def given(source: str, **settings: Any) -> dict[str, Any]:
    """The values that the job's function was called with."""
    return load(source, settings).model()


def refusal(source: str, **settings: Any) -> str:
    with pytest.raises(JobError) as caught:
        load(source, settings)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- Files and functions ----------------------------------------------------------------------------------------


def test_the_function_job_is_called_unless_another_is_named(write: Write):
    """FILE.py means its function `job`; FILE.py:FUNCTION means that one."""
    source = write(
        text=f"""
        import paceline as pl
        def job():
            given = "job"
            {BODY}
        def other():
            given = "other"
            {BODY}
    """
    )
    assert load(source).model() == "job"
    assert load(f"{source}:other").model() == "other"


def test_a_missing_file_names_the_nearest(write: Write, tmp_path: Path):
    """A misspelled file is answered with the file that was probably meant."""
    write("digits.py")
    write("gpt.py")
    message = refusal(str(tmp_path / "digit.py"))
    assert "there is no file" in message and "did you mean digits.py?" in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("notes.txt", "is not a Python file"),
        ("folder/x.py", "there is no file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_is_not_a_python_file_is_refused(write: Write, tmp_path: Path, name: str, part: str):
    """Text files and files in folders that don't exist are named as such."""
    write("notes.txt", "hello")
    assert part in refusal(str(tmp_path / name))


def test_a_folder_is_refused_with_its_files(write: Write, tmp_path: Path):
    """A folder instead of a file is answered with the Python files in it."""
    write("digits.py")
    message = refusal(str(tmp_path))
    assert "is a folder" in message and "digits.py" in message


def test_a_file_without_the_function_lists_candidates(write: Write):
    """A missing function is answered with the file's own functions, those that return a Job first."""
    source = write(
        text="""
        from textwrap import dedent
        import paceline as pl
        def helper(): ...
        def digits_job() -> pl.Job: ...
    """
    )
    message = refusal(source)
    assert "no function 'job'" in message
    assert "known: digits_job, helper" in message
    assert "did you mean 'digits_job'?" in refusal(f"{source}:digit_job")
    assert "dedent" not in message


def test_a_job_that_is_not_in_a_function_is_explained(write: Write):
    """A module-level Job is told from a missing one."""
    source = write(
        text="""
        import paceline as pl
        job = pl.Job(model=list, data=[(0, 0)], loss=max, optimizer=list, batch=1, steps=1)
    """
    )
    assert "'job' in digits.py is a Job, not a function" in refusal(source)


@pytest.mark.parametrize(
    ("returned", "named"), [("None", "None"), ("{'batch': 3}", "a value of type dict")]
)
def test_a_function_that_returns_no_job_says_what_it_returned(
    write: Write, returned: str, named: str
):
    """A forgotten return is named."""
    message = refusal(write(text=f"def job():\n    return {returned}\n"))
    assert f"job() in digits.py returned {named}, not a paceline.Job" in message


def test_a_colon_without_a_function_is_refused(write: Write):
    """FILE.py: and FILE.py:3 name no function."""
    assert "names no function" in refusal(write() + ":")
    assert "names no function" in refusal(write() + ":3")


def test_a_file_is_read_afresh_at_every_load(write: Write, monkeypatch: pytest.MonkeyPatch):
    """An edit is seen at once, even one within the same second, in the file and in its neighbours."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = write(
        text=f"import paceline as pl, own_net\ndef job():\n    given = 1, own_net.WIDTH\n    {BODY}\n"
    )
    write("own_net.py", "WIDTH = 1")
    assert load(source).model() == (1, 1)
    write("own_net.py", "WIDTH = 2")
    write(text=Path(source).read_text().replace("given = 1", "given = 7"))
    assert load(source).model() == (7, 2)


# --- Names that collide -----------------------------------------------------------------------------------------


def test_files_named_like_packages_hide_nothing(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """colorsys.py can be a job that imports colorsys, beside a sched.py and a stringprep.py that are not the real
    ones."""
    others = {"sched": "scheduler", "stringprep": "in_table_a1"}
    for name, other in others.items():
        write(f"{name}.py", f"raise RuntimeError('the wrong {other}')")
    write(
        "colorsys.py",
        header="import colorsys, sched, stringprep\nassert colorsys.rgb_to_hsv and "
        + " and ".join(f"{name}.{other}" for name, other in others.items()),
    )
    for name in ("colorsys", *others):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert load("colorsys.py").steps == 1
    assert importlib.import_module("colorsys").rgb_to_hsv


@pytest.mark.slow
def test_files_named_like_packages_of_ours_hide_nothing(write: Write, tmp_path: Path):
    """torch.py can be a job that imports torch, beside a random.py and a numpy.py that are not the real ones."""
    write(
        "torch.py",
        header="import random, numpy, torch\nassert torch.tensor and random.random and numpy.array",
    )
    for name in ("random.py", "numpy.py"):
        write(name, "raise RuntimeError('the wrong one')")
    code = "import paceline; paceline.load('torch.py'); import random, torch; print(torch.zeros(2).sum().item())"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0.0\n", "")


def test_a_file_never_imports_itself(write: Write):
    """own_datasets.py that wants the package own_datasets is told that it has the package's name."""
    message = refusal(write("own_datasets.py", header="import own_datasets"))
    assert "needs the package 'own_datasets', which is not installed" in message
    assert "has the same name, and a job file can't import itself" in message
    assert "pip install own_datasets, or rename own_datasets.py" in message


def test_a_file_never_imports_itself_from_the_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the job's folder on sys.path, its name still means the package, if there is one."""
    source = write("own_datasets.py", header="import own_datasets\nassert own_datasets.INSTALLED")
    monkeypatch.syspath_prepend(tmp_path)
    assert "can't import itself" in refusal(source)
    write("installed/own_datasets.py", "INSTALLED = True")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    sys.path.insert(0, sys.path.pop(1))  # the job's folder first
    assert load(source)


def test_a_notebook_can_import_the_file_of_a_job_that_it_has_loaded(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the job's own imports, even late ones, don't find it."""
    write("own_helper.py", "import own_job\nMADE = own_job.MADE")
    write(
        "own_job.py",
        f"""
        import paceline as pl
        MADE = 3
        def late():
            import own_job
        def job():
            {BODY.replace("lambda: given", "late")}
    """,
    )
    monkeypatch.syspath_prepend(tmp_path)
    job = load(str(tmp_path / "own_job.py"))
    with pytest.raises(ModuleNotFoundError):
        job.model()
    assert importlib.util.find_spec("own_job") is not None
    assert importlib.import_module("own_helper").MADE == 3


def test_neighbours_can_be_imported_even_late(write: Write):
    """Modules and packages beside the file are found, also from inside the job's lambdas."""
    write("own_net.py", "WIDTH = 3")
    write("own_package/parts.py", "DEPTH = 4")
    source = write(
        text=f"""
        import paceline as pl
        from own_package.parts import DEPTH
        def late():
            import own_net
            return own_net.WIDTH + DEPTH
        def job():
            {BODY.replace("lambda: given", "late")}
    """
    )
    assert load(source).model() == 7
    assert str(Path(source).parent) not in sys.path


def test_jobs_of_two_folders_keep_their_own_neighbours(write: Write):
    """A module of the same name beside another job is not taken for this one's."""
    for folder, width in (("a", 1), ("b", 2)):
        write(f"{folder}/own_net.py", f"WIDTH = {width}")
    for folder, width in (("a", 1), ("b", 2), ("a", 1)):
        load(write(f"{folder}/digits.py", header="from own_net import WIDTH"))
        assert sys.modules["paceline_job_digits"].__dict__["WIDTH"] == width


def test_a_folder_of_data_is_not_a_package(write: Write):
    """A results folder beside the job doesn't stand for the package of its name."""
    write("own_tracker/latest.txt", "a run")
    assert "needs the package 'own_tracker'" in refusal(write(header="import own_tracker"))


def test_a_neighbour_that_an_installed_package_hides_is_explained(write: Write):
    """What is installed comes first; a file of the same name is told to be renamed."""
    write("textwrap.py", "WIDTH = 3")
    message = refusal(write(header="from textwrap import WIDTH"))
    assert (
        "raised ImportError at digits.py:1" in message
        and "not your textwrap.py: rename your file" in message
    )
    message = refusal(write(header="import textwrap\ntextwrap.WIDTH"))
    assert (
        "raised AttributeError at digits.py:2" in message
        and "not your textwrap.py: rename your file" in message
    )


def test_classes_of_a_job_file_can_be_pickled(write: Write):
    """The file's module can be looked up by name, as pickle and dataclasses do."""
    source = write(
        header="import dataclasses\n@dataclasses.dataclass\nclass Item:\n    size: 'int' = 3\n"
    )
    load(source)
    item = sys.modules["paceline_job_digits"].__dict__["Item"](5)
    assert pickle.loads(pickle.dumps(item)) == item


# --- What goes wrong inside the file ----------------------------------------------------------------------------


def test_a_syntax_error_is_placed(write: Write):
    """The file, the line and the text of a syntax error are shown."""
    message = refusal(write(text="x = 1\ndef job(:\n"))
    assert "digits.py:2: SyntaxError" in message and "def job(:" in message
    write("own_net.py", "x = 1\n\ny = = 2\n")
    message = refusal(write(header="import own_net"))
    assert "own_net.py:3: SyntaxError" in message


def test_bytes_that_are_no_text_are_refused(write: Write, tmp_path: Path):
    """A binary file that ends in .py gives a message, not a traceback."""
    (tmp_path / "weights.py").write_bytes(b"\x00\x01\xff")
    assert "weights.py" in refusal(str(tmp_path / "weights.py"))


def test_a_job_that_raises_is_placed_in_the_users_file(write: Write):
    """The message has the exception, its text and the user's own line, also when a library raised it."""
    source = write(
        text="""
        import json
        def job():
            return json.loads("{")
    """
    )
    message = refusal(source)
    assert (
        "job() in digits.py raised JSONDecodeError at digits.py:4: Expecting property name"
        in message
    )
    with pytest.raises(JobError) as caught:
        load(source)
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)


def test_an_error_in_a_neighbour_is_placed_there(write: Write):
    """The innermost line of the user's own files is named."""
    write("own_net.py", "def build():\n    raise KeyError('width')\n")
    message = refusal(write(text="import own_net\nown_net.build()\n"))
    assert "loading digits.py raised KeyError at own_net.py:2: 'width'" in message


def test_a_wrong_job_is_placed(write: Write):
    """What Job itself refuses comes with the line that built it."""
    message = refusal(
        write(
            text="""
        import paceline as pl
        def job():
            return pl.Job(model=list, data=[(0, 0)], loss=max, optimizer=list, batch=0, steps=1)
    """
        )
    )
    assert message == "digits.py:4: batch must be a whole number of at least 1, got 0"


def test_other_errors_of_paceline_pass_unchanged(write: Write):
    """An error that already is a message is not wrapped."""
    source = write(text="import paceline as pl\ndef job():\n    pl.Cluster.local('tpu:0')\n")
    with pytest.raises(ClusterError, match="unknown device kind 'tpu'"):
        load(source)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("sklearn.datasets", "scikit-learn"),
        ("PIL", "pillow"),
        ("yaml", "pyyaml"),
        ("cv2", "opencv-python"),
        ("own_pkg", "own_pkg"),
    ],
)
def test_a_missing_package_says_what_to_install(
    write: Write, monkeypatch: pytest.MonkeyPatch, module: str, package: str
):
    """The name to install is not always the name to import."""
    top = module.partition(".")[0]
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, name)
    message = refusal(write(header=f"\nimport {module}"))
    assert f"digits.py:2 needs the package '{top}', which is not installed" in message
    assert message.endswith(f"hint: pip install {package}")


def test_a_misspelled_neighbour_is_suggested(write: Write):
    """A missing module that resembles a file beside the job may be that file."""
    write("own_network.py", "x = 1")
    assert "or did you mean own_network.py beside digits.py?" in refusal(
        write(header="import own_netwrok")
    )


def test_a_module_missing_inside_a_package_is_not_a_missing_package(write: Write):
    """`import json.nothing` doesn't suggest to install json."""
    message = refusal(write(header="import json.nothing"))
    assert "raised ModuleNotFoundError at digits.py:1" in message and "pip" not in message


def test_a_relative_import_is_explained(write: Write):
    """Neighbours are imported by their plain names."""
    assert "import net, not from . import net" in refusal(write(header="from . import own_net"))


def test_a_file_that_exits_is_an_error(write: Write):
    """sys.exit() while loading doesn't end the caller."""
    message = refusal(write(text="import sys\nsys.exit(3)\n"))
    assert "loading digits.py ended the program at digits.py:2 with exit code 3" in message
    assert "--set NAME=VALUE" in message


def test_ctrl_c_passes(write: Write):
    """An interrupt is not an error of the job."""
    source = write(text="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load(source)
    assert "paceline_job_digits" not in sys.modules


# --- Settings ---------------------------------------------------------------------------------------------------

TYPED = [
    ("x: int = 1", "7", 7),
    ("x: int = 1", "1e3", 1000),
    ("x: int = 1", "-1_000", -1000),
    ("x: float = 1.0", "3e-4", 3e-4),
    ("x: float = 1", "2", 2.0),
    ("x: bool = False", "true", True),
    ("x: bool = True", "no", False),
    ("x: bool = True", "0", False),
    ("x: str = 'a'", "1", "1"),
    ("x: str = 'a'", "", ""),
    ("x: Literal['sgd', 'adam', 3, None] = 'sgd'", "adam", "adam"),
    ("x: Literal['sgd', 'adam', 3, None] = 'sgd'", "3", 3),
    ("x: Literal['sgd', 'adam', 3, None] = 'sgd'", "none", None),
    ("x: Optional[float] = 1.0", "none", None),
    ("x: Optional[float] = 1.0", "2", 2.0),
    ("x: float | None = None", "2", 2.0),
    ("x: float = None", "None", None),
    ("x: str | int = 1", "3", 3),
    ("x: str | int = 1", "auto", "auto"),
    ("x: int | tuple[int, ...] = 1", "3", 3),
    ("x: int | tuple[int, ...] = 1", "3,4", (3, 4)),
    ("x: bool | int = 1", "1", 1),
    ("x: tuple[int, ...] = ()", "1,2,3", (1, 2, 3)),
    ("x: tuple[int, ...] = ()", "(1, 2,)", (1, 2)),
    ("x: tuple[int, ...] = (1,)", "", ()),
    ("x: tuple[int, str] = (1, 'a')", "2,b", (2, "b")),
    ("x: list[float] = []", "[1, 2.5]", [1.0, 2.5]),
    ("x: list = []", "1,a", [1, "a"]),
    ("x: Annotated[float, 'log'] = 1.0", "2", 2.0),
    ("x: Annotated[int | None, 'r'] = 1", "none", None),
    ("x: list[Literal['a', 'b']] = []", "a,b", ["a", "b"]),
    ("x=1", "5", 5),
    ("x=1.0", "5", 5.0),
    ("x=True", "off", False),
    ("x='a'", "5", "5"),
    ("x=(1, 2)", "3", (3,)),
    ("x=[0.5]", "3", [3.0]),
    ("x=None", "5", 5),
    ("x=None", "0.5", 0.5),
    ("x=None", "none", None),
    ("x=None", "false", False),
    ("x=None", "text", "text"),
    ("x", "5", 5),
    ("*, x: int", "5", 5),
    ("x: unknown_name = 1", "5", 5),
    ("x: callable = None", "gelu", "gelu"),
]


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize(("signature", "text", "value"), TYPED)
def test_text_becomes_the_parameters_type(
    write: Write, future: str, signature: str, text: str, value: Any
):
    """A setting's text is read by the annotation, or else by the type of the default."""
    if "unknown_name" in signature and not future:
        future = "from __future__ import annotations\n"
    source = write(
        signature=signature, header=f"{future}from typing import Annotated, Literal, Optional"
    )
    parsed = given(source, x=text)["x"]
    assert parsed == value and type(parsed) is type(value)


REFUSED = [
    ("x: int = 1", "1.5", "a whole number"),
    ("x: int = 1", "inf", "a whole number"),
    ("x: int = 1", "", "a whole"),
    ("x: float = 1.0", "fast", "a number"),
    ("x: bool = True", "2", "true or false"),
    ("x: Literal['sgd', 'adam'] = 'sgd'", "adma", "sgd or adam"),
    ("x: int | None = 1", "a", "a whole number or none"),
    (
        "x: tuple[int, int] = (1, 2)",
        "1,2,3",
        "2 values parted by commas: a whole number, a whole number",
    ),
    ("x: list[int] = []", "1,a", "values parted by commas, each a whole number"),
    ("x: Annotated[float, 1] = 1.0", "a", "a number"),
    ("x=1", "0.5", "a whole number"),
    ("x: complex = 1j", "1", "of type complex, which only Python can set"),
]


@pytest.mark.parametrize(("signature", "text", "allowed"), REFUSED)
def test_a_wrong_value_says_what_is_allowed(write: Write, signature: str, text: str, allowed: str):
    """The message has the parameter, the value and what it may be."""
    source = write(signature=signature, header="from typing import Annotated, Literal")
    assert f"x={text} must be {allowed}" in refusal(source, x=text)


def test_everything_wrong_with_the_settings_is_said_at_once(write: Write):
    """Unknown names (with the nearest), wrong values and missing ones come in one message, with the signature."""
    source = write(signature="width: int, learning_rate=0.1")
    message = refusal(source, learning_rat="1", learning_rate="x")
    assert "unknown hyperparameter 'learning_rat', did you mean 'learning_rate'?" in message
    assert "learning_rate=x must be a number" in message
    assert "hyperparameter 'width' has no default and is not set" in message
    assert "the job is job(width: int, learning_rate: float = 0.1)" in message


@pytest.mark.parametrize(
    ("signature", "value", "expected"),
    [
        ("x: float = 1.0", 2, 2.0),
        ("x: int = 1", 2.0, 2),
        ("x: tuple[int, ...] = ()", [1, 2], (1, 2)),
        ("x: float | None = 1.0", None, None),
        ("x: int | float = 1", 2.0, 2.0),
        ("x=None", {"a": 1}, {"a": 1}),
        ("x: dict = {}", {"a": 1}, {"a": 1}),
        ("x: bool | int = 1", True, True),
    ],
)
def test_values_from_python_are_taken_leniently(
    write: Write, signature: str, value: Any, expected: Any
):
    """A whole float is an int, a list is a tuple, and types that text can't say are passed on."""
    parsed = given(write(signature=signature), x=value)["x"]
    assert parsed == expected and type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        ("x: int = 1", 1.5),
        ("x: int = 1", True),
        ("x: str = 'a'", 1),
        ("x: float = 1.0", None),
        ("x: bool = True", 1),
        ("x: tuple[int, ...] = ()", 3),
    ],
)
def test_values_of_the_wrong_type_from_python_are_refused(write: Write, signature: str, value: Any):
    """A type error in a setting is found before the job runs."""
    assert f"x={value} must be" in refusal(write(signature=signature), x=value)


def test_numpy_numbers_are_numbers(write: Write):
    """A search may hand in numpy's scalars."""
    import numpy as np

    parsed = given(write(signature="x: int = 1, y: float = 1.0"), x=np.int64(3), y=np.float32(0.5))
    assert parsed == {"x": 3, "y": 0.5} and type(parsed["x"]) is int and type(parsed["y"]) is float


# --- JobFile ----------------------------------------------------------------------------------------------------


def test_a_job_file_survives_json_and_another_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run folder can remember its job: the path is absolute and the settings are kept."""
    write(signature="x: tuple[int, ...] = (), y: float = 0.0")
    monkeypatch.chdir(tmp_path)
    file = JobFile.parse("digits.py", {"x": (1, 2), "y": "0.5"})
    monkeypatch.chdir("/")
    again = JobFile.from_dict(json.loads(json.dumps(file.to_dict())))
    assert again.path == tmp_path / "digits.py"
    assert again.load().model() == {"x": (1, 2), "y": 0.5}
    assert isinstance(again.load(), Job)


def test_a_file_that_moved_away_is_named(write: Write):
    """A remembered job whose file is gone says which file."""
    file = JobFile.parse(write())
    file.path.unlink()
    with pytest.raises(JobError, match=r"there is no file .*digits\.py"):
        file.load()


def test_a_setting_that_json_can_not_keep_is_named(write: Write):
    """A run can't remember an object; it says so before it starts."""
    with pytest.raises(JobError, match="setting x=<object"):
        JobFile.parse(write(), {"x": object()}).to_dict()


def test_verbs_take_the_name_of_a_file(write: Write, tmp_path: Path):
    """As the command line does; and say what a job is where they get something else."""
    assert open_job(write("digits.py"))[0] == JobFile(tmp_path / "digits.py")
    with pytest.raises(UsageError, match="or Python file that makes one, got dict"):
        open_job({})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="or Python file that makes one, got type"):
        open_job(Job)


def test_verbs_take_the_function(write: Write):
    """The job is what it returns by its defaults; there is no file that another process could load."""
    function = JobFile.parse(write("digits.py")).open().function
    source, job = open_job(function)
    assert source is None and isinstance(job, Job)
    with pytest.raises(JobError, match=r"<lambda>\(\) in test_jobfile\.py returned None"):
        open_job(lambda: None)  # type: ignore[arg-type, return-value]


def test_a_file_that_is_gone_is_no_script(tmp_path: Path):
    """Whoever loads it says what is wrong with it."""
    assert not is_script(tmp_path / "gone.py")
