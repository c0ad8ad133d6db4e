"""The change of models, and the way back from a bad one."""

import json
import logging
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.serving import models as models_module
from edge_client.serving.models import (
    BAND_PICTURES,
    LONGEST_ANSWER_S,
    MOST_STARTS,
    PROBATION,
    PROVEN_PICTURES,
    ModelServer,
    NoModel,
    is_below_band,
)
from edge_client.storage.models import DeviceModels
from edge_client.storage.serving import ServedAnswers, ServingStatus, read_serving, serving_file, write_serving
from fedvit.data.images import Pixels
from fedvit.errors import BadPayload
from tests.support.codes import has_code
from tests.support.served import Digits, add_model, split_digits
from tests.support.waiting import wait_until


@pytest.fixture
def stream() -> Digits:
    return split_digits(0).stream


def name_of(server: ModelServer, pixels: Pixels) -> str:
    return server.answer(lambda _: pixels).model


def test_answer_is_calibrated_and_right(server: ModelServer, stream: Digits) -> None:
    answers = [server.answer(lambda _, pixels=pixels: pixels, 3) for pixels in stream.pixels[:200]]
    right = [answer.label == f"digit {label}" for answer, label in zip(answers, stream.labels, strict=False)]
    assert np.mean(right) > 0.9
    assert np.mean([answer.confidence for answer in answers]) == pytest.approx(np.mean(right), abs=0.05)
    assert 0 < np.mean([answer.is_unsure for answer in answers]) < 0.2
    assert all(len(answer.answers) == 3 for answer in answers)


def test_pictures_are_decoded_one_after_the_other(server: ModelServer, stream: Digits) -> None:
    """Memory for one of them is enough, however many requests there are."""
    inside, most = [0], [0]

    def read(size: int) -> Pixels:
        inside[0] += 1
        most.append(inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return stream.pixels[0]

    with ThreadPoolExecutor(8) as pool:
        labels = list(pool.map(lambda _: server.answer(read).model, range(8)))
    assert len(labels) == 8
    assert max(most) == 1


def test_answer_that_hangs_is_no_sign_of_life(server: ModelServer, stream: Digits) -> None:
    """The service manager hears nothing, and starts the program again."""
    assert server.is_alive()
    server._answer_began_at = time.monotonic() - LONGEST_ANSWER_S
    assert not server.is_alive()
    name_of(server, stream.pixels[0])
    assert server.is_alive()


def test_new_classes_are_unsure(server: ModelServer) -> None:
    answers = [server.answer(lambda _, pixels=pixels: pixels) for pixels in split_digits(0).unknown.pixels[:100]]
    assert np.mean([answer.is_unsure for answer in answers]) > 0.3


def test_device_without_a_model(tmp_path: Path, stream: Digits) -> None:
    server = ModelServer(tmp_path, 1)
    server.start()
    with pytest.raises(NoModel, check=has_code("FV1492")):
        server.answer(lambda _: stream.pixels[0])
    server.close()


def test_model_is_exchanged_between_two_pictures(
    server: ModelServer, state: Path, digit_bundles: dict[str, Path], stream: Digits
) -> None:
    """A request that began keeps its model; its answer is not counted for the other one."""
    models = DeviceModels(state)
    assert name_of(server, stream.pixels[0]) == "digits-1"
    models.promote(add_model(state, digit_bundles["other"], 2))

    def wait_for_the_other(_: int) -> Pixels:
        current = lambda: server.current  # noqa: E731
        wait_until(lambda: (model := current()) is not None and model.name == "digits-2")
        return stream.pixels[0]

    assert server.answer(wait_for_the_other).model == "digits-1"
    assert server.status.answered.pictures == 0
    assert name_of(server, stream.pixels[0]) == "digits-2"
    models.roll_back()
    wait_until(lambda: name_of(server, stream.pixels[0]) == "digits-1")


@pytest.mark.parametrize("content", [b"", b'{"name": "\xef"}'])
def test_damaged_status_begins_anew(tmp_path: Path, content: bytes) -> None:
    serving_file(tmp_path).parent.mkdir()
    serving_file(tmp_path).write_bytes(content)
    assert ModelServer(tmp_path, 1).status.name == ""


def test_damaged_list_changes_nothing(server: ModelServer, state: Path, stream: Digits) -> None:
    DeviceModels(state).file.write_bytes(b"{")
    wait_until(lambda: server.answer(lambda _: stream.pixels[0]) and server.status.trouble)
    assert name_of(server, stream.pixels[0]) == "digits-1"


@pytest.mark.parametrize(
    "damage", ["another version", "cut off", "removed", "another size", "fewer labels", "another reference"]
)
def test_model_that_cannot_be_opened_is_rolled_back(
    server: ModelServer,
    state: Path,
    digit_bundles: dict[str, Path],
    stream: Digits,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    """After three attempts; the one before it answers all the time."""
    models = DeviceModels(state)
    name = add_model(state, digit_bundles["other"], 2)
    card = models.path(name) / "card.json"

    def change(file: str, key: str | None, make: Callable[[Any], object]) -> None:
        path = models.path(name) / file
        content = json.loads(path.read_bytes())
        content = {**content, key: make(content[key])} if key else make(content)
        path.write_text(json.dumps(content))

    if damage == "another size":
        change("preprocessing.json", "image_size", lambda size: 2 * size)
    elif damage == "fewer labels":
        change("card.json", "classes", lambda count: count - 1)
        change("labels.json", None, lambda labels: labels[1:])
    elif damage == "another reference":
        change("reference.json", "mean", lambda mean: mean[1:])
    elif damage == "another version":
        card.write_bytes(card.read_bytes().replace(b'"v": 1', b'"v": 99'))
    elif damage == "cut off":
        (models.path(name) / "model.onnx").write_bytes(b"\x08\x0a")
    else:
        card.unlink()
    models.promote(name)

    def is_back() -> bool:
        assert name_of(server, stream.pixels[0]) == "digits-1"
        return "model rolled back" in caplog.messages  # the last that a roll back does

    wait_until(is_back)
    assert name in models.read().withdrawn
    assert models.read().serving() == server.models.read().find("champion")
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in lines if "cannot be opened" in line.message]) == 1
    assert len([line for line in lines if line.message == "model rolled back"]) == 1


def test_three_starts_that_die_are_rolled_back(state: Path, digit_bundles: dict[str, Path], stream: Digits) -> None:
    """A process that is killed leaves the number of its starts; one that ends well does not."""
    models = DeviceModels(state)
    models.promote(add_model(state, digit_bundles["other"], 2))
    server = ModelServer(state, 1)
    server.start()
    server.close()
    for _ in range(MOST_STARTS):
        killed = ModelServer(state, 1)
        killed._look()
        assert name_of(killed, stream.pixels[0]) == "digits-2"
    server = ModelServer(state, 1)
    server.start()
    wait_until(lambda: server.current is not None)
    assert name_of(server, stream.pixels[0]) == "digits-1"
    assert "3 starts" in models.read().withdrawn["digits-2"]
    server.close()


def test_proven_model_may_be_killed(state: Path, stream: Digits) -> None:
    server = ModelServer(state, 1)
    server.start()
    for pixels in stream.pixels[:PROVEN_PICTURES]:
        name_of(server, pixels)
    wait_until(lambda: (read_serving(state) or server.status).is_proven)
    server.close()
    for _ in range(2 * MOST_STARTS):
        again = ModelServer(state, 1)
        again._look()
        assert name_of(again, stream.pixels[0]) == "digits-1"


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_first_model_that_cannot_be_opened_is_logged_once(
    tmp_path: Path,
    digit_bundles: dict[str, Path],
    stream: Digits,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried again, without a line or a durable write for each attempt, until it can be opened."""
    models = DeviceModels(tmp_path)
    name = add_model(tmp_path, digit_bundles["good"], 1)
    models.promote(name)
    file = models.path(name) / "labels.json"
    labels = file.read_bytes()
    file.write_text("[]")
    server, writes = ModelServer(tmp_path, 1), list[bool]()

    def write(state: Path, status: ServingStatus, *, durable: bool) -> None:
        writes.append(durable)
        write_serving(state, status, durable=durable)

    monkeypatch.setattr("edge_client.serving.models.write_serving", write)
    for _ in range(5 * MOST_STARTS):
        server._retry_at = 0.0
        server._look()
    assert server.status.starts == MOST_STARTS + 1
    assert writes == [True] * (MOST_STARTS + 1)
    assert len(list_warnings(caplog)) == 2
    assert server._retry_at > 0
    file.write_bytes(labels)
    server._retry_at = 0.0
    server._look()
    assert name_of(server, stream.pixels[0]) == name


def test_full_disk_is_logged_once_and_answers_go_on(
    server: ModelServer, stream: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(2):
        caplog.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            for _ in range(3):
                name_of(server, stream.pixels[0])
                server._note()
                server._save_drift()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert sorted(list_warnings(caplog)) == [
            "statistics of drift are not written",
            "the status of serving is not written",
        ]
        server._note()
        server._save_drift()


def test_proven_model_that_is_damaged_later_is_rolled_back(
    server: ModelServer, state: Path, digit_bundles: dict[str, Path], stream: Digits
) -> None:
    models = DeviceModels(state)
    name = add_model(state, digit_bundles["other"], 2)
    models.promote(name)
    wait_until(lambda: name_of(server, stream.pixels[0]) == name and server.status.is_proven)
    server.close()
    (models.path(name) / "model.onnx").write_bytes(b"")
    again = ModelServer(state, 1)
    again.start()
    wait_until(lambda: again.current is not None)
    assert name_of(again, stream.pixels[0]) == "digits-1"
    again.close()


def test_model_that_cannot_run_later_is_rolled_back(
    server: ModelServer, state: Path, digit_bundles: dict[str, Path], stream: Digits
) -> None:
    """One that has answered; the picture is refused with a reason, the next one gets an answer."""
    models = DeviceModels(state)
    name = add_model(state, digit_bundles["other"], 2)
    models.promote(name)
    wait_until(lambda: name_of(server, stream.pixels[0]) == name)
    with pytest.raises(BadPayload, check=has_code("FV2470")):
        server.answer(lambda _: stream.pixels[0, 1:])
    wait_until(lambda: name_of(server, stream.pixels[0]) == "digits-1")
    assert "cannot answer" in models.read().withdrawn[name]


def test_few_pictures_between_power_cuts_prove_a_model(
    state: Path, digit_bundles: dict[str, Path], stream: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ran for long enough."""
    monkeypatch.setattr(models_module, "PROVEN_S", 0.0)
    models = DeviceModels(state)
    models.promote(add_model(state, digit_bundles["other"], 2))
    for _ in range(2 * MOST_STARTS):
        killed = ModelServer(state, 1)
        killed._look()
        assert name_of(killed, stream.pixels[0]) == "digits-2"
        killed._write()
    assert not models.read().withdrawn


def test_model_without_confidence_is_rolled_back(
    server: ModelServer, state: Path, digit_bundles: dict[str, Path], stream: Digits
) -> None:
    for pixels in stream.pixels[: 2 * BAND_PICTURES]:
        name_of(server, pixels)
    models = DeviceModels(state)
    models.promote(add_model(state, digit_bundles["poisoned"], 2))
    answered = iter(np.tile(np.arange(len(stream.pixels)), 100))
    wait_until(lambda: name_of(server, stream.pixels[next(answered)]) == "digits-2")
    wait_until(lambda: name_of(server, stream.pixels[next(answered)]) == "digits-1")
    assert "mean confidence" in models.read().withdrawn["digits-2"]


def test_band() -> None:
    sums = ServedAnswers(100, 90.0, 81.5)
    assert not is_below_band(ServedAnswers(100, 85.0, 73.0), sums), "a tenth below is no reason"
    assert is_below_band(ServedAnswers(100, 70.0, 50.0), sums)
    assert not is_below_band(ServedAnswers(BAND_PICTURES - 1, 10.0, 3.0), sums)
    assert not is_below_band(ServedAnswers(PROBATION + 1, 10.0, 3.0), sums)
    assert not is_below_band(ServedAnswers(100, 70.0, 50.0), ServedAnswers())
