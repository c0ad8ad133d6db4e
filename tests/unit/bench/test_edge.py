"""`python -m bench cap`: a real device, watched and limited; no process stays."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from bench.cap import CapSettings, run_cap
from bench.edge import MemoryWatch, make_noise_folder, read_memory
from bench.memory_limit import FILES, Kind, MemoryLimit, limit_memory
from fedvit.data.folder import DeviceData
from fedvit.models import SMALL
from tests.support.tiny import TINY_MODEL

MEGA = 10**6
GREEDY = "import sys; held = b'x' * int(sys.argv[1]); print('held')"
TINY_CAP = CapSettings(
    limit_bytes=4000 * MEGA,
    model=SMALL,
    model_options=TINY_MODEL,
    image_size=32,
    images=16,
    options={"local_blocks": 1},
)


def take(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def greedy(size: int) -> list[str]:
    return [sys.executable, "-c", GREEDY, str(size)]


@pytest.fixture
def nobody_is_left() -> Callable[[], bool]:
    """Whether every process that the test started is gone; others of this process may run."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def check() -> bool:
        now = psutil.Process().children(recursive=True)
        return not [child for child in now if child.pid not in before and child.status() != "zombie"]

    return check


class TestCap:
    def test_a_round_under_a_limit_that_suffices(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, nobody_is_left: Callable[[], bool]
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        lines: list[str] = []
        report = run_cap(TINY_CAP, lines.append)
        figures = json.loads(msgspec.json.encode(report))
        assert (figures["completed"], figures["evaluated"], figures["reason"]) == (True, True, None)
        assert figures["limit_bytes"] == 4000 * MEGA
        assert figures["limited_by"] in ("cgroup-v1", "cgroup-v2", "rlimit")
        assert 0 < figures["peak_bytes"] <= figures["limit_bytes"]
        assert 0 < figures["peak_anonymous_bytes"] <= figures["peak_rss_bytes"]
        assert min(figures["step_s"], figures["train_s"], figures["seconds"]) > 0
        assert "limited by" in lines[0]
        assert nobody_is_left()

    def test_a_device_that_needs_more_is_reported_and_nothing_stays(self, nobody_is_left: Callable[[], bool]) -> None:
        """No Python starts with 4 MB."""
        report = run_cap(replace(TINY_CAP, limit_bytes=4 * MEGA))
        assert not report["completed"]
        assert not report["evaluated"]
        assert report["reason"]
        assert report["reason"].startswith(("the kernel killed the device", "the device ended with code"))
        assert nobody_is_left()

    def test_precision_is_an_option_of_the_method(self) -> None:
        assert "frozen_precision" not in TINY_CAP.run["options"]
        assert replace(TINY_CAP, precision="int8").run["options"]["frozen_precision"] == "int8"


class TestMemoryLimit:
    def test_who_takes_more_than_the_limit_does_not_get_it(self) -> None:
        """By whatever this machine limits memory."""
        with limit_memory(60 * MEGA) as limit:
            assert take(limit.command(greedy(10 * MEGA))).stdout == "held\n"
            assert limit.kills() == 0
            assert take(limit.command(greedy(100 * MEGA))).stdout == ""
            assert limit.kills() == (0 if limit.kind == "rlimit" else 1)

    def test_without_cgroups_it_is_an_rlimit(self, tmp_path: Path) -> None:
        """An empty folder is where cgroups should be mounted: nothing stays in it."""
        with limit_memory(60 * MEGA, mount=tmp_path) as limit:
            assert limit.kind == "rlimit"
            assert take(limit.command(greedy(10 * MEGA))).stdout == "held\n"
            assert "MemoryError" in take(limit.command(greedy(100 * MEGA))).stderr
            assert (limit.peak_bytes(), limit.kills()) == (None, 0)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("kind", ["cgroup-v1", "cgroup-v2"])
    def test_both_generations_of_cgroups(self, tmp_path: Path, kind: Kind) -> None:
        contents = {"limit": "", "swap": "", "peak": "7\n", "kills": "low 0\noom 3\noom_kill 2\n"}
        for name, content in contents.items():
            (tmp_path / FILES[kind][name]).write_text(content)
        limit = MemoryLimit(kind, 512, tmp_path)
        limit.write()
        assert (limit.peak_bytes(), limit.kills()) == (7, 2)
        written = [(tmp_path / FILES[kind][name]).read_text() for name in ("limit", "swap")]
        assert written == ["512", "0" if kind == "cgroup-v2" else "512"]


def test_the_highest_memory_is_kept() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with MemoryWatch(child.pid, "VmHWM", "RssAnon") as watch:
            while "RssAnon" not in watch.peaks:
                pass
        child.communicate(b"\n")
    assert 0 < watch.peaks["RssAnon"] <= watch.peaks["VmHWM"]
    assert read_memory(child.pid) == {}


def test_a_made_up_device_has_images_to_train_and_to_test(tmp_path: Path) -> None:
    data = DeviceData.open(make_noise_folder(tmp_path / "parts", images=16, size=8))
    assert (len(data.train), len(data.test)) == (12, 4)
    assert data.classes == ("class-0", "class-1")
