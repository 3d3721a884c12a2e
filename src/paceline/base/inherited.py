"""Things of a process that its forks can't share with it: positions in open files, connections,
threads.

A fork has its parent's descriptors, and each descriptor refers to the same open file or connection
in both processes. A file has one position for both, and an answer on a connection reaches the
process that reads first. So each fork opens files again at their positions, whether it is a rank, a
loader worker or a fork that looks ahead. In forks that read beside others, connections are closed.
Threads are not inherited at all. If a job's file leaves threads or connections behind, a note names
them when the file is loaded.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from paceline.base.user_code import is_users

_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_FLAGS = (
    os.O_ACCMODE | os.O_APPEND | getattr(os, "O_DIRECT", 0)
)  # the flags that a file keeps when it is opened again
_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
_Identity = tuple[int, int]  # device and inode
_places: dict[
    int, tuple[_Identity, int, int]
] = {}  # each file that can be read, its flags and its position, at the last fork
_closed: list[str] = []  # peers of connections that this process may not use


def _note_places() -> None:
    global _places
    places, opened = {}, dict(_open())  # of its own: another thread may fork at the same time
    outputs = {_identity(opened[output]) for output in (1, 2) if output in opened}
    for descriptor, status in opened.items():
        identity = _identity(status)  # all processes write to the outputs at one place
        if stat.S_ISREG(status.st_mode) and identity not in outputs:
            with suppress(OSError):  # opened as a path alone, or closed by another thread
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if flags & os.O_ACCMODE != os.O_WRONLY:
                    places[descriptor] = identity, flags, os.lseek(descriptor, 0, os.SEEK_CUR)
    _places = places


def _open_again() -> None:
    """Open each file again at its position, even if it has been renamed.

    The descriptor keeps its number, so that the file objects of Python and C continue with it.
    """
    here = _identities()
    for descriptor, (identity, flags, position) in _places.items():
        if here.get(descriptor) != identity:
            continue  # another thread has closed it since
        path: str | bytes = f"{_DESCRIPTORS}/{descriptor}"
        try:
            if sys.platform == "darwin":  # there the path would share the file's position
                path = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
            again = os.open(path, flags & _FLAGS)
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(again)
        except OSError as error:
            print(
                f"warning: a fork can't open descriptor {descriptor} again ({error.strerror}), and reads its file at "
                "a place that others move",
                file=sys.stderr,
            )


os.register_at_fork(before=_note_places, after_in_child=_open_again)


def close_connections() -> None:
    """Make connections to other programs look closed by those programs, in a fork.

    The clients that use the connections then connect again or fail.
    """
    for descriptor, status in _open():
        if peer := _peer(descriptor, status):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                os.dup2(ours.fileno(), descriptor, inheritable=False)
            _closed.append(peer)


def closed_connections() -> str:
    """Return a hint for code that reads data, on the parent's connections that were closed; "" if
    there were none.
    """
    return (
        (
            f"connections to {', '.join(dict.fromkeys(_closed))} were made before this process, a fork, which may not "
            "use them: connect in the process that reads, in the data set's first __getitem__"
        )
        if _closed
        else ""
    )


@contextmanager
def named() -> Iterator[None]:
    """Print a note on what the block, which loads a job, leaves behind.

    The note names threads that forks won't have, and connections and files that they can't share.
    """
    before = _identities()
    yield
    if left := _left_behind(before):
        print(f"note: {left}", file=sys.stderr, flush=True)


def _left_behind(before: dict[int, _Identity]) -> str:
    """Describe the job's running threads, and the connections and pipes that were opened after
    `before` was noted.

    The text is empty if there are none.
    """
    threads = [thread.name for thread in threading.enumerate() if _is_of_job(thread)]
    opened = [
        (descriptor, status, _peer(descriptor, status))
        for descriptor, status in _open()
        if before.get(descriptor) != _identity(status)
    ]
    peers = [peer for *_, peer in opened if peer]
    pipes = [
        str(descriptor)
        for descriptor, status, peer in opened
        if not peer
        and (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode))
        and descriptor != resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    ]
    environments = [
        str(path.parent)
        for descriptor, status, _ in opened
        if stat.S_ISREG(status.st_mode)
        and (path := Path(f"{_DESCRIPTORS}/{descriptor}").resolve()).name == "lock.mdb"
    ]
    found = (
        ("threads", threads, "forks don't have them, and what waits for one waits for ever"),
        (
            "LMDB environments with locks",
            environments,
            "forks run out of readers: lock=False has none",
        ),
        ("connections to", peers, "closed in forks that read beside others"),
        (
            "pipes or sockets with the descriptors",
            pipes,
            "forks share them, and a message reaches one reader",
        ),
    )
    parts = [f"{what} {', '.join(names)} ({fate})" for what, names, fate in found if names]
    return (
        (
            f"ranks and loader workers are forks of this process, which has {'; '.join(parts)}. What reads data should "
            "make these itself, in the process that reads: in the data set's first __getitem__"
        )
        if parts
        else ""
    )


def _is_of_job(thread: threading.Thread) -> bool:
    """Whether a thread runs the user's code, or belongs to a pool, which may run it."""
    target = getattr(thread, "_target", None) or type(thread).run
    module = getattr(target, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module in _POOLS or (
        thread is not threading.main_thread() and file is not None and is_users(file)
    )


def _open() -> Iterator[tuple[int, os.stat_result]]:
    for path in Path(_DESCRIPTORS).iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is closed already
            yield int(path.name), os.fstat(int(path.name))


def _identities() -> dict[int, _Identity]:
    return {descriptor: _identity(status) for descriptor, status in _open()}


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _peer(descriptor: int, status: os.stat_result) -> str:
    """Return the other end of a stream socket; "" for other descriptors and for socket pairs of
    this process.
    """
    if not stat.S_ISSOCK(status.st_mode):
        return ""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.type == socket.SOCK_STREAM and (peer := opened.getpeername()):
            return ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else os.fsdecode(peer)
    return ""
