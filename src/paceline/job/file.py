"""Reading a job from a file: find the file, run it under a private name, call its function with
typed settings.

The function's parameters are the hyperparameters. A file can have any name: it never takes the
place of a package and never imports itself. Imports find the modules beside it only after
everything that is installed.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_origin

from paceline.base.errors import JobError, PacelineError, UsageError, nearest
from paceline.base.imports import without_collector
from paceline.job import Job
from paceline.job.choices import chosen
from paceline.job.file_imports import _neighbours_of, _open_imports, _python_files

DEFAULT_FUNCTION = "job"

# Packages that are installed under another name than they are imported by.
_INSTALLED_AS = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class JobFile:
    """The origin of a job, which suffices to build the same `Job` again in another process or on
    another day.
    """

    path: Path  # the Python file, absolute
    function: str = DEFAULT_FUNCTION  # the function in it that returns the job
    # Values for the function's parameters; text is converted to the parameter's type.
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, source: str, settings: Mapping[str, Any] = {}) -> JobFile:
        """Read "FILE.py" or "FILE.py:FUNCTION".

        Raises:
            JobError: there is no such Python file, or the text after the colon can't be a
                function's name.
        """
        file, colon, function = str(source).rpartition(":")
        if not colon:
            file, function = function, DEFAULT_FUNCTION
        if not function.isidentifier():
            raise JobError(
                f"'{source}' names no function after the colon", hint=f"{file}:{DEFAULT_FUNCTION}"
            )
        path = Path(file).resolve()
        _check_file(path, file)
        return cls(path, function, dict(settings))

    def load(self) -> Job:
        """Run the file afresh, with the modules beside it, and build its job.

        Raises:
            JobError: the file, its function, a setting or the job itself is wrong; the message says
                where.
        """
        with without_collector():  # libraries are imported: a second of a core with Transformers
            return self.open().job(self.settings)

    def open(self) -> JobFunction:
        """Run the file afresh, with the modules beside it, and find its function.

        Raises:
            JobError: the file or its function is wrong; the message says where.
        """
        _check_file(self.path, str(self.path))
        if self.function == DEFAULT_FUNCTION and is_script(self.path):
            raise JobError(
                f"{self.path.name} keeps its own loop by pl.attach, and has no function '{self.function}'",
                hint=f"paceline run {self.path.name} --plan data=2; paceline verify takes it, too",
            )
        return JobFunction(_function(_run(self.path), self.function, self.path), self.path)

    def to_dict(self) -> dict[str, Any]:
        """Return the job file as a document that JSON can hold.

        Raises:
            JobError: a setting is a value that JSON can't keep.
        """
        for name, value in self.settings.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise JobError(
                    f"setting {name}={value!r} can't be kept with the run: {error}",
                    hint="give numbers, text, true or false, None, or lists of those",
                ) from error
        return {"path": str(self.path), "function": self.function, "settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> JobFile:
        """Return the job file that `to_dict` described; the file itself is needed only when the job
        is loaded.
        """
        return cls(Path(document["path"]), document["function"], dict(document["settings"]))


# A function returns the job. A text names a file, as on the command line.
AnyJob = Job | Callable[..., Job] | JobFile | str | Path


def open_job(job: AnyJob) -> tuple[JobFile | None, Job]:
    """Return the file that a job comes from, or None, and the job. Text is read as on the command
    line.

    Raises:
        JobError: the file or its function can't be used.
        UsageError: this is no job at all.
    """
    from paceline.base import inherited
    from paceline.base.fork import ask_forks_about_cuda

    ask_forks_about_cuda()
    if isinstance(job, str | Path):
        job = JobFile.parse(str(job))
    with inherited.named():
        if isinstance(job, JobFile):
            return job, job.load()
        if inspect.isroutine(job):
            job = JobFunction.of(job).job({})
    if not isinstance(job, Job):
        raise UsageError(
            f"a job is a paceline.Job, or a function or Python file that makes one, got {type(job).__name__}",
            hint="`paceline docs job` names the page that shows one",
        )
    return None, job


@dataclass(frozen=True)
class JobFunction:
    """A function that returns a job, found in a file that has been run."""

    function: Callable[..., Any]
    path: Path  # the file, for messages

    @classmethod
    def of(cls, function: Callable[..., Any]) -> JobFunction:
        """Return a function that a program has, with its file."""
        code = getattr(function, "__code__", None)
        return cls(function, Path(code.co_filename if code else DEFAULT_FUNCTION))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", DEFAULT_FUNCTION)

    def parameters(self) -> dict[str, tuple[Any, Any]]:
        """Return each hyperparameter's type and default, which are `inspect.Parameter.empty` if
        there are none.
        """
        return {
            name: (_kind(parameter, self.function), parameter.default)
            for name, parameter in _parameters(self.function).items()
        }

    def job(self, settings: Mapping[str, Any]) -> Job:
        """Build the job with these settings. Names with a dot are choices inside its model.

        Raises:
            JobError: a setting or the job itself is wrong; the message says where.
        """
        options = {name: value for name, value in settings.items() if "." in name}
        values = _values(
            self.function, {name: value for name, value in settings.items() if name not in options}
        )
        with _blamed_on(self.path, f"{self.name}() in {self.path.name}"):
            job = self.function(**values)
        if not isinstance(job, Job):
            raise JobError(
                f"{self.name}() in {self.path.name} returned {_indefinite(job)}, not a paceline.Job",
                hint=f"{self.name}() must end with: return paceline.Job(...)",
            )
        return replace(job, model=chosen(job.model, options)) if options else job


def load(source: str, settings: Mapping[str, Any] = {}) -> Job:
    """Load the job of a file.

    Args:
        source: "FILE.py", whose function `job` is called, or "FILE.py:FUNCTION".
        settings: Values for the function's parameters. Text, as from a command line, is converted
            to the parameter's annotated type, or else to the type of its default.

    Raises:
        JobError: the file, its function, a setting or the job itself is wrong; the message says
            where.
    """
    return JobFile.parse(source, settings).load()


def is_script(path: Path) -> bool:
    """Whether a Python file calls `attach`, and has no function `job`: it keeps its own loop."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever runs it says where
        return False
    has_job = any(isinstance(node, ast.FunctionDef) and node.name == "job" for node in tree.body)
    return not has_job and any(
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "attach"
        for node in ast.walk(tree)
    )


# --- Files and modules ------------------------------------------------------------------------------------------


def _check_file(path: Path, text: str) -> None:
    try:
        is_file = path.is_file()
    except OSError as error:  # a name that no file can have
        raise JobError(f"can't look for the job file {text[:80]}...: {error.strerror}") from error
    if is_file and path.suffix == ".py":
        return
    if is_file:
        raise JobError(
            f"{text} is not a Python file", hint="a job is a function in a file that ends in .py"
        )
    if path.is_dir():
        raise JobError(f"{text} is a folder", hint=_python_files(path))
    raise JobError(f"there is no file {text}", hint=_python_files(path.parent, like=path.name))


def _run(path: Path) -> types.ModuleType:
    """Execute a file as a module with a name that no import statement uses.

    It is compiled here and not cached: Python's cache would use the old code after an edit within
    the same second.
    """
    from paceline.base.fork import ask_forks_about_cuda

    name = "paceline_job_" + re.sub(r"\W", "_", path.stem)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise JobError(_syntax_message(error, path)) from error
    except (OSError, ValueError) as error:
        raise JobError(f"can't read {path}: {error}") from error
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    os.environ.setdefault(
        "KERAS_TORCH_DEVICE", "cpu"
    )  # or Keras takes a GPU when it is imported; ranks have them
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    ask_forks_about_cuda()
    _open_imports(path)
    try:
        with _blamed_on(path, f"loading {path.name}"):
            exec(code, vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _function(module: types.ModuleType, name: str, path: Path) -> Callable[..., Any]:
    member = getattr(module, name, None)
    if callable(member):
        return member
    if isinstance(member, Job):
        raise JobError(
            f"'{name}' in {path.name} is a Job, not a function that returns one",
            hint=f"def {name}() -> paceline.Job: return paceline.Job(...)",
        )
    defined = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not key.startswith("_")
    ]
    defined.sort(
        key=lambda key: "Job" not in str(getattr(module, key).__annotations__.get("return"))
    )
    if not defined:
        raise JobError(
            f"{path.name} has no function '{name}', nor any other",
            hint=f"def {name}() -> paceline.Job: return paceline.Job(...)",
        )
    raise JobError(
        f"{path.name} has no function '{name}', {nearest(name, defined)}",
        hint=f"name one: {path.name}:{defined[0]}",
    )


# --- What goes wrong in the user's file -------------------------------------------------------------------------


@contextlib.contextmanager
def _blamed_on(path: Path, doing: str) -> Iterator[None]:
    """Turn an exception of the user's code in the block into a JobError that names the line.

    Ctrl-C is passed on.
    """
    try:
        yield
    except JobError as error:
        raise JobError(f"{_place(error, path)}: {error.args[0]}", hint=error.hint) from error
    except PacelineError:
        raise
    except SystemExit as error:
        raise JobError(
            f"{doing} ended the program at {_place(error, path)} with exit code {error.code!r}",
            hint='keep scripts under `if __name__ == "__main__":`; hyperparameters are the parameters '
            "of the job's function, set with --set NAME=VALUE",
        ) from error
    except SyntaxError as error:
        raise JobError(_syntax_message(error, path)) from error
    except Exception as error:
        raise _job_error(error, path, doing) from error


def _job_error(error: Exception, path: Path, doing: str) -> JobError:
    place = _place(error, path)
    if isinstance(error, ModuleNotFoundError) and (missing := _missing_package(error)):
        message = f"{place} needs the package '{missing}', which is not installed"
        install = f"pip install {_INSTALLED_AS.get(missing, missing)}"
        if missing == path.stem:
            return JobError(
                f"{message}; {path.name} has the same name, and a job file can't import itself",
                hint=f"{install}, or rename {path.name}",
            )
        return JobError(message, hint=f"{install}{_like_a_neighbour(missing, path)}")
    text = f": {error}" if str(error) else ""
    hint = _hidden_neighbour(error, path)
    if isinstance(error, ImportError) and "relative import" in str(error):
        hint = "modules beside a job file are imported by their plain names: import net, not from . import net"
    return JobError(f"{doing} raised {type(error).__name__} at {place}{text}", hint=hint)


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """Return the name of the package that is not installed; None if only a module inside it is
    missing.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in sys.modules:
        return None
    try:
        return None if importlib.util.find_spec(package) else package
    except ModuleNotFoundError:
        return package


def _like_a_neighbour(name: str, path: Path) -> str:
    stems = [file.stem for file in path.parent.glob("*.py") if file != path]
    close = difflib.get_close_matches(name, stems, n=1, cutoff=0.7)
    return f", or did you mean {close[0]}.py beside {path.name}?" if close else ""


def _hidden_neighbour(error: Exception, path: Path) -> str | None:
    """Explain why a name is missing in an installed package that the user takes for their own
    module; or None.
    """
    owner = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    name = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(error, "name", None)
    beside = path.parent / f"{name}.py"
    if isinstance(error, AttributeError | ImportError) and beside.is_file():
        loaded = getattr(sys.modules.get(str(name)), "__file__", None)
        if loaded and Path(loaded).resolve() != beside:
            return f"'{name}' is the installed {loaded}, not your {beside.name}: rename your file"
    return None


def _place(error: BaseException, path: Path) -> str:
    """Return FILE:LINE of the innermost frame in the job file or its neighbours."""
    place, trace = path.name, error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file == path or trace.tb_frame.f_globals.get("__name__", "").partition(".")[
            0
        ] in _neighbours_of(path):
            place = f"{file.relative_to(path.parent) if file.is_relative_to(path.parent) else file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _syntax_message(error: SyntaxError, path: Path) -> str:
    place = f"{Path(error.filename or path).name}:{error.lineno}" if error.lineno else path.name
    line = f"\n    {error.text.strip()}" if error.text and error.text.strip() else ""
    return f"{place}: {type(error).__name__}: {error.msg}{line}"


def _indefinite(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


# --- Settings ---------------------------------------------------------------------------------------------------


def _values(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings to the types of the function's parameters.

    Raises:
        JobError: settings are wrong; the message names all of them.
    """
    from paceline.base.schema import allowed, convert  # msgspec takes a moment to load

    named = _parameters(function)
    kinds = {name: _kind(parameter, function) for name, parameter in named.items()}
    values, problems = {}, []
    for name, setting in settings.items():
        if name not in named:
            problems.append(f"unknown hyperparameter '{name}', {nearest(name, named)}")
            continue
        try:
            values[name] = convert(setting, kinds[name])
        except ValueError:
            problems.append(f"{name}={setting} must be {allowed(kinds[name])}")
    problems += [
        f"hyperparameter '{name}' has no default and is not set"
        for name, parameter in named.items()
        if parameter.default is parameter.empty and name not in settings
    ]
    if problems:
        signature = ", ".join(
            str(parameter.replace(annotation=kinds[name])) for name, parameter in named.items()
        )
        raise JobError(
            "\n".join(problems),
            hint=f"the job is {getattr(function, '__name__', 'job')}({signature})",
        )
    return values


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        p.name: p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _kind(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """Return the type of a parameter: its annotation, or else the type of its default."""
    kind = parameter.annotation
    if isinstance(kind, str):  # from __future__ import annotations
        try:
            kind = eval(kind, getattr(inspect.unwrap(function), "__globals__", {}))
        except Exception:  # a name that only type checkers know
            kind = parameter.empty
    if kind is parameter.empty or not (isinstance(kind, type) or get_origin(kind)):
        return _kind_of_default(parameter.default)
    return kind | None if parameter.default is None else kind


def _kind_of_default(default: Any) -> Any:
    if isinstance(default, tuple | list) and default:
        kinds = [_kind_of_default(element) for element in default]
        element = kinds[0] if all(kind == kinds[0] for kind in kinds) else Any
        return types.GenericAlias(
            *((list, element) if isinstance(default, list) else (tuple, (element, ...)))
        )
    return next(
        (kind for kind in (bool, int, float, str, tuple, list) if isinstance(default, kind)), Any
    )
