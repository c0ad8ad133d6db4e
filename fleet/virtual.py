"""Many virtual devices in one process, each with its own name, vault and connection, in one event loop.

A virtual device is the same `Agent` as a real one. Shared parts are in `fleet.shared`. As on a device, no deep-learning
framework is imported.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from edge_client.agent import TICK_S, Agent
from edge_client.health.guard import Guard
from edge_client.link.device_link import DeviceIdentity, DeviceLink
from edge_client.link.identity import Identity, Renewal
from edge_client.storage.device_storage import DeviceStorage, FixedImages
from edge_client.storage.integrity import Integrity
from edge_client.storage.state import split_file
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData, Files
from fedvit.policy import Policy, SendPolicy
from fedvit.resources import IMAGE_CACHE_BYTES
from fedvit.tracing import Tracing
from fedvit.transport.base import Transport
from fedvit.wire.topics import Topics
from fleet.shared import Fetches, OwnFolder, SharedBlobs, SharedFolder, SharedRuntime, WorkQueue
from profiles.probes.host import device_profile

HOST_CACHE_BYTES = 256 << 20
"""For the decoded images of all devices of a process."""

LOOKING = 0.02
"""Most of a host's time that it looks through folders."""
AGENTS_PER_TICK = 100
"""Agents whose timers run in each tick, beside those that transfer blobs."""
LONGEST_TURN_TICKS = 20
"""Ticks after which the timers of every agent have run: they are seconds long."""
WRITING = 3
"""Threads beside those that compute, for devices that write their vaults: syncs of several are done together."""

NewTransport = Callable[[str, SimpleQueue[object]], Transport]
"""(name of a device, inbox) -> its connection."""


class _Inbox(SimpleQueue[object]):
    """One device's inbox, which puts events with the device's name into the host's inbox."""

    def __init__(self, device: str, host: SimpleQueue[tuple[str, object]]) -> None:
        super().__init__()
        self._device = device
        self._host = host

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        self._host.put((self._device, item))


class HostSettings(NamedTuple):
    """Settings of a host."""

    federation: str
    state: Path  # each device's vault is in a folder of its name
    blobs: Path  # folder of all blobs, to which each device's own `blobs` is a link
    threads: int  # of a device that computes
    at_once: int  # devices that compute at the same time
    software: str
    watches: bool = False  # images that are added or removed count from a device's next task on
    identities: Mapping[str, Identity] = {}  # of devices that have joined a deployment, by name
    labels: Mapping[str, Mapping[str, str]] = {}  # by device


class Host:
    """The virtual devices of one process. `serve` runs all of them in the calling thread.

    `devices` gives their names and folders of images. `kinds` has other classes of agents by name. Raises DataError for
    a folder that cannot be used.
    """

    def __init__(
        self,
        devices: Mapping[str, Path],
        transport: NewTransport,
        settings: HostSettings,
        kinds: Mapping[str, type[Agent]] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._inbox: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._work = WorkQueue(settings.at_once + WRITING)
        self._ticks = 0
        runtime = SharedRuntime(settings.threads, settings.at_once)
        shared, fetches = SharedBlobs(settings.blobs), Fetches()
        vaults = {name: Vault(settings.state / name / "vault") for name in devices}
        integrity = Integrity(
            BlobStore(settings.blobs), lambda: chain.from_iterable(one.files() for one in vaults.values())
        )
        images = _images(devices, settings.state)
        profile, policy = device_profile(settings.threads), Policy(send=SendPolicy(class_counts=True, features="any"))
        self.agents: dict[str, Agent] = {}
        for name in devices:
            _link(settings.state / name / "blobs", settings.blobs)
            identity = DeviceIdentity(
                device=name,
                federation=settings.federation,
                software=settings.software,
                profile=profile,
                labels=settings.labels.get(name, {}),
            )
            joined = settings.identities.get(name)
            renewal = Renewal(joined, Topics(settings.federation)) if joined else None
            own = images[name] if settings.watches else FixedImages(images[name].data)
            storage = DeviceStorage(vaults[name], shared.view(), own, integrity=integrity)
            connection = transport(name, _Inbox(name, self._inbox))
            link = DeviceLink(identity, connection, storage, renewal=renewal, exchange=fetches.exchange)
            kind = (kinds or {}).get(name, Agent)
            worker = kind.worker_class(link, storage, runtime, Guard(), policy, begin=self._work.begin)
            self.agents[name] = kind(link, storage, worker, policy, tracing=tracing)

    def serve(self, stop: threading.Event, *, once: bool = False) -> None:
        """Take part until `stop` is set; with `once`, until the run has ended for all devices.

        Raises PeerRefused when a device is refused for good: then all leave, since the run would wait for it.
        """
        here = dict(self.agents)
        try:
            for agent in here.values():
                agent.open()
            due = 0.0
            while here and not stop.is_set():
                touched = self._handle(here, TICK_S)
                if (now := time.monotonic()) >= due:
                    due = now + TICK_S
                    for name in (waiting := self._waiting(here)):
                        here[name].on_time()
                    touched |= waiting
                for name in touched if once else ():
                    if name in here and here[name].over:
                        here.pop(name).leave()
        finally:
            for agent in here.values():
                agent.halt()  # all, before waiting for one: its work may wait behind that of others
            for agent in here.values():
                agent.leave()
            self._work.close()

    def _waiting(self, here: Mapping[str, Agent]) -> set[str]:
        """The agents whose timers run in this tick: those that transfer blobs, and of the others each in its turn."""
        self._ticks += 1
        turns = min(LONGEST_TURN_TICKS, -(-len(here) // AGENTS_PER_TICK))
        waiting = {name for name, agent in here.items() if agent.link.exchange.is_busy}
        return waiting.union(list(here)[self._ticks % turns :: turns])

    def _handle(self, here: Mapping[str, Agent], timeout_s: float) -> set[str]:
        """Handle waiting events, at most for `timeout_s`, so that the agents' timers run. Returns the names of the
        agents with events."""
        touched = set[str]()
        until = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            name, event = self._inbox.get(timeout=timeout_s)
            while True:
                if name in here:
                    here[name].on_event(event)
                    touched.add(name)
                if time.monotonic() >= until:
                    break
                name, event = self._inbox.get_nowait()
        return touched


def _images(devices: Mapping[str, Path], state: Path) -> dict[str, OwnFolder]:
    """Each device's view of its folder; a folder of several devices is read once."""
    cache_bytes = min(IMAGE_CACHE_BYTES, HOST_CACHE_BYTES // max(1, len(devices)))
    share = LOOKING / max(1, len(set(devices.values())))
    opened: dict[Path, SharedFolder] = {}
    for name, folder in devices.items():
        if folder not in opened:
            split = split_file(state / name)
            opened[folder] = SharedFolder(folder, split_file=split, cache_bytes=cache_bytes, share=share)

    def own(data: DeviceData) -> DeviceData:
        train, test = (replace(part, files=Files(part.paths, cache_bytes)) for part in (data.train, data.test))
        return replace(data, train=train, test=test)

    return {name: OwnFolder(opened[folder], own) for name, folder in devices.items()}


def _link(link: Path, blobs: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(blobs.resolve(), target_is_directory=True)


def share(devices: Mapping[str, Any], host: int, hosts: int) -> dict[str, Any]:
    """The devices of host number `host` of `hosts`, assigned round-robin.

    >>> share({"a": 1, "b": 2, "c": 3}, 0, 2)
    {'a': 1, 'c': 3}
    """
    names: Iterable[str] = list(devices)[host::hosts]
    return {name: devices[name] for name in names}
