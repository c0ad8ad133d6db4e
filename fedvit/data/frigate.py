"""Snapshots of Frigate as a device's images: its folder `clips`, with a file that says which class each one has.

Frigate writes `CAMERA-ID.jpg` for each tracked object, and beside it a copy without boxes, `CAMERA-ID-clean.webp` (or
.png); ID is the time of its start and six letters. The label is not in the name: it is in the answer of Frigate's
`/api/events`, saved as `frigate-events.json`, or the owner writes it into `frigate.toml`.
"""

import os
import re
import time
import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from fedvit.data.layout import Found, Layout
from fedvit.errors import DataError
from fedvit.files import name_failure

SETTINGS = "frigate.toml"
EVENTS = "frigate-events.json"
MOST_SNAPSHOTS = 20_000
"""The newest events that count."""
MAX_EVENTS_BYTES = 64_000_000
SETTLED_S = 5.0
"""Age of a file from which on it is whole: Frigate writes to its final name."""
NO_CLASS = "without a class in frigate.toml or frigate-events.json"
_SNAPSHOT = re.compile(
    r"(?P<camera>.+)-(?P<event>\d{1,12}\.\d{1,9}-[a-z0-9]{1,12})(?P<clean>-clean)?\.(?:jpg|png|webp)"
)


class FrigateSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The file `frigate.toml`. A snapshot has the first class that is found in this order."""

    events: dict[str, str] = {}  # by event
    labels: dict[str, str] = {}  # by Frigate's sub label, else its label; without this table each is its own class
    cameras: dict[str, str] = {}  # by camera


class FrigateEvent(Struct, frozen=True):
    """The part of an event that matters here; older versions have a sub label with a score, or none."""

    id: str
    label: str
    sub_label: str | list[str | float | None] | None = None

    def names(self) -> list[str]:
        """Return its sub label, if it has one, and its label."""
        sub = self.sub_label[0] if isinstance(self.sub_label, list) and self.sub_label else self.sub_label
        return [name for name in (sub, self.label) if isinstance(name, str) and name]


def is_frigate_folder(folder: Path) -> bool:
    """Return whether a folder has the file that makes it one of Frigate."""
    return (folder / SETTINGS).is_file()


def read_frigate(folder: Path) -> Found:
    """Find the snapshots in a folder, and the class of each. Raises DataError, naming the file that cannot be used."""
    settings, events = read_settings(folder), _read_events(folder)
    snapshots = list_snapshots(folder)
    named: dict[Path, str] = {}
    unusable = []
    for path, camera, event in snapshots:
        if name := _find_class(settings, events.get(event), camera, event):
            named[path] = name
        else:
            unusable.append((path, NO_CLASS))
    classes = tuple(sorted({*named.values(), *settings.labels.values(), *settings.cameras.values()}))
    if not classes:
        raise DataError(
            "FV1402", f"{folder}: no snapshot has a class; name one per camera in {SETTINGS}, or save Frigate's events"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    train = [(path, numbers[name]) for path, name in sorted(named.items(), key=lambda each: (each[1], each[0].name))]
    return Found(Layout(classes, train, None, divided=False), unusable=tuple(unusable))


def read_settings(folder: Path) -> FrigateSettings:
    """Read `frigate.toml`. Raises DataError if it cannot be used."""
    file = folder / SETTINGS
    try:
        settings = msgspec.convert(tomllib.loads(file.read_text()), FrigateSettings)
    except OSError as error:
        raise DataError("FV1702", f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise DataError("FV1437", f"{file}: {error}") from error
    names = {*settings.events.values(), *settings.labels.values(), *settings.cameras.values()}
    if wrong := sorted(name for name in names if not name.isprintable() or not name or "/" in name):
        raise DataError("FV1437", f"{file}: class {wrong[0]!r} must be printable, without /")
    return settings


def _read_events(folder: Path) -> dict[str, FrigateEvent]:
    """Read the saved events by their ids; none without the file. Raises DataError if it cannot be used."""
    file = folder / EVENTS
    try:
        if file.stat().st_size > MAX_EVENTS_BYTES:
            raise DataError("FV1437", f"{file} exceeds {MAX_EVENTS_BYTES} bytes")
        found = msgspec.json.decode(file.read_bytes(), type=list[FrigateEvent])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError("FV1702", f"cannot read {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError("FV1437", f"{file}: {error}; it must be the answer of Frigate's /api/events") from error
    return {event.id: event for event in found}


def list_snapshots(folder: Path) -> list[tuple[Path, str, str]]:
    """List the newest whole snapshots with camera and event; of each one the copy without boxes, if it is there."""
    found: dict[str, tuple[bool, Path, str]] = {}
    now_s = time.time()
    with name_failure(f"cannot list folder {folder}", DataError, "FV1402"), os.scandir(folder) as entries:
        for entry in entries:
            match = _SNAPSHOT.fullmatch(entry.name)
            if match is None or not entry.is_file():
                continue
            try:
                age_s = now_s - entry.stat().st_mtime
            except FileNotFoundError:  # Frigate has removed it meanwhile
                continue
            if 0 <= age_s < SETTLED_S:
                found[match["event"]] = (True, Path(), "")  # both files of an event count together
                continue
            is_clean = match["clean"] is not None
            if match["event"] not in found or is_clean > found[match["event"]][0]:
                found[match["event"]] = (is_clean, Path(entry.path), match["camera"])
    newest = sorted(found, key=lambda event: (float(event.partition("-")[0]), event))[-MOST_SNAPSHOTS:]
    return [(path, camera, event) for event in newest for _, path, camera in (found[event],) if camera]


def _find_class(settings: FrigateSettings, event: FrigateEvent | None, camera: str, event_id: str) -> str | None:
    if name := settings.events.get(event_id):
        return name
    for name in event.names() if event else ():
        if not settings.labels and name.isprintable() and "/" not in name:
            return name
        if name in settings.labels:
            return settings.labels[name]
    return settings.cameras.get(camera)
