"""A full disk is told from a broken one; who was here a moment ago is waited for."""

from pathlib import Path

import pytest

from coordinator.rounds.presence import Presence
from fedvit.wire.messages import DeviceState
from tests.support.children import in_child
from tests.support.devices import hello

FULL_RECORD = """
# The record may grow by nothing; then it may again.
import pathlib, resource, sys
from coordinator.record.record import open_record
from coordinator.record.tables import RefusalRecord
from fedvit.errors import DiskFull

folder = pathlib.Path(sys.argv[1])
store = open_record(folder)
store.runs.create("r", {"method": "fedavg"})
kept = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    while True:
        store.devices.add_refusal("r", RefusalRecord(1, "a", "train", "x" * 1000))
        kept += 1
except DiskFull as error:
    print(error)
assert len(store.devices.read_refusals("r")) == kept
assert store.runs.read("r").status == "waiting"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.devices.add_refusal("r", RefusalRecord(1, "a", "train", "the disk has space again"))
assert len(store.devices.read_refusals("r")) == kept + 1
store.close()
print(len(open_record(folder).devices.read_refusals("r")) == kept + 1)
"""

FULL_BLOBS = """
import pathlib, resource, sys
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import DiskFull
from fedvit.wire.messages import Manifest

store = BlobStore(pathlib.Path(sys.argv[1]))
content = bytes(50_000)
manifest = Manifest(digest_of(content), len(content), 1024)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
for write in (lambda: store.put(content), lambda: store.receive(manifest).write(20, content[:1024])):
    try:
        write()
        print("kept")
    except DiskFull as error:
        print("full")
"""


def test_record_on_full_disk_keeps_its_content_and_can_be_used_again(tmp_path: Path) -> None:
    said, again = in_child(FULL_RECORD, tmp_path).splitlines()
    assert said.startswith(f"database sqlite:///{tmp_path / 'fedvit.db'}: ")
    assert again == "True"


def test_blobs_without_room_say_that_it_is_room_that_they_lack(tmp_path: Path) -> None:
    assert in_child(FULL_BLOBS, tmp_path).split() == ["full", "full"]


@pytest.fixture
def presence() -> Presence:
    made = Presence()
    for name in ("a", "b", "c"):
        made.arrived(name, hello(f"{name}1"))
    return made


def test_device_may_return_within_the_grace(presence: Presence) -> None:
    assert presence.may_return(60.0) == []
    presence.state_changed("a", DeviceState("a1", online=False))
    assert presence.may_return(60.0) == ["a"]
    assert presence.may_return(0.0) == []
    presence.arrived("a", hello("a1"))
    assert presence.may_return(60.0) == []


def test_after_the_link_was_lost_everybody_may_return(presence: Presence) -> None:
    presence.all_offline()
    assert presence.may_return(60.0) == ["a", "b", "c"]


def test_device_that_was_sent_away_is_not_awaited(presence: Presence) -> None:
    presence.dismiss("b")
    presence.all_offline()
    assert presence.may_return(60.0) == ["a", "c"]
