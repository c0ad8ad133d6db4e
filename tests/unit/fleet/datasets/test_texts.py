"""Plays and LEAF's JSON, and the device folders that are made of them."""

import json
from pathlib import Path

import msgspec
import pytest

from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, DataError
from fleet.datasets import read_dataset
from fleet.datasets.texts import Texts, read_texts
from fleet.partition import DealSettings, deal
from tests.support.codes import has_code

PLAY = "Title of it\n\nA:\nOne.\nTwo.\n\nB:\nNo: not\n\nA:\nThree.\n"


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def join_said(texts: Texts) -> dict[str, str]:
    return {
        name: "".join(char for char, at in zip(texts.characters, texts.sources, strict=True) if at == source)
        for source, name in enumerate(texts.source_names)
    }


def test_speeches_of_a_role_are_joined(tmp_path: Path) -> None:
    texts = read_dataset(str(write(tmp_path / "play.txt", PLAY)), 3)
    assert isinstance(texts, Texts)
    assert join_said(texts) == {"A": "One.\nTwo.\nThree.\n", "B": "No: not\n"}
    assert (texts.settings.context, texts.settings.stride) == (3, 3)
    assert texts.dataset == "play.txt"


def test_text_without_roles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=has_code("FV2005")):
        read_texts(write(tmp_path / "notes.txt", "Some words: and more.\n"))


def leaf(folder: Path, **users: list[tuple[str, str]]) -> Path:
    data = {user: {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]} for user, pairs in users.items()}
    folder.mkdir(exist_ok=True)
    file = folder / f"{'-'.join(users)}.json"
    file.write_text(json.dumps({"users": list(users), "num_samples": [1], "user_data": data}))
    return file


def test_samples_of_leaf_stay_what_they_are(tmp_path: Path) -> None:
    """A device reads exactly LEAF's samples: context and following character, none across two samples."""
    leaf(tmp_path / "leaf", romeo=[("abc", "d"), ("xyz", "d"), ("abc", "x"), ("yyy", "z")])
    leaf(tmp_path / "leaf", juliet=[("aaa", "b")])
    texts = read_texts(tmp_path / "leaf")
    assert join_said(texts) == {"juliet": "aaab", "romeo": "abcdxyzdabcxyyyz"}
    deal(texts, "natural", 1, tmp_path / "parts", DealSettings(options={"min_samples": 8}, test_share=0.25))
    data = DeviceData.open(tmp_path / "parts" / "device-0")
    names = data.classes
    ends = ["".join(names[code] for code in row) for row in data.train.labels]
    assert ends == ["bcd", "yzd", "bcx"]
    assert len(data.test) == 1


@pytest.mark.parametrize(
    "content",
    [
        '{"users": ["a"]}',
        "no json",
        '{"users": ["a"], "user_data": {}}',
        '{"users": ["a"], "user_data": {"a": {"x": ["ab", "a"], "y": ["c", "c"]}}}',
        '{"users": ["a"], "user_data": {"a": {"x": ["a\\ud800"], "y": ["c"]}}}',
        '{"other": ' + "[" * 100_000,
    ],
    ids=["no data", "no json", "no user", "lengths", "half a character", "depth"],
)
def test_file_that_is_not_leafs_says_why(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, check=has_code("FV2005")):
        read_texts(write(tmp_path / "leaf.json", content))


def test_context_of_leaf_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2005")):
        read_texts(leaf(tmp_path, romeo=[("abc", "d")]), 80)


def test_natural_partition_gives_a_role_to_each_device(tmp_path: Path) -> None:
    play = write(tmp_path / "play.txt", "A:\n" + "ab " * 20 + "\n\nB:\nshort\n\nC:\n" + "xyz" * 20 + "\n")
    summary = deal(str(play), "natural", 2, tmp_path / "parts", DealSettings(options={"min_samples": 50}, size=4))
    assert [device.source for device in summary.devices] == ["A", "C"]
    assert summary.size == 4
    stored = msgspec.json.decode((tmp_path / "parts" / "partition.json").read_bytes())
    assert stored["devices"][1]["source"] == "C"
    first, second = (DeviceData.open(tmp_path / "parts" / f"device-{number}") for number in range(2))
    assert set(first.classes) == {"a", "b", "U+0020", "U+000A"}
    assert sum(summary.devices[1].train.values()) == 45
    assert sum(summary.devices[1].test.values()) == 16
    assert len(second.test) == 3, "the last fifth, in samples of 4 characters and the one that follows"


def test_natural_partition_says_how_many_sources_suffice(tmp_path: Path) -> None:
    play = str(write(tmp_path / "play.txt", PLAY))
    with pytest.raises(ConfigError, check=has_code("FV2003")):
        deal(play, "natural", 2, tmp_path / "parts", DealSettings(options={"min_samples": 10}))
    with pytest.raises(ConfigError, check=has_code("FV2003")):
        deal(play, "natural", 2, tmp_path / "parts", DealSettings(size=5))
    assert not (tmp_path / "parts").exists()


def test_partition_of_single_samples_is_refused_for_text(tmp_path: Path) -> None:
    play = str(write(tmp_path / "play.txt", PLAY))
    with pytest.raises(ConfigError, check=has_code("FV2003")):
        deal(play, "iid", 2, tmp_path / "parts")


def test_natural_partition_needs_sources() -> None:
    from fleet.datasets.digits import read_digits

    with pytest.raises(ConfigError, check=has_code("FV2003")):
        deal(read_digits(8), "natural", 2, Path("nowhere"))
