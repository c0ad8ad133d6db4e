import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedvit.errors import StorageFailed
from fedvit.files import FileGroup, atomic_write, make_private, private_files
from tests.support.children import in_child
from tests.support.codes import has_code
from tests.support.waiting import wait_until


def test_a_file_is_made_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    atomic_write(path, b"content")
    assert path.read_bytes() == b"content"
    assert os.listdir(path.parent) == ["file"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"a long old content")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_an_empty_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "PENDING", b"")
    assert (tmp_path / "PENDING").read_bytes() == b""


def test_a_reader_who_has_the_old_file_open_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    with open(path, "rb") as reader:
        atomic_write(path, b"new")
        assert reader.read() == b"old"


def test_on_a_full_disk_the_old_content_stays(tmp_path: Path) -> None:
    """The child may write 10 000 bytes per file: the kernel cuts the write of 50 000, as on a full disk."""
    path = tmp_path / "file"
    code = """
import resource, sys
from pathlib import Path
from fedvit.errors import StorageFailed
from fedvit.files import atomic_write
path = Path(sys.argv[1])
atomic_write(path, b"old")
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    atomic_write(path, bytes(50_000))
except StorageFailed as error:
    print(error)
"""
    said = in_child(code, path)
    assert said.startswith(f"cannot write {path} (50000 bytes): File too large")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]  # nothing is left that would fill the disk further


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(tmp_path))):
        atomic_write(tmp_path / "file", b"content")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(tmp_path))):
        atomic_write(tmp_path / "a" / "file", b"content")
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_a_group_of_files_is_there_when_it_is_committed(tmp_path: Path) -> None:
    group = FileGroup()
    contents = {tmp_path / f"{number % 3}" / f"file-{number}": bytes([number]) * 1000 for number in range(50)}
    for path, content in contents.items():
        group.write(path, content[:400], content[400:])
    assert not any(path.exists() for path in contents)
    group.commit()
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == contents
    group.commit()
    group.abandon()
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == contents


def test_nothing_stays_of_a_group_that_is_abandoned(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_bytes(b"mine")
    group = FileGroup()
    group.write(tmp_path / "file", b"content")
    with pytest.raises(StorageFailed, check=has_code("FV0010", str(tmp_path))):
        group.write(tmp_path / "in-the-way" / "file", b"content")
    group.abandon()
    assert sorted(os.listdir(tmp_path)) == ["in-the-way"]


def test_killed_writer_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    """A child writes 200 kB of one letter, then of the next, until it is killed; a reader never sees two letters,
    and not a byte too few."""
    path = tmp_path / "file"
    code = """
import sys
from pathlib import Path
from fedvit.files import atomic_write
while True:
    for letter in b"abcdefgh":
        atomic_write(Path(sys.argv[1]), bytes([letter]) * 200_000)
"""
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
        try:
            seen: set[int] = set()

            def saw_three() -> bool:
                if path.exists():
                    content = path.read_bytes()
                    assert (len(content), len(set(content))) == (200_000, 1)
                    seen.add(content[0])  # noqa: B023 - called now
                return len(seen) >= 3  # noqa: B023

            wait_until(saw_three, "the child does not write", pause_s=0.0)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        content = path.read_bytes()
        assert (len(content), len(set(content))) == (200_000, 1)


# --- files that nobody else reads ---------------------------------------------------------------------


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*")}


@pytest.mark.usefixtures("usual_umask")
def test_private_files_are_the_owners_alone_by_every_way_to_make_them(tmp_path: Path) -> None:
    """Ours, a library's, and those of a process that was started; afterwards files are as usual again."""
    with private_files():
        atomic_write(tmp_path / "blobs" / "one", b"features")
        sqlite3.connect(tmp_path / "db").execute("create table t (a)").connection.close()
        subprocess.run(["touch", str(tmp_path / "log")], check=True)
    atomic_write(tmp_path / "report", b"for all")
    assert modes(tmp_path) == {"blobs": 0o700, "one": 0o600, "db": 0o600, "log": 0o600, "report": 0o644}


@pytest.mark.usefixtures("usual_umask")
def test_private_files_end_with_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_files():
        raise ZeroDivisionError
    atomic_write(tmp_path / "report", b"for all")
    assert modes(tmp_path) == {"report": 0o644}


@pytest.mark.usefixtures("usual_umask")
def test_make_private_takes_the_rights_of_others_and_leaves_the_owners(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "db").touch()
    (tmp_path / "read-only").touch(0o444)
    make_private([tmp_path / "run", tmp_path / "db", tmp_path / "read-only", tmp_path / "missing"])
    assert modes(tmp_path) == {"run": 0o700, "db": 0o600, "read-only": 0o400}
