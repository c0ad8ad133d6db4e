"""`coordinator start`: one run, from its configuration to its end."""

import os
import secrets
import signal
import typing
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import config_flags, merge_flags
from coordinator.config import RunConfig, StartConfig, make_config, read_toml
from fedvit.errors import ConfigError
from fedvit.files import make_private, private_files
from fedvit.method_names import METHOD_NAMES
from fedvit.wire.topics import check_name

if typing.TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from coordinator.compute.process import Worker
    from coordinator.deployment.service import Service
    from coordinator.record.store import Store
    from coordinator.run.display import Display


@click.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags win over it.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="newest",
    default=None,
    metavar="[RUN]",
    help="Go on with an interrupted run; without a name the newest.",
)
@click.option(
    "--run", "name", metavar="NAME", default=None, help="Name of the new run; by default date, time and method."
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@config_flags
@private_files()
def start(file: Path | None, out: Path, resume: str | None, name: str | None, quiet: bool, **flags: Any) -> None:
    """Start a broker if none is given, wait for devices, and train."""
    from coordinator.run.display import choose_display

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    if resume is None:
        values = _with_federation(values)
    config = make_config(values, where)
    if config.run.method not in METHOD_NAMES:
        raise ConfigError(f"{where}: unknown method {config.run.method!r}, known are {', '.join(METHOD_NAMES)}")
    with ExitStack() as stack:
        if resume is None:
            run = check_name(name or _usual_name(config.run), "--run")
            if (out / "fedvit.db").exists():
                _check_new(_opened(out, stack), run)
            display = stack.enter_context(choose_display(quiet))
            display.line(f"run {run}: checking its configuration")
            # a run that could never begin leaves nothing behind
            worker, server = _checked(config.run, where, stack)
            store = _opened(out, stack)
            store.create_run(run, msgspec.to_builtins(config.run))
            _lock(out / run, run, stack)
        else:
            store = _opened(out, stack)
            run, config = _resumed(store, resume, values, config)
            _lock(out / run, run, stack)
            display = stack.enter_context(choose_display(quiet))
            worker, server = _worker(stack), config.run.accelerator
        display.line(f"run {run}: {_described(config.run)}, server on {server}")
        _serve(store, out, run, config, display, worker)


def _checked(config: RunConfig, where: str, stack: ExitStack) -> "tuple[Worker, str]":
    """The process that computes, and the device of torch that it takes. Raises ConfigError."""
    from coordinator.compute.messages import Check

    worker = _worker(stack)
    return worker, worker.ask(Check(config=config, where=where))


def _lock(folder: Path, run: str, stack: ExitStack) -> None:
    """No other process serves the run. Raises ConfigError."""
    from coordinator.record.retention import lock_run

    stack.callback(os.close, lock_run(folder, run))


def _worker(stack: ExitStack) -> "Worker":
    """The process that computes, which begins to import torch."""
    from coordinator.compute.process import Worker

    worker = Worker()
    stack.callback(worker.close)
    return worker


def _opened(out: Path, stack: ExitStack) -> "Store":
    """The record of all runs, and none of their files open to others."""
    from coordinator.record.store import Store

    store = Store.in_folder(out, check=False)  # the run reads it as a whole while it waits for devices
    stack.callback(store.close)
    make_private([*out.glob("fedvit.db*"), *(out / record.id for record in store.runs())])
    return store


def _described(config: RunConfig) -> str:
    return f"{config.method} on {config.model}, {config.rounds} rounds"


def _with_federation(values: dict[str, Any]) -> dict[str, Any]:
    """A deployment says how its federation is called; a run need not."""
    settings = values.get("broker")
    folder = settings.get("deployment") if isinstance(settings, dict) else None
    if not isinstance(folder, str) or "federation" in values:
        return values
    from coordinator.deployment.folder import Deployment

    return {**values, "federation": Deployment.open(Path(folder)).settings.federation}


def _usual_name(config: RunConfig) -> str:
    return f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{config.method}-{secrets.token_hex(2)}"


def _check_new(store: "Store", run: str) -> None:
    """Raises ConfigError when there is a run of that name."""
    if any(record.id == run for record in store.runs()):
        raise ConfigError(f"run {run!r} exists already; go on with it by --resume {run}, or choose another --run")


def _resumed(store: "Store", which: str, values: dict[str, Any], config: StartConfig) -> tuple[str, StartConfig]:
    """An unfinished run with the configuration it began with. Raises ConfigError when there is none."""
    if set(values) - {"broker"}:
        changed = sorted(set(values) - {"broker"})
        raise ConfigError(f"--resume goes on with the run's own configuration; {changed[0]!r} cannot be changed")
    if which == "newest":
        unfinished = [record for record in store.runs() if record.status != "finished"]
        if not unfinished:
            raise ConfigError("no run to resume: every run here is finished, or there is none")
        record = unfinished[0]
    else:
        record = store.run(which)
        if record.status == "finished":
            raise ConfigError(f"run {which!r} is finished; there is nothing to resume")
    return record.id, StartConfig(make_config(record.config, f"run {record.id}").run, config.broker)


def _serve(store: "Store", out: Path, run: str, config: StartConfig, display: "Display", worker: "Worker") -> None:
    """Connect the parts and run; every part is taken down again, whatever happens."""
    from coordinator.broker import start_broker
    from coordinator.run.coordinator import Coordinator
    from coordinator.run.inbox import Interrupted
    from fedvit.logs import configure_logging
    from fedvit.transport.mqtt import Address, MqttTransport

    folder = out / run
    log_file = folder / "coordinator.log"
    configure_logging(file=log_file, stderr=False)
    worker.begin(run=run, config=config.run, folder=folder, log_file=log_file)
    with ExitStack() as stack:
        settings = config.broker
        ca_file = Path(settings.ca_file) if settings.ca_file else None
        watch: Callable[[], None] = lambda: None  # noqa: E731 - replaced where the broker is ours
        if settings.deployment is not None:
            service = stack.enter_context(_deployed(config, display.line))
            address = service.address
            kind = service.broker.kind if service.broker else "one that runs by itself"
            display.line(f"broker: {kind} at {address}, for devices of {settings.deployment} alone")

            def watch() -> None:
                service.watch()
                while not service.revoked.empty():
                    coordinator.expel(service.revoked.get(), "its certificate was revoked")
        elif settings.broker in ("auto", "mosquitto", "embedded"):
            password = settings.password or os.environ.get("FEDVIT_BROKER_PASSWORD")
            broker = start_broker(settings.broker, folder / "broker", settings.listen, settings.port, password)
            stack.callback(broker.stop)
            address = broker.address
            display.line(f"broker: {broker.kind} at {address.host}:{address.port}")
            if password is not None:
                display.line("broker: one password for all, and nothing is encrypted; `coordinator init` does better")

            def watch() -> None:
                if done := broker.tend():
                    display.line(f"broker: {done}")
        else:
            address = Address.parse(settings.broker, ca_file=ca_file)
            display.line(f"broker: {address.host}:{address.port}")
        transport = MqttTransport(SimpleQueue(), address, client_id=f"coordinator-{secrets.token_hex(4)}")
        coordinator = Coordinator(
            run=run,
            config=config.run,
            transport=transport,
            store=store,
            folder=folder,
            display=display,
            compute=worker,
            watch=watch,
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: coordinator.stop())
        try:
            coordinator.serve()
        except Interrupted:
            display.line(f"interrupted; go on with: coordinator start --resume {run} --out {out}")
            raise KeyboardInterrupt from None
        display.line(f"finished; tensors: {folder / 'model.safetensors'}, log: {log_file}")


def _deployed(config: StartConfig, say: Callable[[str], None]) -> "AbstractContextManager[Service]":
    """The broker and the enrolment desk of a deployment. Raises ConfigError when they do not go with the run."""
    from coordinator.deployment.folder import Deployment
    from coordinator.deployment.service import served
    from fedvit.transport.mqtt import Address

    settings = config.broker
    deployment = Deployment.open(Path(settings.deployment or ""))
    federation = deployment.settings.federation
    if config.run.federation != federation:
        raise ConfigError(f"federation = {config.run.federation!r}: the deployment is for {federation!r}")
    if settings.broker == "embedded":
        raise ConfigError("broker = 'embedded' cannot ask for certificates; a deployment needs mosquitto")
    if settings.password is not None or settings.ca_file is not None:
        raise ConfigError("password and ca_file do not go with a deployment: it has certificates of its own")
    theirs = None
    if settings.broker not in ("auto", "mosquitto"):
        given = Address.parse(settings.broker)
        theirs = deployment.address_at(given.host, given.port)
    return served(deployment, say, broker=theirs)
