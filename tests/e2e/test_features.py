"""A device with frozen layers keeps their features: later rounds cost little, and nothing depends on the file."""

from pathlib import Path

import pytest

from tests.support.programs import CONFIG, Stage, wait_for

ROUNDS = 5
HEAD = {
    **CONFIG,
    "method": "fed_head",
    "options": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "variants": {},
    "rounds": ROUNDS,
    "devices": 2,
}


def find_features(stage: Stage, device: str) -> list[Path]:
    return list((stage.folder / "state" / device).glob("features/*"))


def list_flops(stage: Stage, device: str) -> list[int]:
    rows = stage.query(
        f"select json_extract(use, '$.flops') from results where kind = 'train' and device = '{device}' order by round"
    )
    return [flops for (flops,) in rows]


def read_expected_flops(stage: Stage, device: str) -> tuple[int, int | None]:
    """Return the predicted FLOPs of a device's first round, and of later ones if they differ."""
    [row] = stage.query(
        "select distinct json_extract(content, '$.flops'), json_extract(content, '$.later_flops') from tasks"
        f" join expectations on tasks.expected = expectations.id where device = '{device}'"
    )
    return row


def test_features_are_kept_encrypted_survive_a_kill_and_damage_and_can_be_forbidden(stage: Stage) -> None:
    coordinator = stage.coordinator(values=HEAD)
    key = str(stage.folder / "key")
    device = stage.device("device-0", "--vault-key", key)
    stage.device("device-1", "--no-keep-features")
    wait_for(lambda: len(list_flops(stage, "device-0")) >= 2, "two rounds")
    device.kill()
    device.wait()
    [file] = find_features(stage, "device-0")
    assert file.stat().st_mode & 0o777 == 0o600
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = stage.device("device-0", "--vault-key", key)
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(again, "device-0") == 0, stage.log("device-0")
    assert find_features(stage, "device-1") == []
    assert file.read_bytes() != bytes(content), "the damaged record was made again"
    kept, made = list_flops(stage, "device-0"), list_flops(stage, "device-1")
    assert len(kept) == len(made) == ROUNDS
    assert len(set(made)) == 1
    assert max(kept[1:]) < 0.3 * kept[0], "one damaged image of many"
    assert 0 < min(kept) < 0.01 * kept[0]
    assert read_expected_flops(stage, "device-1") == (made[0], None)
    first, later = read_expected_flops(stage, "device-0")
    assert first == pytest.approx(kept[0], rel=0.03)
    assert later is not None
    assert 0 < later < 0.01 * first
