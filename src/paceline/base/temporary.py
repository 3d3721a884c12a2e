"""Temporary folders. If an owner is killed, its folder is removed when the next one is made."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _LOCK = "paceline-", "owner.lock"


@contextmanager
def temporary_folder(kind: str = "") -> Iterator[Path]:
    """Make a folder that is removed after the block. Folders of processes that were killed are
    removed first.

    The owner, and its forks that still live, hold the lock of a file in the folder. The kernel
    releases the lock when the last of them ends. They also hold a lock of the folder, because
    systemd-tmpfiles removes files in /tmp that nobody has touched for 10 days, but skips a locked
    folder (tmpfiles.d(5)). If the file in which ranks meet were removed and made anew, they would
    wait for each other for ever.

    Args:
        kind: A word in the folder's name.
    """
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{kind}-" if kind else _PREFIX) as name:
        folder = Path(name)
        with open(folder / f".{_LOCK}", "wb") as lock:
            with suppress(OSError):  # a file system without locks: nobody else gets this one either
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(lock.name).rename(
                folder / _LOCK
            )  # under this name it is never seen unlocked while its owner lives
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(descriptor)


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user, in a folder where everybody may write, and return its
    descriptor.

    The call does not wait.

    Raises:
        OSError: it can't be opened, or is a link, a pipe, a device, or another user's.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "no regular file of this user", str(path))
    return descriptor


def _remove_left() -> None:
    """Remove the folders whose owners have ended; those of other users are left alone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), open(open_own(path, os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
