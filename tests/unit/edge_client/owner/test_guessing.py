from pathlib import Path

from edge_client.owner.guessing import newest_guesser
from fedvit.data.folder import DeviceData
from tests.support.agents import World
from tests.support.settings import Setting


def test_guess_is_the_answer_of_the_devices_newest_model(world: World, fedavg: Setting, digits: Path) -> None:
    """The likeliest of three classes has a third at least."""
    world.device()
    world.server.acknowledge(world.result(fedavg))
    guesser = newest_guesser(device="pi", state=world.state, data=DeviceData.open(digits), threads=1)
    assert guesser is not None
    guesses = [guesser(path) for path in sorted((digits / "test").glob("*/*.png"))]
    assert {guess.label for guess in guesses} <= {"0", "1", "2"}
    assert all(1 / 3 <= guess.probability <= 1 for guess in guesses)


def test_device_without_a_run_makes_no_guess(tmp_path: Path, digits: Path) -> None:
    assert newest_guesser(device="pi", state=tmp_path, data=DeviceData.open(digits), threads=1) is None
