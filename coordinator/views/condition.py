"""The condition of a coordinator for `/readyz`: ready or not, with each cause that keeps it from its work."""

from collections.abc import Iterator

from coordinator.record.leadership import Leadership
from coordinator.rounds.coordinator import Coordinator
from coordinator.rounds.pausing import name_cause
from coordinator.rounds.state import Pause
from coordinator.rounds.validation import MIN_FREE_BYTES
from coordinator.views.observed import Observed
from fedvit.errors import FedvitError
from fedvit.monitoring import Cause, Condition, Role
from fedvit.quantities import format_bytes
from profiles.probes.host import free_disk_bytes


def find_condition(observed: Observed) -> Condition:
    """Return the condition of a service that leads, or of the coordinator of one run.

    It is not ready if devices cannot be served at all, or if each served run is stopped.
    """
    whole = tuple(_find_causes(observed))
    runs = {run.run: find_pauses(run.coordinator) for run in observed.served()}
    stopped = tuple(Cause(pause.cause, pause.reason, run) for run, pauses in runs.items() for pause in pauses)
    role: Role = "leader" if observed.service else "run"
    return Condition(ready=not whole and not (runs and all(runs.values())), role=role, causes=whole + stopped)


def find_standby_condition(leadership: Leadership) -> Condition:
    """Return the condition of a standby, which is ready if it could take over."""
    try:
        leadership.list_services()
    except FedvitError as error:
        return Condition(ready=False, role="standby", causes=(Cause("record", str(error)),))
    return Condition(ready=True, role="standby")


def find_pauses(run: Coordinator) -> list[Pause]:
    """Return each reason why a run cannot go on now."""
    pauses = [run.state.pause] if run.state.pause else []
    if run.objects and run.objects.is_mirror and run.objects.trouble:  # nothing is accepted without its copy there
        pauses.append(Pause("object_store", run.objects.trouble))
    return pauses


def _find_causes(observed: Observed) -> Iterator[Cause]:
    """Find what stops all runs."""
    try:
        observed.store.runs.count()
    except FedvitError as error:  # alone: without the record, a coordinator gives up its broker, too
        yield Cause("record", f"the record cannot be read: {error}")
        return
    if not observed.is_connected():
        yield Cause("broker", "no connection to the broker")
    free_bytes = free_disk_bytes(observed.folder)
    if free_bytes is not None and free_bytes < MIN_FREE_BYTES:
        yield Cause("disk", f"{format_bytes(free_bytes)} are free in {observed.folder}")
    if service := observed.service:
        if service.leadership and not service.leadership.is_current():
            yield Cause("leadership", "the database has not confirmed that this service still leads")
        if trouble := service.find_trouble():
            yield Cause(name_cause(trouble), str(trouble))
