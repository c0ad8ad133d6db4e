"""`edge-client profile`: measures the device, for people and for programs."""

import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from edge_client.owner.speed import Measure, find_speed
from fedvit.errors import FedvitError
from fedvit.policy import Policy
from fedvit.quantities import format_bytes, format_flops, format_seconds
from fedvit.resources import Budget, Speed
from fedvit.transport.address import Address
from profiles.probes.broker import measure_round_trip
from profiles.probes.disk import DiskSpeed, measure_disk
from profiles.probes.host import HostState, free_disk_bytes, host, resident_bytes
from profiles.probes.kernel import ROOT
from profiles.probes.meter import Meter, Sensors
from profiles.probes.thermal import Clock, Zone, clocks

IDLE_S = 1.0
"""Duration of the measurement of the idle device's power."""

Report = Callable[[str], None]
T = TypeVar("T")


class SelfReport(Struct, frozen=True, kw_only=True):
    """The figures of one device at one time. A missing figure is None; `not_measured` has the reason."""

    software: str
    host: HostState
    threads: int
    base_rss_bytes: int  # of this program, without its engine
    speed: Speed | None
    speed_origin: str
    free_disk_bytes: int | None
    disk: DiskSpeed | None
    broker: str
    round_trip_s: float | None  # of a small message
    temperature_c: float | None
    zones: tuple[Zone, ...]
    slowed_now: tuple[str, ...] | None
    slowed_since_start: tuple[str, ...] | None
    clocks: tuple[Clock, ...]
    idle_power_w: float | None
    busy_power_w: float | None  # while the speed was measured
    power_source: str | None
    budget: Budget
    temperature_limit_c: float | None
    not_measured: dict[str, str]


class ProfileTarget(Struct, frozen=True, kw_only=True):
    """The state folder and the broker of a device."""

    state: Path | None
    address: Address
    client_id: str
    probe_topic: str
    threads: int
    policy: Policy


def measure_self(
    target: ProfileTarget,
    measure: Measure,
    report_step: Report,
    *,
    fresh: bool = False,
    root: Path = ROOT,
) -> SelfReport:
    """Measure the device, which takes seconds; `report_step` gets the name of each part. Raises StorageFailed."""
    threads, policy = target.threads, target.policy
    base_rss_bytes = resident_bytes()
    why: dict[str, str] = {}
    sensors = Sensors.find(root)
    if sensors.no_power:
        why["power"] = sensors.no_power
    report_step("temperature, clocks and idle power")
    idle_w, _ = _power(sensors, lambda: time.sleep(IDLE_S if sensors.power else 0))
    celsius, slowing = sensors.thermometer.celsius(), sensors.brakes.read()
    report_step("compute speed")
    began = time.monotonic()
    busy_w, compute = _power(sensors, lambda: find_speed(target.state, threads, measure, fresh=fresh))
    if compute.speed is None:
        why["compute speed"] = compute.origin.removeprefix("not measured: ")
    if time.monotonic() - began < IDLE_S:  # too short to measure the power under load
        busy_w = None
    report_step("disk")
    disk = None
    if target.state is None:
        why["disk"] = "neither --data nor --state is given"
    else:
        disk = measure_disk(target.state)
    report_step(f"connection to the broker {target.address}")
    round_trip_s = None
    try:
        round_trip_s = measure_round_trip(target.address, target.client_id, target.probe_topic)
    except FedvitError as error:
        why["broker"] = str(error)
    return SelfReport(
        software=version("fedvit"),
        host=host(root),
        threads=threads,
        base_rss_bytes=base_rss_bytes,
        speed=compute.speed,
        speed_origin=compute.origin,
        free_disk_bytes=free_disk_bytes(target.state) if target.state else None,
        disk=disk,
        broker=str(target.address),
        round_trip_s=round_trip_s,
        temperature_c=celsius,
        zones=sensors.thermometer.zones(),
        slowed_now=tuple(sorted(slowing.now)) if slowing else None,
        slowed_since_start=tuple(sorted(slowing.since_start)) if slowing else None,
        clocks=clocks(root),
        idle_power_w=idle_w,
        busy_power_w=busy_w,
        power_source=sensors.power.source if sensors.power else None,
        budget=policy.budget,
        temperature_limit_c=policy.train.temperature_limit,
        not_measured=why,
    )


def _power(sensors: Sensors, work: Callable[[], T]) -> tuple[float | None, T]:
    """(mean power in watts while `work` runs, its result)."""
    began = time.monotonic()
    with Meter(sensors) as meter:
        result = work()
    energy_j, took_s = meter.finish().energy_j, time.monotonic() - began
    return (None if energy_j is None else energy_j / took_s), result


# --- for people ---------------------------------------------------------------------------------------

NOT_MEASURED = "not measured"


def table(report: SelfReport) -> str:
    """Two columns of plain text."""
    rows = [*_rows(report)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def _rows(report: SelfReport) -> Iterator[tuple[str, str]]:
    here, why = report.host, report.not_measured
    yield "device", f"{here.name}, {here.board or 'unknown board'}"
    yield "processor", f"{here.processor or here.machine}, {here.cores} cores, {report.threads} threads for training"
    for clock in report.clocks:
        now, allowed, most = (_gigahertz(value) for value in (clock.now_hz, clock.allowed_hz, clock.max_hz))
        yield "clock", f"{clock.cores} cores at {now}, {allowed} allowed of {most}, governor {clock.governor or '?'}"
    yield "system", ", ".join(part for part in (here.os, f"{platform.system()} {here.kernel}", here.libc) if part)
    engine = f"{here.engine} {here.engine_version}" if here.engine else "no onnxruntime"
    yield "software", f"fedvit {report.software}, Python {here.python}, {engine}"
    available = _or(here.available_bytes, format_bytes)
    swap = "no swap" if here.swap_bytes == 0 else f"swap {_or(here.swap_bytes, format_bytes)}"
    yield "memory", f"{_or(here.ram_bytes, format_bytes)}, {available} available, {swap}"
    yield "this program", f"{format_bytes(report.base_rss_bytes)} without its engine"
    yield "compute speed", _speed(report)
    yield "free disk", _or(report.free_disk_bytes, format_bytes, why.get("disk"))
    disk = report.disk
    yield "disk", _or(disk, lambda one: f"{_rate(one.write_bytes_per_s)} written, {_rate(one.read_bytes_per_s)} read",
                      why.get("disk"))  # fmt: skip
    yield (
        "broker",
        f"{report.broker}, "
        + _or(report.round_trip_s, lambda seconds: f"{format_seconds(seconds)} round trip", why.get("broker")),
    )
    zones = ", ".join(f"{zone.name} {zone.celsius:.1f}" for zone in report.zones)
    yield "temperature", _or(report.temperature_c, lambda celsius: f"{celsius:.1f} C ({zones})")
    yield "throttled", _or(report.slowed_now, lambda now: ", ".join(now) or "no")
    if report.slowed_since_start:
        yield "since start", ", ".join(report.slowed_since_start)
    source = report.power_source
    yield "idle power", _or(report.idle_power_w, lambda watts: f"{watts:.2f} W ({source})", why.get("power"))
    if report.busy_power_w is not None:
        yield "power under load", f"{report.busy_power_w:.2f} W"
    yield "budgets", _budgets(report.budget, report.temperature_limit_c)


def _or(value: T | None, text: Callable[[T], str], why: str | None = None) -> str:
    if value is None:
        return f"{NOT_MEASURED}: {why}" if why else NOT_MEASURED
    return text(value)


def _speed(report: SelfReport) -> str:
    if report.speed is None:
        return f"{NOT_MEASURED}: {report.not_measured.get('compute speed', '')}"
    best: dict[str, float] = {}
    for rate in report.speed.products:
        what = {"integers": "integers", "halves": "float16"}.get(rate.kind, "floats")
        best[what] = max(best.get(what, 0.0), rate.flops_per_s)
    rates = f"up to {_or(best.pop('floats', None), format_flops)}/s in products of floats"
    rates += "".join(f", {format_flops(rate)}/s of {what}" for what, rate in best.items())
    return f"{rates}, {report.speed_origin}"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


def _gigahertz(value: float | None) -> str:
    return "?" if value is None else f"{value / 1e9:.2f} GHz"


def _budgets(budget: Budget, limit_c: float | None) -> str:
    parts = [
        ("memory", budget.memory_bytes, format_bytes),
        ("work of a round", budget.flops_per_round, format_flops),
        ("time of a round", budget.round_deadline_s, format_seconds),
        ("upload", budget.upload_bytes, format_bytes),
        ("temperature", limit_c, lambda celsius: f"{celsius:g} C"),
    ]
    return ", ".join(f"{name} {text(value)}" for name, value, text in parts if value is not None) or "none"
