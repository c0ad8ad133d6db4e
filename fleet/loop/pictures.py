"""Pictures that arrive over time: some have labels from the start, the others come one by one, a third class later."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedvit.data.images import Indices
from fedvit.data.layout import UNLABELLED
from fedvit.errors import ConfigError
from fleet.datasets.samples import Samples

CLASSES = 3
LABELLED = 60
"""Most labelled pictures of a known class on a device."""
ARRIVING = 15
"""Pictures of a known class that arrive before the new class appears."""
NEW = 50
"""Most pictures of the new class that arrive before it has a name."""
LEAST_NEW = 25
EVERY_S = 0.2
"""Time between two pictures of a camera."""


class PicturePlan(NamedTuple):
    """The pictures of one device, as row numbers of the data set."""

    labelled: Indices  # of the two known classes, there from the start
    usual: Indices  # arrive first, of the known classes
    new: Indices  # of the third class, arrive next
    later: Indices  # of all three classes, arrive after the promotion


def choose_classes(samples: Samples, names: Sequence[str]) -> tuple[int, ...]:
    """Return the labels of the three classes of the story, the new one last. Raises ConfigError."""
    chosen = tuple(names) or samples.classes[:CLASSES]
    if missing := [name for name in chosen if name not in samples.classes]:
        known = ", ".join(samples.classes[:20])
        raise ConfigError("FV2127", f"{samples.dataset}: there is no class {missing[0]!r}; it has: {known}")
    if len(set(chosen)) != CLASSES:
        raise ConfigError("FV2127", f"{samples.dataset}: the story needs {CLASSES} classes, not {', '.join(chosen)}")
    return tuple(samples.classes.index(name) for name in chosen)


def plan_pictures(samples: Samples, classes: Sequence[int], devices: int, seed: int) -> list[PicturePlan]:
    """Deal the pictures of three classes out to devices and over time. Raises ConfigError if they are too few."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(samples.labels == label)) for label in classes]
    plans = []
    for device in range(devices):
        *known, new = (each[device::devices] for each in rows)
        before, labelled = min(NEW, 2 * len(new) // 3), [min(LABELLED, 2 * len(each) // 3) for each in known]
        if before < LEAST_NEW or min(labelled) < LEAST_NEW:
            counts = ", ".join(str(len(each)) for each in (*known, new))
            raise ConfigError(
                "FV2127", f"{samples.dataset}: {counts} pictures of the classes for a device, the story needs 38 each"
            )
        usual = [each[count:][:ARRIVING] for each, count in zip(known, labelled, strict=True)]
        rest = [each[count + ARRIVING :][:ARRIVING] for each, count in zip(known, labelled, strict=True)]
        plans.append(
            PicturePlan(
                np.concatenate([each[:count] for each, count in zip(known, labelled, strict=True)]),
                rng.permutation(np.concatenate(usual)),
                new[:before],
                rng.permutation(np.concatenate([*rest, new[before:][:NEW]])),
            )
        )
    return plans


class ArrivingPictures:
    """A device's folder of pictures; their names say which rows of the data set they are."""

    def __init__(self, folder: Path, samples: Samples) -> None:
        self.folder = folder
        self.unlabelled = folder / UNLABELLED
        self._samples = samples

    def write_labelled(self, rows: Indices) -> None:
        """Write pictures into class folders."""
        self.unlabelled.mkdir(parents=True)
        for row, pixels in zip(rows.tolist(), self._samples.images[rows], strict=True):
            place = self.folder / self.find_class(f"{row}.png")
            place.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(place / f"{row}.png")

    def find_class(self, name: str) -> str:
        """Return the true class of a picture by its name."""
        return self._samples.classes[int(self._samples.labels[int(name.partition(".")[0])])]

    def receive(self, rows: Iterable[int], every_s: float, stop: threading.Event) -> None:
        """Let pictures arrive without a label, one by one, until `stop`."""
        for row in rows:
            if stop.wait(every_s):
                return
            [pixels] = self._samples.images[np.array([row])]
            part = self.unlabelled / f"{row}.part"
            Image.fromarray(pixels).save(part, "PNG")
            part.rename(self.unlabelled / f"{row}.png")
