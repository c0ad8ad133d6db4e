"""`coordinator serve`: a service for submitted runs."""

import os
import secrets
import signal
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.config_flags import merge_flags, service_flags
from coordinator.commands.flags import record_flag, runs_flag
from coordinator.commands.metrics_page import show_metrics
from coordinator.commands.start import opened_store
from coordinator.config import RunConfig, make_service_config, read_toml
from fedvit import monitoring
from fedvit.command_line import Command, log_format_flag
from fedvit.files import private_files

if TYPE_CHECKING:
    from coordinator.compute.messages import Compute
    from coordinator.monitoring.collector import Observed


@click.command(cls=Command, examples=["coordinator serve --broker.deployment deployment --side-by-side 2"])
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--metrics", "metrics_address", **monitoring.OPTION)
@log_format_flag
@service_flags
@private_files()
def serve(
    file: Path | None,
    folder: Path,
    url: str | None,
    quiet: bool,
    metrics_address: monitoring.ListenAddress | None,
    **flags: Any,
) -> None:
    """Keep a broker and its devices connected, and serve submitted runs until stopped."""
    from coordinator.record.retention import lock_service
    from coordinator.run.display import line_display
    from coordinator.service.broker import broker_endpoint, federation_of
    from coordinator.service.service import RunService
    from fedvit.logs import configure_logging
    from fedvit.systemd import Notifier
    from fedvit.transport.mqtt import MqttTransport

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    config, broker = make_service_config(federation_of(values), where)
    notifier = Notifier.from_environment()
    if url is not None:
        from coordinator.record.store import use_database

        use_database(folder, url)
    with ExitStack() as stack:
        monitor = stack.enter_context(monitoring.monitored(metrics_address))
        store = opened_store(folder, stack)
        stack.callback(os.close, lock_service(folder))
        display = line_display(quiet)
        endpoint = stack.enter_context(broker_endpoint(broker, config.federation, folder / "broker", display.line))
        configure_logging(file=folder / "service.log", stderr=False)
        client_id = f"coordinator-{secrets.token_hex(4)}"
        link = MqttTransport(SimpleQueue(), endpoint.address, client_id, limits=broker.broker_limits())
        service = RunService(
            out=folder,
            config=config,
            store=store,
            link=link,
            endpoint=endpoint,
            display=display,
            compute_of=_worker_of,
            on_turn=notifier.alive,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        display.line(f"serving the runs of {folder}, {config.side_by_side} at a time; `coordinator submit` adds one")

        def observed() -> "Observed":
            from coordinator.monitoring.collector import Observed, Served

            def served() -> list[Served]:
                return [Served(run.coordinator, run.loop) for run in service.served() if run.coordinator]

            return Observed(link, service.is_connected, store, folder, served, {"service": service.loop})

        show_metrics(monitor, display, observed)
        notifier.ready()
        try:
            service.serve()
        finally:
            notifier.stopping()
        display.line(f"stopped; resume with: coordinator serve --runs {folder}")
    raise KeyboardInterrupt


def _worker_of(run: str, config: RunConfig, folder: Path) -> "Compute":
    from coordinator.compute.process import Worker

    worker = Worker()
    worker.begin(run=run, config=config, folder=folder, log_file=folder / "coordinator.log")
    return worker
