"""Many virtual devices in one process: each with its own name, vault and connection, driven by one loop.

A virtual device is the same `Agent` as a real one. What is shared is in `fleet.shared`; nothing here imports a
deep-learning framework, as on a device.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from edge_client.agent import TICK_S, Agent
from edge_client.integrity import Integrity
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData, Files, Split
from fedvit.resources import IMAGE_CACHE_BYTES
from fedvit.transport.base import Transport
from fleet.shared import Fetches, SharedBlobs, SharedRuntime, Turns
from profiles.probes.host import device_profile

log = logging.getLogger(__name__)

HOST_CACHE_BYTES = 256 << 20
"""For the decoded images of all devices of a process."""

WRITING = 3
"""Devices at work beside those that compute: a vault waits for the disk, several at a time do it together."""

NewTransport = Callable[[str, SimpleQueue[object]], Transport]
"""Makes the connection of the device of a name, with this inbox."""


class _Inbox(SimpleQueue[object]):
    """One device's inbox, whose events come out of the host's, with the device's name on them."""

    def __init__(self, device: str, host: SimpleQueue[tuple[str, object]]) -> None:
        super().__init__()
        self._device = device
        self._host = host

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        self._host.put((self._device, item))


class Host:
    """The virtual devices of one process. `serve` drives them all from the thread that calls it.

    `devices` gives their names and folders of images. Below `state` each keeps its vault in a folder of its name;
    the blobs of all are in the folder `blobs`, to which each device's own `blobs` is a link. `at_once` devices compute
    at the same time, with `threads` each. `kinds` makes some devices other agents than the usual. Raises DataError for
    a folder that cannot be used.
    """

    def __init__(
        self,
        devices: Mapping[str, Path],
        *,
        federation: str,
        transport: NewTransport,
        state: Path,
        blobs: Path,
        threads: int,
        at_once: int,
        software: str,
        kinds: Mapping[str, Callable[..., Agent]] | None = None,
    ) -> None:
        self._inbox: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._turns = Turns(at_once + WRITING)
        runtime, shared, fetches = SharedRuntime(threads, at_once), SharedBlobs(blobs), Fetches()
        vaults = {name: Vault(state / name / "vault") for name in devices}
        integrity = Integrity(BlobStore(blobs), lambda: chain.from_iterable(one.files() for one in vaults.values()))
        images = _images(devices)
        profile = device_profile(threads)
        self.agents: dict[str, Agent] = {}
        for name in devices:
            home = state / name
            _link(home / "blobs", blobs)
            self.agents[name] = (kinds or {}).get(name, Agent)(
                device=name,
                federation=federation,
                transport=transport(name, _Inbox(name, self._inbox)),
                data=images[name],
                vault=vaults[name],
                blobs=shared.view(),
                runtime=runtime,
                profile=profile,
                software=software,
                begin=self._turns.begin,
                exchange=fetches.exchange,
                integrity=integrity,
            )

    def serve(self, stop: threading.Event, *, once: bool = False) -> None:
        """Take part until told to stop; with `once`, until the run has ended for all.

        Raises PeerRefused when one is refused for good: all leave then, since the run would wait for it.
        """
        here = dict(self.agents)
        try:
            for agent in here.values():
                agent.open()
            due = 0.0
            while here and not stop.is_set():
                self._handle(here, TICK_S)
                if (now := time.monotonic()) < due:
                    continue
                due = now + TICK_S
                for name, agent in list(here.items()):
                    agent.on_time()
                    if once and agent.over:
                        here.pop(name).leave()
        finally:
            for agent in here.values():
                agent.halt()  # all, before one is waited for: work waits for its turn behind others'
            for agent in here.values():
                agent.leave()
            self._turns.close()

    def _handle(self, here: Mapping[str, Agent], timeout_s: float) -> None:
        """What came, but not for longer than a tick: time must pass for the others."""
        until = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            name, event = self._inbox.get(timeout=timeout_s)
            while True:
                if name in here:
                    here[name].on_event(event)
                if time.monotonic() >= until:
                    return
                name, event = self._inbox.get_nowait()


def _images(devices: Mapping[str, Path]) -> dict[str, DeviceData]:
    """Each device's own view of its folder; a folder that several have is looked through once."""
    cache_bytes = min(IMAGE_CACHE_BYTES, HOST_CACHE_BYTES // max(1, len(devices)))
    opened = {folder: DeviceData.open(folder, cache_bytes=cache_bytes) for folder in dict.fromkeys(devices.values())}

    def own(split: Split) -> Split:
        return Split(split.labels, Files(split.paths, cache_bytes))

    found = {}
    for name, folder in devices.items():
        data = opened[folder]
        found[name] = replace(data, train=own(data.train), test=own(data.test))
    return found


def _link(place: Path, blobs: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.is_symlink():
        place.symlink_to(blobs.resolve(), target_is_directory=True)


def share(devices: Mapping[str, Any], host: int, hosts: int) -> dict[str, Any]:
    """The devices of host number `host` of `hosts`: every so manieth.

    >>> share({"a": 1, "b": 2, "c": 3}, 0, 2)
    {'a': 1, 'c': 3}
    """
    names: Iterable[str] = list(devices)[host::hosts]
    return {name: devices[name] for name in names}
