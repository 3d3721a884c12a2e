"""The keys by which processes of a run prove to each other that they belong to it."""

from __future__ import annotations

import hashlib
import hmac
import os


def run_key(use: str, nonce: str) -> bytes:
    """Return the key of a run for one use, 32 bytes: HMAC-SHA256 of the use and the run's nonce under PACELINE_SECRET.

    Processes tell each other the nonce, in the launcher's store too, and never the secret or a key. Where
    PACELINE_SECRET is not set, whoever learns the nonce can make the key.

    Args:
        use: what the key is for; a key for one use is worth nothing for another.
        nonce: a random text that is new for each launch.
    """
    secret = os.environ.get("PACELINE_SECRET", "").encode()
    return hmac.new(secret, f"paceline {use} {nonce}".encode(), hashlib.sha256).digest()
