"""Programs, Python and others, that see another date; their timers go on as usual."""

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".cpp")


class ShiftedClock:
    """The environment of programs whose clock is wrong. Needs g++."""

    def __init__(self, folder: Path) -> None:
        self._library = folder / "shifted_clock.so"
        subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", self._library, _SOURCE], check=True)

    def environment(self, shift_s: float) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_SHIFT_S": f"{shift_s:.0f}"}
