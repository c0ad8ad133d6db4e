"""A real `edge-client serve`: killed at any moment, with bad pictures, sources, disks and clocks."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import pytest

from edge_client.storage.models import DeviceModels
from tests.support.brokers import mosquitto
from tests.support.draws import choose_count
from tests.support.home_assistant import HomeAssistant
from tests.support.served import (
    PictureStream,
    Serving,
    Supervisor,
    add_model,
    encode_picture,
    serving,
    split_digits,
    write_digits,
)
from tests.support.waiting import wait_until

PICTURES = [encode_picture(pixels) for pixels in split_digits(0).stream.pixels[:100]]


@pytest.fixture(scope="module")
def digit_bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return write_digits(folder / "first", 0), write_digits(folder / "second", 1)


@pytest.fixture
def state(tmp_path: Path, digit_bundles: tuple[Path, Path]) -> Path:
    """A device whose champion is digits-1."""
    state = tmp_path / "state"
    DeviceModels(state).promote(add_model(state, digit_bundles[0], 1))
    return state


@pytest.mark.slow
def test_killed_at_any_moment_it_answers_with_promoted_models_only(
    tmp_path: Path, state: Path, digit_bundles: tuple[Path, Path], record_property: Any
) -> None:
    """Kills over promotions, canaries and the way back, while five pictures a second are asked for."""
    models = DeviceModels(state)
    promoted = {"digits-1"}
    supervisor = Supervisor(state, tmp_path / "log")
    stream = PictureStream(supervisor, PICTURES)
    answers = stream.answers
    rng = random.Random(5)
    for number in range(2, 2 + choose_count(12, 30)):
        name = add_model(state, digit_bundles[number % 2], number, "challenger")
        if rng.random() < 0.8:
            promoted.add(name)
            models.promote(name, rng.choice(["canary", "champion"]))
        elif models.read().find("former") or models.read().find("canary"):
            models.roll_back("drawn")
        time.sleep(rng.random() * 0.3)  # the moment of the kill is drawn
        supervisor.kill()
        seen = len(answers)
        wait_until(lambda seen=seen: len(answers) > seen + 1, lambda: (tmp_path / "log").read_text())
    stream.close()
    supervisor.close()
    assert {each.model for each in answers} <= promoted
    assert len({each.model for each in answers}) > 3
    gaps = sorted(after.at_s - before.at_s for before, after in itertools.pairwise(answers))
    record_property("longest_gap_s", gaps[-1])
    record_property("answers", len(answers))
    restarts = sorted(supervisor.restarts_s)
    print(f"gaps: median {gaps[len(gaps) // 2]:.2f} s, longest {gaps[-1]:.2f} s")
    print(f"restarts: median {restarts[len(restarts) // 2]:.2f} s, longest {restarts[-1]:.2f} s")


def test_exchange_of_models_leaves_no_request_without_an_answer(
    tmp_path: Path, state: Path, digit_bundles: tuple[Path, Path]
) -> None:
    models = DeviceModels(state)
    with serving(state, tmp_path / "log") as running:
        for number in range(2, 8):
            name = add_model(state, digit_bundles[number % 2], number)
            models.promote(name)
            wait_until(lambda name=name: running.predict(PICTURES[0])["model"] == name)
        models.roll_back()
        wait_until(lambda: running.predict(PICTURES[0])["model"] == "digits-6")


def test_former_model_by_hand(tmp_path: Path, state: Path, digit_bundles: tuple[Path, Path]) -> None:
    models = DeviceModels(state)
    models.promote(add_model(state, digit_bundles[1], 2))
    with serving(state, tmp_path / "log", "--former") as running:
        assert running.predict(PICTURES[0])["model"] == "digits-1"
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        assert "Seccomp:\t2" in status, "it starts no programs"
    assert "digits-1 answers again" in (tmp_path / "log").read_text()
    with serving(state, tmp_path / "log", "--former") as running:
        assert running.predict(PICTURES[0])["model"] == "digits-1"
    assert "there is no former model" in (tmp_path / "log").read_text()


# --- what may be wrong --------------------------------------------------------------------------------


def read_results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def warnings_of(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if " W " in line or " E " in line]


def test_folder_with_new_and_damaged_pictures(tmp_path: Path, state: Path) -> None:
    """Old pictures are not answered, damaged ones get a reason, and all stay as they are; also if the folder goes."""
    folder, results, log = tmp_path / "camera", tmp_path / "results.jsonl", tmp_path / "log"
    folder.mkdir()
    (folder / "old.jpg").write_bytes(PICTURES[0])
    with serving(state, log, "--watch", str(folder), "--results", str(results)) as running:
        wait_until(lambda: running.health()["up_s"] > 1.0)
        (folder / "new.jpg").write_bytes(PICTURES[1])
        (folder / "half.jpg").write_bytes(PICTURES[2][:300])
        (folder / "text.png").write_bytes(b"no picture")
        (folder / "notes.txt").write_bytes(b"no picture")
        (folder / "later.part").write_bytes(PICTURES[3])
        (folder / "later.part").rename(folder / "later.jpg")
        lines = wait_until(lambda: len(found := read_results(results)) == 4 and found)
        assert sorted(os.listdir(folder)) == ["half.jpg", "later.jpg", "new.jpg", "notes.txt", "old.jpg", "text.png"]
        by_name = {line["picture"]: line for line in lines}
        assert by_name["new.jpg"]["model"] == "digits-1"
        assert by_name["new.jpg"]["answers"][0]["label"].startswith("digit")
        assert "cannot read image" in by_name["text.png"]["error"]
        assert "error" in by_name["half.jpg"]
        folder.rename(tmp_path / "away")
        wait_until(lambda: warnings_of(log))
        assert running.predict(PICTURES[0])
        (tmp_path / "away").rename(folder)
        (folder / "newest.jpg").write_bytes(PICTURES[4])
        wait_until(lambda: "newest.jpg" in [line["picture"] for line in read_results(results)])
    [line] = warnings_of(log)
    assert "no pictures from the source" in line


def test_full_disk_and_model_of_another_version(tmp_path: Path, state: Path, digit_bundles: tuple[Path, Path]) -> None:
    """One line each; answers go on."""
    folder, log = tmp_path / "camera", tmp_path / "log"
    folder.mkdir()
    models = DeviceModels(state)
    with serving(state, log, "--watch", str(folder), "--results", "/dev/full") as running:
        wait_until(lambda: running.health()["up_s"] > 1.0)
        for number in range(3):
            (folder / f"{number}.jpg").write_bytes(PICTURES[number])
        wait_until(lambda: running.health()["answered"] == 3)
        wait_until(lambda: "No space left" in running.health()["trouble"])
        name = add_model(state, digit_bundles[1], 2)
        card = models.path(name) / "card.json"
        card.write_bytes(card.read_bytes().replace(b'"v": 1', b'"v": 99'))
        models.promote(name)
        wait_until(lambda: running.predict(PICTURES[0])["model"] == "digits-1" and name in models.read().withdrawn)
        wait_until(lambda: len(warnings_of(log)) == 3)
    full, version, back = warnings_of(log)
    assert "a prediction was not written" in full
    assert "version 99" in version
    assert "model rolled back" in back


def test_clock_that_jumps(tmp_path: Path, state: Path) -> None:
    """By ten years, while it serves: one line, and the answers go on."""
    log = tmp_path / "log"
    program = "from tests.support.wrong_clock import main; main()"
    command = [sys.executable, "-c", program, str(-3.15e8), "6", "edge_client.cli", "serve"]
    with serving(state, log, command=command) as running:
        wait_until(lambda: running.predict(PICTURES[0]) and warnings_of(log))
        assert running.predict(PICTURES[1])
    [line] = warnings_of(log)
    assert "the clock was set" in line
    days = json.loads((state / "models" / "drift.json").read_bytes())["days"]
    assert len(days) == 2


def write_video(file: Path, frames: int) -> None:
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"MJPG"), 5.0, (64, 64))
    assert writer.isOpened()
    for pixels in split_digits(0).stream.pixels[:frames]:
        writer.write(cv2.resize(pixels, (64, 64), interpolation=cv2.INTER_NEAREST))
    writer.release()


def test_video_and_a_stream_that_is_not_there(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second of a video of five frames a second; the stream costs one line, and requests are answered."""
    video, results, log = tmp_path / "street.avi", tmp_path / "results.jsonl", tmp_path / "log"
    stream = "rtsp://127.0.0.1:9/stream"
    monkeypatch.setenv("FEDVIT_SERVE_SOURCES", stream.replace("//", "//ann:pa55word@"))
    write_video(video, 21)
    options = ["--source", str(video), "--every", "1s", "--results", str(results)]
    with serving(state, log, *options) as running:
        wait_until(lambda: len(read_results(results)) == 5 and "source has ended" in log.read_text())
        wait_until(lambda: warnings_of(log))
        assert running.predict(PICTURES[0])
    names = [line["picture"].rpartition("#")[2] for line in read_results(results)]
    assert names == ["1", "6", "11", "16", "21"]
    assert len([line for line in warnings_of(log) if stream in line]) == 1
    assert "pa55word" not in log.read_text()


class Stream(BaseHTTPRequestHandler):
    """A network camera that sends ten frames, and ends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for _ in range(10):
            for picture in PICTURES[:10]:
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                self.wfile.write(head.encode() + picture + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


def test_stream_that_stops_is_opened_again(tmp_path: Path, state: Path) -> None:
    """One line each time; requests are answered meanwhile."""
    results, log = tmp_path / "results.jsonl", tmp_path / "log"
    with ThreadingHTTPServer(("127.0.0.1", 0), Stream) as camera:
        threading.Thread(target=camera.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{camera.server_port}/stream.mjpg"
        with serving(state, log, "--source", url, "--every", "1ms", "--results", str(results)) as running:
            wait_until(lambda: log.read_text().count("pictures arrive again") >= 2, log.read_text)
            assert running.predict(PICTURES[0])
        camera.shutdown()
    assert {line["model"] for line in read_results(results)} == {"digits-1"}
    text = log.read_text()
    assert text.count("sends no more frames") - text.count("pictures arrive again") in (0, 1)


def test_home_shows_predictions(tmp_path: Path, state: Path) -> None:
    folder = tmp_path / "camera"
    folder.mkdir()
    with mosquitto(tmp_path / "home", "retain_available true") as broker:
        with contextlib.closing(HomeAssistant(broker.address)) as house:
            home = ["--home", f"mqtt://{broker.address}", "--id", "desk"]
            with serving(state, tmp_path / "log", "--watch", str(folder), *home) as running:
                wait_until(lambda: running.health()["up_s"] > 1.0)
                (folder / "new.png").write_bytes(encode_picture(split_digits(0).stream.pixels[0], "PNG"))
                wait_until(lambda: house.state("prediction") not in (None, "unavailable"))
                assert house.state("model") == "digits-1"
                assert house.state("drift") == "off"
            wait_until(lambda: house.state("prediction") == "unavailable")
        assert not house.faults


def test_owner_changes_the_model(tmp_path: Path, state: Path, digit_bundles: tuple[Path, Path]) -> None:
    """By hand, with the commands."""
    add_model(state, digit_bundles[1], 2)
    program = Path(sys.executable).with_name("edge-client")

    def models(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [program, "models", *words, "--state", str(state), "--json"], capture_output=True, text=True, check=True
        )
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def states(shown: dict[str, Any]) -> dict[int, str]:
        return {model["round"]: model["state"] for model in shown["models"]}

    assert states(models()) == {1: "champion", 2: "trained"}
    assert states(models("promote", "digits-2")) == {1: "former", 2: "champion"}
    assert states(models("rollback")) == {1: "champion"}
    assert models()["withdrawn"] == {"digits-2": "by the owner"}
    assert models()["serving"] is None


def test_token_is_needed_elsewhere(tmp_path: Path, state: Path) -> None:
    line = [Path(sys.executable).with_name("edge-client"), "serve", "--state", str(state), "--listen", "0.0.0.0:0"]
    refused = subprocess.run(line, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "FV1493" in refused.stderr
    running: Serving
    token = tmp_path / "token"
    token.write_text("eight letters\n")
    with serving(state, tmp_path / "log", "--token-file", str(token)) as running:
        assert running.ask("POST", "/predict", PICTURES[0])[0] == 401
        assert running.ask("POST", "/predict", PICTURES[0], {"Authorization": "Bearer eight letters"})[0] == 200
