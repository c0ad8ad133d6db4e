"""Another attempt of a failed run."""

from coordinator.record.record import Record
from fedvit.errors import ConfigError
from fedvit.hints import command


def retry(store: Record, run: str) -> str:
    """Let a service serve a failed run again: from its newest round, or from the queue if it has none.

    Returns what happens. Raises ConfigError if there is no such run, it has not failed, or no service served it.
    """
    record = store.runs.read(run)
    if record.status != "failed":
        raise ConfigError("FV1612", f"run {run!r} is {record.status}: only a failed run can be tried again")
    if record.submitted_at is None:
        resume = command("coordinator", "start", "--resume", run)
        raise ConfigError("FV1615", f"run {run!r} was not submitted to a service; continue it with: {resume}")
    last = store.rounds.find_last(run)
    with store.database.together():
        if not store.runs.retry(run, has_begun=last > 0):
            raise ConfigError("FV1612", f"run {run!r} has just been changed by another process")
        store.audit.add("retry", run, record.reason or "")
    return f"its service resumes it from round {last}" if last else "queued again"
