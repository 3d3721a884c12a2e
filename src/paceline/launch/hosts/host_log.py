"""Files of the run folder in which its hosts say what they do: the log of
`launch/hosts/leader_log.py`, and signs of life.

An entry of the log is a file of its own. A host writes it under another name and links it to the number that is next:
of several hosts that do so, one succeeds, also on file systems of a network.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.base.errors import ClusterError
from paceline.launch.hosts.leader_log import HostEntry, LeaderState

FOLDER = "hosts"
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_BYTES = 2**16  # of a file; more is none of ours


class HostSign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """beats: which grows while the host's process lives. joined: the epoch in which it took part last; 0 before.
    lost: the epoch whose meeting place it can't reach; 0 if it can."""

    beats: int
    joined: int
    lost: int


class HostLog:
    """standing: as it was read last. For use by several threads.

    Raises:
        OSError: from each method, the run folder can't be read or written.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self.standing = LeaderState()
        self._lock = threading.Lock()

    def read(self) -> LeaderState:
        """
        Raises:
            ClusterError: an entry is damaged.
        """
        with self._lock:
            while True:
                try:
                    data = _read(self._path(self.standing.num_entries + 1))
                except FileNotFoundError:
                    return self.standing
                try:
                    self.standing = self.standing.after(msgspec.json.decode(data, type=HostEntry))
                except msgspec.DecodeError as error:
                    raise ClusterError(
                        f"{self._path(self.standing.num_entries + 1)} is damaged: {error}",
                        hint=f"when no host of the run is left, remove {self.folder}",
                    ) from error

    def append(self, entry: HostEntry) -> bool:
        """Returns whether it is in the log now; it is not where the rules forbid it by then.

        Raises:
            ClusterError: the file system can't keep the log, or an entry is damaged.
        """
        while (standing := self.read()).allows(entry):
            if self._link(entry, self._path(standing.num_entries + 1)):
                self.read()
                return True
        return False

    def _link(self, entry: HostEntry, path: Path) -> bool:
        temp = self._write(msgspec.json.encode(entry), is_durable=True)
        try:
            os.link(temp, path)
        except FileExistsError:
            return (
                temp.stat().st_nlink == 2
            )  # a network may lose the answer to a request that succeeded
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise ClusterError(
                    f"the file system of {self.folder} has no hard links, by which hosts agree who goes "
                    "on",
                    hint="--run DIR on another one, such as NFS",
                ) from error
            raise
        finally:
            temp.unlink()
        return True

    def sign(self, host: int, sign: HostSign) -> None:
        """Leave a host's newest sign of life."""
        self._write(msgspec.json.encode(sign)).replace(self.folder / f"host-{host}.json")

    def signs(self) -> dict[int, HostSign]:
        """The newest ones, by host."""
        signs = {}
        for path in self.folder.glob("host-*.json"):
            with suppress(OSError, ValueError):  # msgspec's errors are ValueErrors
                signs[int(path.stem.removeprefix("host-"))] = msgspec.json.decode(
                    _read(path), type=HostSign
                )
        return signs

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _write(self, data: bytes, *, is_durable: bool = False) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        temp = self.folder / f".{uuid.uuid4().hex}"
        with temp.open("xb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        return temp


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)
