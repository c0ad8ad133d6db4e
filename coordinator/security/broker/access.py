"""Access rules, as mosquitto reads them: the topics of a device, and nothing of any other device.

No topic can be both written and read by devices: a device that heard itself could fill the broker's queues.
A device's name is the one in its certificate (%u), never an id that the client chose.
"""

from collections.abc import Iterable

from fedvit.wire.topics import ROOT


def device_rules(federation: str, coordinator: str, revoked: Iterable[str]) -> str:
    """The rules of the listener that asks for a certificate.

    A revoked name is denied everything, also over a connection that is already open: rules for one user precede the
    rules for all users.
    """
    base = f"{ROOT}/{federation}"
    lines = [f"user {coordinator}", f"topic readwrite {base}/#"]
    for name in sorted(revoked):
        lines += [f"user {name}", "topic deny #"]
    lines += [
        f"pattern read {base}/all/#",
        f"pattern read {base}/srv/st",
        f"pattern read {base}/d/%u/dn/#",
        f"pattern write {base}/d/%u/up/#",
        f"pattern write {base}/d/%u/st",
    ]
    return "\n".join(lines) + "\n"


def enrolment_rules(federation: str) -> str:
    """The rules of the listener for devices that have a token, and no certificate yet; the token's id is the user."""
    base = f"{ROOT}/{federation}/enrol/%u"
    return f"pattern write {base}/up\npattern read {base}/dn\n"
