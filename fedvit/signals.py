"""The end of a program that the system or a terminal asks for."""

import _thread
import signal
import threading


def stop_on_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set. Only the main thread may call this."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # the handler runs inside of the main thread, which may hold the event's lock: `set` would wait for ever
        signal.signal(number, lambda *_: _thread.start_new_thread(stop.set, ()))
    return stop
