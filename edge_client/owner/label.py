"""`edge-client label`: a person gives unlabelled images their class in a terminal, with one key for each."""

import os
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge_client.owner.guessing import Guess, Guesser
from edge_client.owner.labelling import ACCEPT, KEYS, QUIT, SKIP, UNDO, Labelling
from fedvit.data.images import Pixels, read_thumbnail
from fedvit.errors import ConfigError, DataError
from fedvit.quantities import format_count
from fedvit.terminal import escape_line, write_styled

_ESCAPE = "\x1b"
_TEXT_LINES = 8
"""Terminal lines below the image."""


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
