"""Work in a thread of its own."""

from __future__ import annotations

import threading


def in_thread(work):
    """A daemon thread that runs `work`, and the list that gets its result or error."""
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found
