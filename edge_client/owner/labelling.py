"""The class folders of a device, and its images that wait for a label: what the terminal and the owner's page share."""

import os
import string
from pathlib import Path

from edge_client.settings import DeviceSettings
from edge_client.storage.state import split_file
from fedvit.data.folder import DeviceData
from fedvit.data.images import header_problem, is_image_name
from fedvit.data.label_file import LABEL_FILE, has_label_file
from fedvit.data.layout import TRAIN, UNLABELLED, find_layout, read_tree
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import DataError
from fedvit.files import name_failure

SKIP, UNDO, QUIT, ACCEPT = " ", "u", "q", "\n"
KEYS = [key for key in string.digits[1:] + "0" + string.ascii_letters if key not in (UNDO, QUIT)]


class ClassFolders:
    """The class folders of a device. Raises DataError when there are none or they cannot be listed.

    An image is moved by one rename, so that the device never sees half of it. An image of the same name in the class
    folder stays as it is.
    """

    def __init__(self, folder: Path) -> None:
        if has_label_file(folder):
            raise DataError(
                "FV1402", f"{folder / LABEL_FILE} has the labels of this folder: add lines to it, images are not moved"
            )
        tree = read_tree(folder, 2)
        tree.folders.pop(UNLABELLED, None)
        layout = find_layout(tree, str(folder))
        self.unlabelled = folder / UNLABELLED
        self.classes = layout.classes
        self.images = [*layout.train, *(layout.test or ())]
        """Labelled images with their class, as indices into `classes`."""
        self._target = folder / TRAIN if layout.divided else folder

    def list_waiting(self) -> list[Path]:
        """List the images without a label, by name. Raises DataError."""
        try:
            with os.scandir(self.unlabelled) as entries:
                names = sorted(entry.name for entry in entries if is_image_name(entry.name) and entry.is_file())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError("FV1402", f"cannot list folder {self.unlabelled}: {error.strerror}") from error
        return [self.unlabelled / name for name in names]

    def move(self, image: Path, name: str) -> Path:
        """Move an image into the folder of a class; return its new place. Raises DataError."""
        place = free_name(self._target / name / image.name)
        move_file(image, place)
        return place


class Labelling:
    """The unlabelled images of a device's folder, by name; the first that waits is `current`.

    Raises DataError when the folder has no class folders or cannot be listed, or an image cannot be moved.
    """

    def __init__(self, folder: Path) -> None:
        self._folders = ClassFolders(folder)
        self.classes = self._folders.classes
        self.labelled = 0
        waiting = self._folders.list_waiting()
        self.unreadable = [(path, reason) for path in waiting if (reason := header_problem(path))]
        unreadable = {path for path, _ in self.unreadable}
        self._waiting = [path for path in waiting if path not in unreadable]
        self._place = 0
        self._decisions: list[Path | None] = []  # for each image before `current`: where it is now; None: skipped

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Path]:
        """The readable images, in the order in which they are shown."""
        return list(self._waiting)

    def sort(self, images: list[Path]) -> None:
        """Show the images in another order, before the first one is labelled."""
        assert not self._decisions
        assert sorted(images) == sorted(self._waiting)
        self._waiting = images

    @property
    def number(self) -> int:
        """Return the number of the current image, from 1."""
        return self._place + 1

    @property
    def current(self) -> Path | None:
        return self._waiting[self._place] if self._place < len(self._waiting) else None

    def label(self, name: str) -> None:
        """Move the current image into a class folder."""
        assert self.current is not None
        self._decisions.append(self._folders.move(self.current, name))
        self._place += 1
        self.labelled += 1

    def skip(self) -> None:
        """Leave the current image where it is."""
        self._decisions.append(None)
        self._place += 1

    def undo(self) -> None:
        """Take back the newest label or skip, if there is one."""
        if not self._decisions:
            return
        if (place := self._decisions[-1]) is not None:
            move_file(place, self._waiting[self._place - 1])
            self.labelled -= 1
        self._decisions.pop()
        self._place -= 1


def free_name(path: Path) -> Path:
    """The path itself, or the first of NAME-2, NAME-3, ... that no file has."""
    free, number = path, 2
    while os.path.lexists(free):
        free, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return free


def move_file(source: Path, target: Path) -> None:
    """Rename a file into a folder that may not exist yet. Raises DataError, also if another file has the name."""
    if os.path.lexists(target):
        raise DataError("FV1413", f"cannot move {source} to {target}: another picture has this name now")
    with name_failure(f"cannot move {source} to {target}", DataError, "FV1413"):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)


def open_images(settings: DeviceSettings, state: Path) -> DeviceData | None:
    """Return the device's labelled images, without decoding them; None if nothing is labelled yet.

    Raises StorageFailed.
    """
    split = KeptSplit.load(split_file(state), settings.test_share) or RandomSplit(settings.test_share)
    try:
        return DeviceData.open(settings.data_folder, split=split)
    except DataError:
        return None
