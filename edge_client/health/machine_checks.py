"""Checks of `edge-client doctor` on the machine: engine, memory, disk, clock, heat and battery."""

import signal
import subprocess
import time
from collections.abc import Iterator

from edge_client.health.doctor_context import DAY_S, DoctorContext, Finding, Level
from fedvit import kernels
from fedvit.files import folder_bytes
from fedvit.quantities import format_bytes
from fedvit.transport.address import describe_error
from profiles.probes.battery import battery
from profiles.probes.host import free_disk_bytes, host, list_engines
from profiles.probes.thermal import Brakes, Thermometer

LEAST_MEMORY_BYTES, LITTLE_MEMORY_BYTES = 100_000_000, 300_000_000
"""An idle device takes 50 MB, one that trains the smallest models 100 MB, one that trains a ViT-Tiny about 250 MB."""
LEAST_DISK_BYTES, LITTLE_DISK_BYTES = 100_000_000, 1_000_000_000
"""The weights of a ViT-B are 343 MB, and those of an older round may be stored beside them."""
HOT_C = 80.0
"""A Raspberry Pi throttles from this temperature on; most other boards a little later."""
YEARS_AHEAD = 20
ENGINE_S = 60.0

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

_SANDBOX_CHILD = """
from edge_client.sandbox.confine import confine
print(*confine((), (), None))
"""
_WITHOUT = {
    "Landlock": "graphs can read files of this user",
    "seccomp": "graphs are not kept from the network",
}


def check_engine(context: DoctorContext) -> Iterator[Finding]:
    """Load the engine and run a graph in a separate process, as a build for another processor dies of a signal."""
    engines = [f"{name} {version}" for name, version in list_engines().items()]
    if not engines:
        hint = "pip install onnxruntime (64-bit Linux with glibc 2.28 or newer and Python 3.11 or newer)"
        yield Finding(check="engine", level="error", what="onnxruntime is not installed", hint=hint)
        return
    if len(engines) > 1:
        names = " ".join(list_engines())
        what = f"{' and '.join(engines)} are installed, of which each has overwritten files of the other"
        hint = f"pip uninstall {names}, then install the one that you want"
        yield Finding(check="engine", level="error", what=what, hint=hint)
        return
    [engine] = engines
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
    if problem := _find_problem(command):
        yield Finding(
            check="kernels",
            level="warning",
            what=f"{kernels.EXTRA} cannot be loaded, training goes on without it: {problem}",
            hint="install the fedvit-kernels of this version of fedvit for this processor: pip wheel ./kernels",
        )
    else:
        yield Finding(check="kernels", level="ok", what=f"{kernels.EXTRA} loads")


def check_sandbox(context: DoctorContext) -> Iterator[Finding]:
    """Let a separate process give up its rights, as the one that runs graphs does."""
    command = [context.interpreter, "-P", "-c", _SANDBOX_CHILD]
    try:
        done = subprocess.run(command, capture_output=True, timeout=ENGINE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(check="sandbox", level="error", what=f"it cannot be tried: {describe_error(error)}")
        return
    missing = done.stdout.decode().split()
    if not missing:
        yield Finding(check="sandbox", level="ok", what="graphs run without network, keys and files to write")
    for name in missing:
        yield Finding(
            check="sandbox",
            level="warning",
            what=f"this system has no {name} for this processor: {_WITHOUT[name]}",
            hint="use a 64-bit Linux from 5.13 on with `landlock` among the words of /sys/kernel/security/lsm; until "
            "then run the device as a user of its own",
        )


def check_training(context: DoctorContext) -> Iterator[Finding]:
    """Train one step in a process of its own, with everything that a task needs but the broker."""
    command = [context.interpreter, "-P", "-m", "edge_client.owner.tiny_step"]
    if problem := _find_problem(command):
        hint = "install fedvit anew; if that does not help, report it with edge-client bugreport"
        yield Finding(check="training", level="error", what=f"a training step fails: {problem}", hint=hint)
    else:
        yield Finding(check="training", level="ok", what="a training step of a tiny model gives the right numbers")


def check_memory(context: DoctorContext) -> Iterator[Finding]:
    here, limit = host(context.root), context.policy.budget.memory_bytes
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
    celsius, limit = Thermometer(context.root).celsius(), context.policy.train.temperature_limit
    cool = "cool the processor: a fan, a heat sink, more air; or train with fewer --threads"
    if celsius is None:
        level: Level = "ok" if limit is None else "warning"
        hint = None if limit is None else "--temperature-limit cannot work without a sensor"
        if context.policy.train.max_temperature is not None:
            flag = "--temperature-limit and --max-temperature" if limit is not None else "--max-temperature"
            level, hint = "warning", f"{flag} cannot work without a sensor"
        yield Finding(check="temperature", level=level, what="not measured", hint=hint)
    elif limit is not None and celsius > limit:
        what = f"{celsius:.1f} C, the limit is {limit:g} C: tasks will be stopped at once"
        yield Finding(check="temperature", level="error", what=what, hint=cool)
    elif context.policy.train.max_temperature is not None and celsius > context.policy.train.max_temperature:
        what = f"{celsius:.1f} C, tasks are declined above {context.policy.train.max_temperature:g} C"
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
    state, least = battery(context.root), context.policy.train.min_battery
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


def _find_problem(command: list[str]) -> str:
    """Run a command, and return why it failed; empty if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=ENGINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return describe_error(error)
    return _exit_reason(done.returncode, done.stderr) if done.returncode else ""


def _exit_reason(code: int, output: bytes) -> str:
    """Return the signal that ended a process, else the last line of its output."""
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    output_lines = output.decode(errors="replace").strip().splitlines()
    return output_lines[-1] if output_lines else f"it ended with code {code}"
