"""Checks whether this device can take part in a run. Each finding comes with a hint.

A check is a function here and a line in CHECKS.
"""

import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from edge_client.clocks import compare_clocks, explain_refusal
from edge_client.doctor_context import DAY_S, LEVELS, DoctorContext, Finding, Level
from edge_client.keys import check_identity, check_vault_key
from edge_client.state import split_file, status_file
from edge_client.status import Unusable, read_status
from edge_client.vault import Vault
from fedvit import kernels
from fedvit.blobs import ALGORITHM, is_whole
from fedvit.data.folder import DeviceData, TextSplit, why_passed_over
from fedvit.data.images import DAMAGED, limit_decoded_bytes
from fedvit.data.split import KeptSplit
from fedvit.errors import BadPayload, ConfigError, DataError, LinkDown, StorageFailed
from fedvit.files import folder_bytes
from fedvit.quantities import format_bytes, format_count
from fedvit.transport.address import Address, describe_error, tls_context
from fedvit.wire.transfer import CHUNK_MESSAGE_BYTES
from profiles.probes.battery import battery
from profiles.probes.broker import PROBE_BYTES, BrokerProbe
from profiles.probes.coordinator import find_coordinator
from profiles.probes.host import find_engine, free_disk_bytes, host
from profiles.probes.thermal import Brakes, Thermometer

LEAST_MEMORY_BYTES, LITTLE_MEMORY_BYTES = 100_000_000, 300_000_000
"""An idle device takes 50 MB, one that trains the smallest models 100 MB, one that trains a ViT-Tiny about 250 MB."""
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = 100_000_000, 1_000_000_000
"""The weights of a ViT-B are 343 MB, and those of an older round may be stored beside them."""
HOT_C = 80.0
"""A Raspberry Pi throttles from this temperature on; most other boards a little later."""
YEARS_AHEAD = 20
ENGINE_S = 60.0
MOST_NAMED = 5
DECODED_SIDE = 224
"""Pixels of an image that is decoded on trial."""
CONNECT_S = 5.0
SMALLER_BYTES = (65_536, 16_384, 4_096)
"""Sizes to try if a whole chunk is not accepted, to report which size is."""

_ENGINE_CHILD = """
from fedvit.engine import trim_memory, load_engine
load_engine()
trim_memory()  # runs a graph
import onnxruntime
print(onnxruntime.__version__)
"""

_KERNELS_CHILD = """
import onnxruntime
from fedvit.kernels import find_library
onnxruntime.SessionOptions().register_custom_ops_library(str(find_library()))
"""


def run_checks(context: DoctorContext) -> Iterator[Finding]:
    """Run all checks and yield their findings."""
    for check in CHECKS:
        yield from check(context)


def worst(findings: list[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def check_engine(context: DoctorContext) -> Iterator[Finding]:
    """Load the engine and run a graph in a separate process, as a build for another processor dies of a signal."""
    name, version = find_engine()
    if name is None:
        hint = "pip install onnxruntime (64-bit Linux with glibc 2.28 or newer and Python 3.11 or newer)"
        yield Finding(check="engine", level="error", what="onnxruntime is not installed", hint=hint)
        return
    engine = f"{name} {version}"
    command = [context.interpreter, "-P", "-c", _ENGINE_CHILD]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ENGINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding(check="engine", level="error", what=f"{engine} cannot be tried: {describe_error(error)}")
        return
    if done.returncode == 0:
        yield Finding(check="engine", level="ok", what=f"{engine} runs")
    elif done.returncode == -signal.SIGILL:
        yield Finding(
            check="engine",
            level="error",
            what=f"{engine} dies of an illegal instruction: it is built for newer processors than this one",
            hint="onnxruntime 1.25 to 1.31.1 run on an emulated Cortex-A72 (ARMv8.0: Raspberry Pi 3, 4, Zero 2 W), "
            "1.21.0 does not: pip install 'onnxruntime>=1.25,<=1.31.1'",
        )
    else:
        what = f"{engine} does not run: {_exit_reason(done.returncode, done.stderr)}"
        hint = "reinstall it: pip install --force-reinstall onnxruntime"
        yield Finding(check="engine", level="error", what=what, hint=hint)


def check_kernels(context: DoctorContext) -> Iterator[Finding]:
    """Load the optional kernels in a separate process, if they are installed."""
    if kernels.find_library() is None:
        what = f"{kernels.EXTRA} is not installed: steps take longer, and are the same otherwise"
        yield Finding(check="kernels", level="ok", what=what)
        return
    command = [context.interpreter, "-P", "-c", _KERNELS_CHILD]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ENGINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = describe_error(error)
    else:
        problem = _exit_reason(done.returncode, done.stderr) if done.returncode else ""
    if problem:
        yield Finding(
            check="kernels",
            level="warning",
            what=f"{kernels.EXTRA} cannot be loaded, training goes on without it: {problem}",
            hint="install the fedvit-kernels of this version of fedvit for this processor: pip wheel ./kernels",
        )
    else:
        yield Finding(check="kernels", level="ok", what=f"{kernels.EXTRA} loads")


def check_memory(context: DoctorContext) -> Iterator[Finding]:
    here, limit = host(context.root), context.budget.memory_bytes
    available, whole = here.available_bytes, here.ram_bytes
    if available is None or whole is None:
        yield Finding(check="memory", level="ok", what="not measured")
        return
    what = f"{format_bytes(available)} of {format_bytes(whole)} are available"
    stop_other_programs = "stop other programs, or use a smaller model (coordinator start --model)"
    if limit is not None and limit > whole:
        hint = f"give --memory-budget less than {format_bytes(whole)}"
        yield Finding(
            check="memory", level="error", what=f"{what}, the memory budget is {format_bytes(limit)}", hint=hint
        )
    elif available < LEAST_MEMORY_BYTES:
        yield Finding(check="memory", level="error", what=what, hint=stop_other_programs)
    elif limit is not None and limit > available:
        what += f", the memory budget is {format_bytes(limit)}"
        yield Finding(
            check="memory", level="warning", what=what, hint=f"{stop_other_programs}, or lower --memory-budget"
        )
    elif available < LITTLE_MEMORY_BYTES:
        yield Finding(check="memory", level="warning", what=what, hint=stop_other_programs)
    else:
        yield Finding(check="memory", level="ok", what=what)


def check_disk(context: DoctorContext) -> Iterator[Finding]:
    state = context.state
    free = None if state is None else free_disk_bytes(state)
    if state is None or free is None:
        yield Finding(check="disk", level="ok", what="not measured")
        return
    taken = format_bytes(folder_bytes(state))
    what = f"{format_bytes(free)} are free where the state is ({state}), which takes {taken}"
    level: Level = "error" if free < LEAST_DISK_BYTES else "warning" if free < LITTLE_DISK_BYTES else "ok"
    hint = "delete what is not needed (edge-client gc: runs that are over), or put the state elsewhere with --state"
    yield Finding(check="disk", level=level, what=what, hint=None if level == "ok" else hint)


def check_clock(context: DoctorContext) -> Iterator[Finding]:
    """A board without a battery starts with a past date, at which certificates of public authorities are not valid yet.

    With an explicit authority (`--ca-file`, or after `join`) the clock does not matter: see
    fedvit.transport.mqtt.tls_context.
    """
    needed = context.address.tls and context.address.ca_file is None
    clock = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(context.now_s))
    installed = time.strftime("%Y-%m-%d", time.gmtime(context.software_s))
    behind = context.now_s < context.software_s - DAY_S
    if behind or context.now_s > context.software_s + YEARS_AHEAD * 365 * DAY_S:
        yield Finding(
            check="clock",
            level="error" if needed else "warning",
            what=f"the clock says {clock}, this software was installed on {installed}",
            hint="set it: sudo timedatectl set-ntp true"
            + (" (certificates of mqtts:// cannot be checked without it)" if needed else ""),
        )
    else:
        yield Finding(check="clock", level="ok", what=f"{clock} is plausible")


def check_heat(context: DoctorContext) -> Iterator[Finding]:
    celsius, limit = Thermometer(context.root).celsius(), context.temperature_limit_c
    cool = "cool the processor: a fan, a heat sink, more air; or train with fewer --threads"
    if celsius is None:
        level: Level = "ok" if limit is None else "warning"
        hint = None if limit is None else "--temperature-limit cannot work without a sensor"
        if context.most_celsius is not None:
            flag = "--temperature-limit and --max-temperature" if limit is not None else "--max-temperature"
            level, hint = "warning", f"{flag} cannot work without a sensor"
        yield Finding(check="temperature", level=level, what="not measured", hint=hint)
    elif limit is not None and celsius > limit:
        what = f"{celsius:.1f} C, the limit is {limit:g} C: tasks will be stopped at once"
        yield Finding(check="temperature", level="error", what=what, hint=cool)
    elif context.most_celsius is not None and celsius > context.most_celsius:
        what = f"{celsius:.1f} C, tasks are declined above {context.most_celsius:g} C"
        yield Finding(check="temperature", level="warning", what=what, hint=cool)
    else:
        hot = celsius >= HOT_C
        yield Finding(
            check="temperature", level="warning" if hot else "ok", what=f"{celsius:.1f} C", hint=cool if hot else None
        )
    slowing = Brakes(context.root).read()
    if slowing is None:
        yield Finding(check="throttling", level="ok", what="not measured")
        return
    seen = sorted(slowing.now | slowing.since_start)
    when = "now" if slowing.now else "since the device was started"
    if not seen:
        yield Finding(check="throttling", level="ok", what="the processor is not slowed down")
        return
    hint = "use the power supply made for this board, and a short cable" if "under-voltage" in seen else cool
    what = f"the processor is slowed down, {when}: {', '.join(sorted(slowing.now) or seen)}"
    yield Finding(check="throttling", level="warning", what=what, hint=hint)


def check_battery(context: DoctorContext) -> Iterator[Finding]:
    state, least = battery(context.root), context.least_battery
    if state is None:
        level: Level = "ok" if least is None else "warning"
        hint = None if least is None else "--min-battery has no effect without a battery that reports its charge"
        yield Finding(check="battery", level=level, what="none was found", hint=hint)
        return
    what = f"{state.percent} %, {'charging, full or plugged in' if state.charging else 'no charger is connected'}"
    if least is not None and not state.charging and state.percent < least:
        what += f"; tasks are declined below {least} %"
        yield Finding(check="battery", level="warning", what=what, hint="connect the charger")
    else:
        yield Finding(check="battery", level="ok", what=what)


def check_state(context: DoctorContext) -> Iterator[Finding]:
    if context.state is None:
        yield Finding(check="state", level="ok", what="not checked: neither --data nor --state is given")
        return
    there = context.state.exists()
    try:
        context.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        trial = context.state / f".trial-{secrets.token_hex(8)}"
        trial.write_bytes(b"x")
        trial.unlink()
        if not there:
            context.state.rmdir()
    except OSError as error:
        who = f"user {os.getuid()}" if hasattr(os, "getuid") else "this user"
        what = f"{context.state} cannot be written: {describe_error(error)}"
        hint = f"let {who} write there, or choose another folder with --state"
        yield Finding(check="state", level="error", what=what, hint=hint)
    else:
        yield Finding(check="state", level="ok", what=f"{context.state} can be written")


def check_files(context: DoctorContext) -> Iterator[Finding]:
    """Verify every file of the state whose digest is known: memory cards flip bits without reporting an error."""
    check, state = "files", context.state
    if state is None or not state.exists():
        yield Finding(check=check, level="ok", what="not checked: there is no state yet")
        return
    blobs = [(path, f"{ALGORITHM}:{path.name}") for path in (state / "blobs").glob("*/*") if len(path.name) == 64]
    files = [*blobs, *Vault(state / "vault").files()]
    try:
        damaged = [path for path, digest in files if not is_whole(path, digest)]
    except StorageFailed as error:
        yield Finding(check=check, level="error", what=str(error), hint="let this user read the state")
        return
    if not damaged:
        yield Finding(check=check, level="ok", what=f"all {len(files)} files are undamaged")
        return
    what = f"{len(damaged)} of {len(files)} files are damaged: {_few(tuple(map(str, damaged)))}"
    hint = (
        "the next task fetches damaged blobs again, and a damaged vault returns to its previous round; "
        "replace the memory card"
    )
    yield Finding(check=check, level="warning", what=what, hint=hint)


def check_data(context: DoctorContext) -> Iterator[Finding]:
    if context.data is None:
        hint = "edge-client doctor --data FOLDER"
        yield Finding(check="data", level="warning", what="not checked: --data is not given", hint=hint)
        return
    layout = "images belong in FOLDER/CLASS/, or FOLDER/train/CLASS/ and FOLDER/test/CLASS/ (docs/data.md)"
    try:
        split = KeptSplit.load(split_file(context.state), context.test_share) if context.state else None
        images = DeviceData.open(
            context.data,
            test_share=context.test_share,
            cache_bytes=0,
            decoded_bytes=limit_decoded_bytes(context.budget.memory_bytes),
            split=split,
        )
    except (DataError, StorageFailed) as error:
        yield Finding(check="data", level="error", what=str(error), hint=layout)
        return
    what = f"{len(images.train)} training and {len(images.test)} test images"
    what += f" of {format_count(len(images.classes), 'class')}: {_few(images.classes)}"
    decoded, count = _decode_sample(images, context.decoded_images), len(images.train) + len(images.test)
    if decoded < count:
        what += f"; {decoded} of them were decoded on trial, --deep decodes all"
    yield Finding(check="data", level="ok", what=what)
    if unreadable := [*images.unusable, *images.train.failed.items(), *images.test.failed.items()]:
        parts = [(path, *reason.partition(": ")) for path, reason in unreadable]
        listed = _by_kind([(f"{path} ({detail})" if detail else str(path), kind) for path, kind, _, detail in parts])
        what = f"images that cannot be read and are skipped: {len(unreadable)}; {listed}"
        yield Finding(check="data", level="warning", what=what, hint="save them again as PNG or JPEG, or delete them")
    for reason, files in undecoded(context).items() if decoded < count else ():
        what = f"images that could not be decoded in the last run: {files.count}, {reason}: {_few(files.examples)}"
        yield Finding(check="data", level="warning", what=what, hint="save them again as PNG or JPEG, or delete them")
    if images.passed_over:
        listed = _by_kind([(str(path), why_passed_over(path)) for path in images.passed_over])
        what = f"not used: {len(images.passed_over)}; {listed}"
        hint = "images lie directly in a class folder, as PNG, JPEG, ... (not HEIC): convert or move them"
        yield Finding(check="data", level="warning", what=what, hint=hint)
    if images.empty:
        what = f"class folders without an image that can be read: {_few(images.empty)}; they do not count as classes"
        yield Finding(check="data", level="warning", what=what, hint="delete folders that are not classes")
    if not len(images.test):
        what = "there is no test image: the model cannot be evaluated on this device"
        yield Finding(check="data", level="warning", what=what, hint="give --test-share, or a folder test/CLASS/")


def _decode_sample(images: DeviceData, most: int | None) -> int:
    """Decode up to `most` images, spread evenly over all; return their number. `failed` of the data has the damaged.

    A text counts as decoded: it is read whole when it is opened.
    """
    places = [(split, row) for split in (images.train, images.test) for row in range(len(split))]
    if isinstance(images.train, TextSplit):
        return len(places)
    count = len(places) if most is None else min(most, len(places))
    for number in range(count):
        split, row = places[number * len(places) // count]
        split.load(np.array([row]), DECODED_SIDE)
    return count


def undecoded(context: DoctorContext) -> dict[str, Unusable]:
    """Images with a good header that the running device could not decode, by reason, as its status file has them."""
    if context.state is None or context.data is None:
        return {}
    try:
        found = read_status(status_file(context.state)).doing.unusable
    except ConfigError:  # it has not run yet
        return {}
    return {reason: files for reason, files in found.items() if reason == DAMAGED}


def check_broker(context: DoctorContext) -> Iterator[Finding]:
    """Check the steps of a connection in their order; the first failure ends the check."""
    address = context.address
    step = "broker"
    try:
        with socket.create_connection((address.host, address.port), CONNECT_S) as plain:
            yield Finding(check=step, level="ok", what=f"{address} is reachable")
            if address.tls:
                step = "tls"
                with tls_context(address).wrap_socket(plain, server_hostname=address.host) as secured:
                    yield Finding(check=step, level="ok", what=f"{secured.version()}, the certificate is trusted")
    except OSError as error:
        hint = _reach_hint(error, address) if step == "broker" else _tls_hint(error, address)
        yield Finding(check=step, level="error", what=f"{address}: {describe_error(error)}", hint=hint)
        return
    except ConfigError as error:
        yield Finding(check=step, level="error", what=str(error), hint="name a readable PEM file with --ca-file")
        return
    topic = context.topics.probe(context.device)
    client_id = f"{context.device}-{secrets.token_hex(4)}"
    try:
        with BrokerProbe(address, client_id, topic) as probe:
            yield Finding(check="login", level="ok", what="the broker accepts this device")
            step = "messages"
            if probe.seconds(PROBE_BYTES) is None:
                raise LinkDown(f"a message on {topic} is not answered")
    except LinkDown as error:
        what, hint = (
            str(error),
            f"the broker's access rules must let this device write below {topic.rpartition('/')[0]}/",
        )
        if step != "messages":
            step = "login"
            what, hint = explain_refusal(context) or (what, _login_hint(what, address))
        yield Finding(check=step, level="error", what=what, hint=hint)
        return
    yield from _check_size(context, client_id, topic)


def check_coordinator(context: DoctorContext) -> Iterator[Finding]:
    """Without a coordinator in its federation the device would wait for ever."""
    federation = context.topics.federation
    try:
        found = find_coordinator(context.address, context.topics, context.device)
    except (LinkDown, ConfigError):
        return  # reported by check_broker
    if found is None:
        yield Finding(
            check="coordinator",
            level="warning",
            what=f"no coordinator serves federation {federation!r} at this broker: this device would wait",
            hint="start it on the server (coordinator start, or coordinator serve), or name the federation that it "
            "serves with --federation",
        )
        return
    doing = f"run {found.run!r}" if found.run else "coordinator serve"
    what = f"{doing} on {found.host or 'a host without a name'} serves federation {federation!r}"
    yield Finding(check="coordinator", level="ok", what=what)
    if found.clock_s and (compared := compare_clocks(context, found.clock_s)):
        what, hint = compared
        yield Finding(check="clock", level="warning", what=what, hint=hint)


def _check_size(context: DoctorContext, client_id: str, topic: str) -> Iterator[Finding]:
    if _is_accepted(context, client_id, topic, CHUNK_MESSAGE_BYTES):
        what = f"messages of {CHUNK_MESSAGE_BYTES} bytes are accepted"
        yield Finding(check="messages", level="ok", what=what)
        return
    fits = next((size for size in SMALLER_BYTES if _is_accepted(context, client_id, topic, size)), PROBE_BYTES)
    yield Finding(
        check="messages",
        level="error",
        what=f"a message of {CHUNK_MESSAGE_BYTES} bytes, as used for models, is not accepted; {fits} bytes are",
        hint="set the broker's limit to at least 131072 bytes: message_size_limit and max_packet_size of mosquitto, "
        "mqtt.max_packet_size of EMQX",
    )


def _is_accepted(context: DoctorContext, client_id: str, topic: str, size_bytes: int) -> bool:
    """Uses a separate connection: some brokers close it when a message is too large, others do not answer."""
    try:
        with BrokerProbe(context.address, client_id, topic) as probe:
            return probe.seconds(size_bytes) is not None
    except (LinkDown, BadPayload):
        return False


CHECKS: tuple[Callable[[DoctorContext], Iterator[Finding]], ...] = (
    check_engine,
    check_kernels,
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


def _exit_reason(code: int, output: bytes) -> str:
    """Why a process failed: the signal that ended it, else the last line of its output."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    output_lines = output.decode(errors="replace").strip().splitlines()
    return output_lines[-1] if output_lines else f"it ended with code {code}"


def _by_kind(files: list[tuple[str, str]]) -> str:
    """Names of files by kind, the first ones of each."""
    kinds = defaultdict[str, list[str]](list)
    for name, kind in files:
        kinds[kind].append(name)
    return "; ".join(
        f"{kind}: {', '.join(names[:MOST_NAMED])}"
        + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
        for kind, names in sorted(kinds.items())
    )


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")


def _reach_hint(error: OSError, address: Address) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: is {address.host!r} spelled correctly? Try the server's IP address"
    if isinstance(error, ConnectionRefusedError) and address.cert_file is not None:
        return (
            "no program listens there: is the coordinator running, with coordinator start --broker.deployment DIR? The "
            "address is that of the join; if the server has another name, address or port now: --broker HOST:PORT"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            "no program listens there: is the coordinator running, with --broker.listen 0.0.0.0 and --broker.port "
            f"{address.port}? By default it listens on its own machine only"
        )
    return "is the server on, in the same network, and does its firewall let this port through?"


def _tls_hint(error: OSError, address: Address) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) and address.cert_file is not None:
        return (
            "this device trusts only the deployment that it joined: set the clock, use a name that coordinator "
            "init gave the server (--host), or join again with a token of the current deployment"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return "give the broker's certificate authority with --ca-file, use the name in the certificate, set the clock"
    return "does this port speak TLS? Without it the address is mqtt://"


def _login_hint(reason: str, address: Address) -> str:
    if address.cert_file is not None:
        return (
            "the broker does not accept this device's certificate: was it revoked (coordinator devices), or has it "
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
    return f"{shown}\n{'':<22}{finding.hint}" if finding.hint else shown
