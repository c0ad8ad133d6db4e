"""`edge-client label`: a person gives unlabelled images their class, with one key for each."""

import os
import shutil
import string
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_client.owner.trained import load_own_model
from edge_client.storage.vault import Vault
from export.bundle.measure import RunGraph, are_probabilities, as_input
from fedvit.data.folder import DeviceData
from fedvit.data.images import Pixels, header_problem, is_image_name, read_image, read_thumbnail
from fedvit.data.layout import TRAIN, UNLABELLED, find_layout, read_tree
from fedvit.errors import ConfigError, DataError
from fedvit.program import Batch
from fedvit.quantities import format_count
from fedvit.terminal import escape_line, write_styled

SKIP, UNDO, QUIT, ACCEPT = " ", "u", "q", "\n"
KEYS = [key for key in string.digits[1:] + "0" + string.ascii_letters if key not in (UNDO, QUIT)]
_ESCAPE = "\x1b"
_TEXT_LINES = 8
"""Terminal lines below the image."""


class Guess(NamedTuple):
    label: str
    probability: float


Guesser = Callable[[Path], Guess]
"""Raises DataError when the image cannot be read."""


def newest_guesser(
    *, device: str, state: Path, data: DeviceData | None, threads: int, vault_key: Path | None = None
) -> Guesser | None:
    """Return the guesser of this device's newest run; None if the device has taken part in no run.

    Raises ConfigError when the model is not whole here, and StorageFailed.
    """
    runs = Vault(state / "vault").runs()
    if not runs:
        return None
    trained, _ = load_own_model(runs[0], device=device, state=state, data=data, threads=threads, vault_key=vault_key)
    graph = RunGraph(trained.graph, trained.values, trained.batch, threads)
    return lambda path: _guess(graph, trained.batch, trained.classes, path)


def _guess(graph: RunGraph, batch: Batch, classes: Sequence[str], path: Path) -> Guess:
    answers_BC = graph(as_input(read_image(path, batch.image_size)[None], batch))
    [answers_C] = answers_BC
    if not are_probabilities(answers_BC):
        answers_C = np.exp(answers_C - answers_C.max())
        answers_C /= answers_C.sum()
    best = int(answers_C.argmax())
    return Guess(classes[best], float(answers_C[best]))


class Labelling:
    """The unlabelled images of a device's folder, by name; the first that waits is `current`.

    An image is moved by one rename, so that the device never sees half of it. Raises DataError when the folder has no
    class folders or cannot be listed, or an image cannot be moved.
    """

    def __init__(self, folder: Path) -> None:
        tree = read_tree(folder, 2)
        tree.folders.pop(UNLABELLED, None)
        layout = find_layout(tree, str(folder))
        self.classes = layout.classes
        self.labelled = 0
        self._target = folder / TRAIN if layout.divided else folder
        waiting = sorted(path for path in self._list_unlabelled(folder) if is_image_name(path.name))
        self.unreadable = [(path, reason) for path in waiting if (reason := header_problem(path))]
        unreadable = {path for path, _ in self.unreadable}
        self._waiting = [path for path in waiting if path not in unreadable]
        self._place = 0
        self._decisions: list[Path | None] = []  # for each image before `current`: where it is now; None: skipped

    def _list_unlabelled(self, folder: Path) -> list[Path]:
        try:
            return [path for path in (folder / UNLABELLED).iterdir() if path.is_file()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError("FV1402", f"cannot list folder {folder / UNLABELLED}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def number(self) -> int:
        """Return the number of the current image, from 1."""
        return self._place + 1

    @property
    def current(self) -> Path | None:
        return self._waiting[self._place] if self._place < len(self._waiting) else None

    def label(self, name: str) -> None:
        """Move the current image into a class folder; an image of the same name there stays as it is."""
        assert self.current is not None
        place = free_name(self._target / name / self.current.name)
        _move(self.current, place)
        self._decisions.append(place)
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
        place = self._decisions.pop()
        self._place -= 1
        if place is not None:
            self.labelled -= 1
            _move(place, self._waiting[self._place])


def free_name(path: Path) -> Path:
    """The path itself, or the first of NAME-2, NAME-3, ... that no file has."""
    free, number = path, 2
    while os.path.lexists(free):
        free, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return free


def _move(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
    except OSError as error:
        raise DataError("FV1413", f"cannot move {source} to {target}: {error.strerror}") from error


# --- the terminal -------------------------------------------------------------------------------------


def run(labelling: Labelling, guesser: Guesser | None) -> None:
    """Show one image after the other, and act on keys, until none waits or the person quits.

    Raises ConfigError without a terminal, or with more classes than keys.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "FV1413", "label needs a terminal: start it in one, or move images into class folders yourself"
        )
    if len(labelling.classes) > len(KEYS):
        raise ConfigError(
            "FV1413", f"{len(labelling.classes)} classes are more than the {len(KEYS)} keys that label has"
        )
    keys = dict(zip(KEYS, labelling.classes, strict=False))
    with _single_keys():
        while labelling.current is not None:
            guess = _try_guess(guesser, labelling.current)
            write_styled(_screen(labelling, guess, keys))
            for key in _read_keys():
                if key == QUIT:
                    return
                if _act(labelling, key, keys, guess):
                    guess = None  # of the image before


def _act(labelling: Labelling, key: str, keys: dict[str, str], guess: Guess | None) -> bool:
    """Do what a key stands for; False if it stands for nothing."""
    if key == UNDO:
        labelling.undo()
    elif labelling.current is None:  # more keys were typed than there are images
        return False
    elif key == SKIP:
        labelling.skip()
    elif key == ACCEPT and guess and guess.label in labelling.classes:
        labelling.label(guess.label)
    elif key in keys:
        labelling.label(keys[key])
    else:
        return False
    return True


def _try_guess(guesser: Guesser | None, path: Path) -> Guess | None:
    try:
        return guesser(path) if guesser else None
    except DataError:
        return None  # the screen says why


def _read_keys() -> Iterator[str]:
    """The keys that were typed, at least one; QUIT when the terminal is gone. Arrows and the like are none."""
    try:
        typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace") or QUIT
    except KeyboardInterrupt:
        typed = QUIT
    yield from typed.partition(_ESCAPE)[0]


@contextmanager
def _single_keys() -> Iterator[None]:
    """Make keys arrive at once, and not be shown, within the context."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _screen(labelling: Labelling, guess: Guess | None, keys: dict[str, str]) -> str:
    assert labelling.current is not None
    columns, rows = shutil.get_terminal_size()
    try:
        picture = draw_image(read_thumbnail(labelling.current, columns, 2 * max(rows - _TEXT_LINES, 4)))
    except DataError as error:
        picture = escape_line(str(error))
    guessed = (
        f"the model says {escape_line(guess.label)} ({guess.probability:.0%}), Enter agrees" if guess else "no guess"
    )
    named = "  ".join(f"[{key}] {escape_line(name)}" for key, name in keys.items())
    return (
        f"{_ESCAPE}[2J{_ESCAPE}[H{picture}\n"
        f"{labelling.number} of {len(labelling)}: {escape_line(labelling.current.name)}; {guessed}\n"
        f"{named}\n[space] skip  [{UNDO}] undo  [{QUIT}] quit\n"
    )


def draw_image(pixels_HWC: Pixels) -> str:
    """An image as lines of half blocks: each character is two pixels, one above the other."""
    true_colour = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    if len(pixels_HWC) % 2:
        pixels_HWC = np.concatenate([pixels_HWC, np.zeros_like(pixels_HWC[:1])])
    lines = []
    for upper, lower in zip(pixels_HWC[::2], pixels_HWC[1::2], strict=True):
        cells = (
            f"{_ESCAPE}[38;{_colour(above, true_colour)};48;{_colour(below, true_colour)}m\u2580"
            for above, below in zip(upper.tolist(), lower.tolist(), strict=True)
        )
        lines.append("".join(cells) + f"{_ESCAPE}[0m")
    return "\n".join(lines)


def _colour(rgb: Sequence[int], true_colour: bool) -> str:
    """Return a colour in the form for terminals: exact, or the nearest of 6 x 6 x 6."""
    if true_colour:
        return "2;" + ";".join(map(str, rgb))
    red, green, blue = (round(value / 51) for value in rgb)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def summary(labelling: Labelling) -> str:
    left = len(labelling) - labelling.labelled
    lines = [
        f"labelled {format_count(labelling.labelled, 'image')}, {left} left; the device uses them from its next task on"
    ]
    lines += [escape_line(f"{path} cannot be read: {reason}") for path, reason in labelling.unreadable]
    return "\n".join(lines)
