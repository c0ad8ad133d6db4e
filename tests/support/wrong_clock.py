"""Run a program with a wrong clock that is corrected while it runs, as on a board without a battery.

Only this process's wall clock is shifted (`time.time`, `datetime.now`). `time.monotonic` is unchanged, as on a real
machine when its date is set.
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
    """Shift this process's wall clock by `offset_s` for its first `right_after_s` seconds."""
    began, true_time, true_datetime = time.monotonic(), time.time, datetime.datetime

    def now_s() -> float:
        return true_time() + (offset_s if time.monotonic() - began < right_after_s else 0.0)

    class Shifted(true_datetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return true_datetime.fromtimestamp(now_s(), tz)

    time.time = now_s
    time.time_ns = lambda: int(now_s() * 1e9)
    datetime.datetime = Shifted  # type: ignore[misc]
    for module in list(sys.modules.values()):  # a forked process has modules that imported the class by name
        if getattr(module, "datetime", None) is true_datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
