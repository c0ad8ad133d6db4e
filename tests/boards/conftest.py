"""Boards and the server that they belong to. The checks of a process share a board, as an owner has one for years.

FEDVIT_BOARD_ARCH is the boards' architecture, FEDVIT_BOARD_SEED repeats drawn moments as far as a machine does.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from tests.boards import used
from tests.boards.board import ROOT, Board, Image, Machine
from tests.boards.scene import NAMES, Scene
from tests.boards.site import RUN, Site, Stopwatch

ARCHITECTURE = os.environ.get("FEDVIT_BOARD_ARCH", "amd64")
BUILD = ROOT / "build" / "boards" / ARCHITECTURE
USED, AGAIN = BUILD / "used", bool(os.environ.get("FEDVIT_BOARD_AGAIN"))
IMAGES = 60


@pytest.fixture(scope="session")
def home() -> Path:
    """A folder on disk: the boards write gigabytes."""
    folder = BUILD / f"work-{os.environ.get('PYTEST_XDIST_WORKER', 'all')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def pictures(home: Path) -> Path:
    """Handwritten digits of each board."""
    digits = read_digits(size=32)
    shares = partition("iid", digits.labels[: IMAGES * len(NAMES)], len(NAMES), seed=3)
    write_device_folders(digits, shares, home / "pictures", test_share=0.2, seed=3)
    for number, name in enumerate(NAMES):
        (home / "pictures" / f"device-{number}").rename(home / "pictures" / name)
    return home / "pictures"


@pytest.fixture(scope="session")
def package() -> Path:
    [file] = (BUILD / "package" / "now").glob("fedvit-edge_*.deb")
    return file


@pytest.fixture(scope="session")
def image() -> Image:
    return Image(BUILD / "image", ARCHITECTURE)


@pytest.fixture(scope="session")
def make_board(home: Path, image: Image, pictures: Path) -> Iterator[Callable[..., Board]]:
    """Make boards that have never been started."""
    boards: list[Board] = []

    def make(name: str, machine: Machine | None = None, image: Image = image) -> Board:
        boards.append(Board(home / name, image, pictures / name, machine))
        return boards[-1]

    yield make
    for board in boards:
        board.close()


@pytest.fixture(scope="session")
def scene(home: Path, image: Image, package: Path, make_board: Callable[..., Board], cache: Path) -> Iterator[Scene]:
    """An empty board is switched on for the first time, and trains one round; or one that did so in a former call."""
    site, is_used = Site(home / "site", cache), AGAIN and used.has_used(USED, image)
    board = make_board("pi-1", image=Image(USED / used.IMAGE, ARCHITECTURE) if is_used else image)
    try:
        scene = used.resume(USED, site, board, package) if is_used else start_first_time(site, board, package)
        if AGAIN and not is_used:
            used.keep(scene, USED, package)
        yield scene
    except BaseException:
        print(board.describe())
        raise
    finally:
        site.close()


def start_first_time(site: Site, board: Board, package: Path) -> Scene:
    """Switch an empty board on; return it after its first round."""
    whole = Stopwatch()
    site.init()
    site.enroll(board, package)
    site.start_run("first", RUN)
    times = {"power-on to ssh": board.switch_on()}
    board.wait_for("test -e /usr/bin/edge-client", "the package is not there", 3600)
    times["to the package unpacked"] = whole.read_s()
    board.wait_for("test ! -e /etc/fedvit/token", "it did not join", 3600)
    times["to the end of joining"] = whole.read_s()
    site.wait_for_rounds("first", 1, 3600)
    times["from the first command to the end of the first round"] = whole.read_s()
    assert [entry["accepted"] for entry in site.finish("first")["rounds"]] == [1]
    # its stages take longer than the rest of a start, and have nothing to do any more
    board.run("touch /etc/cloud/cloud-init.disabled")
    return Scene(site, board, times, list(site.typed))


@pytest.fixture(autouse=True)
def show_board_of_failure(request: pytest.FixtureRequest, scene: Scene) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(scene.board.describe())
