"""The wheel of this source."""

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_own_wheel(folder: Path) -> Path:
    """Build the wheel into a folder; one process at a time, as all builds use the same folder of the source."""
    with open(ROOT / "pyproject.toml") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "build", "--quiet", "--wheel", "--installer", "uv", "--outdir", folder, ROOT]
        subprocess.run(command, check=True)
    [wheel] = folder.glob("fedvit-*.whl")
    return wheel
