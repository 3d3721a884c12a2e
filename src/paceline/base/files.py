"""Files that are written completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file in one move: readers see the old content or the new, also after a power
    cut.
    """
    write_text(path, json.dumps(document, indent=1) + "\n")


def remove(path: Path) -> None:
    """Remove a file or folder if it exists. If that fails, the next launch removes it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in one move.

    The text may have file names whose bytes are no UTF-8; such bytes are written as escapes.
    """
    temp = temp_beside(path)
    try:
        with temp.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        remove(temp)


def temp_beside(path: Path) -> Path:
    """Return a hidden name in the same folder that no other thread or process of this machine
    uses.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
