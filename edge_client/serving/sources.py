"""Sources of pictures: a folder in which they appear, Frigate's snapshots, a camera, a stream, a video file.

A source only reads: nothing is moved, renamed or written beside the pictures. Each runs in a thread of its own, and
tries again when it stops.
"""

import heapq
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fedvit.data.frigate import list_snapshots
from fedvit.data.images import Pixels, is_image_name, read_image
from fedvit.errors import ConfigError, DataError, LinkDown
from fedvit.files import name_failure
from fedvit.transport.backoff import Backoff

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Between two looks at a folder."""
LOOK_SHARE = 10
"""A look at a large folder, on a card or a network, is followed by a wait of this many times its duration."""
DECODED_BYTES = 64 << 20
MAX_FILE_BYTES = 64 << 20
MOST_KNOWN = 20_000
"""Newest pictures of a folder; older ones are not looked at."""
MOST_WAITING = 1000
"""New pictures of one look; the oldest beyond them are left out."""
FRIGATE = "frigate:"
STREAM_PATIENCE_MS = 10_000
"""Longest wait of OpenCV for a stream."""


class Picture(NamedTuple):
    """One picture of a source."""

    name: str
    read: Callable[[int], Pixels]  # at the size of a model; raises DataError


class Source(Protocol):
    """A source of pictures."""

    name: str

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield pictures until `stop` is set or the source has ended. Raises LinkDown, DataError: again later."""


class FolderSource:
    """Pictures that appear in a folder, once each, when their size has not changed between two looks.

    Those that are there at the start are known already.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder
        self._known: dict[str, tuple[int, int]] | None = None
        self._growing: dict[str, tuple[int, int]] = {}
        self._oldest_ns = 0  # older pictures do not become new when newer ones are removed

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield the new pictures, by their time."""
        while not stop.is_set():
            began_at = time.monotonic()
            fresh = self.find_new()
            took_s = time.monotonic() - began_at
            for path in fresh:
                if stop.is_set():
                    return
                yield read_later(path)
            stop.wait(max(LOOK_EVERY_S, LOOK_SHARE * took_s))

    def find_new(self) -> list[Path]:
        """List the pictures that are new and whole since the last call. Raises DataError."""
        seen = self._list()
        if self._known is None:
            self._known = seen
            return []
        fresh = {name: stamp for name, stamp in seen.items() if self._known.get(name) != stamp}
        whole = [name for name, stamp in fresh.items() if stamp[0] and self._growing.get(name) == stamp]
        settled = {name: stamp for name, stamp in seen.items() if name not in fresh or name in whole}
        self._known = _remember(self._known, settled)
        self._growing = {name: stamp for name, stamp in fresh.items() if name not in whole}
        newest = sorted(whole, key=lambda name: (seen[name][1], name))
        if len(newest) > MOST_WAITING:
            log.warning("pictures left out", extra={"count": len(newest) - MOST_WAITING, "folder": self.name})
        return [self._folder / name for name in newest[-MOST_WAITING:]]

    def _list(self) -> dict[str, tuple[int, int]]:
        failure = name_failure(f"cannot list folder {self._folder}", DataError, "FV1494")
        with failure, os.scandir(self._folder) as entries:
            files = _stat_files(entry for entry in entries if is_image_name(entry.name))
            stamps = ((stat.st_mtime_ns, stat.st_size, file.name) for file, stat in files)
            newest = heapq.nlargest(MOST_KNOWN, (stamp for stamp in stamps if stamp[0] >= self._oldest_ns))
        if len(newest) == MOST_KNOWN:
            self._oldest_ns = newest[-1][0]
        return {name: (size, time_ns) for time_ns, size, name in newest}


class FrigateSource(FolderSource):
    """New snapshots of Frigate, the copies without boxes where it writes them."""

    def find_new(self) -> list[Path]:
        """List the snapshots that are new and settled since the last call. Raises DataError."""
        settled = {path.name: path for path, _, _ in list_snapshots(self._folder)}
        known, self._known = self._known, _remember(self._known or {}, dict.fromkeys(settled, (0, 0)))
        return [] if known is None else [path for name, path in settled.items() if name not in known]


def _remember(known: dict[str, tuple[int, int]], settled: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the pictures that are there, and the newest of those that are gone: a folder may be mounted again."""
    gone = [name for name in known if name not in settled]
    return {name: known[name] for name in gone[-MOST_KNOWN:]} | settled


class CameraSource:
    """Frames of a camera, a stream or a video file by OpenCV; of a live one the newest, every `every_s` seconds."""

    def __init__(self, address: str, every_s: float) -> None:
        self.name = hide_login(address)
        self._address = address
        self._every_s = every_s
        self._is_file = Path(address).is_file()
        try:
            self._cv: Any = import_module("cv2")
        except ImportError as error:
            raise ConfigError("FV1495", f'{self.name}: cameras need OpenCV: pip install "fedvit[camera]"') from error

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        """Yield frames. Raises LinkDown when the camera cannot be opened or stops."""
        cv = self._cv
        number = int(self._address) if self._address.isascii() and self._address.isdigit() else self._address
        patience = [
            cv.CAP_PROP_OPEN_TIMEOUT_MSEC,
            STREAM_PATIENCE_MS,
            cv.CAP_PROP_READ_TIMEOUT_MSEC,
            STREAM_PATIENCE_MS,
        ]
        capture = cv.VideoCapture(number) if isinstance(number, int) or self._is_file else None
        capture = capture or cv.VideoCapture(number, cv.CAP_FFMPEG, patience)
        try:
            if not capture.isOpened():
                raise LinkDown("FV1494", f"{self.name} cannot be opened")
            step = max(1, round(self._every_s * (capture.get(cv.CAP_PROP_FPS) or 1.0))) if self._is_file else 0
            yield from self._frames(capture, step, stop)
        finally:
            capture.release()

    def _frames(self, capture: Any, step: int, stop: threading.Event) -> Iterator[Picture]:
        """Yield each frame of number n * step of a file, or the newest one when it is due."""
        count, due_at = 0, time.monotonic()
        while not stop.is_set():
            if not capture.grab():
                if self._is_file:
                    return
                raise LinkDown("FV1494", f"{self.name} sends no more frames")
            count += 1
            is_due = (count - 1) % step == 0 if step else time.monotonic() >= due_at
            if not is_due:
                continue
            due_at = max(due_at + self._every_s, time.monotonic())
            width, height = (
                int(capture.get(key)) for key in (self._cv.CAP_PROP_FRAME_WIDTH, self._cv.CAP_PROP_FRAME_HEIGHT)
            )
            if 3 * width * height > DECODED_BYTES:
                most = f"a frame may take {DECODED_BYTES >> 20} MiB"
                raise DataError("FV1494", f"{self.name} has frames of {width} x {height} pixels: {most}")
            is_read, frame = capture.retrieve()
            if is_read and frame is not None and frame.ndim == 3:
                pixels = np.ascontiguousarray(frame[:, :, ::-1])  # OpenCV has blue first
                yield Picture(f"{self.name}#{count}", partial(resize, pixels))


def hide_login(address: str) -> str:
    """Return an address without user, password and query, to be shown.

    >>> hide_login("rtsp://ann:p@ss/1@camera/stream?password=x"), hide_login("/dev/video0")
    ('rtsp://camera/stream', '/dev/video0')
    """
    scheme, separator, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if separator else address


def open_sources(texts: Iterable[str], every_s: float) -> list[Source]:
    """Open the values of --source. Raises ConfigError.

    Cameras of one recorder may differ in the query alone, which is not shown: they are numbered.
    """
    opened: list[Source] = []
    times: Counter[str] = Counter()
    for source in (open_source(text, every_s) for text in texts):
        times[source.name] += 1
        if times[source.name] > 1:
            source.name = f"{source.name} ({times[source.name]})"
        opened.append(source)
    return opened


def open_source(text: str, every_s: float) -> Source:
    """Read the value of --source: a camera's number or device, a URL, a video file, or frigate:FOLDER.

    Raises ConfigError.
    """
    if text.startswith(FRIGATE):
        return FrigateSource(check_folder(Path(text.removeprefix(FRIGATE)), "--source"))
    return CameraSource(text, every_s)


def check_folder(folder: Path, option: str) -> Path:
    """Return a folder. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError("FV1494", f"{option} {folder}: there is no such folder")
    return folder


def read_later(path: Path) -> Picture:
    """Return the picture in a file, which is read when it is answered."""

    def read(size: int) -> Pixels:
        with name_failure(f"cannot read image {path}", DataError, "FV1403"):
            if path.stat().st_size > MAX_FILE_BYTES:
                raise DataError("FV1403", f"cannot read image {path}: it exceeds {MAX_FILE_BYTES} bytes")
        return read_image(path, size, decoded_bytes=DECODED_BYTES)

    return Picture(path.name, read)


def resize(pixels_HWC: Pixels, size: int) -> Pixels:
    """Resize a frame as the images of a data set are."""
    image = Image.fromarray(pixels_HWC)
    return np.array(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.uint8)


def follow(source: Source, answer: Callable[[Picture], None], stop: threading.Event) -> None:
    """Answer the pictures of a source until `stop`. A source that stops is tried again, with one line for it."""
    backoff, is_down = Backoff(), False
    while not stop.is_set():
        began_at = math.inf
        try:
            for picture in source.pictures(stop):
                if is_down:
                    log.info("pictures arrive again", extra={"source": source.name})
                is_down, began_at = False, min(began_at, time.monotonic())
                answer(picture)
            if not stop.is_set():
                log.info("source has ended", extra={"source": source.name})
            return
        except (LinkDown, DataError) as error:
            if not is_down:
                log.warning("no pictures from the source", extra={"source": source.name, "reason": str(error)})
            is_down = True
        except Exception:  # what a decoder or a driver raises must not end the source's thread
            if not is_down:
                log.exception("no pictures from the source", extra={"source": source.name})
            is_down = True
        stop.wait(backoff.wait_s(time.monotonic() - began_at if math.isfinite(began_at) else None))


def _stat_files(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for entry in entries:
        try:
            if entry.is_file():
                yield entry, entry.stat()
        except OSError:  # removed meanwhile
            continue
