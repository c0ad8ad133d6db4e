"""First boot, and power cuts at drawn moments: in the first boot, while joining, in training, in updates.

A cut loses a random half of what the disk has not flushed. It comes at a drawn moment, or within a flush: there a
program waits for its disk, such as the vault for a round's personal tensors. FEDVIT_BOARD_CUTS is the number of cuts.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.boards.board import Board
from tests.boards.scene import SEED, Scene, check_model
from tests.boards.site import RUN, Stopwatch

pytestmark = pytest.mark.timeout(7200)

CUTS = int(os.environ.get("FEDVIT_BOARD_CUTS", "8"))
JOIN_S = 20.0
"""Time that joining takes an emulated board, from the start of its service to that of training."""


def count_cuts(share: float) -> int:
    """Count the cuts of a check that has this share of all."""
    return max(1, round(CUTS * share))


def cut(board: Board, drawn: random.Random, within_s: float) -> str:
    """Cut the power at a drawn moment within so many seconds, or within a flush after it; describe the moment."""
    within_flush, delay_s = bool(drawn.getrandbits(1)), drawn.uniform(0, within_s)
    time.sleep(delay_s)  # the moment is drawn, not waited for
    board.cut(within_flush=within_flush)
    return f"cut after {delay_s:.1f} s{' within a flush' if within_flush else ''}"


def test_first_round_needs_three_commands(scene: Scene) -> None:
    print(f"emulated by {scene.board.image.accelerator}")
    for name, seconds in scene.times.items():
        print(f"{name}: {seconds:.0f} s")
    print("\n".join(scene.commands))
    assert len(scene.commands) == 3
    assert [entry["accepted"] for entry in scene.site.show("first")["rounds"]] == [1]
    assert scene.board.read_state("fedvit-edge")["ActiveState"] == "active"
    assert scene.board.try_run("systemctl --failed --quiet --no-legend | grep fedvit").stdout == ""


def test_power_cuts_in_training(scene: Scene, pictures: Path, tmp_path: Path, graph_cache: Path) -> None:
    """The board rejoins without a hand after each cut, and no result is lost or counts twice: the model is that of an
    undisturbed run."""
    drawn, cuts = random.Random(SEED), count_cuts(0.5)
    site, board = scene.site, scene.board
    values = {**RUN, "rounds": 3 + cuts + cuts // 4}
    site.start_run("cuts", values)
    site.wait_for_rounds("cuts", 1)
    watch = Stopwatch()
    site.wait_for_rounds("cuts", 2)
    round_s = watch.read_s()
    for number in range(cuts):
        moment = cut(board, drawn, round_s)
        before, booting = site.count_rounds("cuts"), Stopwatch()
        board.give_power()
        site.wait_for_rounds("cuts", min(before + 1, values["rounds"]))
        print(f"{number + 1}: {moment}; round {before + 1} closed {booting.read_s():.0f} s after power-on")
    shown = site.finish("cuts")
    print(f"seed {SEED}: {board.cuts}, a round took {round_s:.0f} s")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1] * values["rounds"]
    check_model(scene, "cuts", values, pictures, tmp_path, graph_cache)


def test_power_cuts_while_joining(scene: Scene) -> None:
    """A token that the board has not used up joins it after the cut; one that it has used is not needed again."""
    drawn = random.Random(SEED)
    site, board = scene.site, scene.board
    for number in range(count_cuts(0.16)):
        run = f"join-{number}"
        site.start_run(run, RUN)
        token = site.make_token("pi-1", "--replace")
        board.run("systemctl stop fedvit-edge; rm -r /var/lib/fedvit-edge/identity")
        board.run(f"install -m 0600 /dev/stdin /etc/fedvit/token <<< '{token}'; sync")
        board.run("systemctl start --no-block fedvit-join")
        moment, booting = cut(board, drawn, JOIN_S), Stopwatch()
        board.give_power()
        shown = site.finish(run)
        assert [entry["accepted"] for entry in shown["rounds"]] == [1]
        print(f"{number + 1}: {moment}; joined and trained {booting.read_s():.0f} s after power-on")
        board.run("test ! -e /etc/fedvit/token")
    print(f"seed {SEED}: {board.cuts}")


def test_power_cuts_in_the_first_boot(scene: Scene, make_board: Callable[..., Board], package: Path) -> None:
    """A new board loses its power while cloud-init starts, the package is installed, it joins and trains."""
    drawn = random.Random(SEED)
    site, board = scene.site, make_board("pi-3")
    scene.board.switch_off()
    site.enroll(board, package)
    site.start_run("first-cuts", RUN)
    board.switch_on()
    board.wait_for("pgrep dpkg-deb", "the package is not unpacked")
    board.cut_power()
    first_s = scene.times["from the first command to the end of the first round"]
    for number in range(count_cuts(0.12)):
        board.give_power()
        moment = cut(board, drawn, first_s)
        print(f"{number + 1}: {moment}; {site.count_rounds('first-cuts')} rounds closed")
    watch = Stopwatch()
    board.give_power()
    shown = site.finish("first-cuts")
    print(f"seed {SEED}: {board.cuts}; finished its round {watch.read_s():.0f} s after the last start")
    assert [entry["accepted"] for entry in shown["rounds"]] == [1]
    site.start_run("after-cuts", RUN)
    assert [entry["accepted"] for entry in site.finish("after-cuts")["rounds"]] == [1]
    board.close()
    scene.board.switch_on()
