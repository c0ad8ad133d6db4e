"""Puts the device's models into the states that the coordinator wants, and reports the actual ones."""

import logging
import time
from collections.abc import Mapping

import msgspec

from edge_client.link.device_link import DeviceLink
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.models import ModelList
from edge_client.storage.serving import ServedAnswers, read_serving, serving_file
from fedvit.errors import ConfigError, FedvitError
from fedvit.policy import ModelsPolicy
from fedvit.wire.messages import ModelReport, Models, WantedState

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of looking for changes by the process that answers pictures."""
SUMS_S = 60.0
"""Interval of reporting sums alone."""
REASON = "by the coordinator"


class ModelStates:
    """The models of a device toward its coordinator. Nothing is sent before the first message about them.

    `policy`: whether the owner lets the coordinator choose, and lets it know of drift.
    """

    def __init__(self, link: DeviceLink, storage: DeviceStorage, policy: ModelsPolicy) -> None:
        self._link = link
        self._state = storage.vault.folder.parent
        self._models = storage.models
        self._ledger = storage.ledger
        self._policy = policy
        self._wanted: Mapping[str, WantedState] = {}
        self._reported: ModelReport | None = None  # None: the coordinator has not spoken of models yet
        self._reported_at = 0.0
        self._looked_at = 0.0
        self._stamp: tuple[int, ...] = ()

    def apply(self, message: Models) -> None:
        """Put the models into the wanted states, and report the actual ones with the reason of each difference."""
        self._wanted = message.states
        try:
            reason = (
                self._apply(message.states) if self._policy.from_coordinator else "policy: from_coordinator = false"
            )
            self._report(self._models.read(), reason)
        except FedvitError as error:  # the coordinator sends the states again
            log.error("states of models not changed", extra={"reason": str(error)})

    def _apply(self, wanted: Mapping[str, WantedState]) -> str:
        """Return the reasons why states differ from the wanted ones; "": none does."""
        models, reasons = self._models, list[str]()
        canary = models.read().find("canary")
        if canary and wanted.get(canary.name) not in ("canary", "champion"):
            models.roll_back(REASON)
        listed = models.read()
        for state in ("champion", "canary"):  # in this order: a champion ends the stage of a canary
            for name in (name for name, each in wanted.items() if each == state):
                if listed.get(name):
                    models.promote(name, state, reason=REASON)
                else:
                    reasons.append(listed.withdrawn.get(name) or f"the device does not have {name}")
        for name in (name for name, state in wanted.items() if state == "retired"):
            try:
                self._retire(name)
            except ConfigError as error:  # there is no other model: pictures are still answered
                reasons.append(str(error))
        return "; ".join(reasons)

    def _retire(self, name: str) -> None:
        """Remove a model, which is no longer used from then on. Raises ConfigError if there is no other one."""
        model = self._models.read().get(name)
        if model and model.state == "champion":
            self._models.roll_back(REASON)
        elif model:
            self._models.retire(name, REASON)

    def tick(self) -> None:
        """Report what the process that answers pictures has changed; to be called often."""
        now = time.monotonic()
        if self._reported is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        try:
            self._report(self._models.read(), self._reported.reason, stamp)
        except FedvitError as error:
            log.error("models not reported", extra={"reason": str(error)})

    def _report(self, listed: ModelList, reason: str, stamp: tuple[int, ...] | None = None) -> None:
        """Send a report; if it is not an answer, only one that says something new, and sums now and then."""
        serving, used = read_serving(self._state), listed.serving()
        name = used.name if used else ""
        in_use = (name for name, state in self._wanted.items() if state in ("canary", "champion"))
        failed = next((name for name in in_use if name in listed.withdrawn), "")
        sums = serving.answered if serving and serving.name == name else ServedAnswers()
        report = ModelReport(
            self._link.instance,
            {model.name: model.state for model in listed.models},
            name,
            failed,
            (listed.withdrawn.get(failed) or reason)[:500],
            sums.pictures,
            min(float(sums.pictures), max(0.0, sums.confidence)),
            self._policy.report_drift and bool(serving and serving.name == name and serving.drift),
        )
        if stamp is not None and self._reported:
            before = {"answered": self._reported.answered, "confidence": self._reported.confidence}
            is_same = msgspec.structs.replace(report, **before) == self._reported
            if is_same and (report == self._reported or time.monotonic() - self._reported_at < SUMS_S):
                return
        self._stamp = self._read_stamp() if stamp is None else stamp
        self._reported, self._reported_at = report, time.monotonic()
        self._ledger.note_models(report)
        self._link.send(report)
        log.info("models reported", extra={"serving": name or "none", "reason": report.reason})

    def _read_stamp(self) -> tuple[int, ...]:
        try:
            changed_ns = serving_file(self._state).stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        return (*self._models.stamp(), changed_ns)
