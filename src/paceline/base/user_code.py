"""The lines of a traceback that are in the user's code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

# Not sys.prefix: it can be /usr, and a container's code is often somewhere in /usr/src.
_NOT_USERS = (
    f"{Path(__file__).resolve().parent.parent}{os.sep}",
    "<",
    *(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "scripts")),
)


def user_frames(error: BaseException) -> tuple[str, list[traceback.FrameSummary]]:
    """Return file:line of the deepest frame that is neither Paceline's nor a library's, and all
    such frames.

    If there is none, return "" and all frames.
    """
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        user = [frame for frame in frames if is_users(frame.filename)]
        if user:
            return f"{user[-1].filename}:{user[-1].lineno}", user
        cause = cause.__cause__
    return "", list(traceback.extract_tb(error.__traceback__))


def is_users(filename: str) -> bool:
    """Whether a frame's file is the user's: neither Paceline's nor a library's, and not code made
    from text.
    """
    return not (
        filename.startswith(_NOT_USERS)
        or "site-packages" in filename
        or "dist-packages" in filename
    )
