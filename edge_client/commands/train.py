"""`edge-client` without a command: takes part in runs."""

import logging
import os
import secrets
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from msgspec.structs import replace

from edge_client.agent import TICK_S, Agent
from edge_client.health.guard import Guard, memory_message
from edge_client.health.home import Home
from edge_client.health.readiness import Readiness
from edge_client.health.recent_log import PrivatePaths, RecentLog
from edge_client.health.status import StatusFile
from edge_client.health.trial import Trial
from edge_client.link.answers import FailureText
from edge_client.link.device_link import DeviceIdentity, DeviceLink
from edge_client.link.endpoint import Endpoint, endpoint_of
from edge_client.link.identity import Renewal
from edge_client.link.session import RETURN_SPREAD_S
from edge_client.owner.speed import find_speed, read_stored
from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.sandbox import Sandbox
from edge_client.settings import DeviceSettings
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.disk import DEFAULT_SHARE
from edge_client.storage.features import FEATURES, FeatureFolder
from edge_client.storage.installed import Installation
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import default_state, device_id, home_folder, lock_new_state, split_file, status_file
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from edge_client.work.task_executor import TaskExecutor
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.data.growing import GrowingFolder
from fedvit.data.images import limit_decoded_bytes
from fedvit.files import folder_bytes, make_private, private_files
from fedvit.logs import configure_logging
from fedvit.monitoring import Watched, serve_metrics
from fedvit.resources import Budget, Speed, image_cache_bytes
from fedvit.signals import stop_on_signals
from fedvit.systemd import Notifier
from fedvit.timings import LoopWatch
from fedvit.tracing import Tracing, open_tracing
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import MODELS_VERSION
from fedvit.wire.topics import Topics
from profiles.probes.host import device_profile, free_disk_bytes
from profiles.probes.meter import Sensors
from profiles.probes.speed import measure_speed

log = logging.getLogger(__name__)

KEEP_RUNS = 10
"""Default of --keep-runs."""


@private_files()
def take_part(settings: DeviceSettings) -> None:
    """Build the device, and take part until it is stopped."""
    log_fields = dict[str, object]()
    configure_logging(level=logging.WARNING if settings.quiet else logging.INFO, fields=log_fields)
    launcher = Launcher()  # before there are threads, keys and connections
    # only a service is started again: its manager waits for a word of it
    installation = Installation.find() if "NOTIFY_SOCKET" in os.environ else None
    notifier = Notifier.from_environment()
    data, memory_bytes = settings.data_folder, settings.policy.train.memory
    endpoint = endpoint_of(settings)
    state = settings.state or default_state(data)
    with lock_new_state(state) as lock:
        images = GrowingFolder(
            data,
            split_file=split_file(state),
            test_share=settings.test_share,
            cache_bytes=image_cache_bytes(memory_bytes),
            decoded_bytes=limit_decoded_bytes(memory_bytes),
        )
        device = log_fields["device"] = device_id(state, endpoint.device, data)
    sensors = Sensors.find()
    tracing = open_tracing("fedvit-device")
    agent = build_agent(settings, endpoint._replace(device=device), state, images, sensors, launcher, tracing)
    for what in images.damaged:
        agent.storage.integrity.report(what)
    stop = stop_on_signals()
    log_images(device, images)
    loop = LoopWatch(TICK_S, notifier.alive)

    def watch() -> Watched:
        from edge_client.health.monitoring import AgentCollector  # imports prometheus_client, which is optional

        collector = AgentCollector(agent.link, agent.state, state, loop, sensors)
        return Watched(collector, lambda: [loop], collector.condition)

    with serve_metrics(settings.metrics_address) as monitor:
        monitor.show(watch)
        if monitor.url:
            log.info("metrics", extra={"url": monitor.url})
        notifier.ready()
        home = Home(settings.home, agent.link.identity, sensors) if settings.home else None
        if home:
            home.start()
        trial = Trial(installation) if installation else None
        if trial:
            trial.begin()

        def turn() -> None:
            loop.turn()
            if home:
                home.look(agent.state)
            if trial:
                execution = agent.current.execution
                trial.look(agent.history, is_working=execution is not None and execution.working)
                if execution is None and trial.is_over():
                    log.info("another version is installed: it is started next")
                    stop.set()

        try:
            reason = agent.serve(stop, once=settings.once, on_turn=turn)
        finally:
            notifier.stopping()
            if home:
                home.close(agent.state())
            if trial:
                trial.close()
            if tracing:
                tracing.close()
    log.info("device leaves", extra={"reason": reason})
    os.close(lock)


def build_agent(
    settings: DeviceSettings,
    endpoint: Endpoint,
    state: Path,
    images: GrowingFolder,
    sensors: Sensors,
    launcher: Launcher,
    tracing: Tracing | None = None,
) -> Agent:
    """Connect the parts of the device; `endpoint` has its name."""
    policy, device = settings.policy, str(endpoint.device)
    home = home_folder()
    private = PrivatePaths([home, settings.data_folder] if home else [settings.data_folder])
    recent_log = attach_recent_log(private, images.data) if policy.send.logs else None
    make_private(state / name for name in ("blobs", "vault", "models"))
    vault = Vault(state / "vault", VaultKey.load(settings.vault_key, make=True) if settings.vault_key else None)
    vault.check_key()
    if policy.train.temperature_limit is not None and sensors.thermometer.celsius() is None:
        log.warning("no temperature sensor: the limit has no effect", extra={"limit_c": policy.train.temperature_limit})
    speed = speed_at_start(state, settings.threads, measure=settings.measures_speed or policy.budget != Budget())
    blobs = BlobStore(state / "blobs")
    models = state / "models"
    for folder in (blobs.folder, models):  # a right to read them can only be given now
        folder.mkdir(parents=True, exist_ok=True)
    sandbox = Sandbox(
        launcher,
        threads=settings.threads,
        provider=settings.provider,
        readable=(blobs.folder, settings.data_folder, models),
        memory_bytes=policy.train.memory,
    )
    if policy.train.memory is not None:
        check_memory_budget(policy.train.memory, sandbox)
    disk_budget_bytes = policy.train.disk or default_disk_budget(state)
    features = None
    if policy.train.keep_features:
        key = vault.round_files.key
        features = FeatureFolder(state / FEATURES, key.features_key if key else None)
    storage = DeviceStorage(vault, blobs, images, disk_budget_bytes=disk_budget_bytes, features=features)
    identity = DeviceIdentity(
        device=device,
        federation=endpoint.federation,
        software=version("fedvit"),
        profile=device_profile(
            settings.threads,
            state,
            speed=speed,
            budget=policy.budget,
            base_rss_bytes=sandbox.memory.resident_bytes(),
            feature_bytes=find_feature_bytes(storage, state),
        ),
        labels=settings.labels,
        denies=policy.denials(certified=endpoint.identity is not None),
        least_mask=policy.send.least_mask,
        publisher=policy.train.publisher,
        models=MODELS_VERSION if policy.models.from_coordinator else 0,
    )
    client_id = f"{device}-{secrets.token_hex(4)}"
    link = DeviceLink(
        identity,
        MqttTransport(SimpleQueue(), endpoint.address, client_id, return_spread_s=RETURN_SPREAD_S),
        storage,
        renewal=Renewal(endpoint.identity, Topics(endpoint.federation)) if endpoint.identity else None,
        failure_text=FailureText(recent_log.text if recent_log else lambda: "", private.hide),
    )
    guard = Guard(
        policy.budget,
        temperature_limit_c=policy.train.temperature_limit,
        sensors=sensors,
        owns_process=True,
        memory=sandbox.memory,
    )
    worker = TaskExecutor(link, storage, sandbox, guard, policy)
    status = StatusFile(status_file(state), identity, broker=str(endpoint.address))
    policy = replace(policy, train=replace(policy.train, keep_runs=policy.train.keep_runs or KEEP_RUNS))
    readiness = Readiness(policy=policy, pause=OwnerPause(state))
    return Agent(link, storage, worker, policy, readiness=readiness, status=status, tracing=tracing)


def attach_recent_log(private: PrivatePaths, data: DeviceData) -> RecentLog:
    """Keep the last lines of this process's log, without paths and class names."""
    recent_log = RecentLog(private, data.classes)
    logging.getLogger().addHandler(recent_log)
    return recent_log


def log_images(device: str, images: GrowingFolder) -> None:
    """Log the numbers of images, and the files and folders that cannot be used."""
    data = images.data
    log.info(
        "device ready",
        extra={"device": device, "train": len(data.train), "test": len(data.test), "classes": len(data.classes)},
    )
    images.log_problems()
    if data.empty:
        log.warning("class folders without images", extra={"count": len(data.empty), "first": data.empty[0]})


def speed_at_start(state: Path, threads: int, *, measure: bool) -> Speed | None:
    """Return the stored compute speed; with `measure` a missing one is measured now, which takes seconds."""
    stored = read_stored(state, threads)
    if stored and stored.speed:
        log.info("compute speed is known from an earlier start")
    elif stored or measure:
        if not stored:
            log.info("measuring the compute speed")
        stored = stored or find_speed(state, threads, measure_speed)
        log.info("compute speed", extra={"origin": stored.origin})
    else:
        log.info("compute speed is not known: --profile or 'edge-client profile' measures it")
    return stored.speed if stored else None


def find_feature_bytes(storage: DeviceStorage, state: Path) -> int | None:
    """Return the space for features of frozen layers; None if the owner forbids them."""
    if storage.features is None:
        return None
    room_bytes = storage.disk.find_feature_room()
    return free_disk_bytes(state) if room_bytes is None else room_bytes


def default_disk_budget(state: Path) -> int | None:
    """Return half of the space that the state uses or that is free; None if that is not known."""
    free_bytes = free_disk_bytes(state)
    return None if free_bytes is None else int(DEFAULT_SHARE * (free_bytes + folder_bytes(state)))


def check_memory_budget(limit_bytes: int, sandbox: Sandbox) -> None:
    """Start the process for graphs, so that the reported memory includes it; warn if that exceeds the budget."""
    sandbox.load()
    if (base_bytes := sandbox.memory.resident_bytes()) > limit_bytes:
        log.warning(memory_message(base_bytes, limit_bytes, base_bytes))
