"""Adoptions of a deployment: the token for a device whose code was typed, and a window that pages open and look at."""

import threading
import time
from dataclasses import dataclass, replace

from coordinator.security.adoption import AdoptionWindow, Applicant
from coordinator.security.announcing import announce_listener
from coordinator.security.folder import Deployment, make_token
from fedvit.errors import ConfigError, FedvitError
from fedvit.transport.address import Address
from fedvit.wire.adoption import ADOPTION_PORT
from fedvit.wire.enrolment import Token

TOKEN_S = 600.0
"""Validity of the token that a device gets."""
TRIES = 3
"""Codes that may be typed for one device."""
RELAYED = "If its screen does show this code, somebody relays between both: refuse here, and answer no there"
LOOK_EVERY_S = 0.2


def open_window(deployment: Deployment, listen: str) -> AdoptionWindow:
    """Listen for devices at HOST[:PORT]. Raises ConfigError."""
    try:
        address = Address.parse(f"mqtt://{listen}")
    except ConfigError as error:
        raise ConfigError("FV1342", f"cannot listen at {listen!r}: it is not HOST or HOST:PORT") from error
    name = f"{deployment.settings.federation} at {deployment.address.host}"
    return AdoptionWindow(name, address.host, address.port if ":" in listen else ADOPTION_PORT)


def grant(applicant: Applicant, deployment: Deployment, *, replaces: bool, policy: str = "") -> Token:
    """Make a token, and send it to the device. If that fails, the device is refused; raises ConfigError and LinkDown.

    Only the operator reads the reason, which may name folders of this machine.
    """
    try:
        token = make_token(deployment, applicant.device, TOKEN_S, replaces=replaces, policy=policy)
        applicant.grant(token.text())
    except FedvitError:
        applicant.refuse("it could not be admitted; the coordinator's operator reads why")
        raise
    return token


@dataclass(frozen=True)
class AdoptionState:
    """The window, as a page shows it."""

    closes_at: float | None = None  # monotonic; None while no device may ask
    place: str = ""  # address at which devices may ask
    note: str = ""  # why the window is not announced in the network; empty if it is
    device: str = ""  # name of the device that shows a code; empty if none does
    device_address: str = ""


class AdoptionService:
    """Opens a window for a time, and admits a device after its code was typed. Any thread may call it.

    One device asks at a time. It waits until somebody has decided, it has gone, or the window has closed.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._deciding = threading.Lock()
        self._applicant: Applicant | None = None
        self._tries = 0
        self.state = AdoptionState()

    def open(self, listen: str, window_s: float) -> None:
        """Let devices ask at HOST[:PORT] for `window_s` seconds. Raises ConfigError."""
        with self._deciding:
            if self.state.closes_at is not None:
                raise ConfigError("FV1342", f"devices may ask already, at {self.state.place}")
            window = open_window(self._deployment, listen)
            self.state = AdoptionState(time.monotonic() + window_s, f"{window.host}:{window.port}")
        threading.Thread(target=self._serve, args=(window,), name="adoption", daemon=True).start()

    def close(self) -> None:
        """Let no device ask any more; the one that does is refused."""
        with self._deciding:
            if self.state.closes_at is not None:
                self.state = replace(self.state, closes_at=0.0)

    def admit(self, typed: str, *, replaces: bool) -> str:
        """Send the device that asks its token if this is its code; return its name.

        Raises ConfigError if no device asks, if it shows another code, or if it may not have its name; LinkDown if it
        has gone. After TRIES wrong codes it is refused.
        """
        with self._deciding:
            applicant = self._find_applicant()
            if applicant.has_code(typed):
                self._forget()
                grant(applicant, self._deployment, replaces=replaces)
                return applicant.device
            self._tries += 1
            if self._tries == TRIES:
                self._forget(f"{TRIES} wrong codes were typed there")
            raise ConfigError("FV1341", f"{typed!r} is not the code of {applicant.device}. {RELAYED}")

    def refuse(self) -> str:
        """Refuse the device that asks; return its name. Raises ConfigError if none does."""
        with self._deciding:
            applicant = self._find_applicant()
            self._forget("its code was not typed there")
            return applicant.device

    def _find_applicant(self) -> Applicant:
        if self._applicant is None:
            raise ConfigError("FV1342", "no device asks: type `edge-client join` on it")
        return self._applicant

    def _forget(self, refusal: str | None = None) -> None:
        """End the wait of the device that asks; tell it why it is refused, if it is."""
        applicant, self._applicant = self._applicant, None
        self.state = replace(self.state, device="", device_address="")
        if applicant and refusal:
            applicant.refuse(refusal)

    def _is_open(self) -> bool:
        return time.monotonic() < (self.state.closes_at or 0.0)

    def _serve(self, window: AdoptionWindow) -> None:
        try:
            with window, announce_listener(window.coordinator, window.host, window.port, self._note):
                for applicant in window.wait(self.state.closes_at or 0.0):
                    if applicant:
                        self._wait_for_decision(applicant)
                    if not self._is_open():
                        break
        finally:
            self.state = AdoptionState()

    def _wait_for_decision(self, applicant: Applicant) -> None:
        with self._deciding:
            self._applicant, self._tries = applicant, 0
            self.state = replace(self.state, device=applicant.device, device_address=applicant.address)
        while True:
            with self._deciding:
                if self._applicant is not applicant:
                    return
                if not (self._is_open() and applicant.is_there()):
                    self._forget("nobody typed its code there in time")
                    return
            time.sleep(LOOK_EVERY_S)

    def _note(self, line: str) -> None:
        with self._deciding:
            self.state = replace(self.state, note=line)
