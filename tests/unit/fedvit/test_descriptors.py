"""No file or connection can be opened any more: that is said, and passes."""

import resource
from pathlib import Path

from fedvit.descriptors import are_used_up, how_many, raise_limit
from tests.support.children import in_child

USED_UP = """
import pathlib, resource, sys
import numpy as np
from coordinator.record.record import open_record
from fedvit.blobs import BlobStore, is_whole
from fedvit.errors import TooManyOpenFiles
from fedvit.tensors import map_tensors, pack

folder = pathlib.Path(sys.argv[1])
blobs, file = BlobStore(folder / "blobs"), folder / "tensors"
digest = blobs.put(b"content").digest
open_record(folder).close()
file.write_bytes(pack({"a": np.zeros(3, np.float32)}))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
path = blobs.path(digest)
for attempt in (lambda: blobs.put(b"more"), lambda: is_whole(path, digest), lambda: open_record(folder)):
    try:
        attempt()
        print("nothing")
    except TooManyOpenFiles as error:
        print(error)
try:
    map_tensors(file)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
blobs.put(b"more"), open_record(folder), map_tensors(file)
print("there are some again")
"""

LINKS = """
import resource, threading, time
from queue import SimpleQueue
from fedvit.transport.base import Disconnected
from fedvit.transport.address import Address
from fedvit.transport.mqtt import MqttTransport
from coordinator.security.broker.process import claim_port

def reasons():
    event = transport.inbox.get(timeout=480)
    return event.reason if isinstance(event, Disconnected) else ""

transport = MqttTransport(SimpleQueue(), Address("127.0.0.1", claim_port()), client_id="c")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
transport.open()
transport.bulk_up()
while "too many open files" not in reasons():
    pass
print("said")
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
while "refused" not in reasons():
    pass
print(*sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("bulk-c")))
transport.close()
"""


def test_used_up_descriptors_are_distinguished_from_missing_or_damaged_files(tmp_path: Path) -> None:
    *said, mapped, again = in_child(USED_UP, tmp_path).splitlines()
    assert len(said) == 3
    for line in said:
        assert "are open, 3 are allowed" in line
        assert "ulimit -n" in line
    assert "Too many open files" in mapped
    assert again == "there are some again"


def test_links_outlive_used_up_descriptors() -> None:
    """Control messages' link says why it is not there, and tries again; that of blobs, too."""
    assert in_child(LINKS).splitlines() == ["said", "bulk-c.b"]


def test_the_limit_is_raised_to_what_is_granted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_open_is_counted_without_opening_anything() -> None:
    count = int(how_many().split()[0])
    with open("/dev/null"), open("/dev/null"):
        assert int(how_many().split()[0]) == count + 2
        assert not are_used_up()
