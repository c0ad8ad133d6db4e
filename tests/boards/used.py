"""A board after its first round, kept for later calls of the checks: it spares them the first boot (AGAIN=1).

It is the disk as a power cut would leave it after `sync`, the server's deployment, and what the first round took.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.boards.board import Board, Image
from tests.boards.scene import Scene
from tests.boards.site import Site

IMAGE, BOOT, SITE, SCENE = "image", "boot", "site", "scene.json"
THERE = "/boot/firmware/fedvit"


def has_used(folder: Path, image: Image) -> bool:
    """Return whether there is a used board of this image."""
    made = folder / SCENE
    return made.exists() and made.stat().st_mtime > image.disk.stat().st_mtime


def keep(scene: Scene, folder: Path, package: Path) -> None:
    """Keep the scene's board, whose run has ended, and its server."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / IMAGE).mkdir(parents=True)
    board, image = scene.board, scene.board.image
    for name in ("vmlinuz", "initrd.img", "key"):
        os.link(image.folder / name, folder / IMAGE / name)
    shutil.copytree(board.boot_folder, folder / BOOT)
    shutil.copytree(scene.site.home, folder / SITE, ignore=shutil.ignore_patterns("*.sock"))
    board.run("sync")
    with board.hold_disk() as layer:
        copy_blocks([image.disk, layer], folder / IMAGE / image.disk.name)
    kept = {"times": scene.times, "commands": scene.commands, "package": hash_package(package)}
    (folder / SCENE).write_text(json.dumps(kept))


def resume(folder: Path, site: Site, board: Board, package: Path) -> Scene:
    """Start a kept board and its server; give it the package of now, if it has another one."""
    kept = json.loads((folder / SCENE).read_text())
    shutil.copytree(folder / SITE, site.home, dirs_exist_ok=True)
    shutil.copytree(folder / BOOT, board.boot_folder, dirs_exist_ok=True)
    shutil.copy(package, board.boot_folder / "fedvit" / package.name)
    board.switch_on()
    if kept["package"] != hash_package(package):
        board.run(f"dpkg --install {THERE}/{package.name} && systemctl restart fedvit-edge", 3600)
    return Scene(site, board, kept["times"], kept["commands"])


def hash_package(package: Path) -> str:
    """Return the digest of a package: two builds of one commit are equal."""
    return hashlib.sha256(package.read_bytes()).hexdigest()


def copy_blocks(layers: list[Path], file: Path) -> None:
    """Write what each of these sparse files holds into one, the later ones over the former ones."""
    with file.open("wb") as target:
        target.truncate(layers[0].stat().st_size)
        for layer in layers:
            with layer.open("rb") as source:
                for start, end in find_extents(source.fileno()):
                    source.seek(start)
                    target.seek(start)
                    target.write(source.read(end - start))


def find_extents(file: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of a sparse file that is not a hole."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError:  # only a hole follows
            return
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end
