"""The catalogue of boards: every figure has a source, and rates are those that were published."""

import subprocess
import sys
from importlib.resources import files

import pytest

from fedvit.errors import ConfigError
from profiles.catalogue import Board, boards, load, read_boards, sources
from tests.support.codes import has_code
from tests.support.waiting import WAIT_S

BOARDS = {board.id: board for board in boards()}
FAMILIES = (
    "rpi-zero2w", "rpi3b+", "rpi4b-1", "rpi4b-2", "rpi4b-4", "rpi4b-8", "rpi5-2", "rpi5-4", "rpi5-8", "rpi5-16",
    "jetson-nano-2", "jetson-nano-4", "jetson-tx2-4", "jetson-tx2-8", "xavier-nx-8", "xavier-nx-16", "agx-xavier-16",
    "agx-xavier-32", "agx-xavier-64", "orin-nano-4", "orin-nano-8", "orin-nano-super", "orin-nx-8", "orin-nx-16",
    "agx-orin-32", "agx-orin-64", "thor-t5000", "coral-dev-1", "coral-dev-4", "rock-5b-4", "rock-5b-32", "n100-mini-8",
    "n100-mini-16", "x86-laptop", "phone-class",
)  # fmt: skip


def test_every_board_is_there() -> None:
    assert set(FAMILIES) <= set(BOARDS)


@pytest.mark.parametrize("board", BOARDS.values(), ids=list(BOARDS))
class TestEveryFile:
    def test_every_figure_has_a_source(self, board: Board) -> None:
        """What is published names where; what is derived names how; nothing is zero for "not known"."""
        figures = board.figures()
        assert {"memory.ram_bytes", "memory.cache_bytes"} <= set(figures)
        for place, figure in figures.items():
            assert figure.value > 0, place
            assert figure.source, place
            assert figure.mark != "published" or figure.source in sources(), (place, figure.source)

    def test_modes_and_software_have_a_source(self, board: Board) -> None:
        for name, mode in board.modes.items():
            assert mode.mark != "published" or mode.source in sources(), name
            assert set(mode.cores) | set(mode.clock_hz) <= {kind.kind for kind in board.cores}, name
        assert board.software.mark != "published" or board.software.source in sources()
        assert board.default_mode is None or board.default_mode in board.modes

    def test_it_gives_what_the_roofline_needs(self, board: Board) -> None:
        for mode in (None, *board.modes):
            speed = board.speed(mode)
            products = [rate for rate in speed.products if rate.kind == "weights"]
            assert [(rate.inner, rate.columns) for rate in products] == [(192, 192), (384, 384), (768, 768)]
            rates = [rate.flops_per_s for rate in products]
            assert rates == sorted(rates)  # wider models use a processor better
            assert rates[-1] < board.peak_flops_per_s(mode)
            assert {rate.kind for rate in speed.products} == {"weights", "gradient", "attention"}
            assert all(0 < rate <= speed.bytes_per_s["Add"] for rate in speed.bytes_per_s.values())
            assert speed.threads == sum(count for _, count, _ in board.training_cores(mode)) > 0
            assert 0 < speed.node_s < 1e-3

    def test_memory_and_power_are_in_their_order(self, board: Board) -> None:
        budget = board.budget().memory_bytes
        assert budget is not None
        assert budget < board.memory.ram_bytes.value
        for mode in (None, *board.modes):
            watts = board.power_w(mode)
            assert watts is None or 0 < watts[0] < watts[1]


def test_the_published_training_times_come_out() -> None:
    """Flower's benchmark, batch 16 at 224 px: ViT-B is 16 x 105.15 GFLOP, ViT-S 16 x 27.48, ViT-Ti 16 x 7.46.

    Raspberry Pi 5: 23.52, 8.25, 2.99 s; Raspberry Pi 4: 57.41, 17.44, 6.08 s. The factors have two digits.
    """
    published = {"rpi5-8": (2.99, 8.25, 23.52), "rpi4b-4": (6.08, 17.44, 57.41)}
    for id, times in published.items():
        rates = [rate.flops_per_s for rate in load(id).speed().products if rate.kind == "weights"]
        predicted = [16 * flops / rate for flops, rate in zip((7.46e9, 27.48e9, 105.15e9), rates, strict=True)]
        assert predicted == pytest.approx(times, rel=0.03)


def test_peaks_follow_from_cores_and_modes() -> None:
    """Raspberry Pi 5: 4 x 2.4 GHz x 16. AGX Orin: 12 x 1.5 GHz x 16 at 50 W, 4 x 1.11 x 16 at 15 W. Nano at 5 W: two
    cores. ROCK 5B: only its four large cores. TX2 with the Denver cores off: 4 x 2.0 x 8."""
    assert load("rpi5-8").peak_flops_per_s() == pytest.approx(153.6e9)
    assert load("agx-orin-64").peak_flops_per_s("50W") == pytest.approx(288e9)
    assert load("agx-orin-64").peak_flops_per_s("15W") == pytest.approx(71.04e9)
    assert load("jetson-nano-4").speed("5W").threads == 2
    assert load("rock-5b-8").peak_flops_per_s() == pytest.approx(150.4e9)
    assert load("jetson-tx2-8").peak_flops_per_s() == pytest.approx(64e9)
    assert load("jetson-tx2-8").peak_flops_per_s("MAXN") == pytest.approx(96e9)


def test_figures_of_boards_and_their_doubts() -> None:
    # memory rates: 2 x memcpy (2 x 5.3 GB/s), or half of the data sheet (68 / 2 is not used where memcpy is known;
    # 34 / 2 is)
    assert load("rpi5-8").stream_bytes_per_s.value == pytest.approx(10.6e9)
    assert load("orin-nano-4").stream_bytes_per_s.value == pytest.approx(17e9)
    assert "half" in load("orin-nano-4").stream_bytes_per_s.source
    assert load("rpi4b-4").power_w() == (2.3, 7.2)
    assert load("agx-orin-64").power_w("15W") == (8.0, 15.0)
    assert load("thor-t5000").power_w() is None  # nobody said what it needs when idle
    assert load("rpi5-8").doubts() == ["usable memory"]
    assert "clocks of the power mode" in load("xavier-nx-8").doubts()
    assert "clocks of the power mode" not in load("agx-orin-64").doubts("50W")


def test_unknown_names_are_helped() -> None:
    with pytest.raises(ConfigError):
        load("rpi5")
    with pytest.raises(ConfigError):
        load("orin-nano8")
    with pytest.raises(ConfigError):
        load("toaster")
    with pytest.raises(ConfigError, check=has_code("FV1902", "'20W'")):
        load("agx-orin-64").speed("20W")


def test_a_wrong_file_is_named() -> None:
    text = (files("profiles") / "devices" / "rpi5.toml").read_text()
    assert next(board.id for board in read_boards("mine", text)) == "mine-2"
    with pytest.raises(ConfigError):
        read_boards("mine", text.replace('mark = "published"', 'mark = "guessed"', 1))
    with pytest.raises(ConfigError):
        read_boards("mine", text.replace("[memory]", '[memory]\ncolour = "red"', 1))
    with pytest.raises(ConfigError):
        read_boards("mine", "[memory")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'timm', 'onnx', 'onnxruntime', 'rich'): sys.modules[name] = None\n"
        "from profiles.catalogue import load\nprint(load('rpi5-8').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.stdout == "Raspberry Pi 5\n", done.stderr
