"""Devices that join and leave: they are admitted, asked to wait, or refused."""

import logging
import time
import typing
from collections import Counter
from functools import partial
from typing import NamedTuple

import msgspec

from coordinator.config import is_region, why_no_regions, why_not_asked, why_too_old
from coordinator.record.tables import Announced
from coordinator.rounds.open_round import Missing
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.state import RunState
from coordinator.rounds.validation import check_class_list, check_hello, check_new_classes
from fedvit.errors import BadPayload, PeerRefused
from fedvit.hints import command
from fedvit.policy import UNSIGNED, Denial, Needs
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import CoordinatorState, DeviceState, Hello, Manifest, Refused, Welcome, decode_class_list

log = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0
"""Interval between printed refusals of one device; the record has all."""
MAX_CLASS_LISTS = 10
"""Class lists that one process fetches from one device: more would let the device fill the disk."""


class Arrival(NamedTuple):
    """A device that was admitted; `was_away`: it was offline before this hello."""

    device: str
    was_away: bool


class _Reported(NamedTuple):
    """A printed refusal of a device."""

    at: float  # monotonic
    reason: str
    unprinted: int  # refusals with other reasons since then


def announce(hello: Hello, what: str = "") -> Announced:
    """Return what the record keeps of a hello; unknown keys of a policy are left out.

    `what` the device does not allow, in words: unknown graphs are denied by most devices, and concern few runs.
    """
    denied = [key for key in typing.get_args(Denial) if key in hello.denies]
    return Announced(hello.software, tuple(key for key in denied if key != "methods" or what.startswith(UNSIGNED)))


class Admission:
    """The devices of one run. `take_arrivals` returns the admitted ones."""

    def __init__(self, state: RunState, exchange: BlobExchange, quarantine: Quarantine) -> None:
        self._state = state
        self._exchange = exchange
        self._quarantine = quarantine
        self._reported: dict[str, _Reported] = {}  # by device: its refusal that was printed last
        self._arrivals: list[Arrival] = []
        self._announced: dict[str, Announced] = {}  # by device, since the last `take_announced`
        self._fetching: dict[str, Hello] = {}  # by device: its newest hello, whose class list is being fetched
        self._class_lists: Counter[str] = Counter()  # by device
        self._unsigned: set[str] = set()  # devices that were set aside for graphs that nobody has signed

    def take_arrivals(self) -> list[Arrival]:
        """Devices that were admitted since the last call."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def take_announced(self) -> dict[str, Announced]:
        """Return what devices announced that were admitted since the last call."""
        announced, self._announced = self._announced, {}
        return announced

    def on_hello(self, device: str, hello: Hello) -> None:
        """Admit a device, or refuse it."""
        state = self._state
        set_here = state.store.devices.read_labels(device).get(device, {})
        hello = msgspec.structs.replace(hello, labels=hello.labels | set_here)
        if why := why_not_asked(state.config.devices_where, hello.labels):
            limits = state.limits.non_default()
            state.send(device, Welcome(hello.instance, state.epoch, f"run {state.run}: {why}", limits=limits))
            return
        if state.needs and (what := state.needs.find_denial(hello.denies, 0.0, hello.publisher)):
            self.set_aside(device, hello, what)
            return
        state.not_allowing.pop(device, None)
        if rival := state.presence.find_rival(device, hello):
            if rival.news:
                state.operator_log(rival.news)
            self._refuse(device, hello, rival.reason, final=False)
            return
        if too_old := why_too_old(state.config.min_device_version, hello.software):
            self._refuse(device, hello, too_old, final=True)
            return
        if is_region(hello.labels) and (why := why_no_regions(state.config)):
            self._refuse(device, hello, f"it is a region: {why}", final=True)
            return
        if hello.class_list is not None:
            self._fetch_classes(device, hello, hello.class_list)
            return
        try:
            check_hello(hello, state.classes)
            if not state.classes:
                check_new_classes(hello, state.presence.classes(), state.config.max_classes)
        except PeerRefused as error:
            self._refuse(device, hello, str(error), final=True)
            return
        quarantine = self._quarantine.record_of(device, state.number)
        why_not = self._quarantine.reason(quarantine) if quarantine else None
        if why_not and quarantine and quarantine.until_round is None:
            self._refuse(device, hello, why_not, final=True)
            return
        was_away = not state.presence.is_online(device)
        state.presence.arrived(device, hello)
        state.revoked.discard(device)
        self._announced[device] = announce(hello)
        if was_away:
            figures = {"train": hello.train_samples, "host": hello.profile.host}
            log.info("device joined", extra={"device": device, **figures})
            state.operator_log(f"{device} joined: {hello.train_samples} training and {hello.test_samples} test images")
        following = why_not or state.doing
        store, limits = state.config.blobs.origin, state.limits.non_default()
        state.send(device, Welcome(hello.instance, state.epoch, following, store, state.spread_s, limits))
        self._arrivals.append(Arrival(device, was_away))

    def set_aside(self, device: str, hello: Hello, what: str) -> None:
        """Do not ask a device whose policy does not allow the run; `what`: its key, in words."""
        state = self._state
        if state.presence.is_online(device):
            state.presence.dismiss(device)
            if state.opened:
                state.opened.fail(device, Missing.OFFLINE)
        if state.not_allowing.get(device) != what:
            state.not_allowing[device] = what
            state.store.devices.set_announced(state.run, {device: announce(hello, what)})
            nobody = "" if state.presence.count_online() else "; no device that is here allows it"
            state.operator_log(f"{device} does not allow {what}, which {state.config.method} needs{nobody}")
            if what.startswith(UNSIGNED) and state.signer:
                file, runs = state.signer.file, state.blobs.folder.parent.parent
                how = command(
                    "coordinator", "plan", "--run", state.run, "--device", "BOARD", "--sign", "KEY",
                    "--signatures", file, runs=runs,
                )  # fmt: skip
                state.operator_log(f"to sign them: {how}")
        if what.startswith(UNSIGNED):
            self._unsigned.add(device)
        reason = f"run {state.run}: the device's policy does not allow {what}"
        if state.offers_refused:
            state.send(device, Refused(hello.instance, reason, final=True))
        else:
            state.send(device, Welcome(hello.instance, state.epoch, reason, limits=state.limits.non_default()))

    def use_needs(self, needs: Needs) -> None:
        """Set aside the devices whose policy does not allow what the run's Program needs."""
        self._state.needs = needs
        for device in self._state.presence.online():
            hello = self._state.presence[device].hello
            if what := needs.find_denial(hello.denies, 0.0, hello.publisher):
                self.set_aside(device, hello, what)

    def admit_signed(self) -> None:
        """Ask devices that were set aside for unknown graphs for another hello once there are new signatures."""
        state = self._state
        if not (self._unsigned and state.signer and state.signer.has_new()):
            return
        if state.needs:  # from now on each device's own Program decides
            state.needs = msgspec.structs.replace(state.needs, publisher=None)
        for device in self._unsigned:
            state.send(device, CoordinatorState(state.epoch + 1, alive=True))  # a new epoch makes it send a hello
        self._unsigned.clear()

    def _fetch_classes(self, device: str, hello: Hello, described: Manifest) -> None:
        """Fetch classes that do not fit into the hello, before the device is admitted."""
        state = self._state
        try:
            check_class_list(hello, described, state.limits)
        except PeerRefused as error:
            self._refuse(device, hello, str(error), final=True)
            return
        before = self._fetching.get(device)
        self._fetching[device] = hello
        if before and before.class_list == described:
            return  # it only repeats its hello
        if not state.blobs.has(described.digest):
            self._class_lists[device] += 1
            if self._class_lists[device] > MAX_CLASS_LISTS:
                del self._fetching[device]
                reason = f"it has sent {MAX_CLASS_LISTS} different lists of classes already"
                self._refuse(device, hello, reason, final=True)
                return
        topic = state.topics.upload(device, described.digest)
        self._exchange.fetch(described, device, topic, partial(self._classes_came, device))

    def _classes_came(self, device: str, described: Manifest, error: Exception | None) -> None:
        hello = self._fetching.get(device)
        if hello is None or hello.class_list != described:
            return  # it has sent a hello with another list since
        del self._fetching[device]
        try:
            if error:
                raise error
            classes = decode_class_list(self._state.blobs.get(described.digest))
        except BadPayload as bad:
            self._refuse(device, hello, f"its list of classes: {bad}", final=True)
        else:
            self.on_hello(device, msgspec.structs.replace(hello, classes=classes, class_list=None))

    def on_state(self, device: str, device_state: DeviceState) -> bool:
        """Handle a last will or a farewell; True if the device has left."""
        if not self._state.presence.state_changed(device, device_state):
            return False
        log.info("device left", extra={"device": device})
        self._state.operator_log(f"{device} left")
        self._state.alert("device_gone", f"{device} is gone", device)
        self._drop_transfers(device)
        return True

    def _drop_transfers(self, device: str) -> None:
        self._fetching.pop(device, None)
        self._exchange.drop_peer(device)

    def expel(self, device: str, reason: str) -> None:
        """Exclude a device that takes part: nothing is awaited from it."""
        state = self._state
        state.refuse(device, "revoked", reason)
        if device in state.presence:
            state.presence.dismiss(device)
        if state.opened:
            state.opened.fail(device, Missing.REVOKED)
        self._drop_transfers(device)
        log.warning("device expelled", extra={"device": device, "reason": reason})

    def on_quarantined(self, device: str) -> None:
        """A device was put into quarantine; if only the operator can end it, the device is sent away."""
        why = f"{device}: {self._quarantine.why_not(device, self._state.number)}"
        self._state.operator_log(why)
        self._state.alert("device_refused", why, device)
        if (banned := self._banned(device)) and self._state.presence.is_online(device):
            self.send_away(device, banned[:500])

    def send_away(self, device: str, reason: str) -> None:
        """Tell a device why this run has no task for it, and forget it."""
        self._state.send(device, Refused(self._state.presence[device].hello.instance, reason, final=True))
        self._state.presence.dismiss(device)

    def _refuse(self, device: str, hello: Hello, reason: str, *, final: bool) -> None:
        self._state.refuse(device, "hello", reason)
        if final:
            self._report_refusal(device, reason)
        self._state.send(device, Refused(hello.instance, reason, final=final))

    def _report_refusal(self, device: str, reason: str) -> None:
        """Print a new reason, unless the device was refused for another one shortly before: then it is counted."""
        now, last = time.monotonic(), self._reported.get(device)
        if last and last.reason == reason:
            return
        if last and now - last.at < REPORT_EVERY_S:
            self._reported[device] = last._replace(unprinted=last.unprinted + 1)
            return
        self._reported[device] = _Reported(now, reason, 0)
        more = f" (and {last.unprinted} times before for other reasons)" if last and last.unprinted else ""
        self._state.operator_log(f"{device} was refused: {reason}{more}")
        self._state.alert("device_refused", f"{device} was refused: {reason}", device)

    def _banned(self, device: str) -> str | None:
        """The reason to send a device away: only the operator can end its quarantine."""
        record = self._quarantine.record_of(device, self._state.number)
        return None if record is None or record.until_round else self._quarantine.why_not(device, self._state.number)
