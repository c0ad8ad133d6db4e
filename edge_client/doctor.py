"""Whether this device can take part, found out before a run needs it: each finding with what to do about it.

A check is a function here and a line in CHECKS.
"""

import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator

from edge_client.keys import check_identity, check_vault_key
from edge_client.patient import DAY_S, LEVELS, Finding, Level, Patient
from edge_client.vault import Vault
from fedvit.blobs import ALGORITHM, is_whole
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload, ConfigError, DataError, LinkDown, StorageFailed
from fedvit.files import folder_bytes
from fedvit.quantities import counted, format_bytes
from fedvit.transport.mqtt import Address, in_words, tls_context
from fedvit.wire.transfer import CHUNK_MESSAGE_BYTES
from profiles.probes.battery import battery
from profiles.probes.broker import PROBE_BYTES, BrokerProbe
from profiles.probes.coordinator import find_coordinator
from profiles.probes.host import free_disk_bytes, host, installed_engine
from profiles.probes.thermal import Brakes, Thermometer

LEAST_MEMORY_BYTES, LITTLE_MEMORY_BYTES = 100_000_000, 300_000_000
"""The program takes 50 MB while it waits and 100 MB with the smallest models; a ViT-Tiny trains in about 250."""
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = 100_000_000, 1_000_000_000
"""The weights of a ViT-B are 343 MB, and an older round's may lie beside them."""
HOT_C = 80.0
"""From here on a Raspberry Pi slows down; most others a little later."""
YEARS_AHEAD = 20
ENGINE_S = 60.0
MOST_NAMED = 5
CONNECT_S = 5.0
SMALLER_BYTES = (65_536, 16_384, 4_096)
"""What is tried where a whole chunk does not come through, to say what would."""

_ENGINE_CHILD = """
from fedvit.engine import give_back, load_engine
load_engine()
give_back()  # runs a graph
import onnxruntime
print(onnxruntime.__version__)
"""


def examine(patient: Patient) -> Iterator[Finding]:
    """All findings, as they are found."""
    for check in CHECKS:
        yield from check(patient)


def worst(findings: list[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def check_engine(patient: Patient) -> Iterator[Finding]:
    """A process of its own loads the engine and runs a graph: a wrong build dies of a signal."""
    name, version = installed_engine()
    if name is None:
        remedy = "pip install onnxruntime (64-bit Linux with glibc 2.28 or newer and Python 3.11 or newer)"
        yield Finding(check="engine", level="error", what="onnxruntime is not installed", remedy=remedy)
        return
    called = f"{name} {version}"
    command = [patient.interpreter, "-c", _ENGINE_CHILD]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ENGINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(check="engine", level="error", what=f"{called} cannot be tried: {in_words(error)}")
        return
    if done.returncode == 0:
        yield Finding(check="engine", level="ok", what=f"{called} runs")
    elif done.returncode == -signal.SIGILL:
        yield Finding(
            check="engine",
            level="error",
            what=f"{called} dies of an illegal instruction: it is built for newer processors than this one",
            remedy="onnxruntime 1.25 to 1.27 run on an emulated Cortex-A72 (ARMv8.0: Raspberry Pi 3, 4, Zero 2 W), "
            "1.21.0 does not: pip install 'onnxruntime>=1.25,<1.28'",
        )
    else:
        what = f"{called} does not run: {_how_it_ended(done.returncode, done.stderr)}"
        remedy = "install it anew: pip install --force-reinstall onnxruntime"
        yield Finding(check="engine", level="error", what=what, remedy=remedy)


def check_memory(patient: Patient) -> Iterator[Finding]:
    here, limit = host(patient.root), patient.budget.memory_bytes
    available, whole = here.available_bytes, here.ram_bytes
    if available is None or whole is None:
        yield Finding(check="memory", level="ok", what="not measured")
        return
    what = f"{format_bytes(available)} of {format_bytes(whole)} are available"
    stop_others = "stop other programs, or use a smaller model (coordinator start --model)"
    if limit is not None and limit > whole:
        remedy = f"give --memory-budget less than {format_bytes(whole)}"
        yield Finding(
            check="memory", level="error", what=f"{what}, the memory budget is {format_bytes(limit)}", remedy=remedy
        )
    elif available < LEAST_MEMORY_BYTES:
        yield Finding(check="memory", level="error", what=what, remedy=stop_others)
    elif limit is not None and limit > available:
        what += f", the memory budget is {format_bytes(limit)}"
        yield Finding(check="memory", level="warning", what=what, remedy=f"{stop_others}, or lower --memory-budget")
    elif available < LITTLE_MEMORY_BYTES:
        yield Finding(check="memory", level="warning", what=what, remedy=stop_others)
    else:
        yield Finding(check="memory", level="ok", what=what)


def check_disk(patient: Patient) -> Iterator[Finding]:
    state = patient.state
    free = None if state is None else free_disk_bytes(state)
    if state is None or free is None:
        yield Finding(check="disk", level="ok", what="not measured")
        return
    taken = format_bytes(folder_bytes(state))
    what = f"{format_bytes(free)} are free where the state is ({state}), which takes {taken}"
    level: Level = "error" if free < LEAST_DISK_BYTES else "warning" if free < LITTLE_DISK_BYTES else "ok"
    remedy = "delete what is not needed (edge-client gc: runs that are over), or put the state elsewhere with --state"
    yield Finding(check="disk", level=level, what=what, remedy=None if level == "ok" else remedy)


def check_clock(patient: Patient) -> Iterator[Finding]:
    """A board without a battery begins in the past; certificates of public authorities are then not valid yet.

    An authority that is named (`--ca-file`, or by `join`) gets by without: see fedvit.transport.mqtt.tls_context.
    """
    needed = patient.address.tls and patient.address.ca_file is None
    said = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(patient.now_s))
    installed = time.strftime("%Y-%m-%d", time.gmtime(patient.software_s))
    behind = patient.now_s < patient.software_s - DAY_S
    if behind or patient.now_s > patient.software_s + YEARS_AHEAD * 365 * DAY_S:
        yield Finding(
            check="clock",
            level="error" if needed else "warning",
            what=f"the clock says {said}, this software was installed on {installed}",
            remedy="set it: sudo timedatectl set-ntp true"
            + (" (certificates of mqtts:// cannot be checked without it)" if needed else ""),
        )
    else:
        yield Finding(check="clock", level="ok", what=f"{said} is plausible")


def check_heat(patient: Patient) -> Iterator[Finding]:
    celsius, limit = Thermometer(patient.root).celsius(), patient.temperature_limit_c
    cool = "cool the processor: a fan, a heat sink, more air; or train with fewer --threads"
    if celsius is None:
        level: Level = "ok" if limit is None else "warning"
        remedy = None if limit is None else "--temperature-limit cannot be kept without a sensor"
        if patient.most_celsius is not None:
            flag = "--temperature-limit and --max-temperature" if limit is not None else "--max-temperature"
            level, remedy = "warning", f"{flag} cannot be kept without a sensor"
        yield Finding(check="temperature", level=level, what="not measured", remedy=remedy)
    elif limit is not None and celsius > limit:
        what = f"{celsius:.1f} C, the limit is {limit:g} C: tasks would be stopped at once"
        yield Finding(check="temperature", level="error", what=what, remedy=cool)
    elif patient.most_celsius is not None and celsius > patient.most_celsius:
        what = f"{celsius:.1f} C, tasks are declined above {patient.most_celsius:g} C"
        yield Finding(check="temperature", level="warning", what=what, remedy=cool)
    else:
        hot = celsius >= HOT_C
        yield Finding(
            check="temperature", level="warning" if hot else "ok", what=f"{celsius:.1f} C", remedy=cool if hot else None
        )
    slowing = Brakes(patient.root).read()
    if slowing is None:
        yield Finding(check="throttling", level="ok", what="not measured")
        return
    seen = sorted(slowing.now | slowing.since_start)
    when = "now" if slowing.now else "since the device was started"
    if not seen:
        yield Finding(check="throttling", level="ok", what="the processor is not slowed down")
        return
    remedy = "use the power supply made for this board, and a short cable" if "under-voltage" in seen else cool
    what = f"the processor is slowed down, {when}: {', '.join(sorted(slowing.now) or seen)}"
    yield Finding(check="throttling", level="warning", what=what, remedy=remedy)


def check_battery(patient: Patient) -> Iterator[Finding]:
    state, least = battery(patient.root), patient.least_battery
    if state is None:
        level: Level = "ok" if least is None else "warning"
        remedy = None if least is None else "--min-battery cannot be kept where no battery tells how full it is"
        yield Finding(check="battery", level=level, what="none was found", remedy=remedy)
        return
    what = f"{state.percent} %, {'charging, full or plugged in' if state.charging else 'no charger is connected'}"
    if least is not None and not state.charging and state.percent < least:
        what += f"; tasks are declined below {least} %"
        yield Finding(check="battery", level="warning", what=what, remedy="connect the charger")
    else:
        yield Finding(check="battery", level="ok", what=what)


def check_state(patient: Patient) -> Iterator[Finding]:
    if patient.state is None:
        yield Finding(check="state", level="ok", what="not checked: neither --data nor --state is given")
        return
    there = patient.state.exists()
    try:
        patient.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = patient.state / f".trial-{secrets.token_hex(8)}"
        trial.write_bytes(b"x")
        trial.unlink()
        if not there:
            patient.state.rmdir()
    except OSError as error:
        who = f"user {os.getuid()}" if hasattr(os, "getuid") else "this user"
        what = f"{patient.state} cannot be written: {in_words(error)}"
        remedy = f"let {who} write there, or choose another folder with --state"
        yield Finding(check="state", level="error", what=what, remedy=remedy)
    else:
        yield Finding(check="state", level="ok", what=f"{patient.state} can be written")


def check_files(patient: Patient) -> Iterator[Finding]:
    """Reads every file of the state whose digest is known: a memory card flips bits, and tells nobody."""
    check, state = "files", patient.state
    if state is None or not state.exists():
        yield Finding(check=check, level="ok", what="not checked: there is no state yet")
        return
    blobs = [(path, f"{ALGORITHM}:{path.name}") for path in (state / "blobs").glob("*/*") if len(path.name) == 64]
    files = [*blobs, *Vault(state / "vault").files()]
    try:
        damaged = [path for path, digest in files if not is_whole(path, digest)]
    except StorageFailed as error:
        yield Finding(check=check, level="error", what=str(error), remedy="let this user read the state")
        return
    if not damaged:
        yield Finding(check=check, level="ok", what=f"all {len(files)} are as they were written")
        return
    what = f"{len(damaged)} of {len(files)} are damaged: {_few(tuple(map(str, damaged)))}"
    remedy = (
        "the next task fetches blobs anew and goes back to the round before where the vault is damaged; "
        "replace the memory card"
    )
    yield Finding(check=check, level="warning", what=what, remedy=remedy)


def check_data(patient: Patient) -> Iterator[Finding]:
    if patient.data is None:
        remedy = "edge-client doctor --data FOLDER"
        yield Finding(check="data", level="warning", what="not checked: --data is not given", remedy=remedy)
        return
    layout = "images belong in FOLDER/CLASS/, or FOLDER/train/CLASS/ and FOLDER/test/CLASS/ (docs/data.md)"
    try:
        images = DeviceData.open(patient.data, test_share=patient.test_share)
    except DataError as error:
        yield Finding(check="data", level="error", what=str(error), remedy=layout)
        return
    counts = f"{len(images.train)} training and {len(images.test)} test images"
    yield Finding(
        check="data", level="ok", what=f"{counts} of {counted(len(images.classes), 'class')}: {_few(images.classes)}"
    )
    if images.unreadable:
        listed = "; ".join(f"{path}: {reason}" for path, reason in images.unreadable[:MOST_NAMED])
        more = f"; and {len(images.unreadable) - MOST_NAMED} more" if len(images.unreadable) > MOST_NAMED else ""
        what = f"images that cannot be read and are left out: {len(images.unreadable)}; {listed}{more}"
        yield Finding(check="data", level="warning", what=what, remedy="save them anew as PNG or JPEG, or delete them")
    if images.passed_over:
        what = f"not used: {len(images.passed_over)}; {_few(tuple(map(str, images.passed_over)))}"
        remedy = "images lie directly in a class folder, as PNG, JPEG, ... (not HEIC): convert or move them"
        yield Finding(check="data", level="warning", what=what, remedy=remedy)
    if empty := images.without_images():
        what = f"class folders without an image that can be read: {_few(tuple(empty))}; a run may count them as classes"
        yield Finding(check="data", level="warning", what=what, remedy="delete folders that are no classes")
    if not len(images.test):
        what = "there is no test image: the model cannot be evaluated on this device"
        yield Finding(check="data", level="warning", what=what, remedy="give --test-share, or a folder test/CLASS/")


def check_broker(patient: Patient) -> Iterator[Finding]:
    """Step by step, as a connection is made; what fails ends it."""
    address = patient.address
    step = "broker"
    try:
        with socket.create_connection((address.host, address.port), CONNECT_S) as plain:
            yield Finding(check=step, level="ok", what=f"{address} is reachable")
            if address.tls:
                step = "tls"
                with tls_context(address).wrap_socket(plain, server_hostname=address.host) as secured:
                    yield Finding(check=step, level="ok", what=f"{secured.version()}, the certificate is trusted")
    except OSError as error:
        remedy = _reach_remedy(error, address) if step == "broker" else _tls_remedy(error, address)
        yield Finding(check=step, level="error", what=f"{address}: {in_words(error)}", remedy=remedy)
        return
    except ConfigError as error:
        yield Finding(check=step, level="error", what=str(error), remedy="name a readable PEM file with --ca-file")
        return
    topic = patient.topics.probe(patient.device)
    client_id = f"{patient.device}-{secrets.token_hex(4)}"
    try:
        with BrokerProbe(address, client_id, topic) as probe:
            yield Finding(check="login", level="ok", what="the broker lets this device in")
            step = "messages"
            if probe.seconds(PROBE_BYTES) is None:
                raise LinkDown(f"a message on {topic} is not answered")
    except LinkDown as error:
        remedy = f"the broker's access rules must let this device write below {topic.rpartition('/')[0]}/"
        if step != "messages":
            step, remedy = "login", _login_remedy(str(error), address)
        yield Finding(check=step, level="error", what=str(error), remedy=remedy)
        return
    yield from _check_size(patient, client_id, topic)


def check_coordinator(patient: Patient) -> Iterator[Finding]:
    """A device that joins a federation that nobody serves would wait for ever."""
    federation = patient.topics.federation
    try:
        found = find_coordinator(patient.address, patient.topics, patient.device)
    except (LinkDown, ConfigError):
        return  # check_broker says what is wrong
    if found is None:
        yield Finding(
            check="coordinator",
            level="warning",
            what=f"nobody serves federation {federation!r} at this broker: this device would wait",
            remedy="start it on the server (coordinator start, or coordinator serve), or name the federation that it "
            "serves with --federation",
        )
        return
    doing = f"run {found.run!r}" if found.run else "coordinator serve"
    what = f"{doing} on {found.host or 'a host without a name'} serves federation {federation!r}"
    yield Finding(check="coordinator", level="ok", what=what)


def _check_size(patient: Patient, client_id: str, topic: str) -> Iterator[Finding]:
    if _is_taken(patient, client_id, topic, CHUNK_MESSAGE_BYTES):
        what = f"messages of {CHUNK_MESSAGE_BYTES} bytes are taken"
        yield Finding(check="messages", level="ok", what=what)
        return
    fits = next((size for size in SMALLER_BYTES if _is_taken(patient, client_id, topic, size)), PROBE_BYTES)
    yield Finding(
        check="messages",
        level="error",
        what=f"a message of {CHUNK_MESSAGE_BYTES} bytes, as models travel in, is not taken; {fits} bytes are",
        remedy="let the broker take at least 131072 bytes: message_size_limit and max_packet_size of mosquitto, "
        "mqtt.max_packet_size of EMQX",
    )


def _is_taken(patient: Patient, client_id: str, topic: str, size_bytes: int) -> bool:
    """Over a connection of its own: some brokers close it when a message is too large for them, others say nothing."""
    try:
        with BrokerProbe(patient.address, client_id, topic) as probe:
            return probe.seconds(size_bytes) is not None
    except (LinkDown, BadPayload):
        return False


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_engine,
    check_memory,
    check_disk,
    check_clock,
    check_heat,
    check_battery,
    check_state,
    check_files,
    check_vault_key,
    check_identity,
    check_data,
    check_broker,
    check_coordinator,
)


def _how_it_ended(code: int, said: bytes) -> str:
    """A process that failed, in words: the signal that ended it, else its last line."""
    if code < 0:
        return f"it is ended by {signal.Signals(-code).name}"
    lines_said = said.decode(errors="replace").strip().splitlines()
    return lines_said[-1] if lines_said else f"it ends with code {code}"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def _reach_remedy(error: OSError, address: Address) -> str:
    if isinstance(error, socket.gaierror):
        return f"no such name: is {address.host!r} written rightly? Try the server's IP address"
    if isinstance(error, ConnectionRefusedError) and address.cert_file is not None:
        return (
            "nobody listens there: is the coordinator running, with coordinator start --broker.deployment DIR? This is "
            "where the device joined; if the server has another name, address or port by now: --broker HOST:PORT"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            "nobody listens there: is the coordinator running, with --broker.listen 0.0.0.0 and --broker.port "
            f"{address.port}? By itself it listens on its own machine only"
        )
    return "is the server on, in the same network, and does its firewall let this port through?"


def _tls_remedy(error: OSError, address: Address) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) and address.cert_file is not None:
        return (
            "this device trusts the deployment that it joined and no other: set the clock, use a name that coordinator "
            "init gave the server (--host), or join again with a token of the deployment that is there now"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return "give the broker's certificate authority with --ca-file, use the name in the certificate, set the clock"
    return "does this port speak TLS? Without it the address is mqtt://"


def _login_remedy(reason: str, address: Address) -> str:
    if address.cert_file is not None:
        return (
            "the broker does not take this device's certificate: was it revoked (coordinator devices), or has it "
            "expired? Then join again, with a new token"
        )
    if "authoris" in reason or "password" in reason:
        return "give user and password: --broker mqtt://USER:PASSWORD@HOST (the coordinator's own broker knows fedvit)"
    if not address.tls:
        return "does this port speak MQTT without TLS? With it the address is mqtts://"
    return "is it an MQTT broker?"


def lines(finding: Finding) -> str:
    """One finding as plain text."""
    shown = f"{finding.level:<7}  {finding.check:<11}  {finding.what}"
    return f"{shown}\n{'':<22}{finding.remedy}" if finding.remedy else shown
