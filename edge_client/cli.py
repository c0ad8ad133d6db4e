"""`edge-client`: one device of a fleet. Nothing here or below imports a deep-learning framework."""

import contextlib
import copy
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from fedvit import command_line
from fedvit.blobs import digest_of
from fedvit.command_line import amount
from fedvit.errors import ConfigError, DataError
from fedvit.files import atomic_write, make_private, private_files
from fedvit.logs import configure_logging
from fedvit.quantities import counted, parse_bytes, parse_celsius, parse_flops, parse_seconds
from fedvit.resources import Budget, Speed, image_cache_bytes
from fedvit.wire.messages import MAX_LABELS
from fedvit.wire.topics import Topics, check_name
from profiles.probes.host import device_profile, fast_cores, resident_bytes, usable_cores
from profiles.probes.meter import Sensors

if TYPE_CHECKING:
    from edge_client.identity import Identity
    from fedvit.transport.mqtt import Address

log = logging.getLogger(__name__)

_LABEL = re.compile(r"([A-Za-z0-9._-]{1,64})=([A-Za-z0-9._-]{1,64})")

CLOCK_REMEDY = "set the clock: sudo timedatectl set-ntp true"


def _labels(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Raises ConfigError naming the label that cannot be used."""
    labels = dict[str, str]()
    for text in given:
        read = _LABEL.fullmatch(text)
        if read is None:
            raise ConfigError(
                f"--label {text[:200]!r} cannot be used: expected KEY=VALUE, each 1 to 64 letters, digits, '.', '_' "
                "or '-'"
            )
        key, value = read.groups()
        if labels.setdefault(key, value) != value:
            raise ConfigError(f"--label {text!r}: {key} is {labels[key]!r} already; give each key once")
    if len(labels) > MAX_LABELS:
        raise ConfigError(f"{len(labels)} labels are given with --label, a device can have {MAX_LABELS}")
    return labels


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.option(
    "--broker",
    envvar="FEDVIT_BROKER",
    metavar="HOST[:PORT]",
    help="MQTT broker; also mqtt://USER:PASSWORD@HOST:PORT and mqtts://... Or set FEDVIT_BROKER, which nobody else on "
    "this machine can read. By default where this device has joined, else localhost.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder with train/CLASS/ and test/CLASS/ images, or CLASS/ alone.",
)
@click.option("--id", "device", metavar="NAME", help="Name of this device; by default made once and kept in --state.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="Folder for personal tensors and unsent results; by default one per data folder.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads that training may use; by default one for each fast core."
)
@click.option(
    "--provider",
    default="CPUExecutionProvider",
    metavar="NAME",
    help="Execution provider of onnxruntime, e.g. CUDAExecutionProvider on a Jetson; without it the CPU is used.",
)
@click.option(
    "--federation",
    help="Which federation at the broker to join. By default the one where this device has joined, else home.",
)
@click.option("--ca-file", type=click.Path(path_type=Path), help="Certificate authority of an mqtts:// broker.")
@click.option(
    "--test-share",
    type=click.FloatRange(0, 0.9),
    default=0.2,
    help="Share of test images where the data folder has no train/ and test/.",
)
@click.option(
    "--memory-budget",
    callback=amount(parse_bytes),
    metavar="BYTES",
    help="Resident memory of the whole process that a task may take, e.g. 512MB.",
)
@click.option(
    "--flops-budget",
    callback=amount(parse_flops),
    metavar="FLOP",
    help="Work that a round's training may take, e.g. 2TFLOP.",
)
@click.option(
    "--round-deadline",
    callback=amount(parse_seconds),
    metavar="TIME",
    help="Time that a round's training may take on this device, without transfers, e.g. 10m.",
)
@click.option(
    "--upload-budget", callback=amount(parse_bytes), metavar="BYTES", help="Size of a round's result, e.g. 5MB."
)
@click.option(
    "--temperature-limit",
    callback=amount(parse_celsius),
    metavar="CELSIUS",
    help="Stop a task when the processor is hotter than this, e.g. 80.",
)
@click.option(
    "--max-temperature",
    callback=amount(parse_celsius),
    metavar="CELSIUS",
    help="Decline a task while the processor is hotter than this, e.g. 65; asked again later.",
)
@click.option(
    "--min-battery",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="Decline a task while the battery holds less and no charger is connected.",
)
@click.option("--busy-file", type=click.Path(path_type=Path), help="Decline a task while this file exists.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    envvar="FEDVIT_LABELS",
    callback=_labels,
    metavar="KEY=VALUE",
    help="What the operator says of this device, e.g. site=berlin; may be given several times. Or set FEDVIT_LABELS to "
    "several, with spaces between them.",
)
@click.option("--quiet-hours", metavar="HH:MM-HH:MM", help="Decline a task at this time of day, e.g. 22:00-06:30.")
@click.option(
    "--vault-key",
    type=click.Path(path_type=Path),
    help="Encrypt personal tensors with the key in this file, which is made where it is missing.",
)
@click.option("--profile", is_flag=True, help="Measure the compute speed at the start, where it is not known yet.")
@click.option(
    "--keep-runs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Remove the vaults of finished runs that are older than the newest N runs of this device, whenever a run has "
    "finished. By default all stay.",
)
@click.option("--once", is_flag=True, help="Leave when the run has ended instead of waiting for the next.")
@click.option("--quiet", is_flag=True, help="Say only what is wrong.")
@click.version_option(version("fedvit"))
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Train on this device's own images, which never leave it, as the coordinator asks."""
    if context.invoked_subcommand is None:
        serve(**options)


@private_files()
def serve(
    *,
    broker: str | None,
    data: Path | None,
    device: str | None,
    state: Path | None,
    threads: int | None,
    provider: str,
    federation: str | None,
    ca_file: Path | None,
    test_share: float,
    memory_budget: int | None,
    flops_budget: int | None,
    round_deadline: float | None,
    upload_budget: int | None,
    temperature_limit: float | None,
    max_temperature: float | None,
    min_battery: int | None,
    busy_file: Path | None,
    quiet_hours: str | None,
    labels: dict[str, str],
    vault_key: Path | None,
    profile: bool,
    keep_runs: int | None,
    once: bool,
    quiet: bool,
) -> None:
    """Connect the parts and take part until stopped."""
    # onnxruntime and the data readers are imported here, so that --help and typing errors answer at once
    from edge_client.agent import RETURN_SPREAD_S, Agent
    from edge_client.guard import Guard
    from edge_client.identity import Renewal
    from edge_client.readiness import Hours, Readiness
    from edge_client.runtime import Runtime
    from edge_client.vault import Vault
    from edge_client.vault_key import VaultKey
    from fedvit.blobs import BlobStore
    from fedvit.data.folder import DeviceData
    from fedvit.transport.mqtt import MqttTransport

    configure_logging(level=logging.WARNING if quiet else logging.INFO)
    if data is None:
        raise ConfigError("--data is missing: the folder with this device's images")
    readiness = Readiness(
        most_celsius=max_temperature,
        least_battery=min_battery,
        busy_file=busy_file,
        quiet_hours=Hours.parse(quiet_hours) if quiet_hours else None,
    )
    way = way_to_broker(broker, ca_file=ca_file, federation=federation, device=device, state=state)
    images = DeviceData.open(data, test_share=test_share, cache_bytes=image_cache_bytes(memory_budget))
    folder = state or default_state(data)
    lock = lock_state(folder)
    make_private(folder / kept for kept in ("blobs", "vault"))
    name = device_id(folder, way.device, data)
    vault = Vault(folder / "vault", VaultKey.load(vault_key, make=True) if vault_key else None)
    vault.check_key()
    threads = threads or fast_cores()
    budget = Budget(
        memory_bytes=memory_budget,
        flops_per_round=flops_budget,
        round_deadline_s=round_deadline,
        upload_bytes=upload_budget,
    )
    sensors = Sensors.find()
    if temperature_limit is not None and sensors.thermometer.celsius() is None:
        log.warning("no temperature sensor: the limit cannot be kept", extra={"limit_c": temperature_limit})
    speed = speed_at_start(folder, threads, measure=profile or budget != Budget())
    if memory_budget is not None:
        ready_for_memory_budget(memory_budget)
    client_id = f"{name}-{secrets.token_hex(4)}"
    transport = MqttTransport(SimpleQueue(), way.address, client_id, return_spread_s=RETURN_SPREAD_S)
    agent = Agent(
        device=name,
        federation=way.federation,
        transport=transport,
        data=images,
        vault=vault,
        blobs=BlobStore(folder / "blobs"),
        runtime=Runtime(threads, provider),
        profile=device_profile(threads, folder, speed=speed, budget=budget),
        software=version("fedvit"),
        guard=Guard(budget, temperature_limit_c=temperature_limit, sensors=sensors, owns_process=True),
        readiness=readiness,
        renewal=Renewal(way.identity, Topics(way.federation)) if way.identity else None,
        labels=labels,
        keep_runs=keep_runs,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log.info(
        "device ready",
        extra={"device": name, "train": len(images.train), "test": len(images.test), "classes": len(images.classes)},
    )
    for path, reason in images.unreadable[:5]:
        log.warning("image left out", extra={"file": str(path), "reason": reason})
    if len(images.unreadable) > 5:
        log.warning("more images left out", extra={"count": len(images.unreadable) - 5})
    if images.passed_over:
        count, first = len(images.passed_over), str(images.passed_over[0])
        log.warning("files that are not used", extra={"count": count, "first": first})
    if empty := images.without_images():
        log.warning("class folders without images", extra={"count": len(empty), "first": empty[0]})
    reason = agent.serve(stop, once=once)
    log.info("device leaves", extra={"reason": reason})
    os.close(lock)


def speed_at_start(state: Path, threads: int, *, measure: bool) -> Speed | None:
    """What is kept of an earlier measurement; only where `measure` says so it is measured now, which takes seconds."""
    from edge_client.speed import find_speed, kept_speed
    from profiles.probes.speed import measure_speed

    if speed := kept_speed(state, threads):
        log.info("compute speed is known from an earlier start")
    elif measure:
        log.info("compute speed is being measured")
        speed, origin = find_speed(state, threads, measure_speed)
        log.info("compute speed", extra={"origin": origin})
    else:
        log.info("compute speed is not known: --profile or 'edge-client profile' measures it")
    return speed


def ready_for_memory_budget(limit_bytes: int) -> None:
    """Load the engine first, so that what this process says of its memory has it in it; warn where that is too much."""
    from edge_client.guard import memory_words
    from fedvit.engine import load_engine

    load_engine()
    if (base_bytes := resident_bytes()) > limit_bytes:
        log.warning(memory_words(base_bytes, limit_bytes, base_bytes))


# --- what a device knows of itself --------------------------------------------------------------------


def as_for_training(*names: str) -> Callable[[click.Command], click.Command]:
    """Let a command take options of the program itself, too, behind its own name; there they win."""

    def add(command: click.Command) -> click.Command:
        for option in cli.params:
            if option.name in names:
                again = copy.copy(option)
                again.default = again.envvar = None  # the program's own option has read it
                command.params.append(again)
        return command

    return add


def _given(context: click.Context, own: Mapping[str, Any]) -> dict[str, Any]:
    before = context.parent.params if context.parent else {}
    return {name: before.get(name) if value is None else value for name, value in own.items()}


_DEVICE_OPTIONS = ("broker", "data", "device", "state", "federation", "ca_file", "memory_budget", "temperature_limit")


@as_for_training(*_DEVICE_OPTIONS, "threads", "flops_budget", "round_deadline", "upload_budget")
@cli.command("profile")
@click.option("--fresh", is_flag=True, help="Measure the compute speed anew, whatever is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def profile_command(context: click.Context, /, *, fresh: bool, as_json: bool, **own: Any) -> None:
    """Measure this device: speed, memory, disk, heat, power, the way to the broker. Takes seconds."""
    from edge_client.profile import Place, measure_self, table
    from profiles.probes.speed import measure_speed

    given = _given(context, own)
    way = _way(given)
    state, device = _place(given, way)
    report = measure_self(
        Place(
            state=state,
            address=way.address,
            client_id=f"{device}-{secrets.token_hex(4)}",
            probe_topic=Topics(way.federation).probe(device),
        ),
        given["threads"] or fast_cores(),
        measure_speed,
        lambda what: click.echo(f"measuring: {what}", err=True),
        budget=Budget(
            memory_bytes=given["memory_budget"],
            flops_per_round=given["flops_budget"],
            round_deadline_s=given["round_deadline"],
            upload_bytes=given["upload_budget"],
        ),
        temperature_limit_c=given["temperature_limit"],
        fresh=fresh,
    )
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else table(report))


@as_for_training(*_DEVICE_OPTIONS, "test_share", "max_temperature", "min_battery", "vault_key")
@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(context: click.Context, /, *, as_json: bool, **own: Any) -> None:
    """Find out whether this device can take part, and what to do if not.

    Exit code 0: all is well; 1: warnings; 2: errors.
    """
    from edge_client.doctor import examine, lines, worst
    from edge_client.patient import LEVELS, Finding, Patient

    given = _given(context, own)
    way = _way(given)
    state, device = _place(given, way)
    patient = Patient(
        address=way.address,
        topics=Topics(way.federation),
        device=device,
        state=state,
        data=given["data"],
        test_share=given["test_share"],
        budget=Budget(memory_bytes=given["memory_budget"]),
        temperature_limit_c=given["temperature_limit"],
        most_celsius=given["max_temperature"],
        least_battery=given["min_battery"],
        vault_key=given["vault_key"],
        identity=way.identity,
        identity_folder=identity_folder(given["state"]),
    )
    findings: list[Finding] = []
    for finding in examine(patient):
        findings.append(finding)
        if not as_json:
            click.echo(lines(finding))
    level = worst(findings)
    if as_json:
        listed = msgspec.json.encode({"worst": level, "findings": findings})
        click.echo(msgspec.json.format(listed).decode())
    sys.exit(LEVELS.index(level))


def _way(given: Mapping[str, Any]) -> "Way":
    return way_to_broker(**{name: given[name] for name in ("broker", "ca_file", "federation", "device", "state")})


def _place(given: Mapping[str, Any], way: "Way") -> tuple[Path | None, str]:
    """Where the device keeps its state, if that is known, and what it is called."""
    data: Path | None = given["data"]
    state: Path | None = given["state"] or (default_state(data) if data else None)
    if way.device:
        return state, check_name(way.device, "--id")
    file = state / "device-id" if state else None
    if file and file.is_file():
        return state, kept_device_id(file)
    return state, f"new-{secrets.token_hex(4)}"


# --- belonging to a deployment ------------------------------------------------------------------------


class Way(NamedTuple):
    """How this device reaches its coordinator."""

    address: "Address"
    federation: str
    device: str | None  # its name, if that is decided already
    identity: "Identity | None"


def way_to_broker(
    broker: str | None, *, ca_file: Path | None, federation: str | None, device: str | None, state: Path | None
) -> Way:
    """Where this device has joined, unless it is told to go elsewhere: by mqtt://, a user, or an authority.

    Raises ConfigError when name or federation are not those of its certificate.
    """
    from edge_client.identity import Identity
    from fedvit.transport.mqtt import Address

    elsewhere = ca_file is not None or (broker is not None and (broker.startswith("mqtt://") or "@" in broker))
    identity = None if elsewhere else Identity.find(identity_folder(state))
    if identity is None:
        address = Address.parse(broker or "localhost", ca_file=ca_file)
        return Way(address, check_name(federation or "home", "federation"), device, None)
    known = identity.membership
    for what, given, joined in (("--id", device, known.device), ("--federation", federation, known.federation)):
        if given not in (None, joined):
            raise ConfigError(
                f"{what} {given!r}: this device has joined as {known.device!r} in {known.federation!r}; "
                "join anew with another token, or name a broker by mqtt://"
            )
    return Way(identity.address(broker), known.federation, known.device, identity)


@as_for_training("broker", "state")
@cli.command("join")
@click.argument("token")
@click.option("--enrolment-port", type=click.IntRange(1, 65535), help="Where the broker takes tokens, if not as usual.")
@click.option("--replace", is_flag=True, help="Forget an earlier deployment of this device.")
@click.option("--patience", default="60s", callback=amount(parse_seconds), metavar="TIME", help="How long to try.")
@click.pass_context
def join_command(
    context: click.Context, /, *, token: str, enrolment_port: int | None, replace: bool, patience: float, **own: Any
) -> None:
    """Become a device of a deployment, with the one-time TOKEN of `coordinator enroll`.

    From then on no flag is needed to reach its broker.
    """
    from edge_client.identity import host_and_port
    from edge_client.join import join
    from fedvit.wire.enrolment import Token

    given = _given(context, own)
    host, port = host_and_port(given["broker"]) if given["broker"] else (None, None)
    joined = join(
        Token.parse(token),
        identity_folder(given["state"]),
        host=host,
        port=port,
        enrolment_port=enrolment_port,
        replace=replace,
        patience_s=patience,
        say=lambda line: click.echo(line, err=True),
    )
    known = joined.identity.membership
    click.echo(f"joined as {known.device!r}; certificate: {joined.identity.certificate}")
    if joined.trouble:
        click.echo(f"but a first connection failed: {joined.trouble}\n{trouble_remedy(joined.trouble)}", err=True)
    state = f" --state {given['state']}" if given["state"] else ""
    click.echo(f"next: edge-client --data FOLDER{state}")


def trouble_remedy(trouble: str) -> str:
    """What to do about a certificate that was just issued and does not work."""
    if "mismatch" in trouble or "not valid for" in trouble:
        return "use a --broker that the server's certificate is for (coordinator init says which)"
    if "expired" in trouble or "not yet valid" in trouble:
        return f"{CLOCK_REMEDY}; this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return "edge-client doctor looks closer"


# --- bundles ------------------------------------------------------------------------------------------

PRECISIONS = ("fp32", "fp16", "int8")


@cli.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bundle"), help="New folder for the bundle.")
@click.option("--data", type=click.Path(path_type=Path), help="This device's images, as for training.")
@click.option("--state", type=click.Path(path_type=Path), help="This device's state, as for training.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to measure with; by default all cores.")
@click.option(
    "--precision", "precisions", type=click.Choice(PRECISIONS), multiple=True, help="Only these files. Repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print the bundle's card.")
@click.pass_context
def export(
    context: click.Context,
    run: str,
    out: Path,
    data: Path | None,
    state: Path | None,
    threads: int | None,
    precisions: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write this device's own model of RUN as ONNX files that work without the coordinator.

    The model is the server's newest that came here with the device's personal tensors, from its vault.
    """
    from edge_client.trained import trained_here
    from export.bundle.assemble import Precision
    from export.bundle.card import summary
    from export.bundle.write import Bench, check_new, write_bundle
    from fedvit.data.folder import DeviceData

    given = context.parent.params if context.parent else {}
    data, state, threads = data or given["data"], state or given["state"], threads or given["threads"]
    folder = _state_folder(data, state)
    check_new(out)
    if not (folder / "device-id").is_file():
        raise ConfigError(f"no device has kept its state in {folder}; --state names another folder")
    images = DeviceData.open(data, test_share=given["test_share"]) if data else None
    threads = threads or fast_cores()
    trained, labelled = trained_here(
        run,
        device=kept_device_id(folder / "device-id"),
        state=folder,
        data=images,
        threads=threads,
        made_by=f"edge-client {version('fedvit')}",
        vault_key=given["vault_key"],
    )
    bench = Bench(
        images=labelled.test if labelled else None,
        described="of the device's own test images",
        threads=threads,
        machine=platform.machine(),
        cores=usable_cores(),
    )
    chosen = tuple(map(Precision, precisions)) or tuple(Precision)
    card = write_bundle(out, trained, bench, precisions=chosen, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo((out / "card.json").read_text(), nl=False)
        return
    click.echo("\n".join([f"bundle: {out}", *summary(card)]))


@cli.command()
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--bundle", type=click.Path(path_type=Path), default=Path("bundle"), help="Folder of the bundle.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Which file answers; by default fp32.")
@click.option("--top", type=click.IntRange(min=1), default=1, help="Name so many of the likeliest classes.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to use; by default all cores.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.pass_context
def predict(
    context: click.Context,
    images: tuple[Path, ...],
    bundle: Path,
    precision: str | None,
    top: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Name what is on each of IMAGES, with its probability, by the model in a bundle; of a folder all images in it."""
    from export.bundle.assemble import Precision
    from export.bundle.read import Bundle

    given = context.parent.params if context.parent else {}
    model = Bundle.open(
        bundle, Precision(precision) if precision else None, threads or given["threads"] or fast_cores()
    )
    listed: list[dict[str, Any]] = []
    failed = 0
    listed_images = [file for path in images for file in _images_of(path)]
    for path in listed_images:
        try:
            answers = model.answer(path, top)
        except DataError as error:
            failed += 1
            listed.append({"image": str(path), "error": str(error)})
            click.echo(f"edge-client: {error}", err=True)
            continue
        listed.append({"image": str(path), "answers": [answer._asdict() for answer in answers]})
        if not as_json:
            named = ", ".join(f"{answer.label} {answer.probability:.3f}" for answer in answers)
            click.echo(f"{path}: {named}")
    if as_json:
        click.echo(json.dumps(listed, indent=2))
    if failed:
        raise DataError(f"{failed} of {counted(len(listed_images), 'image')} cannot be read")


def _images_of(path: Path) -> list[Path]:
    """The image itself, or all images below a folder, by name. Raises DataError where there is none in it."""
    if not path.is_dir():
        return [path]
    from fedvit.data.images import is_image_name

    found = sorted(file for file in path.rglob("*") if file.is_file() and is_image_name(file.name))
    if not found:
        raise DataError(f"{path}: there is no image in this folder")
    return found


# --- room on the disk ---------------------------------------------------------------------------------

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


@as_for_training("data", "state")
@cli.command()
@click.option(
    "--keep-runs", type=click.IntRange(min=1), metavar="N", help="The newest runs, whose vaults stay; by default 1."
)
@_DRY_RUN
@_JSON
@click.pass_context
def gc(context: click.Context, /, *, keep_runs: int | None, dry_run: bool, as_json: bool, **own: Any) -> None:
    """Remove the vaults of finished runs but the newest, blobs that no run needs, and files that were half written.

    A run whose result was not acknowledged stays, and so does one whose end this device did not hear.
    """
    from edge_client.retention import collect, lines, locked

    given = _given(context, {**own, "keep_runs": keep_runs})
    state = _there(given)
    with locked(state, lock_state):
        report = collect(state, keep_runs=given["keep_runs"] or 1, dry_run=dry_run)
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else lines(report))


@as_for_training("data", "state")
@cli.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Also a run whose end this device did not hear.")
@_DRY_RUN
@_JSON
@click.pass_context
def rm(
    context: click.Context, /, *, runs: tuple[str, ...], force: bool, dry_run: bool, as_json: bool, **own: Any
) -> None:
    """Remove the vaults of RUNS, the newest too. Never one whose result was not acknowledged."""
    from edge_client.retention import lines, locked, remove_runs

    state = _there(_given(context, own))
    with locked(state, lock_state):
        report = remove_runs(state, list(dict.fromkeys(runs)), force=force, dry_run=dry_run)
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else lines(report))


def _state_folder(data: Path | None, state: Path | None) -> Path:
    if folder := state or (default_state(data) if data else None):
        return folder
    raise ConfigError("--data or --state is missing: where this device's images or its state are")


def _there(given: Mapping[str, Any]) -> Path:
    """The state folder of a device that has kept something already."""
    folder = _state_folder(given["data"], given["state"])
    if not (folder / "vault").is_dir():
        raise ConfigError(f"no device has kept a run in {folder}; --state names another folder")
    return folder


# --- the device's state -------------------------------------------------------------------------------


def state_base() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedvit"


def identity_folder(state: Path | None) -> Path:
    """Where `join` keeps key and certificate: with the state where that is given, else one place per user."""
    return (state or state_base()) / "identity"


def default_state(data: Path) -> Path:
    """Where a device that was not told otherwise keeps its state: one folder per data folder."""
    place = data.resolve()
    return state_base() / f"{place.name}-{hashlib.blake2b(str(place).encode(), digest_size=4).hexdigest()}"


def lock_state(folder: Path) -> int:
    """Make sure that no other process uses this state. Raises ConfigError naming the one that does."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"state folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(handle, 32, 0).decode().strip()
        remedy = "stop that process, or choose another folder with --state"
        raise ConfigError(f"state folder {folder} is in use by process {owner}: {remedy}") from None
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name on it
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def device_id(folder: Path, wanted: str | None, data: Path) -> str:
    """The device's lasting name: given, kept from before, or made from the data folder's name."""
    file = folder / "device-id"
    if wanted is None and file.is_file():
        return kept_device_id(file)
    if wanted is None:
        stem = re.sub("[^A-Za-z0-9_-]", "-", data.resolve().name).lstrip("-")
        wanted = f"{stem[:48] or 'device'}-{secrets.token_hex(2)}"
    check_name(wanted, "--id")
    content = f"{wanted}\n{digest_of(wanted.encode())}\n".encode()
    if not (file.is_file() and file.read_bytes() == content):  # a device with a full disk can start again
        atomic_write(file, content)
    return wanted


def kept_device_id(file: Path) -> str:
    """The name in a file: its first line; the second, where there is one, is the name's digest. Raises ConfigError."""
    name, _, digest = file.read_text(errors="replace").strip().partition("\n")
    if digest and digest != digest_of(name.encode()):
        raise ConfigError(f"{file} is damaged: start once with --id and this device's name")
    return check_name(name, f"device id in {file}")


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "edge-client")
