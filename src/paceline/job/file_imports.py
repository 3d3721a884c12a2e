"""Imports of a job file: modules beside it are found, and are read anew for each file."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any


def _python_files(folder: Path, like: str = "") -> str:
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    names = sorted(file.name for file in folder.glob("*.py"))
    stems = [name.removesuffix(".py") for name in names]
    if close := difflib.get_close_matches(like.removesuffix(".py"), stems, n=3, cutoff=0.6):
        return f"did you mean {' or '.join(f'{stem}.py' for stem in close)}?"
    if not names:
        return f"there is no Python file in {folder}"
    return f"the Python files in {folder} are {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"


class _Neighbours:
    """A finder of the modules beside a job file, but never of the file itself.

    It is at the end of `sys.meta_path`, so that a neighbour called random.py or torch.py hides no
    other module.
    """

    def __init__(self, job_path: Path) -> None:
        self.job_path = job_path
        self.module_names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if path is not None:  # inside a package, which finds its modules by itself
            return None
        spec = PathFinder.find_spec(name, [str(self.job_path.parent)])
        if (
            spec is None
            or _is_at(spec, self.job_path)
            or (spec.origin is None and not _holds_python(spec))
        ):
            return None
        self.module_names.add(name)
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Uncached(spec.loader.name, spec.loader.path)
        return spec


class _Uncached(SourceFileLoader):
    """A loader that compiles a module at each import.

    Python's cache would use the old code if a file is edited within the same second and keeps its
    length.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code


class _NeverItself:
    """A finder that hides a job file from its own imports if its folder is on `sys.path`, as under
    `python -m`.

    Without it, `import datasets` in datasets.py would run the file a second time. A notebook or a
    script that has loaded the job may import its file.
    """

    def __init__(self, job_path: Path) -> None:
        self.job_path = job_path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if path is not None or name != self.job_path.stem:
            return None
        spec = PathFinder.find_spec(name)
        if spec is None or not _is_at(spec, self.job_path) or not self._is_for_the_job():
            return None
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != self.job_path.parent]
        if other := PathFinder.find_spec(name, elsewhere):
            return other
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def _is_for_the_job(self) -> bool:
        """Whether the job, or code that paceline calls, does this import."""
        own, frame = (
            {"paceline", *_neighbours_of(self.job_path)},
            sys._getframe(2),
        )  # the frame of the code that looks for the module
        while frame is not None:
            if Path(frame.f_code.co_filename) == self.job_path or (
                frame.f_globals.get("__name__", "").partition(".")[0] in own
            ):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def _is_at(spec: ModuleSpec, path: Path) -> bool:
    return spec.origin is not None and Path(spec.origin).resolve() == path


def _holds_python(spec: ModuleSpec) -> bool:
    # A folder of data or results (datasets/, wandb/) is not the package of that name.
    return any(
        next(Path(folder).glob("*.py"), None) for folder in spec.submodule_search_locations or ()
    )


def _open_imports(job_path: Path) -> None:
    """Let this file import its neighbours, each of which is read again.

    Neighbours of earlier jobs in this process are dropped; otherwise a `models.py` of one folder
    would be taken for that of another. Their finders stay behind this one, for imports inside
    functions that run later.
    """
    earlier = [finder for finder in sys.meta_path if isinstance(finder, _Neighbours)]
    forgotten = {name for finder in earlier for name in finder.module_names}
    for name in [name for name in sys.modules if name.partition(".")[0] in forgotten]:
        del sys.modules[name]
    others = [
        finder for finder in sys.meta_path if not isinstance(finder, _Neighbours | _NeverItself)
    ]
    other_finders = [finder for finder in earlier if finder.job_path.parent != job_path.parent]
    sys.meta_path[:] = [_NeverItself(job_path), *others, _Neighbours(job_path), *other_finders]
    importlib.invalidate_caches()  # a neighbour may have been written a moment ago


def imported_by(path: Path) -> list[Path]:
    """Return a job file that was loaded, and the files beside it that it has imported so far."""
    names = _neighbours_of(path)
    files = [
        getattr(module, "__file__", None)
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in names
    ]
    return [path, *(Path(file) for file in files if file)]


def _neighbours_of(path: Path) -> set[str]:
    return next(
        (
            f.module_names
            for f in sys.meta_path
            if isinstance(f, _Neighbours) and f.job_path == path
        ),
        set(),
    )
