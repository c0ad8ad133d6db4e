"""Publishers' keys, their signatures of graphs, and the files that hold both."""

import stat
from pathlib import Path
from threading import Thread

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

from fedvit.errors import ConfigError, StorageFailed
from fedvit.known_graphs import SignedGraphs, read_signatures, write_signatures
from fedvit.public_keys import format_key, parse_key
from fedvit.publisher import PublisherKey, add_signatures, is_signed_by
from tests.support.codes import has_code

GRAPH, OTHER = "blake3:" + "a" * 64, "blake3:" + "b" * 64


@pytest.fixture
def key(tmp_path: Path) -> PublisherKey:
    return PublisherKey.create(tmp_path / "publisher.key")


def test_key_is_private_and_read_again(tmp_path: Path, key: PublisherKey) -> None:
    file = tmp_path / "publisher.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert PublisherKey.read(file).public == key.public
    with pytest.raises(ConfigError, check=has_code("FV1319", str(file))):
        PublisherKey.create(file)


@given(st.binary(min_size=32, max_size=32))
def test_public_key_as_text_is_read_again(public: bytes) -> None:
    text = format_key(public)
    assert parse_key(f" {text}\n") == public
    assert len(text) == 51


@pytest.mark.parametrize("text", ["", "ed25519:", "AAAA", "ed25519:" + "A" * 42, "ed25519:" + "A" * 44, "ed25519:ä"])
def test_other_texts_are_no_public_key(text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1436")):
        parse_key(text)


def test_signature_holds_for_one_graph_and_one_publisher(tmp_path: Path, key: PublisherKey) -> None:
    signature, other = key.sign(GRAPH), PublisherKey.create(tmp_path / "other.key")
    assert is_signed_by(key.public, GRAPH, signature)
    assert not is_signed_by(key.public, OTHER, signature)
    assert not is_signed_by(other.public, GRAPH, signature)
    for wrong in (b"", signature[:-1], bytes([signature[0] ^ 1]) + signature[1:], signature + b"0"):
        assert not is_signed_by(key.public, GRAPH, wrong)


def test_signature_of_the_bare_digest_does_not_count(tmp_path: Path, key: PublisherKey) -> None:
    """The key may sign other things, which must not become graphs."""
    bare = key._key.sign(GRAPH.encode())
    assert not is_signed_by(key.public, GRAPH, bare)


def test_files_that_are_no_key_are_named(tmp_path: Path) -> None:
    file = tmp_path / "publisher.key"
    with pytest.raises(ConfigError, check=has_code("FV1319", str(file))):
        PublisherKey.read(file)
    file.write_text("no key")
    with pytest.raises(ConfigError, check=has_code("FV1319", str(file))):
        PublisherKey.read(file)
    of_a_device = ec.generate_private_key(ec.SECP256R1())
    file.write_bytes(of_a_device.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, check=has_code("FV1319", "no Ed25519 key")):
        PublisherKey.read(file)


def test_signatures_are_added_to_a_file(tmp_path: Path, key: PublisherKey) -> None:
    file = tmp_path / "signatures.txt"
    assert read_signatures(file) is None
    assert add_signatures(file, key, [GRAPH]) == 1
    assert add_signatures(file, key, [GRAPH, OTHER]) == 1
    signed = read_signatures(file)
    assert signed == SignedGraphs(key.public, {GRAPH: key.sign(GRAPH), OTHER: key.sign(OTHER)})
    assert signed.find_all({"train": OTHER, "update": GRAPH}) == (key.sign(OTHER), key.sign(GRAPH))
    assert signed.find_all({"train": "blake3:00"}) is None


def test_threads_that_sign_at_once_lose_nothing(tmp_path: Path, key: PublisherKey) -> None:
    file = tmp_path / "signatures.txt"
    threads = [Thread(target=add_signatures, args=(file, key, [f"blake3:{number}"])) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((read_signatures(file) or SignedGraphs("", {})).signatures) == 8


def test_file_of_another_publisher_is_not_changed(tmp_path: Path, key: PublisherKey) -> None:
    file, other = tmp_path / "signatures.txt", PublisherKey.create(tmp_path / "other.key")
    add_signatures(file, other, [GRAPH])
    before = file.read_bytes()
    with pytest.raises(ConfigError, check=has_code("FV1320", other.public)):
        add_signatures(file, key, [OTHER])
    assert file.read_bytes() == before
    with pytest.raises(StorageFailed):
        add_signatures(tmp_path / "missing" / "signatures.txt", key, [GRAPH])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("publisher nobody", "line 1: 'nobody' is no publisher's key"),
        (f"{GRAPH} AAAA", "line 1"),
        ("# comment\n\npublisher {key}\nblake3:00", "line 4"),
        ("publisher {key}\nblake3:00 not-base64", "line 2"),
        ("publisher {key}\npublisher {key}", "line 2"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, key: PublisherKey, text: str, named: str) -> None:
    file = tmp_path / "signatures.txt"
    file.write_text(text.replace("{key}", key.public))
    with pytest.raises(ConfigError, check=has_code("FV1320", named)):
        read_signatures(file)


def test_empty_file_has_no_signatures(tmp_path: Path) -> None:
    file = tmp_path / "signatures.txt"
    file.write_text("# nothing yet\n")
    assert read_signatures(file) is None
    write_signatures(file, SignedGraphs(format_key(bytes(32)), {}))
    assert read_signatures(file) == SignedGraphs(format_key(bytes(32)), {})
