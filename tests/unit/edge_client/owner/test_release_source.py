"""A package arrives whole over connections that end early, and what was fetched is not fetched again."""

import hashlib
import random
from pathlib import Path

import pytest

from edge_client.owner import release_source
from edge_client.owner.release_source import TRIES, download
from fedvit.errors import BadPayload, LinkDown
from fedvit.releases import Package
from tests.support.codes import has_code
from tests.support.cutting_server import cutting

SIZE = 7_000_000
NAME = "fedvit-edge.zip"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_source, "PAUSE_S", 0.0)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    content = random.Random(1).randbytes(SIZE)
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / NAME).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return Package(file=NAME, version="0.2.0", python="3.11", machine="x86_64", sha256=digest, size=SIZE, unpacked=SIZE)


def is_whole(target: Path, tmp_path: Path) -> bool:
    return target.read_bytes() == (tmp_path / "releases" / NAME).read_bytes()


def test_download_is_resumed_after_each_cut(tmp_path: Path, package: Package) -> None:
    target = tmp_path / "package"
    with cutting(tmp_path / "releases", 2_000_000) as server:
        download(server.url, package, target)
        starts = server.starts(NAME)
    assert starts == [0, 2_000_000, 4_000_000, 6_000_000]
    assert is_whole(target, tmp_path)


def test_cuts_without_a_piece_are_bounded_and_the_next_call_goes_on(tmp_path: Path, package: Package) -> None:
    target = tmp_path / "package"
    with cutting(tmp_path / "releases", 1000) as server:
        with pytest.raises(LinkDown, check=has_code("FV1462", "ended early")):
            download(server.url, package, target)
        assert server.starts(NAME) == [1000 * number for number in range(TRIES)]
        server.most = SIZE
        download(server.url, package, target)
        assert server.starts(NAME)[-1] == 1000 * TRIES
    assert is_whole(target, tmp_path)


def test_server_without_ranges_sends_all_again(tmp_path: Path, package: Package) -> None:
    target = tmp_path / "package"
    with cutting(tmp_path / "releases", 5_000_000, ranges=False) as server:
        target.write_bytes(b"the beginning")
        server.most = SIZE
        download(server.url, package, target)
        assert server.starts(NAME) == [len(b"the beginning")]
    assert is_whole(target, tmp_path)


@pytest.mark.parametrize("left", [b"damaged by a power cut", b"\0" * SIZE, b"\0" * (SIZE + 5)])
def test_damaged_beginning_is_fetched_anew_once(tmp_path: Path, package: Package, left: bytes) -> None:
    target = tmp_path / "package"
    target.write_bytes(left)
    with cutting(tmp_path / "releases", SIZE) as server:
        download(server.url, package, target)
        assert server.starts(NAME)[-1] == 0
    assert is_whole(target, tmp_path)


@pytest.mark.parametrize("content", [b"short", b"x" * SIZE, b"x" * (SIZE + 1)])
@pytest.mark.parametrize("left", [None, b"begun", b"y" * (SIZE - 1)])
def test_other_file_is_refused_and_removed(
    tmp_path: Path, package: Package, content: bytes, left: bytes | None
) -> None:
    target = tmp_path / "package"
    (tmp_path / "releases" / NAME).write_bytes(content)
    with cutting(tmp_path / "releases", SIZE + 1) as server:
        for source in (server.url, str(tmp_path / "releases")):
            if left is not None:
                target.write_bytes(left)
            with pytest.raises(BadPayload, check=has_code("FV1465", NAME)):
                download(source, package, target)
            assert not target.exists()


def test_folder_resumes_too(tmp_path: Path, package: Package) -> None:
    target = tmp_path / "package"
    target.write_bytes((tmp_path / "releases" / NAME).read_bytes()[:3_000_000])
    download(str(tmp_path / "releases"), package, target)
    assert is_whole(target, tmp_path)


def test_file_that_is_gone(tmp_path: Path, package: Package) -> None:
    (tmp_path / "releases" / NAME).unlink()
    with cutting(tmp_path / "releases", SIZE) as server, pytest.raises(LinkDown, check=has_code("FV1462", "404")):
        download(server.url, package, tmp_path / "package")


def test_names_of_a_url_need_not_be_ascii(tmp_path: Path, package: Package) -> None:
    (tmp_path / "releases").rename(tmp_path / "mises à jour")
    with cutting(tmp_path, SIZE) as server:
        download(f"{server.url}/mises%20à%20jour", package, tmp_path / "package")
    assert (tmp_path / "package").stat().st_size == SIZE


def test_source_that_is_no_url_is_named(tmp_path: Path, package: Package) -> None:
    with pytest.raises(LinkDown, check=has_code("FV1462", "http://[host")):
        download("http://[host", package, tmp_path / "package")
