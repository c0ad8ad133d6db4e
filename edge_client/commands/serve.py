"""`edge-client` without a command: takes part in runs."""

import logging
import os
import secrets
import signal
import threading
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from edge_client.endpoint import find_endpoint
from edge_client.state import default_state, device_id, home_folder, lock_new_state, split_file, status_file
from fedvit.errors import ConfigError
from fedvit.files import folder_bytes, make_private, private_files
from fedvit.logs import configure_logging
from fedvit.monitoring import ListenAddress, Watched, serve_metrics
from fedvit.resources import Budget, Speed, image_cache_bytes
from fedvit.systemd import Notifier
from fedvit.timings import LoopWatch
from fedvit.wire.topics import Topics
from profiles.probes.host import device_profile, fast_cores, free_disk_bytes, resident_bytes
from profiles.probes.meter import Sensors

log = logging.getLogger(__name__)

KEEP_RUNS = 10
"""Default of --keep-runs."""


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
    disk_budget: int | None,
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
    metrics_address: ListenAddress | None,
    sends_logs: bool,
    counts_classes: bool,
) -> None:
    """Build the device, and take part until it is stopped."""
    # onnxruntime and the data readers are imported here, so that --help and usage errors are fast
    from edge_client.agent import RETURN_SPREAD_S, TICK_S, Agent
    from edge_client.guard import Guard
    from edge_client.identity import Renewal
    from edge_client.readiness import Hours, Readiness
    from edge_client.recent_log import RecentLog
    from edge_client.runtime import Runtime
    from edge_client.status import StatusFile
    from edge_client.vault import Vault
    from edge_client.vault_key import VaultKey
    from fedvit.blobs import BlobStore
    from fedvit.data.growing import GrowingFolder
    from fedvit.data.images import limit_decoded_bytes
    from fedvit.transport.mqtt import MqttTransport

    log_fields = dict[str, object]()
    configure_logging(level=logging.WARNING if quiet else logging.INFO, fields=log_fields)
    notifier = Notifier.from_environment()
    if data is None:
        raise ConfigError("--data is missing: the folder with this device's images")
    readiness = Readiness(
        most_celsius=max_temperature,
        least_battery=min_battery,
        busy_file=busy_file,
        quiet_hours=Hours.parse(quiet_hours) if quiet_hours else None,
    )
    endpoint = find_endpoint(broker, ca_file=ca_file, federation=federation, device=device, state=state)
    folder = state or default_state(data)
    with lock_new_state(folder) as lock:
        growing = GrowingFolder(
            data,
            split_file=split_file(folder),
            test_share=test_share,
            cache_bytes=image_cache_bytes(memory_budget),
            decoded_bytes=limit_decoded_bytes(memory_budget),
        )
        name = log_fields["device"] = device_id(folder, endpoint.device, data)
    images = growing.data
    home = home_folder()
    recent_log = RecentLog([home, data] if home else [data], images.classes) if sends_logs else None
    if recent_log:
        logging.getLogger().addHandler(recent_log)
    make_private(folder / kept for kept in ("blobs", "vault"))
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
        log.warning("no temperature sensor: the limit has no effect", extra={"limit_c": temperature_limit})
    speed = speed_at_start(folder, threads, measure=profile or budget != Budget())
    if memory_budget is not None:
        check_memory_budget(memory_budget)
    client_id = f"{name}-{secrets.token_hex(4)}"
    transport = MqttTransport(SimpleQueue(), endpoint.address, client_id, return_spread_s=RETURN_SPREAD_S)
    agent = Agent(
        device=name,
        federation=endpoint.federation,
        transport=transport,
        data=images,
        vault=vault,
        blobs=BlobStore(folder / "blobs"),
        runtime=Runtime(threads, provider),
        profile=device_profile(threads, folder, speed=speed, budget=budget),
        software=version("fedvit"),
        guard=Guard(budget, temperature_limit_c=temperature_limit, sensors=sensors, owns_process=True),
        readiness=readiness,
        renewal=Renewal(endpoint.identity, Topics(endpoint.federation)) if endpoint.identity else None,
        labels=labels,
        keep_runs=keep_runs or KEEP_RUNS,
        disk_budget=disk_budget or default_disk_budget(folder),
        growing=growing,
        status=StatusFile(status_file(folder), broker=str(endpoint.address)),
        recent_log=recent_log.text if recent_log else lambda: "",
        counts_classes=counts_classes,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log.info(
        "device ready",
        extra={"device": name, "train": len(images.train), "test": len(images.test), "classes": len(images.classes)},
    )
    growing.log_problems()
    if images.empty:
        log.warning("class folders without images", extra={"count": len(images.empty), "first": images.empty[0]})
    loop = LoopWatch(TICK_S, notifier.alive)

    def watched() -> Watched:
        from edge_client.monitoring import AgentCollector  # imports prometheus_client, which is optional

        collector = AgentCollector(agent, folder, loop, sensors)
        return Watched(collector, lambda: [loop], collector.why_not_ready)

    with serve_metrics(metrics_address) as monitor:
        monitor.show(watched)
        if monitor.url:
            log.info("metrics", extra={"url": monitor.url})
        notifier.ready()
        try:
            reason = agent.serve(stop, once=once, on_turn=loop.turn)
        finally:
            notifier.stopping()
    log.info("device leaves", extra={"reason": reason})
    os.close(lock)


def speed_at_start(state: Path, threads: int, *, measure: bool) -> Speed | None:
    """Return the stored compute speed; with `measure` a missing one is measured now, which takes seconds."""
    from edge_client.speed import find_speed, read_stored
    from profiles.probes.speed import measure_speed

    known = read_stored(state, threads)
    if known and known.speed:
        log.info("compute speed is known from an earlier start")
    elif known or measure:
        if not known:
            log.info("measuring the compute speed")
        known = known or find_speed(state, threads, measure_speed)
        log.info("compute speed", extra={"origin": known.origin})
    else:
        log.info("compute speed is not known: --profile or 'edge-client profile' measures it")
    return known.speed if known else None


def default_disk_budget(state: Path) -> int | None:
    """Return half of the space that the state uses or that is free; None if that is not known."""
    from edge_client.disk import DEFAULT_SHARE

    free_bytes = free_disk_bytes(state)
    return None if free_bytes is None else int(DEFAULT_SHARE * (free_bytes + folder_bytes(state)))


def check_memory_budget(limit_bytes: int) -> None:
    """Load the engine, so that the process's reported memory includes it; warn if that alone exceeds the budget."""
    from edge_client.guard import memory_message
    from fedvit.engine import load_engine

    load_engine()
    if (base_bytes := resident_bytes()) > limit_bytes:
        log.warning(memory_message(base_bytes, limit_bytes, base_bytes))
