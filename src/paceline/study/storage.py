"""Where a study is kept: Optuna's journal file in the run folder, or any of its databases by URL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

JOURNAL = "journal.log"
HEARTBEAT_S = 30.0  # of running trials in a database that several controllers share
_GRACE_S = 150.0  # without a heartbeat, after which another controller starts a trial again
_BUSY_S = 60.0  # that SQLite waits for another process's lock


class StorageError(PacelineError):
    """The study's database can't be used."""


def optuna() -> Any:
    """The package, its log quiet.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise UsageError("a search needs the package 'optuna', which is not installed",
                         hint="pip install 'paceline[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(url: str | None, run_dir: Path) -> BaseStorage:
    """The database at a URL such as sqlite:///FILE or postgresql+psycopg://HOST/NAME; else the run folder's journal.

    Raises:
        UsageError: the URL is wrong. StorageError: the database can't be reached.
    """
    optuna()
    if url is None:
        return _journal(run_dir / JOURNAL)
    if "://" not in url:
        raise UsageError(f"storage '{url}' is not a URL", hint="sqlite:///FILE.db or postgresql+psycopg://HOST/NAME")
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": _BUSY_S}
    with explained(url):
        try:
            return RDBStorage(url, engine_kwargs=options, heartbeat_interval=round(HEARTBEAT_S),
                              grace_period=round(_GRACE_S), failed_trial_callback=RetryHeartbeatStaleTrialCallback())
        except ImportError as error:
            raise UsageError(f"storage '{url}' needs the package '{error.name}', which is not installed",
                             hint=f"pip install {error.name}") from error


def _journal(path: Path) -> BaseStorage:
    """The run folder's own journal, which no live process uses: what a killed one left half done is removed."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    for left in path.parent.glob(f"{path.name}.lock*"):
        left.unlink(missing_ok=True)
    if path.exists():
        held = path.read_bytes()
        whole = held.rfind(b"\n") + 1
        if whole < len(held):  # else the next line would be taken for the end of this one, and neither could be read
            with open(path, "r+b") as file:
                file.truncate(whole)
    with explained(str(path)):
        return JournalStorage(JournalFileBackend(str(path)))


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn what databases raise into a message.

    Raises:
        StorageError
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        if not _is_storages(error):
            raise
        cause = error.__cause__ if error.__cause__ is not None else error
        said = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        hint = "is the database up, and the URL right? --run DIR --resume goes on with the study when it is"
        if "locked" in said:
            hint = "another process keeps it locked; the journal (leave --storage out) and PostgreSQL have no such lock"
        raise StorageError(f"can't use the study's database {url}: {said}", hint=hint) from error


def _is_storages(error: BaseException) -> bool:
    modules = {type(each).__module__.partition(".")[0] for each in (error, error.__cause__) if each is not None}
    return bool(modules & {"sqlalchemy", "sqlite3", "psycopg", "psycopg2", "pymysql", "alembic"}) or (
        type(error).__name__ == "StorageInternalError") or isinstance(error, OSError)
