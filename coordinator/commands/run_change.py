"""`coordinator cancel`, `pause`, `unpause` and `retry`: change one run."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
from coordinator.rounds.service.run_requests import RunAct
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


def _make_command(act: RunAct, field: str, text: str) -> click.Command:
    """Make the command that changes a run; as JSON it prints the run's name and one field of the answer."""

    @click.command(act, cls=Command, help=text, examples=[f"coordinator {act} RUN"])
    @click.argument("run")
    @runs_flag
    @json_flag
    @private_files()
    def change(run: str, folder: Path, as_json: bool) -> None:
        with open_runs(folder, writes=True) as runs:
            changed = runs.change(run, act)
        if as_json:
            click.echo(msgspec.json.encode({"run": changed.run, field: getattr(changed, field)}).decode())
        else:
            click.echo(f"run {changed.run}: {changed.done}")

    return change


cancel = _make_command(
    "cancel",
    "status",
    "Cancel RUN: at once if it is queued, within seconds if it is being served. It cannot be resumed.",
)
pause = _make_command(
    "pause",
    "paused_at",
    "Pause RUN: it finishes its open round, and opens none until `coordinator unpause RUN`, also after a restart.",
)
unpause = _make_command(
    "unpause",
    "paused_at",
    "Let the paused RUN open rounds again. A run whose process has ended needs `coordinator start --resume`, too.",
)
retry = _make_command(
    "retry",
    "status",
    "Let a service serve the failed RUN again: from its newest round, or from the queue if it has none.",
)
