"""`coordinator sign` makes a publisher's key and signs files; `plan --sign` signs the graphs that boards would get."""

import json
from pathlib import Path

import pytest

from fedvit.blobs import digest_of
from fedvit.known_graphs import read_signatures
from fedvit.publisher import PublisherKey, is_signed_by
from tests.unit.coordinator.test_cli import refused, said

SMALL = ["--model-option", "depth=2", "--model-option", "width=16", "--classes", "3", "--device", "rpi5-8"]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublisherKey:
    monkeypatch.chdir(tmp_path)
    public = said("sign", "publisher.key", "--new").output.split()[0]
    key = PublisherKey.read(tmp_path / "publisher.key")
    assert key.public == public
    return key


def test_files_are_signed(key: PublisherKey) -> None:
    Path("train.onnx").write_bytes(b"a graph")
    said("sign", "publisher.key", "train.onnx")
    signed = read_signatures(Path("signatures.txt"))
    assert signed is not None
    assert signed.signatures == {digest_of(b"a graph"): key.sign(digest_of(b"a graph"))}


def test_graphs_of_a_plan_are_signed(key: PublisherKey) -> None:
    for method in ("fedavg", "fedbfpt"):
        plan = ["plan", "--method", method, *SMALL, "--sign", "publisher.key", "--json"]
        assert json.loads(said(*plan).stdout)
    signed = read_signatures(Path("signatures.txt"))
    assert signed is not None
    assert len(signed.signatures) > 3
    assert all(is_signed_by(key.public, digest, one) for digest, one in signed.signatures.items())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["publisher.key", "--new"], "publisher.key exists already"),
        (["missing.key", "train.onnx"], "missing.key"),
        (["publisher.key", "missing.onnx"], "missing.onnx"),
        (["publisher.key", "publisher.key", "--signatures", "publisher.key"], "publisher.key, line 1"),
    ],
)
def test_wrong_files_are_named(key: PublisherKey, arguments: list[str], complaint: str) -> None:
    before = Path("publisher.key").read_bytes()
    assert complaint in refused("sign", *arguments)
    assert Path("publisher.key").read_bytes() == before


@pytest.mark.parametrize("arguments", [["new.key"], ["new.key", "--new", "train.onnx"]])
def test_either_a_key_or_graphs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = said("sign", *arguments)
    assert result.exit_code == 2
    assert "name graphs to sign, or --new to make a key" in result.output
    assert not list(tmp_path.iterdir())
