"""The storage of a study: Optuna's journal file in the run folder, or any of its databases by
URL.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import MissingPackage, PacelineError, UsageError, with_extra

if TYPE_CHECKING:
    from optuna.storages import BaseStorage, RDBStorage
    from optuna.study import Study

JOURNAL = "journal.log"
# seconds between heartbeats of running trials in a database that several controllers share
HEARTBEAT_S = 30.0
_GRACE_S = 150.0  # seconds without a heartbeat after which another controller starts a trial again
_TABLE_TRIES = 5
_BUSY_S = 60.0  # seconds that SQLite waits for another process's lock


class StorageError(PacelineError):
    """The study's database can't be used."""


def optuna() -> Any:
    """Import Optuna and make its log quiet.

    Raises:
        MissingPackage: Optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise MissingPackage("a search", "optuna", install=with_extra("search")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(url: str | None, run_dir: Path) -> BaseStorage:
    """Open the database at a URL such as sqlite:///FILE or postgresql+psycopg://HOST/NAME; else the
    run folder's journal.

    Raises:
        UsageError: the URL is wrong.
        MissingPackage: the database's driver is not installed.
        StorageError: the database can't be reached.
    """
    optuna()
    if url is None:
        return _journal(run_dir / JOURNAL)
    if "://" not in url:
        raise UsageError(
            f"storage '{url}' is not a URL",
            hint="sqlite:///FILE.db or postgresql+psycopg://HOST/NAME",
        )
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

    options: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        options["connect_args"] = {"timeout": _BUSY_S}
    with explained(url), quiet():
        try:
            return _with_tables(
                lambda: RDBStorage(
                    url,
                    engine_kwargs=options,
                    heartbeat_interval=round(HEARTBEAT_S),
                    grace_period=round(_GRACE_S),
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
                )
            )
        except ImportError as error:
            driver = error.name or url.partition(":")[0].rpartition("+")[2]
            raise MissingPackage(
                f"storage '{url}'", driver, install=f"pip install {driver}"
            ) from error


@contextlib.contextmanager
def opened(url: str | None, run_dir: Path) -> Iterator[BaseStorage]:
    """Open the storage, and close its connections at the end of the context. Errors of the database
    inside are explained.
    """
    with explained(url or str(run_dir / JOURNAL)):
        storage = open_storage(url, run_dir)
        try:
            yield storage
        finally:
            if url is not None:
                storage.remove_session()
                storage.engine.dispose()  # type: ignore[attr-defined]


def _with_tables(connect: Callable[[], RDBStorage]) -> RDBStorage:
    """Connect to a database; retry if another controller creates its tables at the same time."""
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    for _ in range(_TABLE_TRIES):
        try:
            return connect()
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            if not any(
                words in str(error)
                for words in ("already exists", "duplicate", "UNIQUE constraint")
            ):
                raise
            time.sleep(random.uniform(0.1, 0.5))
    return connect()


def _journal(path: Path) -> BaseStorage:
    """Open the run folder's own journal, which no live process uses.

    Locks and half-written lines that a killed process left are removed.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    for left in path.parent.glob(f"{path.name}.lock*"):
        left.unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(
            content
        ):  # else the next line would be taken for the end of this one, and neither could be read
            with open(path, "r+b") as file:
                file.truncate(whole)
    with explained(str(path)):
        return JournalStorage(JournalFileBackend(str(path)))


class Heartbeats:
    """Heartbeats of running trials in a shared database, so that trials of a dead machine are
    started again.
    """

    def __init__(self, study: Study) -> None:
        self._study, self._next_s = study, 0.0

    def beat(self, trial_ids: Sequence[int]) -> None:
        """Record that these trials run, and give up trials of others whose heartbeats have ended.
        Do nothing if called too soon.
        """
        from optuna.storages import fail_stale_trials
        from optuna.storages._heartbeat import BaseHeartbeat

        storage = self._study._storage
        if time.monotonic() < self._next_s or not isinstance(storage, BaseHeartbeat):
            return
        self._next_s = time.monotonic() + HEARTBEAT_S
        for trial_id in trial_ids:
            storage.record_heartbeat(trial_id)
        with quiet():
            fail_stale_trials(self._study)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide Optuna's warnings about experimental features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=optuna().exceptions.ExperimentalWarning)
        yield


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn errors of databases into a message.

    Raises:
        StorageError: the database failed.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        if not _is_storages(error):
            raise
        cause = error.__cause__ if error.__cause__ is not None else error
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        hint = "is the database up, and the URL right? --run DIR --resume goes on with the study when it is"
        if "locked" in reason:
            hint = "another process keeps it locked; the journal (leave --storage out) and PostgreSQL have no such lock"
        elif "plugin" in reason:
            hint = "sqlite:///FILE.db or postgresql+psycopg://HOST/NAME"
        raise StorageError(f"can't use the study's database {url}: {reason}", hint=hint) from error


def _is_storages(error: BaseException) -> bool:
    modules = {
        type(each).__module__.partition(".")[0]
        for each in (error, error.__cause__)
        if each is not None
    }
    return (
        bool(modules & {"sqlalchemy", "sqlite3", "psycopg", "psycopg2", "pymysql", "alembic"})
        or (type(error).__name__ == "StorageInternalError")
        or isinstance(error, OSError)
    )
