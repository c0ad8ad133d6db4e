"""What `coordinator status` says; that a coordinator writes it is tested where rounds end."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.record.liveness import STALE_S, STATUS_FILE
from coordinator.rounds.status import AtWork, BackingOff, LiveStatus, lines, read_status
from fedvit.errors import ConfigError

RESUME = "coordinator start --resume r"


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def local(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().strftime("%H:%M:%S")


def status(age_s: float = 0.0) -> LiveStatus:
    working = AtWork(
        device="pi-1", round=2, kind="train", state="working", done_steps=3, total_steps=40, since=at(-60), until=at(90)
    )
    fetching = AtWork(
        device="pi-2", round=2, kind="train", state="fetching", done_steps=0, total_steps=0, since=at(-60), until=at(90)
    )
    resting = BackingOff(device="pi-3", reason="quiet hours until 06:30", until=at(3600))
    return LiveStatus(
        at=at(-age_s), doing="round 2/9: train", waiting_for=[working, fetching], backing_off=[resting], online=3
    )


def test_status_names_awaited_devices_and_their_deadlines() -> None:
    told = status()
    pi_1, pi_2 = told.waiting_for
    assert lines("r", "running", told, RESUME) == [
        "run r: running; round 2/9: train",
        f"  pi-1: train of round 2, working 3/40, since {local(pi_1.since)}, until {local(pi_1.until)}",
        f"  pi-2: train of round 2, fetching, since {local(pi_2.since)}, until {local(pi_2.until)}",
        f"  pi-3: declined (quiet hours until 06:30), asked again after {local(told.backing_off[0].until)}",
    ]


def test_status_of_a_run_that_is_not_served() -> None:
    told = status(age_s=STALE_S + 5)
    assert lines("r", "interrupted", told, RESUME) == [
        f"run r: interrupted; not served since {local(told.at)}: {RESUME}"
    ]
    assert lines("r", "finished", status(age_s=1000), RESUME) == ["run r: finished"]


BROKEN = b'{"at": "2026-13-01", "doing": "", "waiting_for": [], "resting": [], "online": 0}'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no coordinator has served the run"),
        (b"{", "cannot be read"),
        (b"[1]", "Expected `object`"),
        (BROKEN, "month must be"),
    ],
)
def test_a_status_that_is_missing_or_broken_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / STATUS_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_status(tmp_path)
    assert str(tmp_path) in str(refused.value)
