"""README's "On real devices", literally, with each device in the home of a user of its own."""

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from coordinator.security.broker.process import claim_port
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from tests.support.brokers import mosquitto
from tests.support.readme import (
    ENVIRONMENT,
    copy_pictures,
    enroll_device,
    fill,
    read_commands,
    start_command,
    start_deployment,
    wait_for_round,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PASSWORD = "correct-horse"


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(cache))


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    """Homes of three users with a few handwritten digits each."""
    digits = read_digits(size=32)
    write_device_folders(
        digits, partition("iid", digits.labels[:300], 3, seed=3), tmp_path / "parts", test_share=0.2, seed=3
    )
    homes = [tmp_path / name for name in ("one", "two", "three")]
    for number, home in enumerate(homes):
        copy_pictures(tmp_path / "parts" / f"device-{number}" / "train", home)
    return homes


def test_broker_that_is_there(homes: list[Path], tmp_path: Path) -> None:
    start, device = read_commands()[0]
    with mosquitto(tmp_path, password=PASSWORD) as broker, ExitStack() as devices:
        host = f"127.0.0.1:{broker.address.port}"
        names = {"USER": broker.address.user or "", "PASSWORD": PASSWORD, "HOST": host}
        with start_command(fill(start, names), tmp_path) as log:
            for home in homes[:2]:
                devices.enter_context(start_command(fill(device, names), tmp_path, home))
            wait_for_round(tmp_path, log, 2)


def test_deployment(homes: list[Path], tmp_path: Path) -> None:
    *_, doctor, train, page = read_commands()[1]
    ports = {"8883": claim_port(), "8884": claim_port()}
    with start_deployment(tmp_path, "127.0.0.1", ports) as log, ExitStack() as devices:
        for number, home in enumerate(homes, start=1):
            environment = ENVIRONMENT | {"HOME": str(home)}
            with enroll_device(tmp_path, f"pi-{number}") as join:
                subprocess.run(join.split(), env=environment, check=True)
            said = subprocess.run(
                ["bash", "-c", doctor], env=environment, capture_output=True, text=True, check=False
            ).stdout
            assert "error" not in said, said
            devices.enter_context(start_command(train, tmp_path, home))
        listen = f"--listen 127.0.0.1:{claim_port()}"
        with start_command(f"{page} {listen}", tmp_path, homes[0]) as shown:
            file = wait_until(lambda: re.search(r"(/\S+page-\d+\.url)", shown.read_text()), "the page says no address")
            opener = build_opener(HTTPCookieProcessor())
            with opener.open(Path(file[1]).read_text().strip()) as answer:
                assert "pi-1" in answer.read().decode()
        wait_for_round(tmp_path, log, 3)
