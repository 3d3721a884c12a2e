"""What a rank says of its main thread, while other threads wait too."""

from __future__ import annotations

import threading

from paceline.base.waiting import Waiting


def test_another_thread_s_wait_says_nothing_of_the_main_thread():
    """It ends just as the main thread begins to wait, and is slow to say so."""
    waiting, goes_on, main_waits = Waiting(), threading.Event(), threading.Event()
    words: list[bool] = []

    def tell(waits: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            goes_on.set()
            main_waits.wait(10)
        words.append(waits)

    def wait() -> None:
        with waiting:
            waiting.tell = tell
        goes_on.set()

    other = threading.Thread(target=wait)
    other.start()
    goes_on.wait(10)
    with waiting:
        main_waits.set()
        other.join(10)
        assert words[-1] is True
    assert words[-1] is False
