"""The topic tree. At most 7 slashes; `fl1` is version 1 of the tree.

    fl1/F/srv/st           coordinator's state, and its last will
    fl1/F/all/b/BLOB       chunks for all subscribers
    fl1/F/d/DEV/dn/ctl     control to one device
    fl1/F/d/DEV/dn/b/BLOB  dedicated topic: chunks for a device that is slower than the others
    fl1/F/d/DEV/up/ctl     control from one device
    fl1/F/d/DEV/up/b/BLOB  chunks from one device
    fl1/F/d/DEV/st         the device's last will
    fl1/F/d/DEV/up/probe   without subscribers: a device measures the broker by its acknowledgements
    fl1/F/d/DEV/up/cert    a device asks for its next certificate (fedvit.wire.enrolment)
    fl1/F/d/DEV/dn/cert    and gets it
    fl1/F/enrol/TOKEN/up   a device asks for its first certificate
    fl1/F/enrol/TOKEN/dn   and gets it

The device's name is read from the topic, never from a payload: the broker can guard topics.
"""

import re
from typing import NamedTuple

from fedvit.errors import ConfigError

ROOT = "fl1"
TOPIC_BYTES = 256
"""A packet is larger than its payload by less than this: its longest topic, and its head."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


def check_name(name: str, what: str) -> str:
    """Refuse a name that cannot be one level of a topic, or a file. Raises ConfigError naming it."""
    if not is_name(name):
        shown = name if len(name) <= 80 else f"{name[:80]}..."
        raise ConfigError(
            "FV1006", f"{what} {shown!r} must be 1 to 64 letters, digits, '-' or '_', and not begin with '-'"
        )
    return name


def is_name(name: str) -> bool:
    """Return whether a name can be a level of a topic, and a file that no command takes for an option.

    >>> is_name("pi-4"), is_name("../pi"), is_name("-rf"), is_name("")
    (True, False, False, False)
    """
    return _NAME.fullmatch(name) is not None


def blob_level(digest: str) -> str:
    """The short name of a blob in a topic: 16 hex digits of its digest."""
    return digest.partition(":")[2][:16]


class Topics(NamedTuple):
    """All topics of one federation."""

    federation: str

    @property
    def coordinator_state(self) -> str:
        return f"{ROOT}/{self.federation}/srv/st"

    def broadcast(self, digest: str) -> str:
        return f"{ROOT}/{self.federation}/all/b/{blob_level(digest)}"

    def to_device(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/dn/ctl"

    def chunks_for(self, device: str, digest: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/dn/b/{blob_level(digest)}"

    def from_device(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/up/ctl"

    def upload(self, device: str, digest: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/up/b/{blob_level(digest)}"

    def device_state(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/st"

    def probe(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/up/probe"

    def renewal(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/up/cert"

    def certificate_for(self, device: str) -> str:
        return f"{ROOT}/{self.federation}/d/{device}/dn/cert"

    def enrolment(self, token: str) -> str:
        return f"{ROOT}/{self.federation}/enrol/{token}/up"

    def enrolment_reply(self, token: str) -> str:
        return f"{ROOT}/{self.federation}/enrol/{token}/dn"

    @property
    def from_all_devices(self) -> tuple[str, str]:
        """Filters for the coordinator: control messages and last wills of every device."""
        base = f"{ROOT}/{self.federation}/d/+"
        return f"{base}/up/ctl", f"{base}/st"

    def device_of(self, topic: str) -> str:
        """Return the device of a topic below `d/`, or the token of a topic below `enrol/`."""
        return topic.split("/")[3]
