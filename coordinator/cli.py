"""`coordinator`: starts runs and tells of them."""

import json
import os
import platform
import secrets
import signal
import typing
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import msgspec
from msgspec import Meta, Struct

from coordinator.config import (
    TABLES,
    BrokerConfig,
    PrivacyConfig,
    ProtectionConfig,
    RunConfig,
    StartConfig,
    make_config,
    read_toml,
)
from coordinator.cost_commands import boards, plan, profile, report
from coordinator.deployment.commands import devices, enroll, init, revoke
from coordinator.flags import existing_store, key_value, literal
from coordinator.quarantine_command import quarantine
from coordinator.retention_commands import gc, rm
from fedvit import command_line
from fedvit.errors import ConfigError
from fedvit.files import make_private, private_files

if typing.TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from coordinator.compute.process import Worker
    from coordinator.deployment.service import Service
    from coordinator.display import Display
    from coordinator.store import Store


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Dispatch federated rounds to a fleet of devices, and keep what comes of them."""


for command in (boards, devices, enroll, gc, init, plan, profile, quarantine, report, revoke, rm):
    cli.add_command(command)


# --- flags from the configuration ---------------------------------------------------------------------


def config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for every key of the configuration; an unset flag is None."""
    kinds: tuple[type[Struct], ...] = (BrokerConfig, *TABLES.values(), RunConfig)
    for kind in kinds:
        for field in reversed(msgspec.structs.fields(kind)):
            if field.name in TABLES:
                continue
            command = _flag(kind, field.name, field.type, field.default)(command)
    return command


def _flag(
    kind: type[Struct], name: str, hint: Any, default: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    text = _description(hint)
    flag = "--" + name.replace("_", "-")
    common: dict[str, Any] = {"default": None, "help": text, "show_default": False}
    if default not in (None, msgspec.NODEFAULT, ()) and not isinstance(default, bool):
        common["help"] = f"{text} [default: {default}]"
    if name in ("options", "model_options"):
        flags = ["--option", "-o"] if name == "options" else ["--model-option"]
        return click.option(*flags, name, multiple=True, metavar="KEY=VALUE", help=f"{text} Repeatable.")
    if name == "up_groups":
        return click.option("--up-group", name, multiple=True, metavar="GROUP=CODEC", help=f"{text} Repeatable.")
    if name == "variants":
        metavar = "DEVICES:KEY=VALUE"
        return click.option("--variant", name, multiple=True, metavar=metavar, help=f"{text} Repeatable.")
    if name == "classes":
        return click.option("--class", name, multiple=True, metavar="NAME", help=f"{text} Repeatable.")
    if isinstance(default, bool) and name != "pretrained":
        return click.option(f"{flag}/--no-{name.replace('_', '-')}", name, **common)
    numbers = {int: int, float: float}
    return click.option(flag, name, type=str if name == "cohort" else numbers.get(type(default), str), **common)


def _description(hint: Any) -> str:
    """The description in an annotation, also inside a union."""
    for part in (hint, *typing.get_args(hint)):
        for note in getattr(part, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                return note.description
    return ""


_NUMBER_OR_TEXT = {
    "cohort",
    "keep_rounds",
    "keep_runs",
    "pretrained",
    "deadline_s",
    "concurrency",
    *(
        field.name
        for kind in (ProtectionConfig, PrivacyConfig)
        for field in msgspec.structs.fields(kind)
        if field.default is None
    ),
}


def merge_flags(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Put the flags that were set over a file's values."""
    merged = {**values}
    tables: dict[str, type[Struct]] = {"broker": BrokerConfig, **TABLES}
    for name, value in flags.items():
        if value is None or value == ():
            continue
        if name == "variants":
            if isinstance(merged.get(name, {}), dict):  # else the file is wrong, and make_config says so
                merged[name] = _with_variants(merged.get(name, {}), value)
            continue
        if name in ("options", "model_options"):
            inside = merged.get(name, {})
            if isinstance(inside, dict):  # else the file is wrong, and make_config says so
                merged[name] = {**inside, **dict(key_value(pair) for pair in value)}
            continue
        if name in _NUMBER_OR_TEXT:
            value = literal(value)
        home = next((table for table, kind in tables.items() if name in kind.__struct_fields__), None)
        if home:
            inside = merged.get(home, {})
            if isinstance(inside, dict):
                merged[home] = {**inside, name: _by_group(inside, value) if name == "up_groups" else value}
        else:
            merged[name] = list(value) if isinstance(value, tuple) else value
    return merged


def _by_group(table: dict[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
    """A file's codecs of groups, and over them those of the flags GROUP=CODEC."""
    merged = dict(table.get("up_groups", {}))
    for text in flags:
        group, equals, codec = text.partition("=")
        if not equals:
            raise ConfigError(f"up-group {text!r} must be written GROUP=CODEC, as in 'head=none'")
        merged[group] = codec
    return merged


def _with_variants(tables: dict[str, Any], flags: tuple[str, ...]) -> dict[str, Any]:
    """A file's variants, and over them those of the flags DEVICES:KEY=VALUE."""
    merged = {**tables}
    for text in flags:
        pattern, colon, pair = text.partition(":")
        if not colon:
            example = "'jetson-*:batch_size=64'"
            raise ConfigError(f"variant {text!r} must be written DEVICES:KEY=VALUE, as in {example}")
        key, value = key_value(pair)
        inside = merged.get(pattern, {})
        if isinstance(inside, dict):
            merged[pattern] = {**inside, key: value}
    return merged


# --- start --------------------------------------------------------------------------------------------


@cli.command()
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
    from coordinator.compute.messages import Check
    from coordinator.compute.process import Worker
    from coordinator.display import choose_display
    from coordinator.retention import lock_run
    from fedvit.wire.topics import check_name

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    if resume is None:
        values = _with_federation(values)
    config = make_config(values, where)
    with ExitStack() as stack:
        worker = Worker()
        stack.callback(worker.close)
        if resume is None:
            run = check_name(name or _usual_name(config.run), "--run")
            if (out / "fedvit.db").exists():
                _check_new(_opened(out, stack), run)
            display = stack.enter_context(choose_display(quiet))
            display.line(f"run {run}: checking its configuration")
            # a run that could never begin leaves nothing behind
            server = worker.ask(Check(config=config.run, where=where))
            store = _opened(out, stack)
            store.create_run(run, msgspec.to_builtins(config.run))
            stack.callback(os.close, lock_run(out / run, run))
        else:
            store = _opened(out, stack)
            run, config = _resumed(store, resume, values, config)
            stack.callback(os.close, lock_run(out / run, run))
            display = stack.enter_context(choose_display(quiet))
            server = config.run.accelerator
        display.line(f"run {run}: {_described(config.run)}, server on {server}")
        _serve(store, out, run, config, display, worker)


def _opened(out: Path, stack: ExitStack) -> "Store":
    """The record of all runs, and none of their files open to others."""
    from coordinator.store import Store

    store = Store.in_folder(out)
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
    from coordinator.inbox import Interrupted
    from coordinator.rounds import Coordinator
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


# --- runs and show ------------------------------------------------------------------------------------


@cli.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def runs(out: Path, as_json: bool) -> None:
    """List all runs, newest first."""
    from rich.console import Console

    from coordinator.summary import overview, runs_table

    store = existing_store(out)
    try:
        listed = overview(store, out)
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(listed), indent=2))
        return
    console = Console()
    console.print(runs_table(listed, console.width))


@cli.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(run: str, out: Path, as_json: bool) -> None:
    """Print one run: accuracy by round, devices, refusals."""
    from coordinator.summary import MOST_ROUNDS, summarise

    store = existing_store(out)
    try:
        summary = summarise(store, run, accuracy_of=None if as_json else MOST_ROUNDS)
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary)).decode())
        return
    print_summary(summary)


@cli.command()
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run: str | None, out: Path, as_json: bool) -> None:
    """Say what RUN, by default the newest, is waiting for, since when and until when."""
    from coordinator.status import lines, read_status

    store = existing_store(out)
    runs = store.runs()
    if run is None and not runs:
        raise ConfigError(f"there is no run in {out}")
    record = store.run(run) if run else runs[0]
    found = read_status(out / record.id)
    if as_json:
        said = {"run": record.id, "status": record.status, **msgspec.to_builtins(found), "stale": found.is_stale()}
        click.echo(json.dumps(said, indent=2))
        return
    click.echo("\n".join(lines(record.id, record.status, found)))


def print_summary(summary: Any) -> None:
    """The tables of one run on standard output."""
    from rich.console import Console

    from coordinator.summary import report

    console = Console()
    console.print(report(summary, console.width))


# --- export -------------------------------------------------------------------------------------------


@cli.command()
@click.argument("run")
@click.option("--device", metavar="ID", help="The model that was made for this device (FedTP, pFedHN, ...).")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bundle"), help="New folder for the bundle.")
@click.option("--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Images to measure with: those in test/CLASS, or a fifth of those in CLASS.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to measure with; by default all cores.")
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(("fp32", "fp16", "int8")),
    multiple=True,
    help="Only these files. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the bundle's card.")
def export(
    run: str,
    device: str | None,
    out: Path,
    folder: Path,
    data: Path | None,
    threads: int | None,
    precisions: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the newest model of RUN as ONNX files that work without this software."""
    from coordinator.trained import trained_by
    from export.bundle.assemble import Precision
    from export.bundle.card import summary
    from export.bundle.write import Bench, check_new, write_bundle
    from fedvit.data.folder import DeviceData
    from profiles.probes.host import usable_cores

    check_new(out)
    store = existing_store(folder, "--runs")
    try:
        trained = trained_by(store, folder, run, device, f"coordinator {version('fedvit')}")
    finally:
        store.close()
    bench = Bench(
        images=DeviceData.open(data).relabelled(trained.classes).test if data else None,
        described=f"test images of {data.name}" if data else "",
        threads=threads or usable_cores(),
        machine=platform.machine(),
        cores=usable_cores(),
    )
    chosen = tuple(map(Precision, precisions)) or tuple(Precision)
    card = write_bundle(out, trained, bench, precisions=chosen, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo((out / "card.json").read_text(), nl=False)
        return
    click.echo("\n".join([f"bundle: {out}", *summary(card)]))


# --- methods ------------------------------------------------------------------------------------------


@cli.command()
@click.argument("name", required=False)
@click.option("--method", "names", multiple=True, metavar="NAME", help="List only this method. Repeatable.")
@click.option("--model", default="vit_small_images", help="Model that the figures are for.")
@click.option("--model-option", "model_pairs", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Option of the methods. Repeatable.")
@click.option("--classes", default=10, help="Classes that the model tells apart.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def methods(
    name: str | None,
    names: tuple[str, ...],
    model: str,
    model_pairs: tuple[str, ...],
    pairs: tuple[str, ...],
    classes: int,
    as_json: bool,
) -> None:
    """List all methods: what each trains, what it sends; or all about the one named NAME."""
    from rich.console import Console

    from coordinator.catalogue import catalogue, page, table

    if name and names:
        raise ConfigError(f"methods {name} shows that one method; --method {names[0]} is for the list")
    entries = catalogue(
        [name] if name else names,
        model,
        classes,
        options=dict(map(key_value, pairs)),
        model_options=dict(map(key_value, model_pairs)),
    )
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(entries)).decode())
        return
    console = Console()
    console.print(page(entries[0], model, classes) if name else table(entries, model, classes))


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "coordinator")
