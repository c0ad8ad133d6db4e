"""The measured speed: kept, found again, and measured anew when what decides it has changed."""

from pathlib import Path

import msgspec
import pytest

from edge_client.commands.train import speed_at_start
from edge_client.owner.speed import FILE, Conditions, find_speed, read_stored
from fedvit.errors import LinkDown
from fedvit.resources import Speed
from profiles.probes import speed as probe
from tests.support.speeds import some_speed


class Measure:
    """Counts how often it was asked; every answer is faster than the last one."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, threads: int) -> Speed:
        self.asked.append(threads)
        return some_speed(threads, 1e9 * len(self.asked))


def never(threads: int) -> Speed:
    raise AssertionError("it is known already")


def failing(threads: int) -> Speed:
    raise LinkDown("FV0004", "the engine died")


def read_speed(state: Path, threads: int) -> Speed | None:
    known = read_stored(state, threads)
    return known.speed if known else None


def test_it_is_measured_once_and_found_again(tmp_path: Path) -> None:
    measured, origin = find_speed(tmp_path, 2, Measure())
    assert measured == some_speed(2, 1e9)
    assert origin == f"measured now, stored in {tmp_path / FILE}"
    again, origin = find_speed(tmp_path, 2, never)
    assert again == measured
    assert origin == f"stored in {tmp_path / FILE}"
    fresh, _ = find_speed(tmp_path, 2, lambda threads: some_speed(threads, 2e9), fresh=True)
    assert read_speed(tmp_path, 2) == fresh == some_speed(2, 2e9)


def test_without_a_state_nothing_is_kept() -> None:
    assert find_speed(None, 1, Measure()) == (some_speed(1, 1e9), "measured now")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine", "onnxruntime-gpu"),
        ("engine_version", "1.20.1"),
        ("threads", 3),
        ("board", "Raspberry Pi 5 Model B Rev 1.0"),
        ("kernels", "other"),
    ],
)
def test_speed_is_measured_again_under_other_conditions(tmp_path: Path, name: str, value: object) -> None:
    """The file is as another engine, number of threads or board left it."""
    find_speed(tmp_path, 2, Measure())
    kept = msgspec.json.decode((tmp_path / FILE).read_bytes())
    assert name in Conditions.__struct_fields__
    kept["conditions"][name] = not kept["conditions"][name] if name == "kernels" else value
    (tmp_path / FILE).write_bytes(msgspec.json.encode(kept))
    assert read_speed(tmp_path, 2) is None
    assert find_speed(tmp_path, 2, Measure()).speed == some_speed(2, 1e9)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"speed": 5'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert read_speed(tmp_path, 1) is None
    find_speed(tmp_path, 1, Measure())
    assert read_speed(tmp_path, 1) == some_speed(1, 1e9)


def test_what_cannot_be_measured_is_said_and_not_kept(tmp_path: Path) -> None:
    assert find_speed(tmp_path, 1, failing) == (None, "not measured: the engine died")
    assert not (tmp_path / FILE).exists()


def test_a_bit_of_the_file_ends_nobody(tmp_path: Path) -> None:
    """It is measured again, or one figure of a prediction is another one."""
    find_speed(tmp_path, 2, Measure())
    raw = (tmp_path / FILE).read_bytes()
    again = 0
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        (tmp_path / FILE).write_bytes(flipped)
        again += read_speed(tmp_path, 2) is None
    assert again > len(raw) / 3


def test_probe_that_gave_up_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probe, on a device that is too slow for it: the next start does not wait for it again."""
    monkeypatch.setattr(probe, "PATIENCE_S", 0.01)
    assert speed_at_start(tmp_path, 1, measure=True) is None
    monkeypatch.setattr(probe, "measure_speed", never)
    assert speed_at_start(tmp_path, 1, measure=True) is None
    known = read_stored(tmp_path, 1)
    assert known is not None
    assert "was not done within" in known.origin
    assert "edge-client profile --fresh" in known.origin
    assert find_speed(tmp_path, 1, never) == known
    assert find_speed(tmp_path, 1, Measure(), fresh=True).speed == some_speed(1, 1e9)
    assert read_speed(tmp_path, 1) == some_speed(1, 1e9)
