"""The errors that a user can cause or meet, each with its exit code and a way out."""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Iterable

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends
_URL_PASSWORD = re.compile(r"(\w://[^\s/:@]*:)[^\s/]+@")
_NAMED_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:password|passwd|secret|token|api[_-]?key)[ =])[^\s'\"&,]+"
)

_LONGEST = 10_000  # characters of an exception's text that are shown; a rank's log has all of it


def printable(text: str) -> str:
    """Return a text without control characters and without the passwords of URLs.

    A control character is written as an escape such as `\\x1b`, a character that UTF-8 can't encode
    as an escape such as `\\udce9`, and the password of a URL as `***`.

    >>> printable("postgresql://me:pass@word@host/db \\x1b[2J")
    'postgresql://me:***@host/db \\\\x1b[2J'
    """
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return _URL_PASSWORD.sub(r"\1***@", text).encode(errors="backslashreplace").decode()


def in_words(error: BaseException) -> str:
    """Return an exception's type and text, and those of the exceptions of a group.

    A long text is cut, and a text that can't be made or printed does no harm.

    >>> in_words(ValueError("no features of caf\\udce9.jpg"))
    'ValueError: no features of caf\\\\udce9.jpg'
    """
    try:
        text = str(error)
    except Exception as second:
        text = f"its text can't be made ({type(second).__name__})"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... and {len(text) - _LONGEST} more characters"
    parts = getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
    return "\n- ".join([printable(f"{type(error).__name__}: {text}"), *map(in_words, parts)])


def without_secrets(command: str) -> str:
    """Return a command line without its secrets.

    Secrets are the passwords of URLs, and the values of options and settings whose names say
    password, secret, token or API key.

    >>> without_secrets("train job.py --set api_key=abc --token=x --set lr=1")
    'train job.py --set api_key=*** --token=*** --set lr=1'
    """
    return _NAMED_SECRET.sub(r"\1***", printable(command))


def with_hint(message: str, hint: str | None) -> str:
    """Return a message, and what to do."""
    return f"{message}\n\nhint: {hint}" if hint else message


class PacelineError(Exception):
    """The work failed.

    The message says what was given and what is allowed; `hint` says what to do. `heard` says
    whether this rank only learned of the cause, which another rank reports.
    """

    exit_code = 1
    heard = False

    def __init__(self, message: str, *, hint: str | None = None, heard: bool | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if heard is not None:
            self.heard = heard

    def __str__(self) -> str:
        return printable(with_hint(super().__str__(), self.hint))


class UsageError(PacelineError, ValueError):
    """The request makes no sense; nothing was started."""

    exit_code = 2


class HostError(UsageError):
    """Something is missing on this host.

    Other hosts of the run may have it, so each host reports its own.
    """


def with_extra(name: str) -> str:
    """Return the command that installs an extra of Paceline, as the README does."""
    return f"pip install -e '.[{name}]' in Paceline's checkout"


class MissingPackage(HostError):
    """A package is not installed."""

    def __init__(self, feature: str, package: str | None, *, install: str) -> None:
        # feature: the part of Paceline that needs the package. install: the command for it.
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed", hint=install
        )


class JobError(UsageError):
    """A job that can't be loaded, built or trained as it is written."""


class PlanError(UsageError):
    """A plan that is unknown, contradictory, or doesn't suit this job or these devices."""


class PlanRefused(PlanError):
    """A plan under which this job would not compute what one device computes.

    It is raised before the first step.

    The message names the module, parameter or function that stands in the way, and `hint` the plans
    that work.
    """


class NotDeterministic(PlanRefused):
    """An operator has no deterministic form, and only deterministic operators are allowed.

    It is raised in the first step.
    """


class ClusterError(UsageError):
    """Devices that don't exist or can't be read."""


class TrainingError(PacelineError):
    """Training can't go on.

    A loss is not a number, a sample is bad, or a parameter has no gradient, for example.
    """


class DriftError(TrainingError):
    """Replicas that should be equal differ, or a rank's results or its kept values changed without
    a reason.
    """


class RanksDisagree(TrainingError):
    """Ranks exchange different tensors, or are in different places of a step."""


class CheckpointError(PacelineError):
    """A checkpoint can't be written, or no checkpoint can be read."""


class CallbackError(PacelineError):
    """A callback raised an exception, which ended the run."""


class OutOfMemory(PacelineError):
    """A device's memory is exhausted."""

    exit_code = 3


class PeerLost(PacelineError):
    """Another rank died or stopped answering."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        heard: bool | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint, heard=heard)
        self.rank = rank  # the lost rank, if it is known


class Preempted(PacelineError):
    """The scheduler asked the run to stop; it saved a checkpoint and can be resumed."""

    exit_code = 5


def on_full_disk(error: BaseException) -> CheckpointError | None:
    """Return the error to report if the disk can't be written any more; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    ):
        return None
    return CheckpointError(
        f"can't write {error.filename or 'a file'}: {error.strerror}",
        hint="free some space; --resume goes on from the last checkpoint then",
    )


def on_windows(error: BaseException) -> UsageError | None:
    """Return the error to report if Windows lacks one of Python's modules; None for other errors.

    The error takes the place of a message that only names a module, which Python has on other
    systems alone.
    """
    if (
        sys.platform != "win32"
        or not isinstance(error, ModuleNotFoundError)
        or error.name not in ("fcntl", "resource")
    ):
        return None
    return UsageError(
        "paceline runs ranks on Linux and macOS, and this is Windows",
        hint="use it inside WSL 2 (wsl --install), where it is Linux",
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the ending of a message about an unknown name: the closest known name, then all of
    them.

    >>> nearest("shrad", ["data", "shard"])
    "did you mean 'shard'? Known: data, shard"
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not known:
        return "none are known"
    listed = ", ".join(known)
    return f"did you mean '{close[0]}'? Known: {listed}" if close else f"known: {listed}"
