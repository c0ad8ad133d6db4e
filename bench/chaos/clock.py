"""A program with a wrong clock that is put right while it runs, as on a board that has no battery.

The program's own clock alone is moved (`time.time`, `datetime.now`); what counts seconds (`time.monotonic`) goes on as
it does on a real machine whose date is set.
"""

import datetime
import importlib
import sys
import time


def main() -> None:
    """Run MODULE's `main` with the remaining arguments: OFFSET_S RIGHT_AFTER_S MODULE ARGUMENTS..."""
    offset_s, right_after_s, module, *arguments = sys.argv[1:]
    shift(float(offset_s), float(right_after_s))
    sys.argv = [sys.argv[0], *arguments]
    importlib.import_module(module).main()


def shift(offset_s: float, right_after_s: float) -> None:
    """Move this process's clock, for so long."""
    began, true_time, true_datetime = time.monotonic(), time.time, datetime.datetime

    def now_s() -> float:
        return true_time() + (offset_s if time.monotonic() - began < right_after_s else 0.0)

    class Moved(true_datetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return true_datetime.fromtimestamp(now_s(), tz)

    time.time = now_s
    time.time_ns = lambda: int(now_s() * 1e9)
    datetime.datetime = Moved  # type: ignore[misc]
    for module in list(sys.modules.values()):  # those that took it by name, in a process forked from one that has them
        if getattr(module, "datetime", None) is true_datetime:
            module.datetime = Moved  # type: ignore[attr-defined]
