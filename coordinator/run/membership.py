"""Devices that come and go: who is let in, who is told to wait, and who is sent away."""

import logging
from collections.abc import Callable

from coordinator.config import why_not_asked
from coordinator.run.collector import ResultCollector
from coordinator.run.presence import Presence
from coordinator.run.quarantine import Quarantine
from coordinator.run.scheduler import TaskScheduler
from coordinator.run.state import RunState
from coordinator.run.validation import check_hello, check_new_classes
from fedvit.errors import PeerRefused
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import DeviceState, FromCoordinator, Hello, Refused, Welcome

log = logging.getLogger(__name__)


class Membership:
    """One run's. `tell(device, message)` sends; `epoch()` is that of the link, which welcomes carry."""

    def __init__(
        self,
        *,
        course: RunState,
        presence: Presence,
        quarantine: Quarantine,
        results: ResultCollector,
        dispatch: TaskScheduler,
        exchange: BlobExchange,
        tell: Callable[[str, FromCoordinator], None],
        epoch: Callable[[], int],
    ) -> None:
        self._course = course
        self._presence = presence
        self._quarantine = quarantine
        self._results = results
        self._dispatch = dispatch
        self._exchange = exchange
        self._tell = tell
        self._epoch = epoch

    def on_hello(self, device: str, hello: Hello) -> None:
        if why := why_not_asked(self._course.config.devices_where, hello.labels):
            self._tell(device, Welcome(hello.instance, self._epoch(), f"run {self._course.run}: {why}"))
            return
        if rival := self._presence.rival(device, hello):
            where = rival.hello.profile.host
            reason = f"a device with id {device!r} is online already (on {where}); choose another with --id"
            self._refuse(device, hello, reason, final=False)
            return
        try:
            check_hello(hello, self._course.classes)
            if not self._course.classes:
                others = [self._presence[name].hello.classes for name in self._presence.online() if name != device]
                brought = {name for classes in others for name in classes}
                check_new_classes(hello, brought, self._course.config.max_classes)
        except PeerRefused as error:
            self._refuse(device, hello, str(error), final=True)
            return
        if banned := self._banned(device):
            self._refuse(device, hello, banned, final=True)
            return
        fresh = not self._presence.is_online(device)
        self._presence.arrived(device, hello)
        if fresh:
            log.info(
                "device joined", extra={"device": device, "train": hello.train_samples, "host": hello.profile.host}
            )
            self._course.say(f"{device} joined: {hello.train_samples} training and {hello.test_samples} test images")
        following = self._quarantine.why_not(device, self._course.number) or self._course.doing
        self._tell(device, Welcome(hello.instance, self._epoch(), following))
        self._dispatch.give_again(device, anew=fresh)

    def on_state(self, device: str, state: DeviceState) -> None:
        if self._presence.state_changed(device, state) and not state.online:
            log.info("device left", extra={"device": device})
            self._course.say(f"{device} left")
            self._exchange.drop_peer(device)
            self._results.device_left(device)

    def expel(self, device: str, reason: str) -> None:
        """The device may not take part any more: nothing is awaited from it."""
        opened = self._results.opened
        self._results.refuse(device, "revoked", reason, opened.number if opened else None)
        if device in self._presence:
            self._presence.dismiss(device)
        if opened:
            opened.fail(device, reason)
        self._exchange.drop_peer(device)
        self._results.device_left(device)
        log.warning("device expelled", extra={"device": device, "reason": reason})

    def put_away(self, device: str) -> None:
        """A quarantine began: who has to wait long is sent away."""
        self._course.say(f"{device}: {self._quarantine.why_not(device, self._course.number)}")
        if (banned := self._banned(device)) and self._presence.is_online(device):
            self.send_away(device, banned[:500])

    def send_away(self, device: str, reason: str) -> None:
        """It is told why there is nothing for it in this run."""
        self._tell(device, Refused(self._presence[device].hello.instance, reason, final=True))
        self._presence.dismiss(device)

    def _refuse(self, device: str, hello: Hello, reason: str, *, final: bool) -> None:
        self._results.refuse(device, "hello", reason)
        self._tell(device, Refused(hello.instance, reason, final=final))

    def _banned(self, device: str) -> str | None:
        """Why a device need not wait: nothing but the operator ends its quarantine."""
        record = self._quarantine.record_of(device, self._course.number)
        return None if record is None or record.until_round else self._quarantine.why_not(device, self._course.number)
