"""Adoption of a device without a token: the code of six digits binds both keys, and a stranger who relays is caught.

Device and coordinator are the real ones, over real connections; the stranger speaks the protocol to both.
"""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from queue import SimpleQueue

import pytest

from coordinator.security.adoption import AdoptionWindow, Applicant
from coordinator.security.announcing import announce_listener
from edge_client.link.adoption import ask_adoption
from edge_client.link.discovery import Coordinator, find_coordinators
from fedvit.errors import BadPayload, LinkDown, PeerRefused
from fedvit.secure.adopting import make_key_pair, make_number
from fedvit.transport.frames import receive_frame, send_frame
from fedvit.wire.adoption import (
    ADOPTION_VERSION,
    MAX_ADOPTION_BYTES,
    AnyAdoption,
    AskAdoption,
    GrantToken,
    OfferAdoption,
    RefuseAdoption,
    RevealNumber,
    commit,
    decode_adoption,
    encode_adoption,
    make_code,
    make_transcript,
)
from tests.support.adopting import LOCALHOST, WAIT_S, Device
from tests.support.codes import has_code
from tests.support.waiting import wait_until

TOKEN = "fedvit1-a-token"


@pytest.fixture
def window() -> Iterator[AdoptionWindow]:
    with AdoptionWindow("home at server", LOCALHOST, 0) as window:
        yield window


def wait_for_applicant(window: AdoptionWindow) -> Applicant:
    found = next((one for one in window.wait(time.monotonic() + WAIT_S) if one), None)
    assert found is not None, "no device asked"
    return found


def test_device_gets_its_token_after_its_code_was_typed(window: AdoptionWindow) -> None:
    device = Device(window.port)
    applicant = wait_for_applicant(window)
    agreed = device.shown.get(timeout=WAIT_S)
    assert agreed.coordinator == "home at server"
    assert (applicant.device, applicant.address) == ("pi-3", LOCALHOST)
    assert len(agreed.code) == 7
    assert applicant.has_code(agreed.code)
    assert applicant.has_code(agreed.code.replace(" ", ""))
    other = f"{(int(agreed.code.replace(' ', '')) + 1) % 10**6:06d}"
    assert not applicant.has_code(other)
    assert not applicant.has_code("")
    assert applicant.is_there()
    applicant.grant(TOKEN)
    assert device.end() == TOKEN


def test_token_is_not_used_unless_the_coordinator_accepted_the_code(window: AdoptionWindow) -> None:
    device = Device(window.port, says_yes=False)
    applicant = wait_for_applicant(window)
    applicant.grant(TOKEN)
    assert has_code("FV1341", "relay")(device.end())  # type: ignore[arg-type]


def test_devices_are_adopted_one_after_the_other(window: AdoptionWindow) -> None:
    """The second one waits for its turn, and a refused one hears why."""
    first = Device(window.port, "pi-1")
    requests = (one for one in window.wait(time.monotonic() + WAIT_S) if one)
    applicant = next(requests)
    code = first.read_code()
    second = Device(window.port, "pi-2")
    with pytest.raises(queue.Empty):
        second.shown.get(timeout=0.5)
    assert applicant.has_code(code)
    applicant.refuse("its code was not typed there")
    assert has_code("FV1342", "not typed")(first.end())  # type: ignore[arg-type]
    applicant = next(requests)
    assert applicant.device == "pi-2"
    applicant.grant(TOKEN)
    assert second.end() == TOKEN


def test_codes_differ_between_attempts(window: AdoptionWindow) -> None:
    codes = set()
    for _ in range(20):
        device = Device(window.port)
        applicant = wait_for_applicant(window)
        codes.add(device.read_code())
        applicant.refuse("next")
        device.end()
    assert len(codes) >= 19


# --- a stranger between both --------------------------------------------------------------------------


def send(link: socket.socket, message: AnyAdoption) -> None:
    send_frame(link, encode_adoption(message))


def receive(link: socket.socket) -> AnyAdoption:
    return decode_adoption(receive_frame(link, MAX_ADOPTION_BYTES, WAIT_S))


class Relay:
    """A stranger whom a device takes for its coordinator, and who asks the coordinator in the device's name.

    It has keys of its own towards both, so that it could read and replace the token.
    """

    def __init__(self, port: int, *, changes_number: bool = False) -> None:
        self._theirs, self._changes_number = port, changes_number
        self._socket = socket.create_server((LOCALHOST, 0))
        self.port = self._socket.getsockname()[1]
        self.codes: SimpleQueue[tuple[str, str]] = SimpleQueue()  # towards the device, towards the coordinator
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        device, _ = self._socket.accept()
        with closing(self._socket), device, socket.create_connection((LOCALHOST, self._theirs)) as coordinator:
            asked = receive(device)
            assert isinstance(asked, AskAdoption)
            as_device, as_coordinator = make_key_pair(), make_key_pair()
            ask = AskAdoption(ADOPTION_VERSION, asked.device, as_device.public)
            send(coordinator, ask)
            theirs = receive(coordinator)
            assert isinstance(theirs, OfferAdoption)
            number = make_number()
            commitment = commit(asked, theirs.coordinator, as_coordinator.public, number)
            offer = OfferAdoption(theirs.coordinator, as_coordinator.public, commitment)
            send(device, offer)
            revealed = receive(device)
            assert isinstance(revealed, RevealNumber)
            send(coordinator, revealed)
            answered = receive(coordinator)
            assert isinstance(answered, RevealNumber)
            to_coordinator = make_code(make_transcript(ask, theirs, revealed.number, answered.number))
            if self._changes_number:  # now that it knows everything, it looks for a number with the same code
                while True:
                    number = make_number()
                    changed = OfferAdoption(
                        offer.coordinator, offer.key, commit(asked, offer.coordinator, offer.key, number)
                    )
                    if make_code(make_transcript(asked, changed, revealed.number, number))[-1] == to_coordinator[-1]:
                        break
            send(device, RevealNumber(number))
            if not self._changes_number:
                self.codes.put((make_code(make_transcript(asked, offer, revealed.number, number)), to_coordinator))
            with suppress(LinkDown):  # the device has ended, as it noticed something
                send(device, receive(coordinator))


def test_stranger_who_relays_is_caught(window: AdoptionWindow) -> None:
    """The device's code is not the one that the coordinator expects: the operator refuses, the owner says no."""
    relay = Relay(window.port)
    device = Device(relay.port, says_yes=False)
    applicant = wait_for_applicant(window)
    code = device.read_code()
    towards_device, towards_coordinator = relay.codes.get(timeout=WAIT_S)
    assert code == towards_device
    assert applicant.has_code(towards_coordinator)
    assert applicant.has_code(code) == (towards_device == towards_coordinator)  # once in a million
    applicant.refuse("its code was not typed there")
    assert isinstance(device.end(), PeerRefused)


def test_token_for_a_stranger_is_of_no_use_to_the_device(window: AdoptionWindow) -> None:
    """Should an operator grant all the same, the device cannot read what was sealed for the stranger's key."""
    relay = Relay(window.port)
    device = Device(relay.port)
    applicant = wait_for_applicant(window)
    applicant.grant(TOKEN)
    assert has_code("FV1341", "another device")(device.end())  # type: ignore[arg-type]


def test_stranger_cannot_choose_its_number_later(window: AdoptionWindow) -> None:
    """Its commitment binds it before it knows the device's number."""
    relay = Relay(window.port, changes_number=True)
    device = Device(relay.port)
    wait_for_applicant(window)
    assert has_code("FV1341", "after it saw")(device.end())  # type: ignore[arg-type]
    assert device.shown.empty(), "no code is shown"


# --- strangers and noise ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        (2**32 - 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        (200).to_bytes(4, "big") + 200 * b"\x91",
    ],
)
def test_noise_does_not_end_the_window(window: AdoptionWindow, content: bytes) -> None:
    with socket.create_connection((LOCALHOST, window.port)) as stranger:
        stranger.sendall(content)
        stranger.shutdown(socket.SHUT_WR)
        device = Device(window.port)
        applicant = wait_for_applicant(window)
    applicant.grant(TOKEN)
    assert device.end() == TOKEN


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (AskAdoption(9, "pi-3", bytes(32)), "version 9"),
        (AskAdoption(ADOPTION_VERSION, "../pi\x1b[2J", bytes(32)), "name"),
        (RevealNumber(bytes(32)), "RevealNumber"),
    ],
)
def test_wrong_request_hears_why(window: AdoptionWindow, message: AnyAdoption, code: str) -> None:
    with socket.create_connection((LOCALHOST, window.port)) as stranger:
        send(stranger, message)
        assert not any(window.wait(time.monotonic() + 2))
        answer = receive(stranger)
    assert isinstance(answer, RefuseAdoption)
    assert code in answer.reason


def test_device_that_left_is_noticed(window: AdoptionWindow) -> None:
    with socket.create_connection((LOCALHOST, window.port)) as stranger:
        send(stranger, AskAdoption(ADOPTION_VERSION, "pi-3", make_key_pair().public))
        requests = threading.Thread(target=lambda: found.put(wait_for_applicant(window)))
        found: SimpleQueue[Applicant] = SimpleQueue()
        requests.start()
        assert isinstance(receive(stranger), OfferAdoption)
        send(stranger, RevealNumber(bytes(32)))
        assert isinstance(receive(stranger), RevealNumber)
        applicant = found.get(timeout=WAIT_S)
        assert applicant.is_there()
    requests.join()
    assert not applicant.is_there()
    applicant.refuse("nobody hears it")


def test_nobody_listens() -> None:
    with socket.create_server((LOCALHOST, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkDown, check=has_code("FV1342", f":{port}")):
        ask_adoption(LOCALHOST, port, "pi-3", lambda _: None, lambda _: True)


def test_key_that_is_none_is_refused(window: AdoptionWindow) -> None:
    """Zeros would give a secret that everybody knows."""
    with socket.create_connection((LOCALHOST, window.port)) as stranger:
        found: SimpleQueue[Applicant] = SimpleQueue()
        requests = threading.Thread(target=lambda: found.put(wait_for_applicant(window)))
        requests.start()
        send(stranger, AskAdoption(ADOPTION_VERSION, "pi-3", bytes(32)))
        receive(stranger)
        send(stranger, RevealNumber(bytes(32)))
        receive(stranger)
        applicant = found.get(timeout=WAIT_S)
        with pytest.raises(BadPayload):
            applicant.grant(TOKEN)
    requests.join()


def test_messages_are_those_of_this_version() -> None:
    """Changes need a new version."""
    ask = AskAdoption(1, "pi-3", bytes(32))
    offer = OfferAdoption("home", bytes(range(32)), commit(ask, "home", bytes(range(32)), bytes(32)))
    assert make_code(make_transcript(ask, offer, bytes(range(32)), bytes(32))) == "757 129"
    for message in (ask, offer, RevealNumber(bytes(32)), GrantToken(b"x"), RefuseAdoption("no")):
        assert decode_adoption(encode_adoption(message)) == message


# --- in the network -----------------------------------------------------------------------------------


def test_coordinators_are_found_while_they_announce_themselves() -> None:
    lines: list[str] = []
    with (
        announce_listener("home at one", LOCALHOST, 1234, lines.append) as first,
        announce_listener("home at one", LOCALHOST, 1235, lines.append) as second,
    ):
        assert first, lines
        assert second, lines
        found: list[Coordinator] = []

        def are_found() -> bool:  # an answer may be late on a busy machine, and is lost for that search
            found[:] = find_coordinators(interfaces=[LOCALHOST])
            return {one.port for one in found} >= {1234, 1235}

        wait_until(are_found, lambda: f"found {found}")
    assert {(one.name.split(" #")[0], one.host, one.port) for one in found} == {
        ("home at one", LOCALHOST, 1234),
        ("home at one", LOCALHOST, 1235),
    }
    wait_until(lambda: not find_coordinators([LOCALHOST], longest_s=0), "they are still announced")
